"""Finds the runs of an ablation on the Hub: PPO repositories with the same SFT policy and different β.

Cards are not trusted; they only decide which runs are shown together. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.pull import split_revision
from ...hub.client.refusals import translate_hub_errors
from ...hub.client.weights import Origin, commits_have_same_weights
from .card import Card, clean, try_download_card
from .index import TAG, WORKERS, list_checkpoints

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

#: Maximum number of cards that are read in a namespace.
MAX_CARDS = 32
#: Maximum number of runs, including the first. One request of the page samples one checkpoint of each.
MAX_RUNS = 16
_MAX_NAMED = 3  # skipped repositories that a note names


@dataclass(frozen=True)
class Run:
    """A PPO repository.

    Attributes:
        listing: Its checkpoints, as `catalog.index.list_checkpoints` returns them.
        card: rlhf_card.json of `main`, {} without one.
        private: Whether reading the repository needs a token.
    """

    listing: Mapping[str, Any]
    card: Mapping[str, Any]
    private: bool = False

    @property
    def repo(self) -> str:
        """The repository."""
        return str(self.listing["repo"])

    @property
    def beta(self) -> float | None:
        """The KL coefficient β, or its initial value if it adapts; None if the card has no settings."""
        return Card(self.card).beta

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a tag."""
        return tuple(row["step"] for row in self.listing["checkpoints"] if row["step"] is not None)


@dataclass(frozen=True)
class Ablation:
    """The runs of an ablation.

    Attributes:
        runs: The run that others are compared with, then the others.
        problem: Why runs may be missing, as a sentence; None if all were found.
    """

    runs: tuple[Run, ...]
    problem: str | None = None


def find_runs(
    repo: str, card: Mapping[str, Any], *, names: Sequence[str] | None = None, hub: Hub = DEFAULT_HUB
) -> Ablation:
    """Finds the runs that can be compared with a PPO repository.

    Without `names` it searches the `MAX_CARDS` most recently changed PPO models of the namespace for runs with the same
    SFT policy and recipe and another β. Of several runs with one β, it prefers runs with checkpoints, then with the
    seed of `repo`, then the newest. The other runs are sorted by descending β. If the Hub refuses, it returns only the
    run of `repo`, with a `problem`.

    SFT policies are the same if their weights are equal. The commits may differ, as for `best` and its step's tag.

    Args:
        repo: NAMESPACE/NAME; a revision after it is ignored.
        card: rlhf_card.json of the shown checkpoint.
        names: The repositories of the other runs, in this order, with any β and recipe; None to search for them.
        hub: The Hub to search.

    Raises:
        ZooError: One of `names` cannot be read, is not a PPO repository, or started from another SFT policy.
    """
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    name, _ = split_revision(repo)
    with disable_progress_bars():
        first_run, problem = _read_first_run(name, card, hub)
        if not Card(card).origin:  # the card does not name its SFT model; that of `main` may
            card = first_run.card
        if names is not None:
            return Ablation((first_run, *_read_named_runs(first_run, card, names, hub)), problem)
        if problem is not None:
            return Ablation((first_run,), problem)
        try:
            other_runs, notes = _search_runs(first_run, card, hub)
        except ZooError as error:
            return Ablation((first_run,), str(error))
    return Ablation((first_run, *other_runs), f"Of the other runs of {name}, {'; '.join(notes)}." if notes else None)


def _read_first_run(repo: str, card: Mapping[str, Any], hub: Hub) -> tuple[Run, str | None]:
    """Returns (the run, None), or (the run without checkpoints, why they cannot be listed)."""
    try:
        run, _ = _read_run(repo, hub)
    except ZooError as error:
        listing: dict[str, Any] = {"repo": repo, "stage": None, "recipe": None, "note": str(error), "checkpoints": []}
        return Run(listing, card), str(error)
    return (run if run.card else Run(run.listing, card, run.private)), None


def _read_run(repo: str, hub: Hub) -> tuple[Run, str | None]:
    """Returns (a repository's run, why it has no card). Raises ZooError if the repository cannot be read."""
    from huggingface_hub.errors import RepositoryNotFoundError

    with translate_hub_errors(f"Cannot look up {repo} on {hub.name}", "check the name, --hub and the token."):
        try:
            info = hub.api().model_info(repo, expand=["sha", "private"])
        except RepositoryNotFoundError as error:
            raise ZooError(
                f"{repo} is not on {hub.name}, or this token may not read it: check the names of the runs."
            ) from error
    card, note = try_download_card(repo, info.sha or "main", hub)
    return Run(list_checkpoints(repo, hub), card, bool(info.private)), note


def _read_named_runs(first_run: Run, card: Mapping[str, Any], names: Iterable[str], hub: Hub) -> list[Run]:
    repos = dict.fromkeys(split_revision(name)[0] for name in names)
    repos.pop(first_run.repo, None)
    if not repos:
        return []
    origin = Card(card).origin
    if origin is None:
        raise ZooError(
            f"The card of {first_run.repo} does not name its SFT model, so no run can be compared with it: publish its "
            "card again."
        )
    with ThreadPoolExecutor(WORKERS) as pool:
        runs = list(pool.map(partial(_read_run, hub=hub), repos))
    for run, note in runs:
        _check_comparable(run, note, first_run.repo, origin, hub)
    return [run for run, _ in runs]


def _check_comparable(run: Run, note: str | None, reference_repo: str, origin: Origin, hub: Hub) -> None:
    if note is not None:
        raise ZooError(f"{run.repo} cannot be compared with {reference_repo} ({note}): name another run.")
    stage = run.card.get("stage", "ppo")
    if stage != "ppo":
        raise ZooError(
            f"{run.repo} is a checkpoint of the stage {clean(str(stage))}, not of PPO: name the PPO repositories of "
            "the ablation."
        )
    run_origin = Card(run.card).origin
    if not commits_have_same_weights(run_origin, origin, hub=hub):
        origin_clause = f"started from {_short_name(run_origin)}" if run_origin else "does not name its SFT model"
        raise ZooError(
            f"{run.repo} {origin_clause}, but {reference_repo} started from {_short_name(origin)}: name a run with the "
            "same SFT model."
        )


def _short_name(origin: Origin) -> str:
    return f"{origin[0]}@{clean(origin[1])[:10]}"


def _search_runs(first_run: Run, card: Mapping[str, Any], hub: Hub) -> tuple[list[Run], list[str]]:
    """Returns (the other runs, notes on skipped ones). Raises ZooError if the Hub does not list the namespace."""
    namespace = first_run.repo.rpartition("/")[0]
    origin, recipe, beta = Card(card).origin, card.get("recipe"), first_run.beta
    if origin is None or not isinstance(recipe, str) or beta is None or not namespace:
        return [], ["none can be found, because its card lacks the SFT model, the recipe or the settings"]
    with translate_hub_errors(
        f"Cannot list the other runs of {first_run.repo} on {hub.name}", "try again, or check --hub."
    ):
        infos = hub.api().list_models(author=namespace, filter=TAG, expand=["sha", "lastModified", "private", "tags"])
        models = [model for model in infos if model.id != first_run.repo and _may_be_ppo(model)]
    models.sort(key=lambda model: model.last_modified.timestamp() if model.last_modified else 0.0, reverse=True)
    notes = []
    if len(models) > MAX_CARDS:
        notes.append(f"only the {MAX_CARDS} most recently changed of {len(models)} models were read")
    with ThreadPoolExecutor(WORKERS) as pool:
        candidates = list(pool.map(lambda model: _as_run(model, origin, recipe, beta, hub), models[:MAX_CARDS]))
    skip_notes = [note for _, note in candidates if note is not None]
    if skip_notes:
        remainder = f" and {len(skip_notes) - _MAX_NAMED} more" if len(skip_notes) > _MAX_NAMED else ""
        notes.append(f"these are not shown: {', '.join(skip_notes[:_MAX_NAMED])}{remainder}")
    runs = _best_per_beta([run for run, _ in candidates if run is not None], first_run.card.get("seed"))
    if len(runs) >= MAX_RUNS:
        notes.append(f"only {MAX_RUNS - 1} of {len(runs)} are shown: name the runs that you want")
    return sorted(runs[: MAX_RUNS - 1], key=lambda run: (-(run.beta or 0.0), run.repo)), notes


def _may_be_ppo(model: ModelInfo) -> bool:
    """Whether a repository's metadata tags name the stage ppo, or no stage."""
    stages = {tag for tag in model.tags or () if tag.startswith("stage:")}
    return not stages or "stage:ppo" in stages


def _as_run(model: ModelInfo, origin: Origin, recipe: str, beta: float, hub: Hub) -> tuple[Run | None, str | None]:
    """Returns (a model's run, None), (None, why it cannot be read), or (None, None) for a run of another ablation."""
    card, note = try_download_card(model.id, model.sha or "main", hub)
    if note is not None:
        return None, f"{model.id} ({note})"
    is_other_beta = card.is_ppo and card.get("recipe") == recipe and card.beta not in (None, beta)
    if not is_other_beta or not commits_have_same_weights(card.origin, origin, hub=hub):
        return None, None
    try:
        return Run(list_checkpoints(model.id, hub), card, bool(model.private)), None
    except ZooError as error:
        return None, f"{model.id} ({str(error).rstrip('.')})"


def _best_per_beta(runs: Iterable[Run], seed: object) -> list[Run]:
    """Keeps one run per β: with checkpoints rather than without, then with this seed, then the newest.

    `runs` is sorted from newest to oldest.
    """

    def rank(run: Run) -> tuple[bool, bool]:
        return bool(run.steps), run.card.get("seed") == seed

    best_runs: dict[float | None, Run] = {}
    for run in runs:
        if run.beta not in best_runs or rank(run) > rank(best_runs[run.beta]):
            best_runs[run.beta] = run
    return list(best_runs.values())
