"""What engines that are not ours answer, as `Samples`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ZooError
from ..modeling.sampling.sampler import Samples, SamplingRequest, Vocabulary, left_pad


def outside(vocabulary: Vocabulary, model: Any) -> list[int]:
    """Rows of the model's head that stand for no token."""
    rows = model.get_output_embeddings().weight.shape[0]
    return [*vocabulary.holes, *range(vocabulary.size, rows)]


def as_samples(
    request: SamplingRequest,
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    *,
    device: torch.device | str,
) -> Samples:
    """Token lists as `Samples`. Raises ZooError for a completion without tokens or with others than can be sampled."""
    for row, tokens in enumerate(completions):
        if not tokens or len(tokens) != len(logprobs[row]):
            raise ZooError(
                f"The rollout engine gave completion {row} {len(tokens)} tokens and {len(logprobs[row])} "
                "log-probabilities: choose rollout_engine 'native'."
            )
        if strange := [index for index in tokens if index not in request.vocabulary]:
            raise ZooError(
                f"The rollout engine sampled the id {strange[0]}, which the tokenizer does not name: choose "
                "rollout_engine 'native'."
            )
    prompt_ids, prompt_mask = left_pad(request.prompts, request.pad_id, device)
    width = max(map(len, completions))

    def beside(rows: Sequence[Sequence[Any]], fill: Any) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], device=device)

    lengths = torch.tensor([len(tokens) for tokens in completions], device=device)
    return Samples(
        prompt_ids,
        prompt_mask,
        beside(completions, request.pad_id),
        torch.arange(width, device=device) < lengths.unsqueeze(1),
        beside(logprobs, 0.0).float(),
        torch.tensor([tokens[-1] in set(request.stop_ids) for tokens in completions], device=device),
        request.vocabulary,
    )
