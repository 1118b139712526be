"""Computes log-probabilities of sampled tokens, in a forward pass over prompts and completions.

On the plain path, the logits (B, T, V) stay in memory in float32 for the backward pass. If
`chunked_logprobs.logit_transform` recognizes the model's head, logits are computed in chunks instead. Results are the
same up to rounding.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..functional import entropy, selected_logprobs
from .batches import split_batches
from .chunked_logprobs import TokenLoss, chunked_logprobs, logit_transform
from .packed_attention import pack_inputs, supports_packing
from .sampling.decoder import positions_of, record_inputs, replace_padding
from .sampling.sampler import Samples, accepts_argument, scale_logits


class PolicyOutput(NamedTuple):
    """The outputs of a policy for each response token.

    Attributes:
        logprobs: (B, T) log π in nats, 0 outside the mask. If a loss was passed, only the loss has a gradient.
        entropy: (B, T) in nats, 0 outside the mask. It has no gradient if a loss was passed.
        states: (B, T, H), the input of the model's head. May be None if states were not requested.
        logits: (B, T, V) float32; None if logits were not requested.
        loss: A scalar; None if no loss was passed.
        loss_terms: The terms of the loss for logging, {name: tensor}, without gradients; None if no loss was passed.
    """

    logprobs: Tensor
    entropy: Tensor
    states: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None
    loss_terms: Mapping[str, Tensor] | None = None


def response_outputs(model: PreTrainedModel, samples: Samples) -> Tensor:
    """Computes a model's outputs at the position before each response token.

    Args:
        model: A policy or a critic.
        samples: B prompts with completions.

    Returns:
        (B, T, V) for a policy, (B, T, 1) for a critic, in the model's type; undefined outside the mask.
    """
    outputs, select_positions = _run_model(model, samples)
    return select_positions(outputs)


def _run_model(model: PreTrainedModel, samples: Samples) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Runs a model. Returns its outputs, and a function that selects the position before each response token.

    The function maps the outputs, or a tensor that a hook recorded during the pass, to (B, T, ·).
    """
    ids = torch.cat([samples.prompt_ids, samples.completion_ids], dim=1)
    attention = torch.cat([samples.prompt_mask, samples.mask], dim=1)
    if supports_packing(model):
        return _run_packed(model, ids, attention, samples.mask)
    # Prompts are padded on the left and completions on the right. Move all padding to the left: the batch is then only
    # as wide as the longest row, and all responses are in the last columns, so the head can run on these columns alone.
    length, width = samples.mask.shape[1], int(attention.sum(1).max())
    columns = torch.arange(-width, 0, device=ids.device) + (ids.shape[1] - _right_padding(samples))
    attention = attention.gather(1, columns.clamp(min=0)) & (columns >= 0)
    output = model(
        input_ids=replace_padding(ids.gather(1, columns.clamp(min=0)), attention),
        attention_mask=attention.long(),
        position_ids=positions_of(attention),
        use_cache=False,
        **({"logits_to_keep": length + 1} if accepts_argument(model, "logits_to_keep") else {}),
    )
    return output.logits, lambda x: _align_responses(x[:, -length - 1 : -1], samples)


def _run_packed(
    model: PreTrainedModel, ids: Tensor, attention: Tensor, mask: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Computes the same as `_run_model`, with all rows packed into one."""
    # A response token is predicted at its index in the packed row minus one.
    positions = (attention.flatten().cumsum(0) - 1).view_as(attention)[:, -mask.shape[1] :][mask] - 1
    selects_logits = accepts_argument(model, "logits_to_keep")
    inputs = pack_inputs(ids, attention, positions_of(attention))
    if selects_logits:
        inputs |= {"logits_to_keep": positions}

    def select_positions(x: Tensor) -> Tensor:
        responses = x[0] if selects_logits else x[0, positions]
        return x.new_zeros(*mask.shape, x.shape[-1]).masked_scatter(mask.unsqueeze(-1), responses)

    return model(**inputs, use_cache=False).logits, select_positions


def _right_padding(samples: Samples) -> Tensor:
    """Counts the padding after each response, (B, 1)."""
    return (~samples.mask).sum(1, keepdim=True)


def _align_responses(outputs: Tensor, samples: Samples) -> Tensor:
    """Shifts the rows of (B, T, ·), whose responses end at the same column, so that responses begin at column 0."""
    length = samples.mask.shape[1]
    columns = (torch.arange(length, device=outputs.device) + _right_padding(samples)).clamp(max=length - 1)
    # Copy entire positions. A gather would read an index for each logit, which takes several times as long.
    return outputs[torch.arange(len(outputs), device=outputs.device).unsqueeze(1), columns]


def response_logits(model: PreTrainedModel, samples: Samples, *, temperature: float = 1.0) -> Tensor:
    """Computes the logits that predict each response token.

    Args:
        model: The policy.
        samples: B prompts with completions.
        temperature: The sampling temperature, by which logits are divided.

    Returns:
        (B, T, V) float32, where V is `samples.vocabulary.size`, if set.
    """
    return scale_logits(response_outputs(model, samples), temperature, samples.vocabulary)


def response_logprobs(
    model: PreTrainedModel,
    samples: Samples,
    *,
    temperature: float = 1.0,
    return_states: bool = False,
    return_logits: bool = False,
    entropy_requires_grad: bool = False,
    loss: TokenLoss | None = None,
) -> PolicyOutput:
    """Computes log π and entropy of the response tokens, and a loss of both if one is passed.

    Logits are computed in chunks if they are not requested and `logit_transform` recognizes the model's head.

    Args:
        model: The policy.
        samples: B prompts with completions.
        temperature: The sampling temperature, by which logits are divided.
        return_states: Whether to return the input of the model's head.
        return_logits: Whether to return the logits.
        entropy_requires_grad: Whether the entropy has a gradient.
        loss: A loss of log π and entropy, (B, T) in nats; None for no loss. The loss of a token may depend only on that
            token.
    """
    transform = None if return_logits else logit_transform(model)
    mask = samples.mask
    head: Any = model.get_output_embeddings() if return_states or transform else None
    # The chunked path needs only the head's input, so the head itself is skipped.
    with record_inputs(head, skip_head=transform is not None) as head_inputs:
        outputs, select_positions = _run_model(model, samples)
    head_states = select_positions(head_inputs[-1]) if head_inputs else None
    if transform is None or head_states is None:
        scaled_logits = scale_logits(select_positions(outputs), temperature, samples.vocabulary)
        logprobs = selected_logprobs(scaled_logits, samples.completion_ids)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_requires_grad):
            entropies = entropy(scaled_logits)
        # Mask padding before the loss, because a log-probability of −∞ at padding would have the gradient NaN.
        logprobs, entropies = (x.masked_fill(~mask, 0) for x in (logprobs, entropies))
        returned_logits = scaled_logits if return_logits else None
        if loss is None:
            return PolicyOutput(logprobs, entropies, head_states, returned_logits)
        loss_value, loss_terms = loss(logprobs, entropies)
        loss_terms = {name: term.detach() for name, term in loss_terms.items()}
        return PolicyOutput(logprobs.detach(), entropies.detach(), head_states, returned_logits, loss_value, loss_terms)

    # Compute the indices only once, because the CPU waits for the GPU at this point.
    indices = mask.flatten().nonzero().squeeze(1)

    def to_rows(flat: Tensor) -> Tensor:
        """Puts (N,) values of response tokens into (B, T), with 0 outside the mask."""
        return torch.zeros(mask.numel(), device=mask.device).index_copy(0, indices, flat).view(mask.shape)

    logprobs, entropies, chunked_loss, chunked_terms = chunked_logprobs(
        head_states.flatten(0, 1).index_select(0, indices),
        head,
        samples.completion_ids.flatten()[indices],
        transform=transform,
        temperature=temperature,
        vocabulary=samples.vocabulary,
        loss=None if loss is None else lambda *flat: loss(*map(to_rows, flat)),
    )
    entropies = to_rows(entropies)
    entropies = entropies if entropy_requires_grad else entropies.detach()
    return PolicyOutput(to_rows(logprobs), entropies, head_states, loss=chunked_loss, loss_terms=chunked_terms)


def response_states(model: PreTrainedModel, samples: Samples) -> Tensor:
    """Computes the input of the model's head at the position before each response token.

    Args:
        model: The policy.
        samples: B prompts with completions.

    Returns:
        (B, T, H), undefined outside the mask.
    """
    with record_inputs(model.get_output_embeddings(), skip_head=logit_transform(model) is not None) as head_inputs:
        _, select_positions = _run_model(model, samples)
    return select_positions(head_inputs[-1])


@torch.no_grad()
def token_logprobs(
    model: PreTrainedModel,
    samples: Samples,
    *,
    temperature: float = 1.0,
    batch_size: int = 64,
    max_tokens: int | None = None,
) -> Tensor:
    """Computes log π of each response token, without gradients.

    Args:
        model: The policy, or a reference.
        samples: B prompts with completions.
        temperature: The sampling temperature, by which logits are divided.
        batch_size: The maximum number of rows in a pass.
        max_tokens: The maximum number of tokens in a pass, padding included; None for no limit.

    Returns:
        (B, T) in nats, 0 outside the mask.
    """
    padded_logprobs = torch.zeros_like(samples.logprobs)
    for indices in split_batches(samples, max_rows=batch_size, max_tokens=max_tokens, packed=supports_packing(model)):
        logprobs = response_logprobs(model, samples.select(indices), temperature=temperature).logprobs
        # A batch is only as wide as its longest completion.
        padded_logprobs[indices, : logprobs.shape[1]] = logprobs.to(padded_logprobs)
    return padded_logprobs


def text_logprobs(model: PreTrainedModel, ids: Tensor, attention: Tensor) -> Tensor:
    """Computes log π of each token except the first in each text, at temperature 1.

    Args:
        model: A causal language model.
        ids: (B, L) int64 token ids.
        attention: (B, L) bool, False for padding.

    Returns:
        (B, L−1) in nats, 0 at padding.
    """
    transform, mask = logit_transform(model), attention[:, 1:]
    head: Any = model.get_output_embeddings() if transform else None
    with record_inputs(head, skip_head=transform is not None) as head_inputs:
        logits = model(
            input_ids=replace_padding(ids, attention), attention_mask=attention.long(), use_cache=False
        ).logits
    if transform is None:
        return selected_logprobs(logits[:, :-1].float(), ids[:, 1:]).masked_fill(~mask, 0)
    # The last token predicts nothing, and padding needs no logits.
    logprobs = chunked_logprobs(head_inputs[-1][:, :-1][mask], head, ids[:, 1:][mask], transform=transform)[0]
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, logprobs)
