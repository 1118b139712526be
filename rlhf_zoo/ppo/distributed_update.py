"""An update in several processes: gathers their rollouts and splits each minibatch among them.

After gathering, every process has the complete scored rollout, in the order in which a single process would have it.
Advantages, whitening, minibatches, β and metrics are then computed as in one process. After that, processes exchange
only gradients and the sums for checks and metrics.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..modeling.batches import split_batches
from ..modeling.sampling.sampler import Samples
from ..rewards import RewardScores
from .actor_critic import TextBatch
from .rollout import Rollout


def single_process_order(
    row_counts: Sequence[int], prompts_per_batch: Sequence[Sequence[int]], *, group_size: int
) -> list[int]:
    """Orders the concatenated rows of all processes as a single process would have them.

    A single process would read batch after batch: in each batch first the share of process 0, then the share of
    process 1, and so on. Rows beyond the counted prompts are filler and are left out.

    Args:
        row_counts: The number of rows of each process.
        prompts_per_batch: For each process, the number of prompts in each of its batches.
        group_size: The number of rows per prompt.

    Returns:
        Indices into the concatenation.
    """
    process_starts = [sum(row_counts[:process]) for process in range(len(row_counts))]
    indices: list[int] = []
    for batch in range(len(prompts_per_batch[0])):
        for process_start, prompt_counts in zip(process_starts, prompts_per_batch, strict=True):
            begin = process_start + sum(prompt_counts[:batch]) * group_size
            indices += range(begin, begin + prompt_counts[batch] * group_size)
    return indices


def gather_rollouts(
    rollout: Rollout, reward_scores: RewardScores, prompts_per_batch: Sequence[int]
) -> tuple[Rollout, RewardScores]:
    """Joins the rollouts of all processes.

    Args:
        rollout: The rollout of this process.
        reward_scores: The completions' scores.
        prompts_per_batch: The number of prompts in each of this process's batches.

    Returns:
        The rollout and scores of all processes, in the order that a single process would produce, without `extra`.
    """
    from accelerate.utils import gather_object

    samples, device = rollout.samples, rollout.mask.device
    # Move tensors to the CPU, because they are pickled for exchange, and another process's device may not exist here.
    local_part: dict[str, Any] = {
        "samples": {name: value.cpu() for name, value in vars(samples).items() if isinstance(value, Tensor)},
        "ref_logprobs": rollout.ref_logprobs.cpu(),
        "values": rollout.values.cpu(),
        "engine": None if rollout.engine_logprobs is None else rollout.engine_logprobs.cpu(),
        "total": reward_scores.total.cpu(),
        "per_reward": reward_scores.per_reward.cpu(),
        "by_token": None if reward_scores.by_token is None else reward_scores.by_token.cpu(),
        "metrics": dict(reward_scores.metrics),
        "prompts_per_batch": list(prompts_per_batch),
    }
    all_parts: list[dict[str, Any]] = gather_object([local_part])
    prompt_counts = [part["prompts_per_batch"] for part in all_parts]
    # The shuffle picks rows by index, so all processes need the same order.
    row_counts = [len(part["total"]) for part in all_parts]
    order = torch.tensor(single_process_order(row_counts, prompt_counts, group_size=reward_scores.group_size))

    def join(tensors: Iterable[Tensor], *, left_padded: bool = False) -> Tensor:
        return _concatenate(list(tensors), left_padded=left_padded)[order].to(device)

    fields = {
        name: join((part["samples"][name] for part in all_parts), left_padded=name in ("prompt_ids", "prompt_mask"))
        for name in local_part["samples"]
    }
    joined_rollout = Rollout(
        Samples(**fields, vocabulary=samples.vocabulary),
        join(part["ref_logprobs"] for part in all_parts),
        join(part["values"] for part in all_parts),
        has_reference=rollout.has_reference,
        engine_logprobs=None if rollout.engine_logprobs is None else join(part["engine"] for part in all_parts),
    )
    # A reward function may have returned per-token scores in some processes only.
    token_scores = [part["by_token"] for part in all_parts]
    by_token = [
        torch.zeros_like(part["samples"]["logprobs"]) if scores is None else scores
        for part, scores in zip(all_parts, token_scores, strict=True)
    ]
    return joined_rollout, replace(
        reward_scores,
        total=join(part["total"] for part in all_parts),
        per_reward=join(part["per_reward"] for part in all_parts),
        extra={},
        metrics=_mean_metrics([part["metrics"] for part in all_parts], [sum(counts) for counts in prompt_counts]),
        by_token=None if all(scores is None for scores in token_scores) else join(by_token),
    )


def _concatenate(tensors: Sequence[Tensor], *, left_padded: bool) -> Tensor:
    """Concatenates the rows of tensors, padded with 0 on the left or right to the width of the widest tensor."""
    if tensors[0].ndim == 1:
        return torch.cat(list(tensors))
    # Each process padded its rows to its own longest row.
    width = max(tensor.shape[1] for tensor in tensors)
    concatenated = tensors[0].new_zeros(sum(len(tensor) for tensor in tensors), width)
    row = 0
    for tensor in tensors:
        columns = slice(width - tensor.shape[1], None) if left_padded else slice(tensor.shape[1])
        concatenated[row : row + len(tensor), columns] = tensor
        row += len(tensor)
    return concatenated


def _mean_metrics(metrics: Sequence[Mapping[str, float]], prompt_counts: Sequence[int]) -> dict[str, float]:
    """Averages each metric that reward functions logged, over the prompts of the processes that logged it."""
    means: dict[str, float] = {}
    by_process = list(zip(metrics, prompt_counts, strict=True))
    for name in dict.fromkeys(name for process_metrics, count in by_process if count for name in process_metrics):
        values = [(process_metrics[name], count) for process_metrics, count in by_process if name in process_metrics]
        means[name] = sum(value * count for value, count in values) / sum(count for _, count in values)
    return means


def split_samples(samples: Samples, *, process_index: int, num_processes: int, **options: Any) -> list[Tensor]:
    """Splits a minibatch into the micro-batches of one process.

    Processes wait for each other's gradients (and under FSDP for weights), so each gets the same number of
    micro-batches. A process with no rows left gets empty micro-batches.

    Args:
        samples: The completions of the minibatch, of all processes.
        process_index: The index of this process.
        num_processes: The number of processes.
        **options: More arguments of `split_batches`.

    Returns:
        Row indices within the minibatch, (m,) int64 for each micro-batch.
    """
    # Assign rows round-robin in order of length, so that all processes get rows of about the same lengths.
    order = samples.mask.sum(1).argsort(stable=True)
    by_process = [split_batches(samples, order[index::num_processes], **options) for index in range(num_processes)]
    micro_batches = by_process[process_index]
    return micro_batches + [order[:0]] * (max(map(len, by_process)) - len(micro_batches))


def split_texts(texts: TextBatch, *, max_batches: int, process_index: int, num_processes: int) -> list[TextBatch]:
    """Returns one process's share of a minibatch's texts, split among its micro-batches.

    Args:
        texts: The texts of all processes.
        max_batches: The maximum number of batches.
        process_index: The index of this process.
        num_processes: The number of processes.

    Returns:
        At most `max_batches` batches, the same number in every process.
    """
    # Assign texts round-robin, so that the counts of any two processes differ by at most one.
    local_texts = TextBatch(*(tensor[process_index::num_processes] for tensor in texts))
    size = math.ceil(math.ceil(len(texts.ids) / num_processes) / max_batches)
    starts = [batch * size for batch in range(max_batches)]
    batches = [TextBatch(*(tensor[start : start + size] for tensor in local_texts)) for start in starts]
    if num_processes == 1:
        return [batch for batch in batches if len(batch.ids)]
    # A process with no texts left gets a text whose tokens are all masked.
    masked_text = TextBatch(texts.ids[:1], texts.attention[:1], torch.zeros_like(texts.mask[:1]))
    return [batch if len(batch.ids) else masked_text for batch in batches]
