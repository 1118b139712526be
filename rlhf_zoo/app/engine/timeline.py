"""The same prompt over training: every published checkpoint of a PPO run, and the runs of an ablation beside it.

What a run has is plain data, from its card and the Hub's tags. Weights are fetched and loaded when a checkpoint is
asked for, and only the last few of them are kept.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...errors import ZooError
from ...fileio import number, whole
from ...modeling.devices import MEMORY_ERRORS, move, out_of_memory
from ...modeling.loading import load_tokenizer
from ...modeling.models import load_causal
from ...modeling.value_head import ValueHead
from ...ppo.config import PPOConfig
from ...ppo.saved_critic import load_critic
from ...rewards.model import same_tokenizer
from .cache import ModelCache, bytes_of
from .compare import Comparison
from .limits import check_steps
from .results import Snapshot


@dataclass(frozen=True)
class TimelinePoint:
    """A checkpoint of a run.

    Attributes:
        step: Of training.
        tag: Its name on the Hub.
        commit: Its commit on the Hub; None where it is not published.
        source: What its weights are fetched by, NAMESPACE/NAME@COMMIT or a folder.
        reward: What training logged there; None where the card does not say.
        kl: To SFT, as training logged it, in nats per completion; None where the card does not say.
        chosen: Whether the run chose it: `main` and `best` of its repository.
        recommended: Whether an evaluation recommends it.
        watched: The means of rewards of weight 0 there, by name.
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

    @property
    def marks(self) -> list[str]:
        """What the page calls it: recommended, best, both or neither."""
        return ["recommended"] * self.recommended + ["best"] * self.chosen


@dataclass(frozen=True)
class TimelineRun:
    """A PPO run and its checkpoints.

    Attributes:
        name: A repository or a folder.
        beta: The coefficient of its KL penalty, at first where it adapts.
        points: Its checkpoints by step.
    """

    name: str
    beta: float | None
    points: tuple[TimelinePoint, ...]

    @classmethod
    def from_listing(cls, listing: Mapping[str, Any], card: Mapping[str, Any]) -> TimelineRun:
        """Makes a run from its repository's tags, as `catalog.index.checkpoints` lists them, and from its card.

        Args:
            listing: {repo, checkpoints: [{revision, step, commit, also, metrics}]}.
            card: rlhf_card.json of `main`, {} without one. It is its publisher's word, of which only finite numbers are
                taken. The recommended step is `evaluation.recommended` there, {step} or a number.
        """
        repo = str(listing["repo"])
        points = []
        for row in listing["checkpoints"]:
            step, commit, metrics = row["step"], row["commit"], row.get("metrics") or {}
            if step is not None and commit is not None:
                reward, kl = number(metrics.get("reward")), number(metrics.get("kl"))
                on_branch = "best" in (row.get("also") or ())
                points.append(
                    TimelinePoint(
                        step, row["revision"], commit, f"{repo}@{commit}", reward, kl, on_branch,
                        watched=_watched(metrics),
                    )
                )  # fmt: skip
        return cls._marked(repo, card, points)

    @classmethod
    def from_card(cls, card: Mapping[str, Any], folder: Path) -> TimelineRun:
        """Makes a run of this machine from its card.

        Args:
            card: rlhf_card.json.
            folder: The stage's directory. Checkpoints that do not lie there are left out.
        """
        rows = card.get("checkpoints")
        points = []
        for row in rows if isinstance(rows, list) else []:
            step = _step(row) if isinstance(row, Mapping) else None
            path = folder / f"checkpoint-{step}"
            if step is not None and path.is_dir():
                commit = row["commit"] if isinstance(row.get("commit"), str) else None
                reward, kl = number(row.get("reward")), number(row.get("kl"))
                points.append(
                    TimelinePoint(step, str(row.get("tag")), commit, str(path), reward, kl, watched=_watched(row))
                )
        return cls._marked(str(folder), card, points)

    @classmethod
    def _marked(cls, name: str, card: Mapping[str, Any], points: Iterable[TimelinePoint]) -> TimelineRun:
        """With β and the marks that the card says; the step that it names goes before the branch `best`."""
        chosen, evaluation, settings = _step(card.get("chosen")), card.get("evaluation"), card.get("settings")
        recommended = _step(evaluation.get("recommended")) if isinstance(evaluation, Mapping) else None
        beta = number(settings.get("kl_coef", PPOConfig.kl_coef)) if isinstance(settings, Mapping) else None
        marked = [
            replace(
                point,
                chosen=point.chosen if chosen is None else point.step == chosen,
                recommended=point.step == recommended,
            )
            for point in points
        ]
        return cls(name, beta, tuple(sorted(marked, key=lambda point: point.step)))

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(point.step for point in self.points)

    @property
    def best(self) -> TimelinePoint:
        """The recommended checkpoint, else the chosen one, else the last.

        Raises:
            ZooError: The run has no checkpoint.
        """
        if not self.points:
            raise ZooError(f"{self.name} has no checkpoint with a tag: publish one of its steps.")
        return max(self.points, key=lambda point: (point.recommended, point.chosen, point.step))

    def at(self, step: int) -> TimelinePoint:
        """Returns the checkpoint of a step.

        Args:
            step: Of training.

        Raises:
            ZooError: The run has no checkpoint of this step.
        """
        for point in self.points:
            if point.step == step:
                return point
        listed = ", ".join(map(str, self.steps)) or "none"
        raise ZooError(f"{self.name} has no checkpoint of step {reprlib.repr(step)}: it has {listed}.")

    def spread(self, count: int) -> tuple[int, ...]:
        """Chooses steps as evenly as possible; the first, the last and the marked ones are among them.

        Args:
            count: How many, at most.
        """
        steps = self.steps
        if len(steps) <= count:
            return steps
        marked = [point.step for point in self.points if point.marks]
        even = [steps[round(place * (len(steps) - 1) / max(count - 1, 1))] for place in range(count)]
        return tuple(sorted(list(dict.fromkeys([steps[0], steps[-1], *marked, *even]))[:count]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class AtCheckpoint:
    """A prompt at one checkpoint: either `found`, its completions, or `problem`, why it cannot be shown."""

    run: str
    beta: float | None
    point: TimelinePoint
    found: Snapshot | None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        found = None if self.found is None else self.found.to_json()
        return {**asdict(replace(self, found=None)), "found": found}


def _watched(row: Mapping[str, Any]) -> dict[str, float]:
    """Single rewards in what a card says of a checkpoint: those that pay nothing, as cards name no others."""
    rewards = {key.partition("/")[2]: number(value) for key, value in row.items() if str(key).startswith("rewards/")}
    return {name: value for name, value in rewards.items() if value is not None}


def _step(value: Any) -> int | None:
    """Of a card's {step} or number."""
    return whole(value.get("step") if isinstance(value, Mapping) else value)


class Timeline:
    """A comparison at the checkpoints of one run or of several, whose policies are loaded when they are asked for.

    Args:
        comparison: Gives the SFT policy, the reward model and the device.
        runs: The runs; the first is the default.
        fetch: Returns the folder of a `TimelinePoint.source`; the default takes folders as they are.
        max_models: How many policies stay loaded.
        max_bytes: How large they may be together, with their critics.
        critics: Whether critics are loaded too.

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
        critics: bool = True,
    ) -> None:
        """comparison: whose SFT policy, reward model and device all use.

        fetch: the folder of a `TimelinePoint.source`; the default takes folders as they are. max_models, max_bytes: how
        many policies stay loaded, and how large they may be together, with their critics. critics: whether those are
        loaded too.
        """
        if not runs:
            raise ZooError("No run can be shown over training: give a PPO repository.")
        self._comparison = comparison
        self._fetch, self._critics = fetch, critics
        self.runs = {run.name: run for run in runs}
        self.models: ModelCache[tuple[PreTrainedModel, PreTrainedModel | ValueHead | None]] = ModelCache(
            self._load, size=lambda loaded: bytes_of(*loaded), max_models=max_models, max_bytes=max_bytes
        )

    def run(self, name: str | None = None) -> TimelineRun:
        """Returns a run.

        Args:
            name: Its name; None for the first.

        Raises:
            ZooError: There is no such run.
        """
        if name is None:
            return next(iter(self.runs.values()))
        if not isinstance(name, str) or name not in self.runs:  # a request may hold anything
            raise ZooError(f"There is no run {reprlib.repr(name)} here: choose one of {', '.join(self.runs)}.")
        return self.runs[name]

    @property
    def by_beta(self) -> tuple[TimelineRun, ...]:
        """The runs whose β is known and that have a checkpoint, from the largest β to the smallest."""
        with_beta = [run for run in self.runs.values() if run.beta is not None and run.points]
        return tuple(sorted(with_beta, key=lambda run: -(run.beta or 0.0)))

    def comparison(self, step: int | None = None, *, run: str | None = None) -> Comparison:
        """Compares SFT with the policy of a step.

        Args:
            step: Of training; None is the run's best.
            run: The run's name; None for the first.

        Raises:
            ZooError: The checkpoint cannot be had.
        """
        shown_run = self.run(run)
        return self._comparison_at(shown_run.best if step is None else shown_run.at(step))

    def at_steps(
        self, prompt: str, steps: Sequence[int] | None = None, *, run: str | None = None, **sampling: Any
    ) -> Generator[AtCheckpoint, None, None]:
        """Draws the same prompt and seed at several checkpoints, one after the other.

        Args:
            prompt: The beginning of a text.
            steps: In the order of the answer; None spreads as many as one request may have over the run.
            run: The run's name; None for the first.
            **sampling: Keywords of `Comparison.stream`.

        Returns:
            Each checkpoint as it is done. One that cannot be had is a `problem` in its place, and the others go on.

        Raises:
            ZooError: Arguments are out of range, at once.
        """
        shown_run = self.run(run)
        limits = self._comparison.limits
        wanted = shown_run.spread(limits.steps) if steps is None else tuple(steps)
        check_steps(len(wanted), limits)
        return self._go([(shown_run, shown_run.at(step)) for step in wanted], prompt, sampling)

    def at_betas(self, prompt: str, **sampling: Any) -> Generator[AtCheckpoint, None, None]:
        """Draws the same prompt and seed at the best checkpoint of each run with a known β, otherwise as `at_steps`.

        Args:
            prompt: The beginning of a text.
            **sampling: Keywords of `Comparison.stream`.
        """
        check_steps(len(self.by_beta), self._comparison.limits)
        return self._go([(run, run.best) for run in self.by_beta], prompt, sampling)

    def _go(
        self, places: Iterable[tuple[TimelineRun, TimelinePoint]], prompt: str, sampling: Mapping[str, Any]
    ) -> Generator[AtCheckpoint, None, None]:
        self._comparison.check(prompt, **sampling)

        def each() -> Generator[AtCheckpoint, None, None]:
            for run, point in places:
                snapshot, problem = None, None
                try:
                    snapshot = deque(self._comparison_at(point).stream(prompt, **sampling), maxlen=1).pop()
                except ZooError as error:
                    problem = str(error)
                yield AtCheckpoint(run.name, run.beta, point, snapshot, problem)

        return each()

    def _comparison_at(self, point: TimelinePoint) -> Comparison:
        policy, critic = self.models.get(point.source)
        return self._comparison.with_policy(policy, critic=critic)

    def _load(self, source: str) -> tuple[PreTrainedModel, PreTrainedModel | ValueHead | None]:
        """A policy and its critic, None without one."""
        folder = self._fetch(source)
        if not same_tokenizer(load_tokenizer(folder), self._comparison.tokenizer):
            raise ZooError(
                f"{source} has another tokenizer than the SFT policy, so they cannot be compared token by token: leave "
                "it out."
            )
        try:
            policy = load_causal(folder)
            critic = load_critic(folder, policy) if self._critics else None
            for model in (policy, critic):
                if model is not None:
                    move(model, self._comparison.device)
            return policy, critic
        except MEMORY_ERRORS as error:
            if (full := out_of_memory(error, mend="show fewer checkpoints at a time.")) is None:
                raise
            raise full from error
