"""The helper functions that scripts imported from TRL's PPO."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...errors import ZooError


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean of values where the mask is not 0.

    Args:
        values: any shape.
        mask: of the same shape.
        axis: to average along; None for all.
    """
    kept = values * mask
    return kept.sum() / mask.sum() if axis is None else kept.sum(axis) / mask.sum(axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of values where mask is not 0, over n − 1 where `unbiased`. Returns a scalar.

    Raises ZooError for an empty mask, and for a single value where the variance should be unbiased.
    """
    count = mask.sum()
    if count == 0 or (unbiased and count == 1):
        raise ZooError(
            f"masked_var got {int(count)} values, which have no {'unbiased ' * unbiased}variance: give a larger batch."
        )
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x − μ)/√(σ² + 1e-8) with the unbiased σ²; μ is added back where `shift_mean` is False; padding changes too."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * (masked_var(values, mask) + 1e-8).rsqrt()
    return whitened if shift_mean else whitened + mean


@torch.no_grad()
def batch_generation(
    model: Any,
    queries: Tensor,
    local_rollout_forward_batch_size: int,
    pad_token_id: int,
    generation_config: GenerationConfig,
) -> tuple[Tensor, Tensor]:
    """Generates by `model.generate`, some rows at a time.

    Args:
        model: the policy.
        queries: (B, P) int64, left-padded with pad_token_id.
        local_rollout_forward_batch_size: rows at a time.
        pad_token_id: may lie past the embeddings.
        generation_config: for `model.generate`.

    Returns:
        Queries with responses (B, P + T), pad_token_id behind a response's end; and the processed scores that each
        response token was drawn from (B, T, V), 0 behind its end.
    """
    stops = torch.tensor(stop_ids_of(model, generation_config), device=queries.device)
    config = copy.copy(generation_config)
    config.return_dict_in_generate = config.output_scores = True
    config.pad_token_id = 0
    sequences, scores = [], []
    for rows in queries.split(local_rollout_forward_batch_size):
        is_token = rows != pad_token_id
        out = model.generate(
            input_ids=rows.masked_fill(~is_token, 0), attention_mask=is_token.long(), generation_config=config
        )
        responses = out.sequences[:, rows.shape[1] :]
        ends = torch.isin(responses, stops).long()
        over = (ends.cumsum(1) - ends).bool()
        sequences.append(torch.cat([rows, responses.masked_fill(over, pad_token_id)], dim=1))
        scores.append(torch.stack(out.scores, dim=1).masked_fill(over.unsqueeze(-1), 0))
    width = max(score.shape[1] for score in scores)
    full = queries.shape[1] + width
    padded = [torch.nn.functional.pad(ids, (0, full - ids.shape[1]), value=pad_token_id) for ids in sequences]
    stacked = [torch.nn.functional.pad(score, (0, 0, 0, width - score.shape[1])) for score in scores]
    return torch.cat(padded), torch.cat(stacked)


def stop_ids_of(model: Any, generation_config: GenerationConfig | None = None, given: Any = None) -> list[int]:
    """The ids at which `model.generate` ends a row: those given, else the configuration's own, else the model's."""
    ids = given
    if ids is None and generation_config is not None:
        ids = generation_config.eos_token_id
    ids = model.generation_config.eos_token_id if ids is None else ids
    return [] if ids is None else [int(index) for index in (ids if isinstance(ids, Sequence) else [ids])]
