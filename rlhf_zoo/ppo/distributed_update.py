"""One update of several processes: what each rolled out becomes one batch, of which each learns its share.

Every process holds the whole scored rollout, in the order in which one process would have it. So advantages, whitening,
minibatches, β and metrics are computed as in one process, and only gradients are exchanged.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..modeling.logprobs import in_batches
from ..modeling.sampling.sampler import Samples
from ..rewards import Scored
from .actor_critic import TextBatch
from .rollout import Rollout


def place_of_rows(rows: Sequence[int], sizes: Sequence[Sequence[int]], *, group: int) -> list[int]:
    """Where one process's rows go among those of all processes, laid one process after the other.

    Batch by batch, one process alone would read the data in the order of the processes. Rows beyond the batches' are
    left out.

    Args:
        rows: how many each process has.
        sizes: of each process, the number of prompts in each of its batches.
        group: rows of each prompt.
    """
    starts = [sum(rows[:process]) for process in range(len(rows))]
    places: list[int] = []
    for batch in range(len(sizes[0])):
        for start, each in zip(starts, sizes, strict=True):
            begin = start + sum(each[:batch]) * group
            places += range(begin, begin + each[batch] * group)
    return places


def together(rollout: Rollout, scored: Scored, *, sizes: Sequence[int], group: int) -> tuple[Rollout, Scored]:
    """Joins the rollouts of all processes.

    Args:
        rollout: of this process.
        scored: its rewards.
        sizes: the number of prompts in each of this process's batches.
        group: completions of each prompt.

    Returns:
        Rollout and rewards of all processes, in the order that they have in one process.
    """
    from accelerate.utils import gather_object

    samples, device = rollout.samples, rollout.mask.device
    own: dict[str, Any] = {
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
    parts_of_all: list[dict[str, Any]] = gather_object([own])
    every_size = [part["sizes"] for part in parts_of_all]
    order = torch.tensor(place_of_rows([len(part["total"]) for part in parts_of_all], every_size, group=group))

    def rows(parts: Iterable[Tensor], *, left: bool = False) -> Tensor:
        return _stacked(list(parts), left=left)[order].to(device)

    fields = {
        name: rows((part["samples"][name] for part in parts_of_all), left=name in ("prompt_ids", "prompt_mask"))
        for name in own["samples"]
    }
    whole = Rollout(
        Samples(**fields, vocabulary=samples.vocabulary),
        rows(part["ref_logprobs"] for part in parts_of_all),
        rows(part["values"] for part in parts_of_all),
        measured=rollout.measured,
        engine_logprobs=None if rollout.engine_logprobs is None else rows(part["engine"] for part in parts_of_all),
    )
    # A function may pay by token in some processes alone.
    dense = [part["by_token"] for part in parts_of_all]
    by_token = [
        torch.zeros_like(part["samples"]["logprobs"]) if each is None else each
        for part, each in zip(parts_of_all, dense, strict=True)
    ]
    return whole, replace(
        scored,
        total=rows(part["total"] for part in parts_of_all),
        each=rows(part["each"] for part in parts_of_all),
        extra={},
        metrics=_mean_metrics([part["metrics"] for part in parts_of_all], [sum(sizes) for sizes in every_size]),
        by_token=None if all(each is None for each in dense) else rows(by_token),
    )


def _stacked(parts: Sequence[Tensor], *, left: bool) -> Tensor:
    """Rows of several tensors in one, filled up with 0 to the widest: on the left, or on the right."""
    if parts[0].ndim == 1:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    whole = parts[0].new_zeros(sum(len(part) for part in parts), width)
    row = 0
    for part in parts:
        where = slice(width - part.shape[1], None) if left else slice(part.shape[1])
        whole[row : row + len(part), where] = part
        row += len(part)
    return whole


def _mean_metrics(seen: Sequence[Mapping[str, float]], rows: Sequence[int]) -> dict[str, float]:
    """What reward functions logged of their batches, averaged over the rows of the processes that logged it."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for one, count in zip(seen, rows, strict=True) if count for name in one):
        logged = [(one[name], count) for one, count in zip(seen, rows, strict=True) if name in one]
        found[name] = sum(value * count for value, count in logged) / sum(count for _, count in logged)
    return found


def shares(samples: Samples, *, process: int, processes: int, **how: Any) -> list[Tensor]:
    """Splits a minibatch into the micro-batches of one process.

    Processes wait for each other's gradients (and under FSDP for weights), so each gets as many micro-batches, and one
    that has no row left gets an empty one.

    Args:
        samples: the minibatch's, of all processes.
        process: the index of this one.
        processes: how many there are.
        how: what `in_batches` takes.

    Returns:
        Places of rows within the minibatch, (m,) int64 a micro-batch.
    """
    # Dealt out from the shortest on, so that the processes get rows of about the same lengths.
    order = samples.mask.sum(1).argsort(stable=True)
    dealt = [in_batches(samples, order[index::processes], **how) for index in range(processes)]
    return dealt[process] + [order[:0]] * (max(map(len, dealt)) - len(dealt[process]))


def text_shares(texts: TextBatch, *, parts: int, process: int, processes: int) -> list[TextBatch]:
    """Splits a minibatch's texts into those of one process's micro-batches.

    Args:
        texts: of all processes.
        parts: the most micro-batches.
        process: the index of this process.
        processes: how many there are.

    Returns:
        `parts` batches at most, as many in every process.
    """
    own = TextBatch(*(x[process::processes] for x in texts))
    size = math.ceil(math.ceil(len(texts.ids) / processes) / parts)
    shares_of_texts = [TextBatch(*(x[start * size : (start + 1) * size] for x in own)) for start in range(parts)]
    if processes == 1:
        return [part for part in shares_of_texts if len(part.ids)]
    # A text of which no token counts, for a process that has none left.
    nothing = TextBatch(texts.ids[:1], texts.attention[:1], torch.zeros_like(texts.mask[:1]))
    return [part if len(part.ids) else nothing for part in shares_of_texts]
