"""Splits a rollout's rows into batches of rows of similar length, so that forward passes compute little padding."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .sampling.sampler import Samples


def split_batches(
    samples: Samples,
    rows: Tensor | None = None,
    *,
    max_rows: int,
    max_tokens: int | None = None,
    minimize_padding: bool = False,
    packed: bool = False,
) -> list[Tensor]:
    """Splits rows into batches of rows of similar length.

    Args:
        samples: B prompts with completions.
        rows: (R,) row numbers; None for all rows.
        max_rows: The maximum number of rows in a batch.
        max_tokens: The maximum number of tokens in a batch, padding included; None for no limit. A longer row gets its
            own batch.
        minimize_padding: Whether to choose the split with the least padding among the splits with the fewest batches.
            Otherwise, batches are filled in order, starting with the shortest row. Has no effect without `max_tokens`
            or with `packed`.
        packed: Whether rows are packed without padding. With `max_tokens`, the split then has the fewest batches of
            consecutive rows in order of length, each with about the same number of tokens.

    Returns:
        The row numbers of each batch, int64.
    """
    if rows is None:
        rows = torch.arange(len(samples), device=samples.mask.device)
    lengths = (samples.prompt_mask[rows].sum(1) + samples.mask[rows].sum(1)).tolist()
    # `sorted` is stable, so rows of equal length keep their order on every device.
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    if (minimize_padding or packed) and max_tokens is not None:
        bounds = (_packed_bounds if packed else _least_padding_bounds)(
            [lengths[position] for position in order], max_rows=max_rows, max_tokens=max_tokens
        )
        return [rows[order[begin:end]] for begin, end in pairwise(bounds)]
    batches: list[list[int]] = []
    for position in order:  # lengths increase, so this row determines the padded width of its batch
        starts_batch = not batches or len(batches[-1]) == max_rows
        if starts_batch or (max_tokens is not None and (len(batches[-1]) + 1) * lengths[position] > max_tokens):
            batches.append([])
        batches[-1].append(position)
    return [rows[batch] for batch in batches]


def _least_padding_bounds(lengths: Sequence[int], *, max_rows: int, max_tokens: int) -> list[int]:
    """Splits rows of increasing length into the fewest batches, with as little padding as possible.

    Returns the batch boundaries, from 0 to the number of rows.
    """
    # Dynamic programming. best[n] is the best split of the first n rows: (batches, tokens including padding, start of
    # the last batch). Tuples compare in this order, so fewer batches always beat less padding.
    best = [(0, 0, 0)]
    for end, longest in enumerate(lengths, start=1):
        starts = range(max(end - min(max_rows, max(max_tokens // longest, 1)), 0), end)
        best.append(min((best[start][0] + 1, best[start][1] + (end - start) * longest, start) for start in starts))
    bounds = [len(lengths)]
    while bounds[-1]:
        bounds.append(best[bounds[-1]][2])
    return bounds[::-1]


def _packed_bounds(lengths: Sequence[int], *, max_rows: int, max_tokens: int) -> list[int]:
    """Splits rows into the fewest batches of consecutive rows, with the largest batch as small as possible.

    Returns the batch boundaries, from 0 to the number of rows.
    """

    def fill_batches(limit: int) -> list[int]:
        """Fills batches of at most `limit` tokens in order. Returns the boundaries."""
        starts, batch_tokens = [0], 0
        for position, length in enumerate(lengths):
            if position > starts[-1] and (batch_tokens + length > limit or position - starts[-1] == max_rows):
                starts.append(position)
                batch_tokens = 0
            batch_tokens += length
        return [*starts, len(lengths)]

    # A smaller limit never needs fewer batches, so bisection finds the smallest limit that still needs the fewest.
    min_count = len(fill_batches(max_tokens))
    return fill_batches(bisect_left(range(max_tokens), True, key=lambda limit: len(fill_batches(limit)) == min_count))


def count_tokens(samples: Samples, rows: Tensor, *, packed: bool = False) -> int:
    """Counts the tokens that a forward pass over rows computes, padding included.

    Args:
        samples: B prompts with completions.
        rows: (R,) row numbers.
        packed: Whether the rows are packed without padding.
    """
    lengths = samples.prompt_mask[rows].sum(1) + samples.mask[rows].sum(1)
    return int(lengths.sum() if packed else len(rows) * lengths.max())
