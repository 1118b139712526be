"""Which rows of which data set a stage learned from and was measured on, as its card says it."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from ...fileio import finite, hub_id
from ...runs.registry import STAGES
from .facts import Facts
from .markdown import Raw, code


@dataclass(frozen=True)
class DataPart:
    """Rows of a data set. repo: None of one that is not published; folder: its name on the machine that trained.

    share: of the split's prompts, held out or, with `trained`, left out. columns: the stage's -> the data set's.
    another: whether as large a share of the same split is held out for something else.
    """

    repo: str | None
    folder: str | None
    config: str | None
    split: str | None
    share: float | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    trained: bool = False
    another: bool = False

    @property
    def name(self) -> str | None:
        return self.repo or self.folder

    @property
    def rows(self) -> Raw:
        """Split, share and configuration in words."""
        split = f"the {code(self.split)} split" if self.split else "a split that is not recorded"
        if self.share is not None:
            share = f"{100 * self.share:g}%"
            held_out = f"{'another' if self.another else 'the'} {share} held out of {split}"
            split = f"{split} but for {share} of its prompts" if self.trained else held_out
        return Raw(split + (f", configuration {code(self.config)}" if self.config else ""))

    @property
    def words(self) -> Raw:
        """All of it."""
        of = f"{',' if self.config else ''} of {code(self.name)}" if self.name else ""
        columns = ", ".join(f"{ours} in {code(theirs)}" for ours, theirs in self.columns.items())
        return Raw(f"{self.rows}{of}{f' ({columns})' if columns else ''}")


def stage_key(facts: Facts, key: str) -> Any:
    """A data key of the stage as the run had it; its default where the run did not set it."""
    if key in facts.settings:
        return facts.settings[key]
    known = {entry.name: entry for entry in fields(STAGES[facts.stage].load("arguments"))}
    default = known[key].default if key in known else None
    return None if default is MISSING else default


def of_stage(facts: Facts) -> DataPart:
    """What the stage trained on."""
    share = stage_key(facts, "held_out_share")
    if facts.stage == "ppo" and finite(share):  # one such share for the evaluation, and another to watch by
        share = 2 * share
    return _part(facts, stage_key(facts, "dataset_train_split"), share, trained=True)


def validated_on(facts: Facts) -> DataPart:
    """What was evaluated while the stage trained."""
    share = stage_key(facts, "held_out_share")
    key = "dataset_validation_split" if facts.stage == "reward" else "dataset_test_split"
    return _part(facts, stage_key(facts, key if share is None else "dataset_train_split"), share)


def measured_on(facts: Facts) -> DataPart:
    """The pairs that a reward model was measured on."""
    share = stage_key(facts, "held_out_share")
    return _part(facts, stage_key(facts, "dataset_test_split" if share is None else "dataset_train_split"), share)


def evaluated_on(facts: Facts, found: Mapping[str, Any] | None = None) -> DataPart:
    """The prompts of ../eval, or of its part `found`, which is measured on prompts of its own."""
    data = facts.evaluation.get("data")
    split = (found or facts.evaluation).get("split", "test")
    if not isinstance(data, Mapping) or "config" not in data:
        return DataPart(*_place(facts), "prompts", str(split))
    share, own = (found or data).get("held_out_share"), data.get("held_out_share")
    another = found is not None and finite(share) and finite(own)
    if found is not None and finite(share) and not finite(own):  # the evaluation's share was to spare: see runs.data
        share = 2 * share
    repo = hub_id(data.get("location"))
    place = repo, None if repo else _place(facts)[1]
    return DataPart(*place, data["config"], str(split), share if finite(share) else None, another=another)


def training_saw(facts: Facts) -> str:
    """A clause on the evaluation's prompts, for each stage of the run: whether it trained on them, as was counted.

    "" where nobody counted, as in evaluations of earlier versions.
    """
    data = facts.evaluation.get("data")
    seen = data.get("seen") if isinstance(data, Mapping) else None
    if not isinstance(seen, Mapping):
        return ""
    known = {stage: title for stage, title in TITLES.items() if stage in seen}
    never = [title for stage, title in known.items() if seen[stage] == 0]
    unknown = [title for stage, title in known.items() if not finite(seen[stage])]
    counted = [(title, seen[stage]) for stage, title in known.items() if finite(seen[stage]) and seen[stage]]
    clauses = [f"**{count:,} of which {title} trained on as well**" for title, count in counted]
    if never:
        clauses.append(f"which {_listed(never, 'and')} never trained on")
    if unknown:
        clauses.append(f"of which nobody knows whether {_listed(unknown, 'or')} trained on them")
    return ", ".join(clauses)


#: The stages in a sentence on what they trained on.
TITLES = {"sft": "SFT", "reward": "the reward model", "ppo": "PPO"}


def _listed(names: Sequence[str], word: str) -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _part(facts: Facts, split: Any, share: Any, *, trained: bool = False) -> DataPart:
    columns = stage_key(facts, "columns")
    return DataPart(
        *_place(facts),
        stage_key(facts, "dataset_config"),
        split,
        share if finite(share) else None,
        columns if isinstance(columns, Mapping) else {},
        trained,
    )


def _place(facts: Facts) -> tuple[str | None, str | None]:
    return (facts.datasets[0] if facts.datasets else None), facts.parents.get("data", {}).get("folder")
