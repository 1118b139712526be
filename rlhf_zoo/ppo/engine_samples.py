"""Converts the completions of another engine to `Samples`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ZooError
from ..modeling.sampling.sampler import Samples, SamplingRequest, Vocabulary, left_pad


def excluded_ids(vocabulary: Vocabulary, model: PreTrainedModel) -> list[int]:
    """Lists the ids for which the model has logits, but which cannot be sampled.

    Args:
        vocabulary: The tokens that can be sampled.
        model: The policy.
    """
    head: Any = model.get_output_embeddings()
    return [*vocabulary.holes, *range(vocabulary.size, head.weight.shape[0])]


def as_samples(
    request: SamplingRequest,
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    *,
    device: torch.device | str,
) -> Samples:
    """Converts token lists to `Samples`.

    Args:
        request: The request that the engine answered.
        completions: B token lists.
        logprobs: B lists of log π in nats, one for each token.
        device: The device of the samples.

    Raises:
        ZooError: A completion is empty, its numbers of tokens and log-probabilities differ, or it has a token that
            cannot be sampled.
    """
    for row, tokens in enumerate(completions):
        if not tokens or len(tokens) != len(logprobs[row]):
            raise ZooError(
                f"The rollout engine gave completion {row} {len(tokens)} tokens and {len(logprobs[row])} "
                "log-probabilities: choose rollout_engine 'native'."
            )
        if unknown_ids := [token_id for token_id in tokens if token_id not in request.vocabulary]:
            raise ZooError(
                f"The rollout engine sampled the id {unknown_ids[0]}, which the tokenizer does not have: choose "
                "rollout_engine 'native'."
            )
    prompt_ids, prompt_mask = left_pad(request.prompts, request.pad_id, device)
    width = max(map(len, completions))

    def pad_rows(rows: Sequence[Sequence[Any]], fill: Any) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], device=device)

    lengths = torch.tensor([len(tokens) for tokens in completions], device=device)
    return Samples(
        prompt_ids,
        prompt_mask,
        pad_rows(completions, request.pad_id),
        torch.arange(width, device=device) < lengths.unsqueeze(1),
        pad_rows(logprobs, 0.0).float(),
        torch.tensor([tokens[-1] in set(request.stop_ids) for tokens in completions], device=device),
        request.vocabulary,
    )
