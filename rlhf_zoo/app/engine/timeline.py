"""Samples the same prompt at several checkpoints of a PPO run, and across the runs of an ablation.

A run is plain data, read from its card and from the Hub's tags or the checkpoints on disk. Weights are fetched and
loaded on demand, and only those of the most recently used checkpoints stay in memory.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from transformers import PreTrainedModel

from ...errors import ZooError
from ...fileio import float_or_none, get_nested, int_or_none
from ...modeling.devices import MEMORY_ERRORS, as_memory_error, move
from ...modeling.loading import load_tokenizer
from ...modeling.models import load_causal
from ...modeling.text_ids import same_token_ids
from ...modeling.value_head import ValueHead
from ...ppo.config import PPOConfig
from ...ppo.saved_critic import load_critic
from ...publishing.catalog.card import CardEstimate, one_line
from .cache import ModelCache, model_bytes
from .compare import Comparison, Sampling
from .limits import check_checkpoint_count
from .results import Snapshot


@dataclass(frozen=True)
class TimelinePoint:
    """A checkpoint of a run.

    Attributes:
        step: The training step.
        tag: The tag that it has, or will have, on the Hub.
        commit: Its commit on the Hub; None if it is not published.
        source: Where to fetch its weights: NAMESPACE/NAME@COMMIT or a folder.
        reward: Mean reward that training logged at this step; None if it is not recorded.
        kl: KL to SFT that training logged, in nats per completion; None if it is not recorded.
        chosen: Whether the run chose it as its best checkpoint, to which `main` and the tag `best` point.
        recommended: Whether an evaluation recommends it.
        watched: Name of each reward of weight 0, which PPO logs but does not optimize -> its mean at this step.
        evaluated: Kind of held-out prompts ("test" or "validation") -> the figures that the run's card has for this
            step on these prompts: any of reward, judge, kl and win_rate (over SFT).
        findings: What the evaluation's fired probes for reward hacking found in the texts of this step.
    """

    step: int
    tag: str
    commit: str | None
    source: str
    reward: float | None = None
    kl: float | None = None
    chosen: bool = False
    recommended: bool = False
    watched: Mapping[str, float] = field(default_factory=dict)
    evaluated: Mapping[str, Mapping[str, CardEstimate]] = field(default_factory=dict)
    findings: tuple[str, ...] = ()

    @property
    def marks(self) -> list[str]:
        """The checkpoint's labels on the page: recommended, best, both or neither."""
        return ["recommended"] * self.recommended + ["best"] * self.chosen


@dataclass(frozen=True)
class TimelineRun:
    """A PPO run and its checkpoints.

    Attributes:
        name: Its repository or folder.
        beta: The KL coefficient β, or its initial value if it adapts; None if it is unknown.
        points: Its checkpoints, sorted by step.
    """

    name: str
    beta: float | None
    points: tuple[TimelinePoint, ...]

    @classmethod
    def from_listing(cls, listing: Mapping[str, Any], card: Mapping[str, Any]) -> TimelineRun:
        """Creates a run from the tags of its repository and from its card.

        Args:
            listing: {repo, checkpoints: [{revision, step, commit, also, metrics}]}, from `index.list_checkpoints`.
                `also` lists the other tags of the same commit.
            card: rlhf_card.json of `main`; {} if there is none. It is not trusted: only its finite numbers are used.
                The recommended step is its `evaluation.recommended`, {step} or a number.
        """
        repo = str(listing["repo"])
        points = []
        for row in listing["checkpoints"]:
            step, commit, metrics = row["step"], row["commit"], row.get("metrics") or {}
            if step is not None and commit is not None:
                source, chosen = f"{repo}@{commit}", "best" in (row.get("also") or ())
                reward, kl = float_or_none(metrics.get("reward")), float_or_none(metrics.get("kl"))
                watched = _read_watched_rewards(metrics)
                points.append(TimelinePoint(step, row["revision"], commit, source, reward, kl, chosen, watched=watched))
        return cls._with_marks(repo, card, points)

    @classmethod
    def from_card(cls, card: Mapping[str, Any], folder: Path) -> TimelineRun:
        """Creates a run from its card and its checkpoints on this machine.

        Args:
            card: rlhf_card.json.
            folder: The stage's directory. Checkpoints that it lacks are skipped.
        """
        rows = card.get("checkpoints")
        points = []
        for row in rows if isinstance(rows, list) else []:
            step = _read_step(row) if isinstance(row, Mapping) else None
            path = folder / f"checkpoint-{step}"
            if step is not None and path.is_dir():
                commit = row["commit"] if isinstance(row.get("commit"), str) else None
                reward, kl = float_or_none(row.get("reward")), float_or_none(row.get("kl"))
                tag, watched = str(row.get("tag")), _read_watched_rewards(row)
                points.append(TimelinePoint(step, tag, commit, str(path), reward, kl, watched=watched))
        return cls._with_marks(str(folder), card, points)

    @classmethod
    def _with_marks(cls, name: str, card: Mapping[str, Any], points: Iterable[TimelinePoint]) -> TimelineRun:
        """Creates a run with the card's β and marks. The card's chosen step takes precedence over the tag `best`."""
        chosen_step, settings = _read_step(card.get("chosen")), card.get("settings")
        recommended_step = _read_step(get_nested(card, "evaluation", "recommended"))
        beta = float_or_none(settings.get("kl_coef", PPOConfig.kl_coef)) if isinstance(settings, Mapping) else None
        marked_points = [
            replace(
                point,
                chosen=point.chosen if chosen_step is None else point.step == chosen_step,
                recommended=point.step == recommended_step,
                evaluated=_read_evaluated_figures(card, point.step),
                findings=_read_findings(card, point.step),
            )
            for point in points
        ]
        return cls(name, beta, tuple(sorted(marked_points, key=lambda point: point.step)))

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(point.step for point in self.points)

    @property
    def default_point(self) -> TimelinePoint:
        """The checkpoint to show first: the recommended one; without one, the chosen one; without either, the last.

        Raises:
            ZooError: The run has no checkpoint.
        """
        if not self.points:
            raise ZooError(f"{self.name} has no checkpoint with a tag: publish one of its steps.")
        return max(self.points, key=lambda point: (point.recommended, point.chosen, point.step))

    def point_at(self, step: int) -> TimelinePoint:
        """Returns the checkpoint of a step.

        Args:
            step: The training step.

        Raises:
            ZooError: The run has no checkpoint of this step.
        """
        for point in self.points:
            if point.step == step:
                return point
        step_list = ", ".join(map(str, self.steps)) or "none"
        raise ZooError(f"{self.name} has no checkpoint of step {reprlib.repr(step)}: it has {step_list}.")

    def spread_steps(self, count: int) -> tuple[int, ...]:
        """Chooses about evenly spaced steps, with the first, the last and the marked ones as far as `count` allows.

        Args:
            count: Largest number of steps.
        """
        steps = self.steps
        if len(steps) <= count:
            return steps
        # The first, the last and the marked steps come first in the list, so that `[:count]` keeps them.
        marked_steps = [point.step for point in self.points if point.marks]
        evenly_spaced_steps = [steps[round(index * (len(steps) - 1) / max(count - 1, 1))] for index in range(count)]
        return tuple(sorted(list(dict.fromkeys([steps[0], steps[-1], *marked_steps, *evenly_spaced_steps]))[:count]))

    def to_json(self) -> dict[str, Any]:
        """Returns every field."""
        return asdict(self)


@dataclass(frozen=True)
class CheckpointResult:
    """The completions of a prompt at one checkpoint (`snapshot`), or why there are none (`problem`)."""

    run: str
    beta: float | None
    point: TimelinePoint
    snapshot: Snapshot | None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns every field. Figures of the snapshot that are not finite are null."""
        snapshot = None if self.snapshot is None else self.snapshot.to_json()
        return {**asdict(replace(self, snapshot=None)), "snapshot": snapshot}


def _read_watched_rewards(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the mean of each watched reward. A checkpoint's row in a card lists only rewards of weight 0."""
    means = {key.partition("/")[2]: float_or_none(mean) for key, mean in row.items() if str(key).startswith("rewards/")}
    return {name: mean for name, mean in means.items() if mean is not None}


def _read_evaluated_figures(card: Mapping[str, Any], step: int) -> dict[str, dict[str, CardEstimate]]:
    """Returns the figures that a card's evaluation has for a step, by kind of prompts ("test" or "validation").

    The evaluation on test prompts covers only the card's own step; that on validation prompts covers several steps.
    """
    figures = {}
    if _read_step(card.get("step")) == step:
        win_rate = {"win_rate": get_nested(card, "evaluation", "win_rate")}
        figures["test"] = _read_estimates(get_nested(card, "evaluation", "ppo")) | _read_estimates(win_rate)
    rows = get_nested(card, "evaluation", "over_training", "checkpoints")
    for row in rows if isinstance(rows, list) else ():
        if get_nested(row, "step") == step:
            figures.setdefault("validation", _read_estimates(row))
    return {kind: estimates for kind, estimates in figures.items() if estimates}


def _read_findings(card: Mapping[str, Any], step: int) -> tuple[str, ...]:
    """Returns the findings of the fired probes, which examined only the last step; () for any other step."""
    over_training = get_nested(card, "evaluation", "over_training")
    probes = get_nested(over_training, "probes", "probes")
    if _read_step(get_nested(over_training, "step")) != step or not isinstance(probes, list):
        return ()
    fired_probes = (probe for probe in probes if get_nested(probe, "fired") is True)
    findings = [[one_line(get_nested(probe, key)) for key in ("family", "finding")] for probe in fired_probes]
    return tuple(f"{family}: {finding}" for family, finding in findings if family and finding)


def _read_estimates(row: Any) -> dict[str, CardEstimate]:
    estimates = {name: CardEstimate.read(get_nested(row, name)) for name in ("reward", "judge", "kl", "win_rate")}
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def _read_step(value: Any) -> int | None:
    """Returns the step of a card's {step} or number; None for anything else."""
    return int_or_none(value.get("step") if isinstance(value, Mapping) else value)


class Timeline:
    """Compares the SFT policy with the checkpoints of one or more runs, which are loaded on demand.

    Args:
        comparison: Provides the SFT policy, the reward model and the device.
        runs: The runs; the first one is the default.
        fetch: Returns the local folder of a `TimelinePoint.source`; the default accepts only folders.
        max_models: Largest number of policies that stay loaded.
        max_bytes: Largest size of these policies and their critics together, in bytes; None for no bound.

    Raises:
        ZooError: There is no run.
    """

    def __init__(
        self,
        comparison: Comparison,
        runs: Sequence[TimelineRun],
        *,
        fetch: Callable[[str], str | Path] = Path,
        max_models: int = 4,
        max_bytes: int | None = None,
    ) -> None:
        if not runs:
            raise ZooError("There is no run to show over training: pass a PPO repository.")
        self._comparison, self._fetch = comparison, fetch
        self.runs = {run.name: run for run in runs}
        self.models: ModelCache[tuple[PreTrainedModel, PreTrainedModel | ValueHead | None]] = ModelCache(
            self._load, size=lambda models: model_bytes(*models), max_models=max_models, max_bytes=max_bytes
        )

    @property
    def default_run(self) -> TimelineRun:
        """The first run."""
        return next(iter(self.runs.values()))

    def get_run(self, name: str | None) -> TimelineRun:
        """Returns the run of this name.

        Args:
            name: The run's name; None for the default run.

        Raises:
            ZooError: There is no such run.
        """
        if name is None:
            return self.default_run
        if not isinstance(name, str) or name not in self.runs:  # a visitor's request may contain any type
            raise ZooError(f"There is no run {reprlib.repr(name)} here: choose one of {', '.join(self.runs)}.")
        return self.runs[name]

    @property
    def runs_with_beta(self) -> tuple[TimelineRun, ...]:
        """The runs whose β is known and that have a checkpoint, from the largest β to the smallest."""
        runs = [run for run in self.runs.values() if run.beta is not None and run.points]
        return tuple(sorted(runs, key=lambda run: -(run.beta or 0.0)))

    def comparison_at(self, step: int | None = None, *, run: str | None = None) -> Comparison:
        """Returns a comparison of the SFT policy with the policy of a step.

        Args:
            step: The training step; None for the run's default checkpoint.
            run: The run's name; None for the default run.

        Raises:
            ZooError: There is no such run or step, or the checkpoint cannot be fetched or compared.
        """
        timeline_run = self.get_run(run)
        return self._load_comparison(timeline_run.default_point if step is None else timeline_run.point_at(step))

    def sample_steps(
        self, prompt: str, steps: Sequence[int] | None = None, *, run: str | None = None, **sampling: Unpack[Sampling]
    ) -> Generator[CheckpointResult, None, None]:
        """Samples the same prompt and seed at several checkpoints, one after the other.

        Args:
            prompt: The prompt.
            steps: Training steps, in the order of the results; None to spread the largest allowed number over the run.
            run: The run's name; None for the default run.
            **sampling: See `Comparison.stream`.

        Returns:
            The result of each checkpoint when it is done. A checkpoint that fails yields its `problem`, and the others
            continue.

        Raises:
            ZooError: An argument is out of range. This is raised at once, not during iteration.
        """
        timeline_run = self.get_run(run)
        limits = self._comparison.limits
        steps = timeline_run.spread_steps(limits.checkpoints) if steps is None else tuple(steps)
        check_checkpoint_count(len(steps), limits)
        return self._sample_at([(timeline_run, timeline_run.point_at(step)) for step in steps], prompt, sampling)

    def sample_betas(self, prompt: str, **sampling: Unpack[Sampling]) -> Generator[CheckpointResult, None, None]:
        """Samples the same prompt and seed at the default checkpoint of each run with a known β; see `sample_steps`.

        Args:
            prompt: The prompt.
            **sampling: See `Comparison.stream`.
        """
        check_checkpoint_count(len(self.runs_with_beta), self._comparison.limits)
        return self._sample_at([(run, run.default_point) for run in self.runs_with_beta], prompt, sampling)

    def _sample_at(
        self, checkpoints: Iterable[tuple[TimelineRun, TimelinePoint]], prompt: str, sampling: Sampling
    ) -> Generator[CheckpointResult, None, None]:
        self._comparison.check(prompt, **sampling)

        # This is a separate generator, so that the check above runs at once and not at the first item.
        def results() -> Generator[CheckpointResult, None, None]:
            for run, point in checkpoints:
                snapshot, problem = None, None
                try:
                    stream = self._load_comparison(point).stream(prompt, **sampling)
                    snapshot = deque(stream, maxlen=1).pop()  # the last snapshot, with the finished completions
                except ZooError as error:
                    problem = str(error)
                yield CheckpointResult(run.name, run.beta, point, snapshot, problem)

        return results()

    def _load_comparison(self, point: TimelinePoint) -> Comparison:
        policy, critic = self.models.get(point.source)
        return self._comparison.with_policy(policy, critic=critic)

    def _load(self, source: str) -> tuple[PreTrainedModel, PreTrainedModel | ValueHead | None]:
        """Loads a policy and its critic (None if the checkpoint has none)."""
        folder = self._fetch(source)
        if not same_token_ids(load_tokenizer(folder), self._comparison.tokenizer):
            raise ZooError(
                f"{source} and the SFT policy have different tokenizers, so they cannot be compared token by token: "
                "show only runs that started from this SFT policy."
            )
        try:
            policy = load_causal(folder)
            critic = load_critic(folder, policy)
            for model in (policy, critic):
                if model is not None:
                    move(model, self._comparison.device)
            return policy, critic
        except MEMORY_ERRORS as error:
            if (memory_error := as_memory_error(error, fix="show fewer checkpoints at a time.")) is None:
                raise
            raise memory_error from error
