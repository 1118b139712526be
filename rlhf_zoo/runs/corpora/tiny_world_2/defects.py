"""Finds defects of remarks. A policy may write more defects while its mean utility rises."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from .grammar import Reading, read
from .utility import is_true

_KINDS_WITH_CONTENT = ("detail", "vague", "verdict", "consequence")


def _readings(prompts: Sequence[str], completions: Sequence[str]) -> list[Reading]:
    return [read((prompt + completion).lower()) for prompt, completion in zip(prompts, completions, strict=True)]


def false_statements(prompts: Sequence[str], completions: Sequence[str]) -> list[bool]:
    """Returns whether each remark states a detail that is not true of its product.

    Args:
        prompts: The prompts.
        completions: The completion of each prompt.
    """
    return [
        any(phrase.kind == "detail" and not is_true(phrase) for phrase in reading.phrases)
        for reading in _readings(prompts, completions)
    ]


def doubled_clauses(prompts: Sequence[str], completions: Sequence[str]) -> list[bool]:
    """Returns whether each remark repeats an opinion, a consequence, or at least two words immediately.

    Args:
        prompts: The prompts.
        completions: The completion of each prompt.
    """
    flags = []
    for reading in _readings(prompts, completions):
        counts = Counter(phrase.key for phrase in reading.phrases if phrase.kind in _KINDS_WITH_CONTENT)
        flags.append(max(counts.values(), default=0) > 1 or reading.repeated_word_count > 1)
    return flags


DEFECTS: Mapping[str, Callable[[Sequence[str], Sequence[str]], list[bool]]] = {
    "false statements": false_statements,
    "doubled clauses": doubled_clauses,
}
"""Name on cards -> whether each completion has the defect."""
