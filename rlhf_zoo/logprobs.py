"""Log-probabilities of sampled tokens under a model, from a forward pass over prompts and completions."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .functional import selected_logprobs
from .sampling import Samples, positions_of, scaled, takes

__all__ = ["response_logits", "response_outputs", "token_logprobs"]


def response_outputs(model: PreTrainedModel, samples: Samples) -> Tensor:
    """What the model's head gives at the position before each response token; it runs on these positions only.

    Returns (B, T, V) of a policy, (B, T, 1) of a critic, in the model's type.
    """
    length = samples.mask.shape[1]
    seen = torch.cat([samples.prompt_mask, samples.mask], dim=1)
    out = model(
        input_ids=torch.cat([samples.prompt_ids, samples.completion_ids], dim=1),
        attention_mask=seen.long(),
        position_ids=positions_of(seen),
        use_cache=False,
        **({"logits_to_keep": length + 1} if takes(model, "logits_to_keep") else {}),
    )
    return out.logits[:, -length - 1 : -1]


def response_logits(model: PreTrainedModel, samples: Samples, *, temperature: float = 1.0) -> Tensor:
    """Logits that predict each response token, at the sampling temperature.

    Returns (B, T, V) float32, of the tokens that could be sampled.
    """
    return scaled(response_outputs(model, samples), temperature, samples.vocabulary)


@torch.no_grad()
def token_logprobs(
    model: PreTrainedModel, samples: Samples, *, temperature: float = 1.0, batch_size: int = 64
) -> Tensor:
    """log π of each response token under `model` at `temperature`. Returns (B, T) in nats, 0 outside the mask."""
    out = torch.zeros_like(samples.logprobs)
    for start, chunk in zip(range(0, len(samples), batch_size), samples.chunks(batch_size), strict=True):
        logits = response_logits(model, chunk, temperature=temperature)
        logps = selected_logprobs(logits, chunk.completion_ids).masked_fill(~chunk.mask, 0)
        out[start : start + len(chunk), : logps.shape[1]] = logps
    return out
