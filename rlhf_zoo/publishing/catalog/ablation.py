"""The runs of an ablation on the Hub: PPO repositories that started from one SFT policy and differ in β.

Cards are written by their publishers, so they only decide which runs are shown side by side. Needs no torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import ZooError
from ...hub.client.connect import CLIENT, Hub
from ...hub.client.pull import split_revision
from ...hub.client.refusals import refusals_as
from ...hub.client.weights import Origin, equal_weights
from .card import Card, clean, fetch_card
from .index import TAG, WORKERS, checkpoints

MOST_LOOKED_AT = 32
"""Repositories of a namespace whose cards are read."""
MOST_RUNS = 16
"""Runs that are found, the given one among them: as many checkpoints as one request of the page may show."""
_TOLD = 3


@dataclass(frozen=True)
class Run:
    """A PPO repository.

    Attributes:
        listing: Its checkpoints, as `catalog.index.checkpoints` returns them; one without step tags has none to show.
        card: rlhf_card.json of `main`, {} without one.
        private: Whether reading it needs a token.
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
        """The coefficient of its KL penalty, at the start where it adapts; None where the card has no settings."""
        return Card(self.card).beta

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a tag."""
        return tuple(row["step"] for row in self.listing["checkpoints"] if row["step"] is not None)


@dataclass(frozen=True)
class Ablation:
    """The runs of an ablation.

    Attributes:
        runs: The given run, then the others.
        problem: A sentence on why runs may be missing.
    """

    runs: tuple[Run, ...]
    problem: str | None = None


def find_runs(
    repo: str, card: Mapping[str, Any], *, others: Sequence[str] | None = None, hub: Hub = CLIENT
) -> Ablation:
    """Finds the runs that can be shown beside a PPO repository.

    By default it searches the `MOST_LOOKED_AT` most recently changed models of the namespace for runs with the same SFT
    policy and recipe and another β. Of several with one β it takes the one with the given run's seed, else the newest.
    The runs are ordered by β, the largest first. Where the Hub refuses, at least the given run is returned, with a
    `problem`.

    SFT policies are the same where their weights are equal, as those of `best` and of its step's tag are.

    Args:
        repo: NAMESPACE/NAME; a revision after it is ignored.
        card: rlhf_card.json of the checkpoint that is shown.
        others: Exactly these runs, in their order, whatever their β and recipe; the given repository does not count
            again.
        hub: The Hub.

    Returns:
        The runs.

    Raises:
        ZooError: One of `others` cannot be had, is not a PPO repository, or started from another SFT policy.
    """
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    name, _ = split_revision(repo)
    with disable_progress_bars():
        own, problem = _own(name, card, hub)
        described = card if Card(card).origin else own.card
        if others is not None:
            return Ablation((own, *_named(own, described, others, hub)), problem)
        if problem is not None:
            return Ablation((own,), problem)
        try:
            discovered, notes = _discovered(own, described, hub)
        except ZooError as error:
            return Ablation((own,), str(error))
    return Ablation((own, *discovered), f"Of the runs beside {name}, {'; '.join(notes)}." if notes else None)


def _own(repo: str, card: Mapping[str, Any], hub: Hub) -> tuple[Run, str | None]:
    """Returns the given run, and why its checkpoints cannot be listed, if they cannot."""
    try:
        run, _ = _read(repo, hub)
    except ZooError as error:
        listing: dict[str, Any] = {"repo": repo, "stage": None, "recipe": None, "note": str(error), "checkpoints": []}
        return Run(listing, card), str(error)
    return (run if run.card else Run(run.listing, card, run.private)), None


def _read(repo: str, hub: Hub) -> tuple[Run, str | None]:
    """Returns (a repository's run, why it has no card). Raises ZooError where the Hub does not show the repository."""
    from huggingface_hub.errors import RepositoryNotFoundError

    with refusals_as(f"{repo} cannot be looked at on {hub.name}", "check the name, --hub and the token."):
        try:
            info = hub.api().model_info(repo, expand=["sha", "private"])
        except RepositoryNotFoundError as error:
            raise ZooError(
                f"{repo} is not on {hub.name}, or this token may not read it: check the names of the runs."
            ) from error
    card, note = fetch_card(repo, info.sha or "main", hub)
    return Run(checkpoints(repo, hub), card, bool(info.private)), note


# Runs that the caller names


def _named(own: Run, card: Mapping[str, Any], names: Iterable[str], hub: Hub) -> list[Run]:
    repos = dict.fromkeys(split_revision(name)[0] for name in names)
    repos.pop(own.repo, None)
    if not repos:
        return []
    origin = Card(card).origin
    if origin is None:
        raise ZooError(
            f"{own.repo} does not say which SFT model it started from, so that no run can be held against it: publish "
            "its card again."
        )
    with ThreadPoolExecutor(WORKERS) as pool:
        read = list(pool.map(partial(_read, hub=hub), repos))
    for run, note in read:
        _check(run, note, own.repo, origin, hub)
    return [run for run, _ in read]


def _check(run: Run, note: str | None, beside: str, origin: Origin, hub: Hub) -> None:
    if note is not None:
        raise ZooError(f"{run.repo} is no run that can stand beside {beside} ({note}): name another.")
    stage = run.card.get("stage", "ppo")
    if stage != "ppo":
        raise ZooError(
            f"{run.repo} is a checkpoint of the stage {clean(str(stage))}, not of PPO: name the PPO repositories of "
            "the ablation."
        )
    its = Card(run.card).origin
    if not equal_weights(its, origin, hub=hub):
        started = f"started from {_short(its)}" if its else "does not say which SFT model it started from"
        raise ZooError(
            f"{run.repo} {started}, and {beside} started from {_short(origin)}: runs can be compared where these are "
            "the same, so name another."
        )


def _short(origin: Origin) -> str:
    return f"{origin[0]}@{clean(origin[1])[:10]}"


# Runs that are searched for


def _discovered(own: Run, card: Mapping[str, Any], hub: Hub) -> tuple[list[Run], list[str]]:
    """Returns (the runs, notes on what was left out). Raises ZooError where the Hub does not list the namespace."""
    namespace = own.repo.rpartition("/")[0]
    origin, recipe, beta = Card(card).origin, card.get("recipe"), own.beta
    if origin is None or not isinstance(recipe, str) or beta is None or not namespace:
        return [], ["none can be found: its card lacks the SFT model, the recipe or the settings"]
    with refusals_as(f"The runs beside {own.repo} cannot be listed on {hub.name}", "try again, or check --hub."):
        listed = hub.api().list_models(author=namespace, filter=TAG, expand=["sha", "lastModified", "private", "tags"])
        models = [model for model in listed if model.id != own.repo and _may_be_ppo(model)]
    models.sort(key=lambda model: model.last_modified.timestamp() if model.last_modified else 0.0, reverse=True)
    notes = []
    if len(models) > MOST_LOOKED_AT:
        notes.append(f"only the {MOST_LOOKED_AT} most recently changed of {len(models)} models were looked at")
    with ThreadPoolExecutor(WORKERS) as pool:
        looked = list(pool.map(lambda model: _look(model, origin, recipe, beta, hub), models[:MOST_LOOKED_AT]))
    left_out = [note for _, note in looked if note is not None]
    if left_out:
        more = f" and {len(left_out) - _TOLD} more" if len(left_out) > _TOLD else ""
        notes.append(f"these are left out: {', '.join(left_out[:_TOLD])}{more}")
    runs = _one_of_each_beta([run for run, _ in looked if run is not None], own.card.get("seed"))
    if len(runs) >= MOST_RUNS:
        notes.append(f"only {MOST_RUNS - 1} of {len(runs)} are taken: name those that you want")
    return sorted(runs[: MOST_RUNS - 1], key=lambda run: (-(run.beta or 0.0), run.repo)), notes


def _may_be_ppo(model: Any) -> bool:
    stages = {tag for tag in model.tags or () if tag.startswith("stage:")}
    return not stages or "stage:ppo" in stages


def _look(model: Any, origin: Origin, recipe: str, beta: float, hub: Hub) -> tuple[Run | None, str | None]:
    """Returns (a listed model as a run of the ablation, None), or (None, a note where it cannot be told to be one)."""
    card, note = fetch_card(model.id, model.sha, hub)
    if note is not None:
        return None, f"{model.id} ({note})"
    same_run = card.is_ppo and card.get("recipe") == recipe and equal_weights(card.origin, origin, hub=hub)
    if not same_run or card.beta in (None, beta):
        return None, None
    try:
        return Run(checkpoints(model.id, hub), card, bool(model.private)), None
    except ZooError as error:
        return None, f"{model.id} ({str(error).rstrip('.')})"


def _one_of_each_beta(runs: Iterable[Run], seed: Any) -> list[Run]:
    """Keeps one run of each β: the newest, unless another has checkpoints or the seed where the newest has not.

    `runs` holds the newest first.
    """

    def rank(run: Run) -> tuple[bool, bool]:
        return bool(run.steps), run.card.get("seed") == seed

    best: dict[float | None, Run] = {}
    for run in runs:
        if run.beta not in best or rank(run) > rank(best[run.beta]):
            best[run.beta] = run
    return list(best.values())
