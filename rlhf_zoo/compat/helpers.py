"""The helper functions that scripts imported from TRL's PPO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..errors import ZooError

__all__ = ["batch_generation", "masked_mean", "masked_var", "masked_whiten"]


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean of values where mask is not 0: of all, or along `axis`. values, mask: same shape."""
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

    queries: (B, P) token ids, left-padded with pad_token_id. Returns queries with responses (B, P + T), right-padded
    with pad_token_id, and the processed scores that each response token was drawn from (B, T, V), 0 where a batch ended
    earlier than the longest.
    """
    found, scores = [], []
    for rows in queries.split(local_rollout_forward_batch_size):
        out = model.generate(
            input_ids=rows,
            attention_mask=(rows != pad_token_id).long(),
            generation_config=generation_config,
            pad_token_id=pad_token_id,
            return_dict_in_generate=True,
            output_scores=True,
        )
        # Some models give the prompt back without its padding tokens replaced: keep the caller's.
        found.append(torch.cat([rows, out.sequences[:, rows.shape[1] :]], dim=1))
        scores.append(torch.stack(out.scores, dim=1))
    width = max(score.shape[1] for score in scores)
    full = queries.shape[1] + width
    padded = [torch.nn.functional.pad(ids, (0, full - ids.shape[1]), value=pad_token_id) for ids in found]
    stacked = [torch.nn.functional.pad(score, (0, 0, 0, width - score.shape[1])) for score in scores]
    return torch.cat(padded), torch.cat(stacked)
