"""Computes log-probabilities and entropies from a linear head, without all logits (N, V) in memory at once.

The logits of a chunk of tokens are computed in float32, used and freed. The backward pass computes them again. If a
loss is passed, the forward pass also computes the loss's gradients while it has the logits. The loss of a token must
then depend on that token alone. Results equal those of the plain path (`logprobs.py`) up to rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from .sampling.sampler import Vocabulary

#: The least number of logits in a chunk: as many as fit into a CPU's caches, or enough to keep an accelerator busy.
CHUNK_ON_CPU, CHUNK_ON_ACCELERATOR = 2**22, 2**26


class LogitTransform(NamedTuple):
    """How a model turns its head's output z into logits: z·scale, or softcap·tanh(z·scale/softcap).

    Attributes:
        scale: The factor.
        softcap: The bound on |logit|; None for no bound.
    """

    scale: float = 1.0
    softcap: float | None = None


IDENTITY = LogitTransform()
#: Maps log π and entropy, of the same shape, to a scalar loss and {name: term to log}. The loss of a token may depend
#: only on that token.
TokenLoss = Callable[[Tensor, Tensor], tuple[Tensor, Mapping[str, Tensor]]]


# The result of `_detect_transform` for each model. The keys are weak, so the cache keeps no model in memory.
_TRANSFORMS: WeakKeyDictionary[nn.Module, LogitTransform | None] = WeakKeyDictionary()


def logit_transform(model: Any) -> LogitTransform | None:
    """Finds how a model transforms the output of its head, so that logits can be computed from hidden states.

    Args:
        model: A model, or anything else.

    Returns:
        The transform; None if logits must come from the model's own forward pass: for a transform that LogitTransform
        cannot express, for a head that is not a plain nn.Linear (because it has an adapter, a hook or quantized
        weights), and for a sharded model.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear or "forward" in vars(head) or isinstance(model, FSDPModule):
        return None
    # A hook may change the output, and a sharded or quantized weight does not have its layer's shape.
    if head._forward_hooks or head.weight.shape != (head.out_features, head.in_features):
        return None
    if model not in _TRANSFORMS:
        _TRANSFORMS[model] = _detect_transform(model, head)
    return _TRANSFORMS[model]


@torch.no_grad()
def _detect_transform(model: Any, head: Any) -> LogitTransform | None:
    """Replaces the head's output with fixed numbers, and compares the model's logits with these numbers.

    The configuration does not help: each model family has its own key for a scale, and some apply the scale elsewhere.
    """
    device = head.weight.device
    indices = torch.arange(head.out_features, device=device)
    numbers = torch.ldexp((1.0 - 2 * (indices % 2)), indices % 9 - 2)  # ±¼ to ±64, exact in any type
    head.forward = lambda states: numbers.expand(*states.shape[:-1], -1)
    # Any tokens will do, because the head's output is replaced.
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    try:
        with torch.autocast(device.type, enabled=False):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return None  # the model does more than transform its head's output
    finally:
        del head.forward
    if logits.shape[-1:] != numbers.shape:
        return None
    logits = logits.reshape(-1, len(numbers))[-1].float()
    # With a softcap, the ratio of a logit to its number is not the scale. So read the bound from the configuration, and
    # assume a scale of 1.
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    for transform in (LogitTransform(float(logits[0] / numbers[0])), LogitTransform(1.0, softcap)):
        if torch.allclose(_apply_transform(numbers.clone(), transform, 1.0), logits, rtol=1e-5, atol=1e-6):
            return transform
    return None


def _apply_transform(z: Tensor, transform: LogitTransform, temperature: float) -> Tensor:
    """Converts a head's output (..., V) to logits at the temperature, in place."""
    if transform.softcap is None:
        return z if transform.scale == temperature else z.mul_(transform.scale / temperature)
    return z.mul_(transform.scale / transform.softcap).tanh_().mul_(transform.softcap / temperature)


def chunked_logprobs(
    states: Tensor,
    head: nn.Linear,
    tokens: Tensor,
    *,
    transform: LogitTransform = IDENTITY,
    temperature: float = 1.0,
    vocabulary: Vocabulary | None = None,
    loss: TokenLoss | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Mapping[str, Tensor] | None]:
    """Computes log π of N tokens and the entropy of their distributions, one chunk of logits at a time.

    Args:
        states: (N, H) hidden states, the head's input.
        head: The output embeddings.
        tokens: (N,) int64 token ids.
        transform: How the model transforms the head's output.
        temperature: The sampling temperature, by which logits are divided.
        vocabulary: The tokens that can be sampled; None for every entry of the logits.
        loss: A loss of log π and entropy, whose gradients the forward pass computes; None for no loss.

    Returns:
        log π and entropy, (N,) float32 in nats; the loss and its terms, both None if no loss was passed. If a loss was
        passed, only the loss has a gradient. Otherwise log π and entropy have gradients.
    """
    device_type = states.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else head.weight.dtype
    holes = torch.tensor(vocabulary.holes, device=states.device) if vocabulary and vocabulary.holes else None
    size = head.out_features if vocabulary is None else vocabulary.size
    inputs = states, head.weight, head.bias, tokens, (transform, temperature, size, holes, dtype)
    # Turn autocast off: the matrix products already use its type, and it would reduce the precision of float32 sums.
    with torch.autocast(device_type, enabled=False):
        if loss is None:
            logprobs, entropies = cast(tuple[Tensor, Tensor], _ChunkedLogprobs.apply(*inputs))
            return logprobs, entropies, None, None
        return cast(tuple[Tensor, Tensor, Tensor, Mapping[str, Tensor]], _ChunkedLoss.apply(*inputs, loss))


class _ChunkedLogprobs(torch.autograd.Function):
    """Computes log π and entropy. The backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # if the entropy is only logged, its gradient stays None and costs nothing
        *tensors, ctx.settings = inputs
        ctx.save_for_backward(*tensors)
        return _run_chunks(inputs)

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tokens = ctx.saved_tensors[3]
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(tokens.shape, device=tokens.device)
        sums = _GradientSums(ctx.saved_tensors, ctx.needs_input_grad)
        _run_chunks((*ctx.saved_tensors, ctx.settings), sums, lambda *_: (grad_logprobs, grad_entropies))
        return *sums.for_inputs(), None, None  # tokens and settings have no gradient


class _ChunkedLoss(torch.autograd.Function):
    """Computes a loss of log π and entropy, and its gradients in the same pass over the logits.

    This is possible because a token's gradient depends only on the token's own log π and entropy.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Tensor]]:
        *inputs, loss = arguments

        def derivatives(*outputs: Tensor) -> tuple[Tensor, Tensor | None]:
            with torch.enable_grad():
                outputs = tuple(x.clone().requires_grad_() for x in outputs)
                # This graph has only (N,) tensors. `_run_chunks` computes the derivatives of the logits by hand.
                grad_logprobs, grad_entropies = torch.autograd.grad(loss(*outputs)[0], outputs, allow_unused=True)
            return (torch.zeros_like(outputs[0]) if grad_logprobs is None else grad_logprobs), grad_entropies

        sums = _GradientSums(inputs, ctx.needs_input_grad)
        logprobs, entropies = _run_chunks(inputs, sums, derivatives)
        ctx.sums = sums
        ctx.mark_non_differentiable(logprobs, entropies)
        return logprobs, entropies, *loss(logprobs, entropies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The sums are as large as the head, so scale them in place, and do not keep them for a second backward pass.
        sums, ctx.sums = ctx.sums, None
        return *sums.for_inputs(grads[2]), None, None, None


class _GradientSums:
    """Gradients of states, weight and bias, summed over chunks in float32; None for inputs that need no gradient."""

    def __init__(self, inputs: Sequence[Any], needs_gradient: Sequence[bool]) -> None:
        self._types = [None if x is None else x.dtype for x in inputs[:3]]
        self.states, self.weight, self.bias = (
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) if is_needed else None
            for x, is_needed in zip(inputs[:3], needs_gradient, strict=False)
        )

    def add(self, chunk: slice, states: Tensor, weight: Tensor, grad: Tensor) -> None:
        """Adds the gradients of a chunk of n tokens from states (n, H), weight (V, H) and the output's grad (n, V)."""
        size = len(weight)
        if self.states is not None:
            self.states[chunk] = (grad @ weight).float()
        if self.weight is not None and grad.dtype == torch.float32:
            self.weight[:size].addmm_(grad.t(), states)
        # A product in half precision cannot be added to float32 in one call.
        elif self.weight is not None:
            self.weight[:size] += grad.t() @ states
        if self.bias is not None:
            self.bias[:size] += grad.sum(0, dtype=torch.float32)

    def for_inputs(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """Returns the sums in the inputs' types, multiplied in place by a scalar factor."""
        sums = [self.states, self.weight, self.bias]
        if factor is not None:
            sums = [None if x is None else x.mul_(factor) for x in sums]
        return [None if x is None else x.to(dtype) for x, dtype in zip(sums, self._types, strict=True)]


def tokens_per_chunk(states: Tensor, size: int) -> int:
    """Returns the number of tokens in a chunk.

    The number is at least H, so that a chunk has at least as many elements as the weight's gradient (V, H). Each chunk
    adds to every element of that gradient, and smaller chunks would spend most of their time on these additions.

    Args:
        states: (N, H) hidden states.
        size: V, the size of the vocabulary.
    """
    return max(states.shape[1], (CHUNK_ON_CPU if states.device.type == "cpu" else CHUNK_ON_ACCELERATOR) // size)


def _run_chunks(
    inputs: Sequence[Any],
    sums: _GradientSums | None = None,
    derivatives: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes log π and entropy, (N,), from chunks of logits (n, V). Adds gradients to `sums` if `sums` is passed.

    With respect to the logits z, ∂log p_a/∂z = 1[a] − p and ∂H/∂z = −p·(log p + H).

    Args:
        inputs: States, weight, bias, tokens and settings, as `chunked_logprobs` packs them.
        sums: The sums of gradients; None to compute none.
        derivatives: Called with log π and entropy, which are 0 for tokens of later chunks. Returns the loss's
            derivatives with respect to both, (N,); the second is None if the loss does not depend on the entropy.
    """
    states, weight, bias, tokens, (transform, temperature, size, holes, dtype) = inputs
    weight = weight[:size].to(dtype)
    # A bias of −∞ must become finite, because the entropy multiplies it by a probability of 0, and 0·∞ is NaN.
    bias = None if bias is None else bias[:size].to(dtype).clamp(min=-1e30)
    logprobs, entropies = (torch.zeros(len(states), device=states.device) for _ in range(2))
    chunk_size = tokens_per_chunk(states, size)
    for start in range(0, len(states), chunk_size):
        chunk = slice(start, start + chunk_size)
        chunk_states, chunk_tokens = states[chunk].to(dtype), tokens[chunk].unsqueeze(-1)
        z = _apply_transform(functional.linear(chunk_states, weight, bias).float(), transform, temperature)
        if holes is not None:
            z.index_fill_(-1, holes, torch.finfo(torch.float32).min / 2)
        tanh_slope = None  # d tanh(x)/dx = 1 − tanh²(x), of the capped logits
        if sums is not None and transform.softcap is not None:
            tanh_slope = 1 - (z * (temperature / transform.softcap)).square_()
        # Sum exp(z − max z) with torch.sum. Unlike softmax's error, its error does not grow with the vocabulary.
        z.sub_(z.amax(-1, keepdim=True))
        logprobs[chunk] = z.gather(-1, chunk_tokens).squeeze(-1)
        p = z.exp()
        total = p.sum(-1)
        log_total = total.log()
        logprobs[chunk] -= log_total
        z.mul_(p)  # p·z from here on
        entropies[chunk] = log_total - z.sum(-1) / total
        if sums is None or derivatives is None:
            del z, p  # otherwise this chunk would stay in memory while the next chunk is computed
            continue
        # d logit / d (head's output), without the slope of tanh. The slope differs between logits and is applied last.
        gain = transform.scale / temperature
        grad_logprobs, grad_entropies = derivatives(logprobs, entropies)
        grad_logprobs = gain * grad_logprobs[chunk]
        # ∂L/∂z = g·1[a] + p·(−g − h·(log p + H)), with g = ∂L/∂log p_a and h = ∂L/∂H.
        p_factor = -grad_logprobs
        if grad_entropies is not None:
            grad_entropies = gain * grad_entropies[chunk]
            p_factor = p_factor - grad_entropies * (entropies[chunk] - log_total)
        # Work in place from here on, because another (n, V) tensor would double the memory of a chunk.
        grad = p.mul_((p_factor / total).unsqueeze(-1))
        if grad_entropies is not None:
            grad.addcmul_(z, (-grad_entropies / total).unsqueeze(-1))
        grad.scatter_add_(-1, chunk_tokens, grad_logprobs.unsqueeze(-1))
        if tanh_slope is not None:
            grad.mul_(tanh_slope)
            if holes is not None:
                grad.index_fill_(-1, holes, 0)  # otherwise NaN, because 0·∞ is NaN
        sums.add(chunk, chunk_states, weight, grad.to(dtype))
        del z, p, grad, tanh_slope
    return logprobs, entropies
