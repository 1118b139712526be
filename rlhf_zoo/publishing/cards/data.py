"""Describes the data that a stage was trained and measured on."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from ...fileio import hub_id, is_finite
from ...runs.registry import STAGES
from .facts import StageFacts
from .markdown import Raw, code


@dataclass(frozen=True)
class DataPart:
    """Rows of a data set.

    Attributes:
        repo: The data set's repository; None if it is not published.
        folder: Name of the data set's folder on the training machine; None if it has a repository.
        config: The data set's configuration.
        split: The split that holds the rows.
        share: Share of the split's prompts that is held out: these rows or, if `is_training_data`, all other rows. None
            if these rows are the whole split.
        columns: Name of the stage's column -> name of the data set's.
        is_training_data: Whether the stage trained on the rows.
        is_second_share: Whether an equal share of the same split is held out for another purpose.
    """

    repo: str | None
    folder: str | None
    config: str | None
    split: str | None
    share: float | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    is_training_data: bool = False
    is_second_share: bool = False

    @property
    def name(self) -> str | None:
        """The repository, else the folder."""
        return self.repo or self.folder

    @property
    def split_description(self) -> Raw:
        """Split, share and configuration, as a phrase."""
        split = f"the {code(self.split)} split" if self.split else "a split that is not recorded"
        if self.share is not None:
            share = f"{100 * self.share:g}%"
            held_out = f"{'another' if self.is_second_share else 'the'} {share} held out of {split}"
            split = f"{split} without {share} of its prompts" if self.is_training_data else held_out
        return Raw(split + (f", configuration {code(self.config)}" if self.config else ""))

    @property
    def description(self) -> Raw:
        """Split, share, configuration, data set and columns, as a phrase."""
        data_set = f"{',' if self.config else ''} of {code(self.name)}" if self.name else ""
        columns = ", ".join(f"{ours} from {code(theirs)}" for ours, theirs in self.columns.items())
        return Raw(f"{self.split_description}{data_set}{f' ({columns})' if columns else ''}")


def stage_setting(facts: StageFacts, key: str) -> Any:
    """Returns the value of a key in the stage's settings, or else its default; None if it has neither.

    Args:
        facts: The facts of the stage.
        key: A key of the stage.
    """
    if key in facts.settings:
        return facts.settings[key]
    defaults = {entry.name: entry.default for entry in fields(STAGES[facts.stage].load("arguments"))}
    default = defaults.get(key)
    return None if default is MISSING else default


def trained_on(facts: StageFacts) -> DataPart:
    """Returns the rows that the stage trained on.

    Args:
        facts: The facts of the stage.
    """
    share = stage_setting(facts, "held_out_share")
    if facts.stage == "ppo" and is_finite(share):  # PPO holds out a second share, for validation
        share = 2 * share
    return _part(facts, stage_setting(facts, "dataset_train_split"), share, is_training_data=True)


#: Key of `left_out` in run.json -> description of those rows, which follows their number.
_LEFT_OUT = {
    "held_out_by_ppo": "whose prompts PPO holds out",
    "max_prompt_length": "whose prompts are longer than `max_prompt_length`",
    "max_length": "that `max_length` leaves out",
}


def left_out(facts: StageFacts) -> Raw:
    """Returns a sentence, after a space, on the training rows that the stage left out; "" if there are none.

    Args:
        facts: The facts of the stage.
    """
    counts = facts.run.get("left_out")
    counts = counts if isinstance(counts, Mapping) else {}
    parts = [f"{counts[key]:,} {rows}" for key, rows in _LEFT_OUT.items() if is_finite(counts.get(key)) and counts[key]]
    return Raw(f" Rows left out: {_join(parts, 'and')}." if parts else "")


def validated_on(facts: StageFacts) -> DataPart:
    """Returns the rows that the validation metrics of training were measured on.

    Args:
        facts: The facts of the stage.
    """
    share = stage_setting(facts, "held_out_share")
    key = "dataset_validation_split" if facts.stage == "reward" else "dataset_test_split"
    return _part(facts, stage_setting(facts, key if share is None else "dataset_train_split"), share)


def measured_on(facts: StageFacts) -> DataPart:
    """Returns the pairs that a reward model was measured on.

    Args:
        facts: The facts of the stage.
    """
    share = stage_setting(facts, "held_out_share")
    return _part(facts, stage_setting(facts, "dataset_test_split" if share is None else "dataset_train_split"), share)


def evaluated_on(facts: StageFacts, part: Mapping[str, Any] | None = None) -> DataPart:
    """Returns the prompts of the evaluation in ../eval, or of a part of it that has its own prompts.

    Args:
        facts: The facts of the stage.
        part: The part of evaluation.json; None for the main evaluation.
    """
    data = facts.evaluation.get("data")
    split = (part or facts.evaluation).get("split", "test")
    if not isinstance(data, Mapping) or "config" not in data:
        return DataPart(*_repo_and_folder(facts), "prompts", str(split))
    share, main_share = (part or data).get("held_out_share"), data.get("held_out_share")
    is_second_share = part is not None and is_finite(share) and is_finite(main_share)
    # If the data set has a test split, validation gets both shares.
    if part is not None and is_finite(share) and not is_finite(main_share):
        share = 2 * share
    repo = hub_id(data.get("location"))
    folder = None if repo else _repo_and_folder(facts)[1]
    share = share if is_finite(share) else None
    return DataPart(repo, folder, data["config"], str(split), share, is_second_share=is_second_share)


def overlap_with_training(facts: StageFacts) -> str:
    """Returns sentences on which stages trained on prompts of the evaluation; "" if it did not compare the prompts.

    Args:
        facts: The facts of the stage.
    """
    data = facts.evaluation.get("data")
    counts = data.get("trained_on") if isinstance(data, Mapping) else None
    if not isinstance(counts, Mapping):
        return ""
    titles = {stage: title for stage, title in STAGE_NAMES.items() if stage in counts}
    titles_without_overlap = [title for stage, title in titles.items() if counts[stage] == 0]
    uncounted_titles = [title for stage, title in titles.items() if not is_finite(counts[stage])]
    sentences = [
        f"{title} also trained on **{counts[stage]:,} of them**."
        for stage, title in titles.items()
        if is_finite(counts[stage]) and counts[stage]
    ]
    if titles_without_overlap:
        sentences.append(f"{_join(titles_without_overlap, 'and')} never trained on them.")
    if uncounted_titles:
        sentences.append(f"It is unknown whether {_join(uncounted_titles, 'or')} trained on them.")
    return " ".join(f"{sentence[:1].upper()}{sentence[1:]}" for sentence in sentences)


#: Stage -> its name within a sentence.
STAGE_NAMES = {"sft": "SFT", "reward": "the reward model", "ppo": "PPO"}


def _join(names: Sequence[str], word: str) -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _part(facts: StageFacts, split: Any, share: Any, *, is_training_data: bool = False) -> DataPart:
    columns = stage_setting(facts, "columns")
    return DataPart(
        *_repo_and_folder(facts),
        stage_setting(facts, "dataset_config"),
        split,
        share if is_finite(share) else None,
        columns if isinstance(columns, Mapping) else {},
        is_training_data,
    )


def _repo_and_folder(facts: StageFacts) -> tuple[str | None, str | None]:
    return (facts.dataset_ids[0] if facts.dataset_ids else None), facts.parents.get("data", {}).get("folder")
