"""Helper functions that scripts import from TRL's PPO."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...errors import ZooError


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Computes the mean of values where the mask is not 0.

    Args:
        values: A tensor of any shape.
        mask: A mask of the same shape.
        axis: The axis to average over; None for all.
    """
    masked_values = values * mask
    return masked_values.sum() / mask.sum() if axis is None else masked_values.sum(axis) / mask.sum(axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Computes the variance of values where the mask is not 0.

    Args:
        values: A tensor of any shape.
        mask: A mask of the same shape.
        unbiased: Whether to divide by n − 1 instead of n.

    Returns:
        A scalar.

    Raises:
        ZooError: The mask selects no entry, or only one and `unbiased` is True.
    """
    count = mask.sum()
    if count == 0 or (unbiased and count == 1):
        raise ZooError(
            f"masked_var got {int(count)} values, which have no {'unbiased ' * unbiased}variance: use a larger batch."
        )
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    # Apply Bessel's correction, as TRL does.
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Computes (x − μ)/√(σ² + 1e-8) with the unbiased σ². Entries outside of the mask change too.

    Args:
        values: A tensor of any shape.
        mask: A mask of the same shape, which selects the entries for μ and σ.
        shift_mean: Whether the mean becomes 0; otherwise μ is added back.
    """
    mean = masked_mean(values, mask)
    whitened_values = (values - mean) * (masked_var(values, mask) + 1e-8).rsqrt()
    return whitened_values if shift_mean else whitened_values + mean


@torch.no_grad()
def batch_generation(
    model: Any,
    queries: Tensor,
    local_rollout_forward_batch_size: int,
    pad_token_id: int,
    generation_config: GenerationConfig,
) -> tuple[Tensor, Tensor]:
    """Generates responses with `model.generate`, some rows at a time.

    Args:
        model: The policy.
        queries: (B, P) int64, left-padded with pad_token_id.
        local_rollout_forward_batch_size: The number of rows at a time.
        pad_token_id: The id of PAD, which may be past the embeddings.
        generation_config: The configuration for `model.generate`.

    Returns:
        Queries with responses (B, P + T), with pad_token_id after a response's end; and the processed scores from which
        each response token was drawn, (B, T, V), 0 after the end.
    """
    stops = torch.tensor(stop_ids_of(model, generation_config), device=queries.device)
    config = copy.copy(generation_config)
    config.return_dict_in_generate = config.output_scores = True
    # pad_token_id may be past the embeddings, so `generate` pads with 0, and the padding is replaced below.
    config.pad_token_id = 0
    sequences, scores = [], []
    for rows in queries.split(local_rollout_forward_batch_size):
        is_token = rows != pad_token_id
        output = model.generate(
            input_ids=rows.masked_fill(~is_token, 0), attention_mask=is_token.long(), generation_config=config
        )
        responses = output.sequences[:, rows.shape[1] :]
        ends = torch.isin(responses, stops).long()
        # Subtracting `ends` keeps the first end token itself, which belongs to the response.
        after_end = (ends.cumsum(1) - ends).bool()
        sequences.append(torch.cat([rows, responses.masked_fill(after_end, pad_token_id)], dim=1))
        scores.append(torch.stack(output.scores, dim=1).masked_fill(after_end.unsqueeze(-1), 0))
    # `generate` stops when all of its rows have ended, so calls may return different widths.
    width = max(score.shape[1] for score in scores)
    total_width = queries.shape[1] + width
    sequences = [torch.nn.functional.pad(ids, (0, total_width - ids.shape[1]), value=pad_token_id) for ids in sequences]
    scores = [torch.nn.functional.pad(score, (0, 0, 0, width - score.shape[1])) for score in scores]
    return torch.cat(sequences), torch.cat(scores)


def stop_ids_of(model: Any, generation_config: GenerationConfig | None = None, ids: Any = None) -> list[int]:
    """Returns the ids at which `model.generate` ends a row.

    Args:
        model: The policy.
        generation_config: The configuration passed to `generate`, whose ids are used if `ids` is None.
        ids: The ids passed to `generate`. If neither argument names ids, the model's own are used.
    """
    if ids is None and generation_config is not None:
        ids = generation_config.eos_token_id
    ids = model.generation_config.eos_token_id if ids is None else ids
    return [] if ids is None else [int(token_id) for token_id in (ids if isinstance(ids, Sequence) else [ids])]
