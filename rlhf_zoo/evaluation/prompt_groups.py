"""Groups prompts that ask the same question. Their completions are alike, so intervals resample whole groups.

Two prompts are near-duplicates if their normal forms are equal. The normal form leaves out only what does not change
the question: case, white space, punctuation at the end of a word, an article or another determiner before a word, and
`please` at the start. "My phone's battery" becomes "battery of phone". Every other word, number and sign counts, in
order, so prompts of one template that ask different questions stay apart. The overlap of n-grams would not work: "the
price of our chair" shares more n-grams with "the price of our table" than with "my chair's price".
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ZooError
from ..modeling.chat_template import Prompt, is_conversation
from ..modeling.prompt_keys import prompt_key
from .stats import group_indices

if TYPE_CHECKING:
    from datasets import Dataset

#: The value of `evaluation.group` and `--group` that groups prompts by their normal form.
NEAR_DUPLICATES = "near-duplicates"

_DETERMINERS = frozenset(["a", "an", "the", "this", "that", "these", "those", "my", "our"])
# After these, 's is short for "is".
_CONTRACTION = re.compile(r"\b(what|who|where|when|why|how|it|that|there|here|he|she)'s\b", re.IGNORECASE)
# The match begins at the start of a word; otherwise a long run of letters would take quadratic time.
_GENITIVE = re.compile(r"\b(\w+)'s\s+(\w+)")
# A mark inside a word or number counts, as in 1.5, f(x) or a!=b. So does the ! of 5!, since 5! is not 5.
_TOKEN = re.compile(
    r"""(?P<dropped>(?<!\d)!(?=[\s"”!?]|$)|[.,;:?…"“”](?=[\s"”.,;:!?…)]|$)|(?<![^\s(])["“])"""
    r"|\d+(?:[.,:]\d+)*|\w+(?:['-]\w+)*|[^\w\s]"
)


def normal_form(text: str) -> str:
    """Returns the normal form of a text, as the module's docstring defines it.

    Args:
        text: A prompt.
    """
    plain = unicodedata.normalize("NFKC", text).replace("’", "'")
    plain = _GENITIVE.sub(r"\2 of \1", _CONTRACTION.sub(r"\1 is", plain))
    tokens = list(_TOKEN.finditer(plain))
    kept_tokens = []
    for index, match in enumerate(tokens):
        token = match.group()
        # A text may break off after "the". A policy continues it differently, so a final determiner is kept.
        is_before_word = index + 1 < len(tokens) and tokens[index + 1].group()[0].isalpha()
        # A capital A inside a text may be a name, as in "vitamin A deficiency", unless all letters are capitals.
        is_determiner = token.casefold() in _DETERMINERS and (token != "A" or index == 0 or text.isupper())
        is_please = token.casefold() == "please" and index == 0
        if match["dropped"] is None and not (is_before_word and (is_determiner or is_please)):
            kept_tokens.append(token.casefold())
    return " ".join(kept_tokens)


def near_duplicate_key(prompt: Prompt) -> str:
    """Returns a key that is equal for near-duplicate prompts: their normal form, turn by turn in a conversation.

    Args:
        prompt: A text or a conversation, in which every turn counts.
    """
    key = prompt_key(prompt)
    if not isinstance(prompt, str) and is_conversation(prompt):
        turns = [(turn["role"], turn["content"]) for turn in prompt]
        # A single user turn counts as its text, as in `prompt_key`.
        if len(turns) > 1 and all(isinstance(content, str) for _, content in turns):
            return json.dumps([(role, normal_form(content)) for role, content in turns])
    # The normal form of a prompt that has only punctuation is empty.
    return normal_form(key) or key


def number_prompts(prompts: Iterable[Prompt]) -> list[int]:
    """Numbers prompts so that equal prompts share a number.

    Args:
        prompts: (N,) texts or conversations.

    Returns:
        (N,) indices among the distinct prompts, in order of first appearance.
    """
    return group_indices([prompt_key(prompt) for prompt in prompts]).tolist()


def group_prompts(prompts: Iterable[Prompt]) -> list[int]:
    """Numbers prompts so that near-duplicates share a number.

    Args:
        prompts: (N,) texts or conversations.

    Returns:
        (N,) numbers 0 … G−1, in order of first appearance.
    """
    return group_indices([near_duplicate_key(prompt) for prompt in prompts]).tolist()


def group_rows(rows: Dataset, by: str | None) -> list[int]:
    """Numbers the groups of an evaluation's rows, which intervals resample.

    Args:
        rows: The rows, with the column `prompt`.
        by: `NEAR_DUPLICATES`, the column that has the group of each row, or None if every prompt is its own group.

    Returns:
        (N,) numbers 0 … G−1, in order of first appearance. Equal prompts share a number.

    Raises:
        ZooError: The column is missing, a value is neither text nor a whole number, or a prompt has two values.
    """
    prompts = rows["prompt"]
    if by is None:
        return number_prompts(prompts)
    if by == NEAR_DUPLICATES:
        return group_prompts(prompts)
    check_column(rows, by)
    labels = list(rows[by])
    check_labels([prompt_key(prompt) for prompt in prompts], labels, f"the column {by} that `group` names")
    return group_indices(labels).tolist()


def group_other_prompts(prompts: Sequence[Prompt], by: str | None) -> list[int]:
    """Numbers the groups of prompts outside of an evaluation's rows, such as those of labeled pairs.

    Texts without a prompt have an empty one. They answer no common question, so each is its own group.

    Args:
        prompts: (N,) texts or conversations.
        by: As in `group_rows`. These prompts have no such column, so its name groups near-duplicates instead.

    Returns:
        (N,) numbers 0 … G−1, in order of first appearance. Equal prompts share a number unless they are empty.
    """
    keys = map(prompt_key if by is None else near_duplicate_key, prompts)
    return group_indices([key if key.strip() else index for index, key in enumerate(keys)]).tolist()


def check_column(rows: Dataset, by: str | None) -> None:
    """Checks that the rows have the column that holds the groups.

    Args:
        rows: The rows of an evaluation.
        by: As in `group_rows`.

    Raises:
        ZooError: The column is missing.
    """
    if by not in (None, NEAR_DUPLICATES, *rows.column_names):
        raise ZooError(
            f"`group` of the evaluation names the column {by}, but the prompts have "
            f"{', '.join(name for name in rows.column_names if not name.startswith('_'))}: name one of these, or "
            f"{NEAR_DUPLICATES}."
        )


def check_labels(prompts: Sequence[str], labels: Sequence[object], where: str) -> None:
    """Checks that no prompt has two groups.

    Args:
        prompts: (N,) a key for each prompt.
        labels: (N,) the group of each prompt.
        where: The source of the labels, as the subject of the error message.

    Raises:
        ZooError: A group is neither text nor a whole number, or a prompt has two groups.
    """
    label_of: dict[str, object] = {}
    for prompt, label in zip(prompts, labels, strict=True):
        if not is_label(label):
            raise ZooError(f"{where} has {label!r}: a group must be text or a whole number.")
        if label_of.setdefault(prompt, label) != label:
            raise ZooError(
                f"{where} has {label_of[prompt]!r} and {label!r} for one prompt, {prompt[:60]!r}: give each prompt one "
                "group."
            )


def is_label(value: object) -> bool:
    """Whether a value may be the name of a group: text, or a whole number.

    Args:
        value: A value from a file or a data set.
    """
    return isinstance(value, str | int) and not isinstance(value, bool)


def group_means(values: ArrayLike, groups: Sequence[Hashable]) -> NDArray[np.float64]:
    """Averages values by group, so that every group counts the same, however many values it has.

    Args:
        values: (…, N) numbers.
        groups: (N,) hashable labels.

    Returns:
        (…, G) means, in order of the labels' first appearance; the values themselves if all labels differ.

    Raises:
        ValueError: The numbers of values and labels differ.
    """
    array, group_ids = np.asarray(values, dtype=float), group_indices(groups)
    if array.shape[-1:] != group_ids.shape:
        raise ValueError(f"There are {array.shape[-1:]} values and {len(groups)} groups: each value needs its group.")
    sizes = np.bincount(group_ids)
    if len(sizes) == len(group_ids):
        return array
    sums = np.apply_along_axis(lambda row: np.bincount(group_ids, weights=row), -1, array)
    return np.asarray(sums / sizes, dtype=float)


def number_of_groups(groups: Iterable[Hashable]) -> int:
    """Counts groups: the effective number of prompts.

    Args:
        groups: The group of each prompt.
    """
    return len(set(groups))
