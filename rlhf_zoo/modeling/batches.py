"""Splits a rollout's rows into batches of similar length, so that a forward pass computes little padding."""

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
    size: int,
    tokens: int | None = None,
    minimize_padding: bool = False,
    packed: bool = False,
) -> list[Tensor]:
    """Splits rows into batches of similar length, so that little padding is computed.

    Args:
        samples: B prompts with completions.
        rows: (R,) row numbers; None for all.
        size: The maximum number of rows in a batch.
        tokens: The maximum number of tokens in a batch, padding included; None for no limit. A longer row gets its own
            batch.
        minimize_padding: Whether to choose the split with the least padding among those with the fewest batches.
            Otherwise batches are filled in order, starting with the shortest row.
        packed: Whether rows are packed without padding. Then there are as few batches as possible, of about equal
            numbers of tokens.

    Returns:
        The row numbers of each batch, int64.
    """
    if rows is None:
        rows = torch.arange(len(samples), device=samples.mask.device)
    lengths = (samples.prompt_mask[rows].sum(1) + samples.mask[rows].sum(1)).tolist()
    # `sorted` is stable, so rows of equal length keep their order on every device.
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    if (minimize_padding or packed) and tokens is not None:
        bounds = (_packed_bounds if packed else _least_padding_bounds)(
            [lengths[row] for row in order], size=size, tokens=tokens
        )
        return [rows[order[begin:end]] for begin, end in pairwise(bounds)]
    batches: list[list[int]] = []
    for row in order:  # lengths increase, so this row determines the padded width of its batch
        starts_batch = not batches or len(batches[-1]) == size
        if starts_batch or (tokens is not None and (len(batches[-1]) + 1) * lengths[row] > tokens):
            batches.append([])
        batches[-1].append(row)
    return [rows[batch] for batch in batches]


def _least_padding_bounds(lengths: Sequence[int], *, size: int, tokens: int) -> list[int]:
    """Splits rows of increasing length into the fewest batches, with the least padding among such splits.

    Returns the boundaries, 0 and the number of rows included.
    """
    # Dynamic programming. best[n] is the best split of the first n rows: (batches, padded tokens, start of the last
    # batch). Tuples compare in this order, so fewer batches always beat less padding.
    best = [(0, 0, 0)]
    for end, longest in enumerate(lengths, start=1):
        starts = range(max(end - min(size, max(tokens // longest, 1)), 0), end)
        best.append(min((best[start][0] + 1, best[start][1] + (end - start) * longest, start) for start in starts))
    bounds = [len(lengths)]
    while bounds[-1]:
        bounds.append(best[bounds[-1]][2])
    return bounds[::-1]


def _packed_bounds(lengths: Sequence[int], *, size: int, tokens: int) -> list[int]:
    """Splits rows into the fewest batches, with the largest batch as small as possible.

    Returns the boundaries, 0 and the number of rows included.
    """

    def fill_batches(limit: int) -> list[int]:
        """Fills batches of at most `limit` tokens in order. Returns the boundaries."""
        starts, batch_tokens = [0], 0
        for row, length in enumerate(lengths):
            if row > starts[-1] and (batch_tokens + length > limit or row - starts[-1] == size):
                starts.append(row)
                batch_tokens = 0
            batch_tokens += length
        return [*starts, len(lengths)]

    # A smaller limit never needs fewer batches, so bisection finds the smallest limit that still needs the fewest.
    fewest = len(fill_batches(tokens))
    return fill_batches(bisect_left(range(tokens), True, key=lambda limit: len(fill_batches(limit)) == fewest))


def count_tokens(samples: Samples, rows: Tensor, *, packed: bool = False) -> int:
    """Counts the tokens that a forward pass over rows computes, padding included.

    Args:
        samples: B prompts with completions.
        rows: (R,) row numbers.
        packed: Whether the rows are packed without padding.
    """
    lengths = samples.prompt_mask[rows].sum(1) + samples.mask[rows].sum(1)
    return int(lengths.sum() if packed else len(rows) * lengths.max())
