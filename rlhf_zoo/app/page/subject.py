"""What one page shows: the models, and the runs that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ZooError
from ...fileio import at
from ...hub.client.connect import CLIENT, Hub
from ...hub.client.refs import resolve
from ...hub.client.run_signature import FLAG
from ...publishing.cards.card import card_json
from ...publishing.cards.facts import Facts
from ...publishing.catalog.ablation import find_runs
from ...publishing.catalog.lineage import Lineage, find_lineage
from ...runs.record import StageRecord
from ..engine import Comparison, Limits, Timeline, TimelineRun
from .held_out import held_out_prompts, stage_of

LIMITS = Limits()
#: Policies of other checkpoints that stay loaded, and the bytes that they may have together.
KEPT, KEPT_BYTES = 8, 2 * 2**30


@dataclass(frozen=True)
class Subject:
    """A comparison, the lineage of its models, and its runs over training.

    Attributes:
        comparison: The loaded models.
        lineage: Where they come from.
        timeline: The runs; None where no checkpoint of the run can be had.
        problem: Why there is no timeline, or why runs are missing; a sentence.
        held_out: Prompts to draw from by chance; () for those of the card, which also stand on the page as examples.
    """

    comparison: Comparison
    lineage: Lineage
    timeline: Timeline | None = None
    problem: str | None = None
    held_out: tuple[str, ...] = ()

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts to draw from by chance."""
        return self.held_out or tuple(self.lineage.prompts)

    @classmethod
    def load(
        cls,
        ppo: str,
        *,
        sft: str | None = None,
        reward: str | None = None,
        runs: Sequence[str] | None = None,
        lenient: bool = False,
        hub: Hub = CLIENT,
    ) -> Subject:
        """Fetches and loads the models of a PPO checkpoint.

        Args:
            ppo: NAMESPACE/NAME[@TAG] or a folder.
            sft: The same; None takes what the checkpoint's lineage names.
            reward: The same; None takes what the checkpoint's lineage names.
            runs: Other runs of its ablation; None finds them on the Hub.
            lenient: Whether other runs that cannot be had are left out, and `problem` says so.
            hub: Where models come from.

        Raises:
            ZooError: A model cannot be had.
        """
        lineage = find_lineage(ppo, sft=sft, reward=reward, hub=hub)
        loader = lineage.reward_loader if reward is None else None
        unread = loader is not None and not _may_load(loader, stage_of(Path(lineage.ppo.name)))
        comparison = Comparison.load(
            ppo=lineage.ppo.path,
            sft=lineage.sft.path,
            reward=() if unread else [model.path for model in lineage.rewards],
            reading=lineage.reward_reading,
            loader=None if unread else loader,
            limits=LIMITS,
        )
        timeline_runs, problem = _runs(lineage, runs, lenient=lenient, hub=hub)
        timeline = None
        if timeline_runs:
            timeline = Timeline(
                comparison,
                timeline_runs,
                fetch=lambda name: resolve(name, hub).path,
                max_models=KEPT,
                max_bytes=KEPT_BYTES,
            )
        length = max(int(lineage.setting("response_length", 1)), 1)
        held_out = held_out_prompts(lineage, lambda prompt: comparison.check(prompt, max_new_tokens=length), hub)
        return cls(comparison, lineage, timeline, problem, tuple(held_out))


def _may_load(loader: str, stage: Path | None) -> bool:
    """Whether the code that a card names may load a reward model: the run of the user's, in whose stage the card lies,
    names it too; False for a repository. Raises ZooError for a run that is not the user's."""
    if stage is None:
        return False
    record = StageRecord(stage)
    if not record.is_own():
        raise ZooError(
            f"{record.run_file} was not written by your rlhf-zoo, or was changed since, and its reward model is loaded "
            f"by {loader}: name another with --reward, or add {FLAG} if you trust this run."
        )
    return bool(at(record.read(), "resolved", "reward_model_loader") == loader)


def _runs(
    lineage: Lineage, others: Sequence[str] | None, *, lenient: bool, hub: Hub = CLIENT
) -> tuple[list[TimelineRun], str | None]:
    """The run of the PPO checkpoint and those beside it, each with a checkpoint at least; why some are missing."""
    folder = Path(lineage.ppo.name)
    if folder.is_dir():
        stage = stage_of(folder)
        if stage is not None:
            try:
                StageRecord(stage).check_own()
            except ZooError as error:
                return [], str(error)
        own = TimelineRun.from_card(card_json(Facts.read(stage, None)), stage) if stage is not None else None
        if own is None or not own.points:
            return [], f"{folder} lies beside no checkpoints of its run: give the run's PPO stage, or a repository."
        return [own], None
    missing = None
    try:
        listed = find_runs(lineage.ppo.name, lineage.card, others=others, hub=hub)
    except ZooError as error:
        if not lenient:
            raise
        missing = f"The other runs are left out: {error}"
        listed = find_runs(lineage.ppo.name, lineage.card, others=(), hub=hub)
    runs = [run for run in (TimelineRun.from_listing(entry.listing, entry.card) for entry in listed.runs) if run.points]
    if not runs or runs[0].name != listed.runs[0].repo:
        return (
            [],
            listed.problem or f"{listed.runs[0].repo} has no checkpoint with a tag: publish the steps of its run.",
        )
    return runs, missing or listed.problem
