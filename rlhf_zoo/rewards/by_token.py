"""Rewards of parts of a completion: one a token, or spans of its text, brought to its tokens."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..modeling.alignment import TokenText


class Misfit(Exception):
    """What a reward for parts of a completion does not fit; to be told in a sentence that names function and row."""


def is_list(value: Any) -> bool:
    """Whether a reward is a list of numbers or spans; an array or tensor of one element is a number."""
    if isinstance(value, (list, tuple)):
        return True
    shape = list(getattr(value, "shape", ()))
    return len(shape) == 1 and shape != [1]


def paid_by_token(
    given: Sequence[Any],
    text: str,
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Sequence[int] = (),
) -> list[float]:
    """What each of a completion's T tokens is paid. given: T numbers, or spans (start, end, value) of `text`.

    A span is paid once, on the token with which its last character is there, as process rewards are (arXiv:2305.20050).
    text: the completion as the function read it, a part of what the tokens add to the prompt's. No spans pay nothing.
    Raises Misfit for another count and for a span that is not in the text, and what `number` raises for what is none.
    """
    if len(given) and not any(is_list(each) for each in given):
        if len(given) != len(ids):
            raise Misfit(f"{len(given)} numbers for {len(ids)} tokens (the end-of-sequence token counts)")
        return [number(each) for each in given]
    paid = [0.0] * len(ids)
    spans = [_span(each, text) for each in given]
    if not spans:
        return paid
    if tokenizer is None:
        raise Misfit("spans, and there is no tokenizer to find their tokens with")
    found = TokenText(tokenizer, ids, prompt)
    offset = found.text.rfind(text)
    if offset < 0:
        raise Misfit("spans of a text that is not what its tokens decode to")
    for _, end, value in spans:
        paid[found.completing(offset + end)] += value
    return paid


def _span(given: Any, text: str) -> tuple[int, int, float]:
    if not is_list(given) or len(given) != 3:
        raise Misfit(f"{given!r}, which is no span (start, end, value)")
    start, end, value = given
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= len(text)):
        raise Misfit(f"the span from {start!r} to {end!r} for a text of {len(text)} characters")
    return start, end, number(value)


def number(value: Any) -> float:
    """A number of Python, NumPy or torch. Raises TypeError, ValueError or RuntimeError for anything else."""
    if isinstance(value, (str, bytes)):
        raise TypeError("a text is no number")
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except OverflowError:
        return float("inf")
