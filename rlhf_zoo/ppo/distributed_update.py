"""One update in several processes: their rollouts are joined, and each process trains on its share.

Every process has all of the scored rollout, in the order in which one process would have it. So advantages, whitening,
minibatches, β and metrics are computed as in one process, and only gradients are exchanged.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..modeling.batches import split_batches
from ..modeling.sampling.sampler import Samples
from ..rewards import Scored
from .actor_critic import TextBatch
from .rollout import Rollout


def place_of_rows(rows: Sequence[int], sizes: Sequence[Sequence[int]], *, group: int) -> list[int]:
    """Orders the concatenated rows of all processes as one process would have them.

    One process alone would read batch after batch, and each batch in the order of the processes. Rows that only fill up
    a batch are left out.

    Args:
        rows: the number of rows of each process.
        sizes: for each process, the number of prompts in each of its batches.
        group: rows of each prompt.

    Returns:
        Indices into the concatenation.
    """
    starts = [sum(rows[:process]) for process in range(len(rows))]
    places: list[int] = []
    for batch in range(len(sizes[0])):
        for start, batch_sizes in zip(starts, sizes, strict=True):
            begin = start + sum(batch_sizes[:batch]) * group
            places += range(begin, begin + batch_sizes[batch] * group)
    return places


def gather_rollouts(rollout: Rollout, scored: Scored, *, sizes: Sequence[int], group: int) -> tuple[Rollout, Scored]:
    """Joins the rollouts of all processes.

    Args:
        rollout: of this process.
        scored: its rewards.
        sizes: the number of prompts in each of this process's batches.
        group: completions of each prompt.

    Returns:
        Rollout and rewards of all processes, in the order that a single process would produce.
    """
    from accelerate.utils import gather_object

    samples, device = rollout.samples, rollout.mask.device
    # On the CPU, because objects are pickled for the exchange and another process's device may not exist here.
    local_part: dict[str, Any] = {
        "samples": {n: x.cpu() for n, x in vars(samples).items() if isinstance(x, Tensor)},
        "ref_logprobs": rollout.ref_logprobs.cpu(),
        "values": rollout.values.cpu(),
        "engine": None if rollout.engine_logprobs is None else rollout.engine_logprobs.cpu(),
        "total": scored.total.cpu(),
        "each": scored.each.cpu(),
        "by_token": None if scored.by_token is None else scored.by_token.cpu(),
        "metrics": dict(scored.metrics),
        "sizes": list(sizes),
    }
    parts_of_all: list[dict[str, Any]] = gather_object([local_part])
    every_size = [part["sizes"] for part in parts_of_all]
    # The shuffle picks rows by index, so all processes need the same order.
    order = torch.tensor(place_of_rows([len(part["total"]) for part in parts_of_all], every_size, group=group))

    def rows(parts: Iterable[Tensor], *, left: bool = False) -> Tensor:
        return _stack(list(parts), left=left)[order].to(device)

    fields = {
        name: rows((part["samples"][name] for part in parts_of_all), left=name in ("prompt_ids", "prompt_mask"))
        for name in local_part["samples"]
    }
    joined = Rollout(
        Samples(**fields, vocabulary=samples.vocabulary),
        rows(part["ref_logprobs"] for part in parts_of_all),
        rows(part["values"] for part in parts_of_all),
        measured=rollout.measured,
        engine_logprobs=None if rollout.engine_logprobs is None else rows(part["engine"] for part in parts_of_all),
    )
    # A reward function may have returned per-token scores in some processes only.
    token_scores = [part["by_token"] for part in parts_of_all]
    by_token = [
        torch.zeros_like(part["samples"]["logprobs"]) if scores is None else scores
        for part, scores in zip(parts_of_all, token_scores, strict=True)
    ]
    return joined, replace(
        scored,
        total=rows(part["total"] for part in parts_of_all),
        each=rows(part["each"] for part in parts_of_all),
        extra={},
        metrics=_mean_metrics([part["metrics"] for part in parts_of_all], [sum(sizes) for sizes in every_size]),
        by_token=None if all(scores is None for scores in token_scores) else rows(by_token),
    )


def _stack(parts: Sequence[Tensor], *, left: bool) -> Tensor:
    """Concatenates the rows of tensors, padded with 0 on the left or on the right to the widest."""
    if parts[0].ndim == 1:
        return torch.cat(list(parts))
    # Each process padded its rows to its own longest one.
    width = max(part.shape[1] for part in parts)
    stacked = parts[0].new_zeros(sum(len(part) for part in parts), width)
    row = 0
    for part in parts:
        columns = slice(width - part.shape[1], None) if left else slice(part.shape[1])
        stacked[row : row + len(part), columns] = part
        row += len(part)
    return stacked


def _mean_metrics(metrics: Sequence[Mapping[str, float]], rows: Sequence[int]) -> dict[str, float]:
    """Averages what reward functions logged, over the rows of the processes that logged it."""
    means: dict[str, float] = {}
    by_process = list(zip(metrics, rows, strict=True))
    for name in dict.fromkeys(name for logged, count in by_process if count for name in logged):
        values = [(logged[name], count) for logged, count in by_process if name in logged]
        means[name] = sum(value * count for value, count in values) / sum(count for _, count in values)
    return means


def split_samples(samples: Samples, *, process: int, processes: int, **how: Any) -> list[Tensor]:
    """Splits a minibatch into the micro-batches of one process.

    Processes wait for each other's gradients (and under FSDP for weights), so each gets the same number of
    micro-batches. A process without a row left gets empty ones.

    Args:
        samples: the minibatch's, of all processes.
        process: the index of this one.
        processes: how many there are.
        **how: arguments of `split_batches`.

    Returns:
        Row indices within the minibatch, (m,) int64 for each micro-batch.
    """
    # Rows are assigned in turn, from the shortest on, so that processes get rows of about the same lengths.
    order = samples.mask.sum(1).argsort(stable=True)
    assigned = [split_batches(samples, order[index::processes], **how) for index in range(processes)]
    return assigned[process] + [order[:0]] * (max(map(len, assigned)) - len(assigned[process]))


def split_texts(texts: TextBatch, *, parts: int, process: int, processes: int) -> list[TextBatch]:
    """Splits a minibatch's texts into those of one process's micro-batches.

    Args:
        texts: of all processes.
        parts: the most micro-batches.
        process: the index of this process.
        processes: how many there are.

    Returns:
        At most `parts` batches, the same number in every process.
    """
    # In turn, so that the number of texts differs by at most one between processes.
    local_texts = TextBatch(*(x[process::processes] for x in texts))
    size = math.ceil(math.ceil(len(texts.ids) / processes) / parts)
    shares_of_texts = [
        TextBatch(*(x[start * size : (start + 1) * size] for x in local_texts)) for start in range(parts)
    ]
    if processes == 1:
        return [part for part in shares_of_texts if len(part.ids)]
    # A text whose tokens are all masked, for a process that has no text left.
    nothing = TextBatch(texts.ids[:1], texts.attention[:1], torch.zeros_like(texts.mask[:1]))
    return [part if len(part.ids) else nothing for part in shares_of_texts]
