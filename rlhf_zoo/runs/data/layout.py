"""The data keys of all stages, and the forms in which stages read rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from ...errors import ZooError
from ...fields import option
from ...modeling.chat import append_completion, has_answer_prefix, move_answer_prefix, tokenize_prompt
from ...modeling.chat_template import is_conversation
from ...modeling.prompt_keys import prompt_key
from ...modeling.reserved_columns import PROMPT_TOKENS, QUESTION
from ...plugins import did_you_mean
from .columns import fill_placeholders, has_placeholders, placeholder_values
from .overlap import drop_question_column
from .row_values import check_values
from .turns import SHAREGPT_COLUMN, align_answers, as_messages, conversation_columns, replace_columns, split_dialogues

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

#: The forms of a row: a text to learn, a pair of answers, a prompt, or a text with a label.
Form = Literal["texts", "pairs", "prompts", "labeled"]
#: The columns of each form, for error messages.
_NEEDED_COLUMNS = {
    "texts": "messages, conversations, prompt and completion, or text",
    "pairs": "chosen and rejected, with prompt or conversations if they do not begin with the prompt",
    "prompts": "prompt, messages, conversations, or chosen and rejected that begin with the prompt",
    "labeled": "text and label",
}
#: Keys of PPO's data that determine which prompts are held out of all stages.
HELD_OUT_KEYS = (
    "dataset_name", "dataset_revision", "dataset_config", "dataset_train_split", "columns", "keep_above",
    "held_out_share",
)  # fmt: skip
#: Keys of PPO that determine how completions are cut.
TRUNCATION_KEYS = ("response_length_min", "truncate_text", "truncate_after")
STOP_KEYS = ("stop_token", "stop_token_id")
#: Minimum similarity to a known key at which an unknown key counts as misspelled.
_TYPO_CUTOFF = 0.8
#: The start of an answer in dialogues written as one text, such as those of Anthropic/hh-rlhf.
_ANSWER = "\n\nAssistant:"
#: (columns that are read, columns that are ignored) for each warning that this process has logged.
_warned_columns: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class DataArguments:
    """The data keys that every stage has.

    Raises:
        ZooError: Keys contradict each other, or a value is not valid.
    """

    dataset_name: str | None = option(None, "Data set of only this stage; None takes the recipe's.")
    dataset_revision: str | None = option(None, "Revision of dataset_name.")
    columns: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "Mapping from a column that the stage reads to a column of the data set, or to a text with "
            "{column}, {column[key]} or {column:2-8 words}."
        },
    )
    keep_above: dict[str, float] = field(
        default_factory=dict, metadata={"help": "Column -> number; rows whose value is not above it are dropped."}
    )
    held_out_share: float | None = option(
        None, "Share of the training split's prompts to hold out, instead of a test split."
    )
    max_prompt_length: int | None = option(None, "Drop rows whose prompt has more tokens; None drops no rows.")

    def __post_init__(self) -> None:
        test_split = getattr(self, "dataset_test_split", None)
        if self.held_out_share is not None and test_split is not None:
            raise ZooError(
                "held_out_share takes its rows from the training split, but dataset_test_split names "
                f"{test_split!r}: set dataset_test_split to null."
            )
        if self.dataset_revision is not None and self.dataset_name is None:
            raise ZooError("dataset_revision is set and dataset_name of the stage is not: set both, or neither.")
        check_columns(self.columns)
        for name, bound in self.keep_above.items():
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise ZooError(f"keep_above has {bound!r} for {name}, which is not a number.")

    @property
    def evaluated_split(self) -> str | None:
        """The split that is evaluated during training."""
        return getattr(self, "dataset_test_split", None)


def check_columns(columns: Mapping[str, Any]) -> None:
    """Checks the values of `columns`.

    Args:
        columns: {the stage's column: a column of the data set, or a text}.

    Raises:
        ZooError: A value is not a text.
    """
    for target, source in columns.items():
        if not isinstance(source, str):
            raise ZooError(f"columns has {source!r} for {target}, which is not the name of a column.")


def convert_rows(
    rows: Dataset, form: Form, *, columns: Mapping[str, str], as_chat: bool, subject: str, text_column: str = "text"
) -> Dataset:
    """Converts rows to the columns that a stage reads. Other columns are kept, except in the form "texts".

    Args:
        rows: The rows of a data set, as loaded.
        form: The form that the stage reads.
        columns: The stage's column -> the data set's column, or a text with placeholders for `fill_placeholders`.
        as_chat: Whether texts become conversations: plain prompts become user turns, plain completions become
            assistant turns, and dialogues in one text become their turns.
        subject: What to call the data set, at the start of a sentence.
        text_column: The column of plain texts.

    Raises:
        ZooError: A column is missing, or a row cannot be read.
    """
    subject_within_sentence = subject[:1].lower() + subject[1:]
    templates = {target: source for target, source in columns.items() if has_placeholders(source)}
    rows = drop_question_column(rows)
    if templates and len(rows):
        prompt_template = templates.get("prompt", templates.get(text_column))

        def fill(index: int, row: dict[str, Any]) -> dict[str, Any]:
            texts = {
                target: fill_placeholders(template, row, subject=subject, index=index)
                for target, template in templates.items()
            }
            if prompt_template is None:
                return texts
            return {**texts, QUESTION: placeholder_values(prompt_template, row, subject=subject)}

        filled_rows = [fill(index, row) for index, row in enumerate(rows)]
        rows = replace_columns(rows, {name: [row[name] for row in filled_rows] for name in filled_rows[0]})
    for target, source in columns.items():
        if target in templates:
            continue
        if source not in rows.column_names:
            column_list = ", ".join(map(repr, rows.column_names))
            raise ZooError(f"{subject} has no column {source!r}, only {column_list}: correct `columns`.")
        if target != source:
            rows = rows.remove_columns(target) if target in rows.column_names else rows
            rows = rows.rename_column(source, target)
    if len(rows) == 0:
        raise ZooError(f"{subject} is empty: choose another split.")
    if as_chat and form != "labeled":
        read_columns = ["prompt", "messages", "chosen", "rejected"]
        if form == "prompts" and "prompt" in rows.column_names:
            read_columns = ["prompt"]  # other columns are for reward functions
        rows = split_dialogues(rows, read_columns, subject=subject_within_sentence)
    rows = _unify_turns(rows, form, text_column=text_column, column_sources=columns, subject=subject)
    names = set(rows.column_names)
    check_values(rows, form, text_column=text_column, subject=subject_within_sentence)
    changed_columns = align_answers(rows[0]).keys() if form in ("pairs", "texts") else ()
    if changed_columns:
        mismatch_index = next((i for i, row in enumerate(rows) if align_answers(row).keys() != changed_columns), None)
        if mismatch_index is not None:
            raise ZooError(
                f"Row {mismatch_index} of {subject_within_sentence} has its prompt and answers in a different form "
                "from row 0: write all rows as texts, or all as conversations."
            )
        rows = _map_rows(rows, align_answers)
    if form in ("pairs", "prompts") and {"chosen", "rejected"} <= names:
        first = rows[0]
        has_prompt = "prompt" in names
        if has_prompt and form == "pairs":  # answers in another form begin with the prompt
            has_prompt = is_conversation(first["prompt"]) == is_conversation(first["chosen"])
        if not has_prompt:
            rows = _map_rows(rows, split_pair)
    elif form == "prompts" and "prompt" not in names:
        rows = _map_rows(rows, prompt_from_messages, drop=["messages"])
    if form == "texts":
        rows = _sft_columns(rows, text_column)
    elif form == "prompts":  # token ids in a data set may come from another tokenizer
        rows = rows.remove_columns([name for name in (PROMPT_TOKENS, "attention_mask") if name in rows.column_names])
    return _map_rows(rows, as_turns) if as_chat and "prompt" in rows.column_names else rows


def _unify_turns(
    rows: Dataset, form: Form, *, text_column: str, column_sources: Mapping[str, str], subject: str
) -> Dataset:
    """Converts all conversations in the columns that the stage reads to lists of {role, content}.

    `column_sources` is the stage's key `columns`. Raises ZooError if the data set lacks the columns that the stage
    reads.
    """
    names = set(rows.column_names)
    has_needed_columns = any(columns <= names for columns in _columns_of(form, text_column))
    new_names = {}
    if form != "labeled":
        new_names = conversation_columns(rows, for_texts=form == "texts", has_needed_columns=has_needed_columns)
    for target, source in new_names.items():
        rows = rows.rename_column(source, target)
    _check_form(rows.column_names, form, text_column=text_column, subject=subject, keys=column_sources)
    matches = [columns for columns in _columns_of(form, text_column) if columns <= set(rows.column_names)]
    if matches[0] == {"prompt"}:  # chosen and rejected answer these prompts, so ignoring them needs no warning
        matches = [columns for columns in matches if "chosen" not in columns]
    if len(matches) > 1 and not column_sources:
        read_text, ignored_text = (
            " and ".join(sorted(columns)) for columns in (matches[0], set().union(*matches[1:]) - matches[0])
        )
        _warn_of_ignored_columns(subject, read_text, ignored_text)
    if form == "prompts" and "prompt" in rows.column_names:
        read_columns = ["prompt"]  # other columns are for reward functions
    else:
        read_columns = ["prompt", "messages", "completion", "chosen", "rejected"] if form != "labeled" else []
    is_sharegpt = bool(new_names) or SHAREGPT_COLUMN in column_sources.values()
    return as_messages(rows, read_columns, read_system_column=is_sharegpt, subject=subject[:1].lower() + subject[1:])


def _warn_of_ignored_columns(subject: str, read: str, ignored: str) -> None:
    # A command may read a data set for several stages, under several titles, but one warning is enough.
    if (read, ignored) not in _warned_columns:
        _warned_columns.add((read, ignored))
        log.warning(
            "%s has the columns %s, which the stage reads, and also %s, which it does not.", subject, read, ignored
        )


def _columns_of(form: Form, text_column: str) -> tuple[set[str], ...]:
    """Returns the sets of columns that a form accepts; the first set that a data set has is read."""
    alternatives: dict[str, tuple[set[str], ...]] = {
        "texts": ({"messages"}, {"prompt", "completion"}, {text_column}),
        "pairs": ({"chosen", "rejected"},),
        "prompts": ({"prompt"}, {"chosen", "rejected"}, {"messages"}),
        "labeled": ({"text", "label"},),
    }
    return alternatives[form]


def _check_form(names: Sequence[str], form: Form, *, text_column: str, subject: str, keys: Iterable[str]) -> None:
    """Checks that a data set has the columns that a stage reads. `keys` are those of the stage's `columns`.

    A key that the stage does not read is taken to be for reward functions, unless it resembles a key that
    the stage reads, or a column that the stage needs is missing.
    """
    alternatives = _columns_of(form, text_column)
    read_columns = {"prompt", *([] if form == "labeled" else [SHAREGPT_COLUMN])}.union(*alternatives)
    has_needed_columns = any(columns <= set(names) for columns in alternatives)
    for key in keys:
        if key in read_columns:
            continue
        if get_close_matches(key, read_columns, cutoff=_TYPO_CUTOFF) or not has_needed_columns:
            suggestion = did_you_mean(key, read_columns)
            key_list = f"its keys are {', '.join(sorted(read_columns))}"
            raise ZooError(
                f"`columns` for {subject} has the key {key!r}, which nothing reads{suggestion or ':'} {key_list}."
            )
    if has_needed_columns:
        return
    usual_columns = alternatives[-1 if form == "texts" else 0]
    missing = next(name for name in sorted(usual_columns) if name not in names)
    raise ZooError(
        f"{subject} has no column {missing!r}, only {', '.join(map(repr, names))}: the stage reads "
        f"{_NEEDED_COLUMNS[form]}; rename the column, set `columns` in the stage, or choose another data set."
    )


def _map_rows(rows: Dataset, function: Callable[[dict], dict], *, drop: Sequence[str] = ()) -> Dataset:
    """Adds or replaces the columns that a function of each row returns."""
    values = [function(row) for row in rows]
    columns = {name: [row[name] for row in values] for name in values[0]}
    return replace_columns(rows.remove_columns([*drop]), columns)


def split_pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """Splits two texts or conversations into their common beginning, the prompt, and the two answers.

    Args:
        row: A row with `chosen` and `rejected`.

    Returns:
        {prompt, chosen, rejected}.

    Raises:
        ZooError: Two conversations have different first turns.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    shorter_length = min(len(chosen), len(rejected))
    differing_indices = (index for index in range(shorter_length) if chosen[index] != rejected[index])
    prompt_length = next(differing_indices, shorter_length)
    if isinstance(chosen, str):
        answer_index = chosen[:prompt_length].rfind(_ANSWER)
        space_index = _last_white_space(chosen[:prompt_length])
        if answer_index >= 0:
            prompt_length = answer_index + len(_ANSWER)
        else:  # as in tokenizers, a newline belongs to the prompt, and a space to the answer's first word
            prompt_length = space_index if space_index >= 0 and chosen[space_index] == " " else space_index + 1
    else:
        prompt_length = min(prompt_length, shorter_length - 1)
        if prompt_length == 0:
            raise ZooError(
                "A pair of conversations starts with two different turns, so it has no prompt: add a column 'prompt', "
                "or correct the row."
            )
    return {"prompt": chosen[:prompt_length], "chosen": chosen[prompt_length:], "rejected": rejected[prompt_length:]}


def _last_white_space(text: str) -> int:
    """Returns the index of a text's last white space, newlines included; -1 for a text without white space."""
    return next((index for index in range(len(text) - 1, -1, -1) if text[index].isspace()), -1)


def prompt_from_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a conversation's prompt, as {prompt: its turns before the last answer}.

    Args:
        row: A row with `messages`.
    """
    turns = row["messages"]
    return {"prompt": turns[:-1] if len(turns) > 1 and turns[-1]["role"] == "assistant" else turns}


def as_turns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a row's plain texts to conversations of one turn, and keeps its conversations.

    Args:
        row: The row. Only its columns prompt, completion, chosen and rejected are returned.
    """
    roles = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
    return {
        name: [{"role": role, "content": row[name].strip()}] if isinstance(row[name], str) else row[name]
        for name, role in roles.items()
        if name in row
    }


def _sft_columns(rows: Dataset, text_column: str) -> Dataset:
    """Keeps only the columns that SFT reads, because trl might read other columns instead."""
    names = set(rows.column_names)
    question_columns = [QUESTION] if QUESTION in names else []
    if "messages" in names:
        return rows.select_columns(["messages", *question_columns])
    if {"prompt", "completion"} <= names:
        rows = rows.select_columns(["prompt", "completion", *question_columns])
        return _map_rows(rows, _move_prefix) if any(map(has_answer_prefix, rows["prompt"])) else rows
    return rows.select_columns([text_column, *question_columns])


def _move_prefix(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = move_answer_prefix(row["prompt"], row["completion"])
    return {"prompt": prompt, "completion": completion}


def sft_text(row: Mapping[str, Any], text_column: str) -> Any:
    """Returns the complete text or conversation that SFT learns from a row.

    Args:
        row: A row in the form "texts".
        text_column: The column of plain texts.
    """
    if "messages" in row:
        return row["messages"]
    return append_completion(row["prompt"], row["completion"]) if "completion" in row else row[text_column]


def put_distinct_prompts_first(rows: Dataset) -> Dataset:
    """Reorders rows so that each prompt's first row comes before any prompt's second row, and so on.

    The first N rows then have as many different prompts as possible.

    Args:
        rows: Rows with the column `prompt`.
    """
    counts: Counter[str] = Counter()
    earlier_counts = []
    for prompt in rows["prompt"]:
        key = prompt_key(prompt)
        earlier_counts.append(counts[key])
        counts[key] += 1
    if max(earlier_counts, default=0) == 0:
        return rows
    return rows.select(sorted(range(len(earlier_counts)), key=earlier_counts.__getitem__))


def drop_long_prompts(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None, *, subject: str
) -> tuple[Dataset, int]:
    """Drops the rows whose prompt is too long, and logs their number.

    Args:
        rows: Rows in the form of a stage; rows without the column `prompt` are kept.
        tokenizer: The tokenizer that counts tokens.
        max_tokens: Maximum number of tokens in a prompt; None keeps all rows.
        subject: What to call the rows, in messages.

    Returns:
        (the kept rows, the number of dropped rows).

    Raises:
        ZooError: No row is kept.
    """
    if max_tokens is None or "prompt" not in rows.column_names:
        return rows, 0
    lengths = [len(tokenize_prompt(prompt, tokenizer)) for prompt in rows["prompt"]]
    indices = [index for index, length in enumerate(lengths) if length <= max_tokens]
    dropped_count = len(rows) - len(indices)
    if not indices:
        raise ZooError(f"max_prompt_length is {max_tokens}, but all prompts of {subject} are longer: raise the limit.")
    if dropped_count:
        log.warning(
            "%d of %d rows of %s are left out: max_prompt_length is %d.", dropped_count, len(rows), subject, max_tokens
        )
    return rows.select(indices), dropped_count


def has_conversations(rows: Dataset) -> bool:
    """Whether the first row has a conversation in a column that stages read.

    Args:
        rows: The rows, all in the same form.
    """
    return any(is_conversation(rows[0].get(name)) for name in ("prompt", "messages", "completion", "chosen"))
