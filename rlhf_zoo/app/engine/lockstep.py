"""Samples from two policies in lockstep, one token per step, and computes metrics of both at each position."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ...errors import ZooError
from ...functional import entropy, exact_kl, selected_logprobs
from ...modeling.sampling.decoder import forward
from ...modeling.sampling.random import draw_tokens, uniforms
from ...modeling.sampling.sampler import Vocabulary, check_accepts_cache, scale_logits

#: First part of the keys of this module's random streams. Other samplers of the package use other numbers.
COMPARE_STREAM = 7


@dataclass(frozen=True)
class SampledToken:
    """A sampled token, and metrics of both policies at its position, in nats.

    Attributes:
        index: Index of the completion in its `LockstepSampler`.
        token_id: The token's id.
        logprob_sft: log π_SFT of the token.
        logprob_ppo: log π_PPO of the token.
        log_ratio: log π_PPO − log π_SFT.
        kl: KL(π_PPO‖π_SFT) at this position.
        kl_reverse: KL(π_SFT‖π_PPO) at this position.
        entropy_sft: Entropy of the SFT policy at this position.
        entropy_ppo: Entropy of the PPO policy at this position.
        stop: "eos" or "length" for the completion's last token; None otherwise.
    """

    index: int
    token_id: int
    logprob_sft: float
    logprob_ppo: float
    log_ratio: float
    kl: float
    kl_reverse: float
    entropy_sft: float
    entropy_ppo: float
    stop: str | None


class LockstepSampler:
    """Samples n completions of one prompt from each of two policies: 0 to n − 1 from SFT, n to 2n − 1 from PPO.

    Each step runs one forward pass of each model over the same batch, which has one row per distinct token sequence.
    Completions share a row until their tokens differ. So the prompt is processed once, and policies with the same
    weights sample identical completions. Completion i of either policy uses random stream i.

    Args:
        sft: The SFT policy.
        ppo: The PPO policy.
        prompt_ids: At least one token id. Prompt and `max_new_tokens` must fit into both models' contexts.
        n: Number of completions of each policy.
        seed: Seed of the random streams.
        temperature: Divides the logits.
        top_p: Samples from the most likely tokens with this total probability.
        max_new_tokens: Largest number of tokens in a completion.
        stop_ids: Token ids that end a completion.
        vocabulary: The tokens that both policies can sample.

    Raises:
        ZooError: A policy does not support the KV cache that sampling needs.
    """

    def __init__(
        self,
        *,
        sft: PreTrainedModel,
        ppo: PreTrainedModel,
        prompt_ids: Sequence[int],
        n: int,
        seed: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        vocabulary: Vocabulary,
    ) -> None:
        device = next(ppo.parameters()).device
        self._models = (sft, ppo)
        for model in self._models:
            check_accepts_cache(model)
        self._caches = tuple(DynamicCache(config=model.config) for model in self._models)
        self._vocabulary = vocabulary
        self._temperature, self._top_p, self._max_new_tokens = temperature, top_p, max_new_tokens
        self._stop_ids = torch.tensor(list(stop_ids), device=device, dtype=torch.long)
        # Completion 0 always has the same key, so that its text depends on the seed but not on n.
        keys = [(COMPARE_STREAM, index) if index else (COMPARE_STREAM,) for index in range(n)]
        self._uniforms = uniforms(seed, keys, max_new_tokens).to(device).repeat(2, 1)  # the same for both policies
        self._inputs = torch.tensor([list(prompt_ids)], device=device)
        self._length = len(prompt_ids)  # of prompt and completion so far
        self._n, self._step = n, 0
        # Indices of the unfinished completions, and the batch row of each.
        self._unfinished = torch.arange(2 * n, device=device)
        self._rows = torch.zeros_like(self._unfinished)

    @property
    def is_done(self) -> bool:
        return len(self._unfinished) == 0

    @torch.no_grad()
    def step(self) -> list[SampledToken]:
        """Samples the next token of every unfinished completion.

        Returns:
            One token for each unfinished completion.

        Raises:
            ZooError: The logits of a policy are NaN.
        """
        sft_logits, ppo_logits = self._compute_logits()
        indices, rows = self._unfinished, self._rows
        own_logits = torch.where((indices < self._n).unsqueeze(1), sft_logits[rows], ppo_logits[rows])
        tokens = draw_tokens(own_logits, self._uniforms[indices, self._step], top_p=self._top_p)
        ended_mask = torch.isin(tokens, self._stop_ids)
        metrics = _token_metrics(sft_logits.double(), ppo_logits.double(), rows, tokens)
        self._step += 1
        is_last = self._step == self._max_new_tokens
        stops = ["eos" if has_ended else "length" if is_last else None for has_ended in ended_mask.tolist()]
        columns = (indices.tolist(), tokens.tolist(), *metrics.T.tolist(), stops)
        sampled_tokens = [SampledToken(*fields) for fields in zip(*columns, strict=True)]
        unfinished_mask = torch.zeros_like(ended_mask) if is_last else ~ended_mask
        self._advance(rows[unfinished_mask], tokens[unfinished_mask], len(sft_logits))
        self._unfinished = indices[unfinished_mask]
        return sampled_tokens

    def _compute_logits(self) -> list[Tensor]:
        ids, length = self._inputs, self._length  # rows have equal lengths, so there is no padding
        batch_size, new_count = ids.shape
        positions = torch.arange(length - new_count, length, device=ids.device).expand(batch_size, new_count)
        both_logits = []
        for model, cache in zip(self._models, self._caches, strict=True):
            output = forward(model, ids, ids.new_ones(batch_size, length), positions, cache)
            both_logits.append(scale_logits(output.logits, self._temperature, self._vocabulary))
        for name, logits in zip(("SFT", "PPO"), both_logits, strict=True):
            if logits.isnan().any():
                raise ZooError(f"The {name} policy's logits are NaN: choose another checkpoint.")
        return both_logits

    def _advance(self, rows: Tensor, tokens: Tensor, batch_size: int) -> None:
        """Builds the next batch: one row for each distinct pair of a row of this batch and a token sampled from it."""
        # Encode each pair as one integer, so that `unique` returns the distinct pairs.
        base = int(tokens.max()) + 1 if len(tokens) else 1
        pairs, self._rows = torch.unique(rows * base + tokens, return_inverse=True)
        kept_rows = pairs // base
        self._inputs, self._length = (pairs % base).unsqueeze(1), self._length + 1
        # Reordering copies the cache, so it is skipped if every row stays where it is.
        if len(kept_rows) and kept_rows.tolist() != list(range(batch_size)):
            for cache in self._caches:
                cache.reorder_cache(kept_rows)


def _token_metrics(sft_logits: Tensor, ppo_logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Computes the metrics of `SampledToken`, in its order: logits (R, V) float64, rows (C,), tokens (C,) -> (C, 7)."""
    both_logits = (sft_logits, ppo_logits)
    logprobs = [selected_logprobs(logits[rows], tokens) for logits in both_logits]
    # A KL divergence is at least 0; rounding must not make it negative.
    kl = exact_kl(ppo_logits, sft_logits).clamp(min=0)[rows]
    kl_reverse = exact_kl(sft_logits, ppo_logits).clamp(min=0)[rows]
    entropies = [entropy(logits)[rows] for logits in both_logits]
    return torch.stack([*logprobs, logprobs[1] - logprobs[0], kl, kl_reverse, *entropies], dim=1)
