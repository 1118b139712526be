"""Draws tokens with random numbers from one stream per row."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...errors import NotFinite


def uniforms(seed: int, keys: Sequence[tuple[int, ...]], length: int) -> Tensor:
    """Draws uniform numbers in [0, 1) that depend only on the seed and each row's key.

    Args:
        seed: The run's seed.
        keys: B keys of non-negative integers, one for each row.
        length: The number of draws for each row.

    Returns:
        (B, length) float64.
    """
    # Include the key's length: SeedSequence pads with zeros, so (1,) and (1, 0) would otherwise share a stream.
    streams = (np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, len(key), *key]))) for key in keys)
    return torch.from_numpy(np.stack([stream.random(length) for stream in streams]))


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Sets probabilities (B, V) to 0, except the fewest and largest that add up to at least `top_p`."""
    sorted_probabilities, order = probabilities.sort(-1, descending=True)
    # Compare the sum before each token, so that the token that reaches top_p stays, and at least one token remains.
    is_outside = sorted_probabilities.cumsum(-1) - sorted_probabilities >= top_p
    return probabilities.masked_fill(is_outside.gather(-1, order.argsort(-1)), 0)


def draw_tokens(logits: Tensor, uniform: Tensor, *, top_p: float = 1.0) -> Tensor:
    """Draws tokens by the inverse CDF.

    Args:
        logits: (B, V).
        uniform: (B,) numbers from `uniforms`.
        top_p: The draw is limited to the most likely tokens that together have this probability.

    Returns:
        (B,) token ids.

    Raises:
        NotFinite: Logits are not finite.
    """
    return draw_with_logprobs(logits, uniform, top_p=top_p)[0]


def draw_with_logprobs(logits: Tensor, uniform: Tensor, *, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draws tokens as `draw_tokens` does, and computes their log π without `top_p`, from the same softmax.

    softmax's own sum loses precision as the vocabulary grows, so log π = log(p / Σp) with Σp in float64.

    Args:
        logits: (B, V).
        uniform: (B,) numbers from `uniforms`.
        top_p: The draw is limited to the most likely tokens that together have this probability.

    Returns:
        (B,) token ids, and (B,) log-probabilities in nats.

    Raises:
        NotFinite: Logits are not finite.
    """
    probabilities = logits.softmax(-1)
    if top_p < 1:
        tokens, _ = _inverse_cdf(_nucleus(probabilities.double(), top_p), uniform)
        total = probabilities.sum(-1, dtype=torch.float64)
    elif logits.shape[-1] < _MIN_SIZE_FOR_BLOCKS:
        tokens, total = _inverse_cdf(probabilities, uniform)
    else:
        tokens, total = _inverse_cdf_by_blocks(probabilities, uniform)
    token_probabilities = probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return tokens, (token_probabilities / total).log().to(logits.dtype)


def _inverse_cdf(probabilities: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first token whose cumulative sum exceeds the uniform number, (B,), and the sum over all tokens, (B,).

    Sums are in float64, because V may be large.
    """
    cumulative = probabilities.double().cumsum(-1)
    total = cumulative[:, -1]
    _check_finite(total)
    # Rounding may make the product equal to the total, which no cumulative sum exceeds. So stay just below the total.
    target = torch.minimum(uniform.to(cumulative) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1), total


# A float32 sum over a block of 64 numbers has a relative error below 16 roundings, 1e-6, and so do the edges of a
# token's interval. A draw that is closer to an edge than _MARGIN, relative to the total, is repeated in float64.
_BLOCK_SIZE, _MARGIN = 64, 2e-6
# The vocabulary size from which blocks save time.
_MIN_SIZE_FOR_BLOCKS = 1024


def _inverse_cdf_by_blocks(probabilities: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the same as `_inverse_cdf`, with float64 sums only in the vocabulary block that contains the token.

    If a row's number is so close to an interval's edge that rounding could decide, `_inverse_cdf` draws the token.
    """
    size = probabilities.shape[1]
    full_blocks_size = size // _BLOCK_SIZE * _BLOCK_SIZE
    block_sums = probabilities[:, :full_blocks_size].unflatten(1, (-1, _BLOCK_SIZE)).sum(-1)
    if full_blocks_size < size:
        block_sums = torch.cat([block_sums, probabilities[:, full_blocks_size:].sum(-1, keepdim=True)], dim=1)
    block_ends = block_sums.double().cumsum(-1)
    total = block_ends[:, -1:]
    _check_finite(total)
    target = uniform.to(block_ends).unsqueeze(1) * total
    # Rounding may put the target past the last block.
    block = torch.searchsorted(block_ends, target, right=True).clamp(max=block_ends.shape[1] - 1)
    positions = block * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE, device=block.device)
    mass = probabilities.gather(1, positions.clamp(max=size - 1)).double().masked_fill(positions >= size, 0)
    cumulative = block_ends.gather(1, block) - block_sums.gather(1, block) + mass.cumsum(-1)
    offset = torch.searchsorted(cumulative, target, right=True).clamp(max=_BLOCK_SIZE - 1)
    upper = cumulative.gather(1, offset)
    lower = upper - mass.gather(1, offset)
    tokens = (block * _BLOCK_SIZE + offset).squeeze(1)
    uncertain_rows = (torch.minimum(target - lower, upper - target) < _MARGIN * total).squeeze(1).nonzero().squeeze(1)
    if len(uncertain_rows):
        tokens[uncertain_rows], _ = _inverse_cdf(probabilities[uncertain_rows], uniform.to(block_ends)[uncertain_rows])
    return tokens, total.squeeze(1)


def _check_finite(sums: Tensor) -> None:
    if not sums.isfinite().all():
        raise NotFinite(
            "The policy's logits are not finite, so no token can be drawn: check its weights; in training, lower "
            "learning_rate, or set bf16: false."
        )
