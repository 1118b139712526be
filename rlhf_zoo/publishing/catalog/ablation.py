"""The runs of an ablation on the Hub: PPO repositories that started from one SFT policy and differ in β.

What a card says is its publisher's word: it decides which runs stand beside which, and nothing more. Needs no torch.
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

    listing: its checkpoints, as `catalog.index.checkpoints` gives them; without step tags it has none to show.
    card: rlhf_card.json of `main`, {} without one. private: whether only a token may read it.
    """

    listing: Mapping[str, Any]
    card: Mapping[str, Any]
    private: bool = False

    @property
    def repo(self) -> str:
        return str(self.listing["repo"])

    @property
    def beta(self) -> float | None:
        """The coefficient of its KL penalty, at first where it adapts; None where the card has no settings."""
        return Card(self.card).beta

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a tag."""
        return tuple(row["step"] for row in self.listing["checkpoints"] if row["step"] is not None)


@dataclass(frozen=True)
class Ablation:
    """The given run, then the others. problem: why there may be fewer than there are, a sentence."""

    runs: tuple[Run, ...]
    problem: str | None = None


def find_runs(
    repo: str, card: Mapping[str, Any], *, others: Sequence[str] | None = None, hub: Hub = CLIENT
) -> Ablation:
    """The runs that can be shown beside those of a PPO repository NAMESPACE/NAME; a revision behind it is left out.

    card: rlhf_card.json of the checkpoint that is shown. others None looks for them in the namespace, among its
    `MOST_LOOKED_AT` most recently changed models: same SFT policy, same recipe, another β. Of several with one β,
    the one of the given run's seed is taken, else the newest; they come by β, the largest first. Whatever the Hub
    refuses is then a `problem`, and at least the given run is there.

    others given: exactly those, in their order, whatever their β and recipe; the given repository itself does not count
    again. Raises ZooError where one cannot be had, is not of PPO, or started from another SFT policy.

    Two commits are of one SFT policy where their weights are equal, as those of `best` and of its step's tag are.
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
            found, notes = _discovered(own, described, hub)
        except ZooError as error:
            return Ablation((own,), str(error))
    return Ablation((own, *found), f"Of the runs beside {name}, {'; '.join(notes)}." if notes else None)


def _own(repo: str, card: Mapping[str, Any], hub: Hub) -> tuple[Run, str | None]:
    """The given run, and why its checkpoints cannot be listed if they cannot."""
    try:
        run, _ = _read(repo, hub)
    except ZooError as error:
        listing: dict[str, Any] = {"repo": repo, "stage": None, "recipe": None, "note": str(error), "checkpoints": []}
        return Run(listing, card), str(error)
    return (run if run.card else Run(run.listing, card, run.private)), None


def _read(repo: str, hub: Hub) -> tuple[Run, str | None]:
    """(a repository's run, why it has no card if it has none). Raises ZooError where the Hub does not show it."""
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


# Those that are named


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
        found = list(pool.map(partial(_read, hub=hub), repos))
    for run, note in found:
        _check(run, note, own.repo, origin, hub)
    return [run for run, _ in found]


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


# Those that are found


def _discovered(own: Run, card: Mapping[str, Any], hub: Hub) -> tuple[list[Run], list[str]]:
    """(the runs, notes on what was left out). Raises ZooError where the Hub does not list the namespace."""
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
    found = _one_of_each_beta([run for run, _ in looked if run is not None], own.card.get("seed"))
    if len(found) >= MOST_RUNS:
        notes.append(f"only {MOST_RUNS - 1} of {len(found)} are taken: name those that you want")
    return sorted(found[: MOST_RUNS - 1], key=lambda run: (-(run.beta or 0.0), run.repo)), notes


def _may_be_ppo(model: Any) -> bool:
    stages = {tag for tag in model.tags or () if tag.startswith("stage:")}
    return not stages or "stage:ppo" in stages


def _look(model: Any, origin: Origin, recipe: str, beta: float, hub: Hub) -> tuple[Run | None, str | None]:
    """(a listed model as a run of the ablation, None), or (None, a note if it is not known whether it is one)."""
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
    """runs: the newest first, which stands unless another has checkpoints, or the seed, and it has not."""

    def rank(run: Run) -> tuple[bool, bool]:
        return bool(run.steps), run.card.get("seed") == seed

    best: dict[float | None, Run] = {}
    for run in runs:
        if run.beta not in best or rank(run) > rank(best[run.beta]):
            best[run.beta] = run
    return list(best.values())
