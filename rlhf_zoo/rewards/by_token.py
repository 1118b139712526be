"""Rewards for parts of a completion: one number per token, or a value for each of several spans of the text."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..modeling.alignment import TokenText


class PartsMismatch(Exception):
    """A list of rewards does not fit its completion. The caller's error names the function and the row."""


def is_list(value: Any) -> bool:
    """Whether a reward is a list of numbers or spans. An array or tensor with one element counts as a number.

    Args:
        value: The reward that a function returned for a row.
    """
    if isinstance(value, (list, tuple)):
        return True
    shape = list(getattr(value, "shape", ()))
    return len(shape) == 1 and shape != [1]


def rewards_by_token(
    values: Sequence[Any],
    text: str,
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    prompt_ids: Sequence[int] = (),
) -> list[float]:
    """Converts a list of rewards for parts of a completion to one number per token.

    A span's value goes to the token that completes the span's last character, as in process supervision
    (arXiv:2305.20050).

    Args:
        values: T numbers, or spans (start, end, value) of `text`. An empty list gives 0 for each token.
        text: The text that the function read. It may be only part of the completion's decoded text.
        ids: The completion's T token ids.
        tokenizer: The policy's tokenizer, which finds the tokens of spans; None if there are no spans.
        prompt_ids: Token ids of the prompt.

    Returns:
        T numbers.

    Raises:
        PartsMismatch: There are not T numbers, a span is malformed or not in the text, the text is not in the decoded
            completion, or spans lack a tokenizer.
        TypeError, ValueError, RuntimeError: A value is not a number; see `to_float`.
    """
    if len(values) and not any(is_list(value) for value in values):
        if len(values) != len(ids):
            raise PartsMismatch(f"{len(values)} numbers for {len(ids)} tokens, the end-of-sequence token included")
        return [to_float(value) for value in values]
    token_rewards = [0.0] * len(ids)
    spans = [_parse_span(value, text) for value in values]
    if not spans:
        return token_rewards
    if tokenizer is None:
        raise PartsMismatch("spans need a tokenizer to find their tokens")
    token_text = TokenText(tokenizer, ids, prompt_ids)
    # The function may have read only part of the decoded text, such as an answer without thoughts, so search for it.
    offset = token_text.text.rfind(text)
    if offset < 0:
        raise PartsMismatch("its text is not in the text of its decoded tokens")
    for _, end, reward in spans:
        token_rewards[token_text.completing_token(offset + end)] += reward
    return token_rewards


def _parse_span(span: Any, text: str) -> tuple[int, int, float]:
    if not is_list(span) or len(span) != 3:
        raise PartsMismatch(f"{span!r} is not a span (start, end, value)")
    start, end, reward = span
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= len(text)):
        raise PartsMismatch(f"the span from {start!r} to {end!r} is not in the text of {len(text)} characters")
    return start, end, to_float(reward)


def to_float(value: Any) -> float:
    """Converts a Python, NumPy or torch number to a float.

    Args:
        value: The number. An integer that is too large for a float becomes infinity.

    Raises:
        TypeError, ValueError, RuntimeError: The value is not a number.
    """
    if isinstance(value, (str, bytes)):
        raise TypeError("a text is not a number")
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except OverflowError:
        return float("inf")
