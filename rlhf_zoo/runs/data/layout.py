"""Where a stage's rows are in its data set, and in which form: the keys, and rows in the columns that stages read.

Prompts are split by the hash of their prompt, so that a share can be held out of a data set with one split.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from ...errors import ZooError
from ...fields import option
from ...modeling.chat import (
    append_completion,
    has_answer_prefix,
    is_conversation,
    move_answer_prefix,
    prompt_key,
    tokenize_prompt,
)
from ...modeling.reserved_columns import ASKED, PROMPT_TOKENS
from ...plugins import did_you_mean
from .columns import filled, is_text, values_in
from .overlap import overlap, unmarked, whole_question
from .row_values import check_values
from .turns import SHAREGPT, in_our_turns, named_conversations, of_one_kind

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Form = Literal["texts", "pairs", "prompts", "labeled"]
NEEDED = {
    "texts": "messages, conversations, prompt and completion, or text",
    "pairs": "chosen and rejected, and prompt or conversations where they do not begin with it",
    "prompts": "prompt, messages, conversations, or chosen and rejected that begin with one",
    "labeled": "text and label",
}
#: Keys of PPO's data that decide which prompts are held out of all stages.
HOLDS_OUT = (
    "dataset_name", "dataset_revision", "dataset_config", "dataset_train_split", "columns", "keep_above",
    "held_out_share",
)  # fmt: skip
#: Keys of PPO by which completions are cut.
CUTS = ("response_length_min", "truncate_text", "truncate_after")
#: How alike a key is to another that is meant.
CLOSE = 0.8
#: By which texts of dialogues, as those of Anthropic/hh-rlhf, begin an answer.
_ANSWER = "\n\nAssistant:"


@dataclass(frozen=True)
class DataArguments:
    """The keys of every stage's data."""

    dataset_name: str | None = option(None, "Data set of this stage alone; None takes the recipe's.")
    dataset_revision: str | None = option(None, "Revision of dataset_name.")
    columns: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "Column that the stage reads: column of the data set, or a text with {column}, {column[key]} or "
            "{column:2-8 words} in it, as a mapping."
        },
    )
    keep_above: dict[str, float] = field(
        default_factory=dict, metadata={"help": "Leave out rows whose number in a column is not above this."}
    )
    held_out_share: float | None = option(
        None, "Hold this share of the training split's prompts out; needs no test split."
    )
    max_prompt_length: int | None = option(None, "Leave out rows whose prompt has more tokens; None leaves out none.")

    def __post_init__(self) -> None:
        test = getattr(self, "dataset_test_split", None)
        if self.held_out_share is not None and test is not None:
            raise ZooError(
                f"held_out_share takes its rows from the training split, and dataset_test_split names {test!r}: set "
                "dataset_test_split to null."
            )
        if self.dataset_revision is not None and self.dataset_name is None:
            raise ZooError("dataset_revision is given and dataset_name of the stage is not: give both, or neither.")
        check_columns(self.columns)
        for name, bound in self.keep_above.items():
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise ZooError(f"keep_above says {bound!r} for {name}: give a number.")

    @property
    def evaluated_split(self) -> str | None:
        """The split that is evaluated while training goes on."""
        return getattr(self, "dataset_test_split", None)


def check_columns(columns: Mapping[str, Any]) -> None:
    """Raises ZooError for a value of `columns` that names nothing."""
    for ours, theirs in columns.items():
        if not isinstance(theirs, str):
            raise ZooError(f"columns says {theirs!r} for {ours}: give the name of a column.")


def in_form(rows: Dataset, form: Form, *, columns: Mapping[str, str], turns: bool, text: str, of: str) -> Dataset:
    """The rows in the columns that a stage reads, other columns beside them.

    columns: ours -> theirs, or a text as `columns.filled` takes it. turns: texts of prompts become a user's turn, and
    of completions the assistant's. text: the column of plain texts. of: what to call the data set. Raises ZooError for
    a column that is not there.
    """
    made = {ours: text for ours, text in columns.items() if is_text(text)}
    rows = unmarked(rows)
    if made and len(rows):
        asking = made.get("prompt", made.get(text))

        def written(place: int, row: dict[str, Any]) -> dict[str, Any]:
            texts = {ours: filled(text, row, of=of, place=place) for ours, text in made.items()}
            return texts if asking is None else {**texts, ASKED: values_in(asking, row, of=of)}

        rows = _with_columns(rows, [written(place, row) for place, row in enumerate(rows)])
    for ours, theirs in columns.items():
        if ours in made:
            continue
        if theirs not in rows.column_names:
            listed = ", ".join(map(repr, rows.column_names))
            raise ZooError(f"{of} has no column {theirs!r}, only {listed}: mend `columns`.")
        if ours != theirs:
            rows = rows.remove_columns(ours) if ours in rows.column_names else rows
            rows = rows.rename_column(theirs, ours)
    if len(rows) == 0:
        raise ZooError(f"{of} is empty: choose another split.")
    rows = _in_turns(rows, form, text=text, given=columns, of=of)
    names = set(rows.column_names)
    check_values(rows, form, text=text, of=of[:1].lower() + of[1:])
    if form in ("pairs", "texts") and (changed := of_one_kind(rows[0])):
        other = next((place for place, row in enumerate(rows) if of_one_kind(row).keys() != changed.keys()), None)
        if other is not None:
            raise ZooError(
                f"Row {other} of {of[:1].lower() + of[1:]} has its prompt and answers in another form than row 0: "
                "write all rows as texts, or all as conversations."
            )
        rows = _mapped(rows, of_one_kind)
    if form in ("pairs", "prompts") and {"chosen", "rejected"} <= names:
        first = rows[0]
        apart = "prompt" in names and is_conversation(first["prompt"]) == is_conversation(first["chosen"])
        if not apart and (form == "pairs" or "prompt" not in names):
            rows = _mapped(rows, split_pair)
    elif form == "prompts" and "prompt" not in names:
        rows = _mapped(rows, _first_turns, drop=["messages"])
    if form == "texts":
        rows = _texts(rows, text)
    elif form == "prompts":  # in a data set, these are some other tokenizer's
        rows = rows.remove_columns([name for name in (PROMPT_TOKENS, "attention_mask") if name in rows.column_names])
    return _mapped(rows, as_turns) if turns and "prompt" in rows.column_names else rows


def _in_turns(rows: Dataset, form: Form, *, text: str, given: Mapping[str, str], of: str) -> Dataset:
    """The rows with conversations of any form as lists of {role, content}, in the columns that the stage reads.

    Raises ZooError where there are no such columns.
    """
    names = set(rows.column_names)
    fits = any(needed <= names for needed in _columns_of(form, text))
    named = named_conversations(rows, of_texts=form == "texts", fits=fits) if form != "labeled" else {}
    for ours, theirs in named.items():
        rows = rows.rename_column(theirs, ours)
    need_form(rows.column_names, form, text=text, of=of, given=given)
    if form == "prompts" and "prompt" in rows.column_names:
        read = ["prompt"]  # any other is for reward functions
    else:
        read = ["prompt", "messages", "completion", "chosen", "rejected"] if form != "labeled" else []
    sharegpt = bool(named) or SHAREGPT in given.values()
    return in_our_turns(rows, read, system=sharegpt, of=of[:1].lower() + of[1:])


def _columns_of(form: Form, text: str) -> tuple[set[str], ...]:
    """The columns that a form takes, in each of its kinds."""
    known: dict[str, tuple[set[str], ...]] = {
        "texts": ({"messages"}, {"prompt", "completion"}, {text}),
        "pairs": ({"chosen", "rejected"},),
        "prompts": ({"prompt"}, {"messages"}, {"chosen", "rejected"}),
        "labeled": ({"text", "label"},),
    }
    return known[form]


def need_form(names: Sequence[str], form: Form, *, text: str, of: str, given: Iterable[str] = ()) -> None:
    """Raises ZooError where columns of these names are none of the forms that a stage takes; given: keys of `columns`.

    A key that no stage reads is for reward functions, unless it is next to one that is read.
    """
    known = _columns_of(form, text)
    reads = {"prompt", *([] if form == "labeled" else [SHAREGPT])}.union(*known)
    fits = any(needed <= set(names) for needed in known)
    for ours in given:
        if ours not in reads and (get_close_matches(ours, reads, cutoff=CLOSE) or not fits):
            near = did_you_mean(ours, reads)
            listed = f"its keys are {', '.join(sorted(reads))}"
            raise ZooError(f"`columns` for {of} says {ours!r}, which nothing reads{near or ':'} {listed}.")
    if fits:
        return
    usual = known[-1 if form == "texts" else 0]
    missing = next(name for name in sorted(usual) if name not in names)
    raise ZooError(
        f"{of} has no column {missing!r}, only {', '.join(map(repr, names))}: the stage reads {NEEDED[form]}; rename "
        "the column, say `columns` in the stage, or choose another data set."
    )


def _mapped(rows: Dataset, function: Callable[[dict], dict], *, drop: Sequence[str] = ()) -> Dataset:
    """As Dataset.map, where a column may change from texts to conversations."""
    return _with_columns(rows, [function(row) for row in rows], drop=drop)


def _with_columns(rows: Dataset, values: Sequence[Mapping[str, Any]], *, drop: Sequence[str] = ()) -> Dataset:
    """The rows with these columns, in place of those that had their names. values: of each row, by column."""
    from datasets import concatenate_datasets

    from .tables import dataset_of

    made = dataset_of({name: [row[name] for row in values] for name in values[0]})
    kept = [name for name in rows.column_names if name not in made.column_names and name not in drop]
    return concatenate_datasets([rows.select_columns(kept), made], axis=1) if kept else made


def split_pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of two texts or conversations that begin alike: that prompt, and what comes behind it on each side."""
    chosen, rejected = row["chosen"], row["rejected"]
    most = min(len(chosen), len(rejected))
    same = next((place for place in range(most) if chosen[place] != rejected[place]), most)
    if isinstance(chosen, str):
        place = chosen[:same].rfind(_ANSWER)
        # A newline belongs to the prompt; a space to the answer's first word, as tokenizers have it.
        space = _last_space(chosen[:same])
        same = place + len(_ANSWER) if place >= 0 else space + (space >= 0 and chosen[space] != " ")
        same = max(same, 0)
    else:
        same = min(same, most - 1)
        if same == 0:
            raise ZooError(
                "A pair of conversations begins with two different turns, so that it has no prompt: give a column "
                "'prompt', or mend the row."
            )
    return {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


def _last_space(text: str) -> int:
    """Where the last white space of a text is, be it a newline; -1 where there is none."""
    return next((place for place in range(len(text) - 1, -1, -1) if text[place].isspace()), -1)


def _first_turns(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = row["messages"]
    return {"prompt": turns[:-1] if len(turns) > 1 and turns[-1]["role"] == "assistant" else turns}


def as_turns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Texts of a row as turns of a conversation; what is one already stays."""
    roles = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
    return {
        name: [{"role": role, "content": row[name].strip()}] if isinstance(row[name], str) else row[name]
        for name, role in roles.items()
        if name in row
    }


def _texts(rows: Dataset, text: str) -> Dataset:
    """The columns that SFT learns from, alone where others could be taken for them."""
    names = set(rows.column_names)
    asked = [ASKED] if ASKED in names else []
    if "messages" in names:
        return rows.select_columns(["messages", *asked])
    if {"prompt", "completion"} <= names:
        rows = rows.select_columns(["prompt", "completion", *asked])
        return _mapped(rows, _closed) if any(map(has_answer_prefix, rows["prompt"])) else rows
    return rows.select_columns([text, *asked])  # trl reads token ids and masks where it finds them


def _closed(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = move_answer_prefix(row["prompt"], row["completion"])
    return {"prompt": prompt, "completion": completion}


def sft_text(row: Mapping[str, Any], text: str) -> Any:
    """The whole text or conversation that a row of SFT is."""
    if "messages" in row:
        return row["messages"]
    return append_completion(row["prompt"], row["completion"]) if "completion" in row else row[text]


def hold_out(rows: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """(rows to train on, rows held out): those of `share` of the prompts, at least one, by the sha256 of the prompt.

    All rows of a prompt, in whichever form, stay on one side. As a data set grows a prompt hardly ever changes sides.
    Raises ZooError where nothing would be left to train on.
    """
    parts = parts_of(rows, share, parts=1)
    return parts[-1], parts[0]


def parts_of(rows: Dataset, share: float, *, parts: int) -> list[Dataset]:
    """`parts` times `share` of the prompts, each at least one, and at the end the rest; see `hold_out`."""
    digests = _digests(rows)
    distinct = sorted(set(digests))
    count = math.ceil(share * len(distinct))
    if parts * count >= len(distinct):
        raise ZooError(
            f"held_out_share is {share}, which leaves none of {len(distinct)} prompts to train on: gather rows on "
            "more prompts, or set it to null, and nothing is measured on prompts held out."
        )
    place = {digest: min(rank // count, parts) for rank, digest in enumerate(distinct)}
    chosen: list[list[int]] = [[] for _ in range(parts + 1)]
    for row, digest in enumerate(digests):
        chosen[place[digest]].append(row)
    return [rows.select(one) for one in chosen]


def without_prompts(
    rows: Dataset, prompts: Dataset | Sequence[Mapping[str, Any]], *, of: str
) -> tuple[Dataset, int | None]:
    """Leaves out the rows that ask one of some prompts: see `overlap`.

    Args:
        rows: What a stage would learn from.
        prompts: Rows with the column `prompt`.
        of: What to call the stage.

    Returns:
        The other rows, and how many were left out; None where none is, and a prompt may stand in texts that do not
        tell it from its answer.

    Raises:
        ZooError: Nothing is left.
    """
    found = overlap(prompts, rows)
    left_out = len(found.rows)
    if left_out == len(rows):
        raise ZooError(f"PPO's held_out_share takes every prompt of {of}: give more data, or lower it.")
    if not left_out:
        return rows, 0 if found.told else None
    return rows.select([place for place in range(len(rows)) if place not in found.rows]), left_out


def distinct_first(rows: Dataset) -> Dataset:
    """The rows with each prompt's first row before every prompt's second one, and so on; else in their order.

    So the first N rows hold as many different prompts as N rows can.
    """
    seen: Counter[str] = Counter()
    times = []
    for prompt in rows["prompt"]:
        key = prompt_key(prompt)
        times.append(seen[key])
        seen[key] += 1
    if max(times, default=0) == 0:
        return rows
    return rows.select(sorted(range(len(times)), key=times.__getitem__))


def _digests(rows: Dataset) -> list[str]:
    """For each row, the sha256 of its prompt; the same one for rows that ask the same in other forms."""
    least: dict[str, str] = {}
    keys = []
    for row in rows:
        digest = _digest(_key(row))
        key = whole_question(row) or digest
        least[key] = min(digest, least.get(key, digest))
        keys.append(key)
    return [least[key] for key in keys]


def _key(row: Mapping[str, Any]) -> Any:
    if "prompt" in row:
        return row["prompt"]
    return _first_turns(row)["prompt"] if "messages" in row else row["text"] if "text" in row else dict(row)


def _digest(prompt: Any) -> str:
    """sha256 of a text or a conversation."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def fitting(rows: Dataset, tokenizer: PreTrainedTokenizerBase, most: int | None, *, of: str) -> tuple[Dataset, int]:
    """Rows whose prompt has at most `most` tokens, and how many were left out, which is said in a line."""
    if most is None or "prompt" not in rows.column_names:
        return rows, 0
    keep = [place for place, prompt in enumerate(rows["prompt"]) if len(tokenize_prompt(prompt, tokenizer)) <= most]
    left_out = len(rows) - len(keep)
    if not keep:
        raise ZooError(f"max_prompt_length is {most}, and no prompt of {of} is as short: raise it.")
    if left_out:
        log.warning("%d of %d rows of %s are left out: max_prompt_length is %d.", left_out, len(rows), of, most)
    return rows.select(keep), left_out


def conversational(rows: Dataset) -> bool:
    """Whether the rows are conversations."""
    return any(is_conversation(rows[0].get(name)) for name in ("prompt", "messages", "completion", "chosen"))
