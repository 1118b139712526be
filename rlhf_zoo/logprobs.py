"""Log-probabilities of sampled tokens under a model, from a forward pass over prompts and completions.

The plain path makes the logits (B, T, V) in float32 and keeps them for the backward pass: `response_logits`, then the
formulas. The chunked one gives the same numbers, but for rounding, of a few rows of the vocabulary's width at a time,
which the backward pass makes again: where a model's head is one linear layer, and scales or caps its logits at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from transformers import PreTrainedModel

from .functional import entropy, selected_logprobs
from .sampling import Samples, Vocabulary, positions_of, scaled, takes

__all__ = [
    "AfterHead",
    "Spoken",
    "after_head",
    "chunked_logprobs",
    "in_batches",
    "response_logits",
    "response_logprobs",
    "response_outputs",
    "response_states",
    "token_logprobs",
]

# Numbers in a chunk of logits: on a CPU what its caches hold, elsewhere what keeps the device busy.
CHUNK, CHUNK_ELSEWHERE = 2**22, 2**26


class AfterHead(NamedTuple):
    """What a model makes of the output z of its head: z·scale, or softcap·tanh(z·scale/softcap)."""

    scale: float = 1.0
    softcap: float | None = None


_NOTHING = AfterHead()


class Spoken(NamedTuple):
    """What a policy says of each response token: log π and the entropy, (B, T) in nats, 0 outside the mask.

    states (B, T, H): what its head reads there; logits (B, T, V): where they were asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    states: Tensor | None = None
    logits: Tensor | None = None


def in_batches(samples: Samples, rows: Tensor | None = None, *, size: int, tokens: int | None = None) -> list[Tensor]:
    """Splits `rows`, by default all, into batches of at most `size`, alike in length: less padding is computed.

    tokens: the most that a batch may have, its padding included; a row that has more is alone.
    """
    if rows is None:
        rows = torch.arange(len(samples), device=samples.mask.device)
    responses = samples.mask[rows].sum(1)
    if tokens is None:
        return list(rows[responses.argsort(stable=True)].split(size))
    prompts = samples.prompt_mask[rows].sum(1)
    order = (prompts + responses).argsort(stable=True).tolist()
    lengths = list(zip(prompts.tolist(), responses.tolist(), strict=True))
    batches: list[list[int]] = []
    wide = long = 0
    for row in order:
        wide, long = max(wide, lengths[row][0]), max(long, lengths[row][1])
        if not batches or len(batches[-1]) == size or (len(batches[-1]) + 1) * (wide + long) > tokens:
            batches.append([])
            wide, long = lengths[row]
        batches[-1].append(row)
    return [rows[batch] for batch in batches]


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


def response_logprobs(
    model: PreTrainedModel,
    samples: Samples,
    *,
    temperature: float = 1.0,
    states: bool = False,
    logits: bool = False,
    entropy_learns: bool = False,
) -> Spoken:
    """log π and entropy of the response tokens, and what else is asked for. entropy_learns: it has a gradient.

    Chunked where no logits are asked for and `after_head` knows the model.
    """
    after, mask = None if logits else after_head(model), samples.mask
    head: Any = model.get_output_embeddings() if states or after else None
    with _watched(head, skipped=after is not None) as seen:
        given = response_outputs(model, samples)
    length = mask.shape[1]
    read = seen[-1][:, -length - 1 : -1] if seen else None
    if after is None or read is None:
        made = scaled(given, temperature, samples.vocabulary)
        logprobs = selected_logprobs(made, samples.completion_ids)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_learns):
            entropies = entropy(made)
        # Padding has log-probabilities too, some of −∞ whose gradients are no numbers.
        logprobs, entropies = (x.masked_fill(~mask, 0) for x in (logprobs, entropies))
        return Spoken(logprobs, entropies, read, made if logits else None)
    found = chunked_logprobs(
        read[mask],
        head,
        samples.completion_ids[mask],
        after=after,
        temperature=temperature,
        vocabulary=samples.vocabulary,
    )
    padded = [torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, each) for each in found]
    return Spoken(padded[0], padded[1] if entropy_learns else padded[1].detach(), read)


def response_states(model: PreTrainedModel, samples: Samples) -> Tensor:
    """What the model's head reads at the position before each response token, (B, T, H)."""
    with _watched(model.get_output_embeddings(), skipped=after_head(model) is not None) as seen:
        response_outputs(model, samples)
    return seen[-1][:, -samples.mask.shape[1] - 1 : -1]


@torch.no_grad()
def token_logprobs(
    model: PreTrainedModel,
    samples: Samples,
    *,
    temperature: float = 1.0,
    batch_size: int = 64,
    tokens: int | None = None,
) -> Tensor:
    """log π of each response token under `model` at `temperature`. Returns (B, T) in nats, 0 outside the mask.

    batch_size, tokens: the most rows and tokens of a pass, as `in_batches` has them.
    """
    out = torch.zeros_like(samples.logprobs)
    for rows in in_batches(samples, size=batch_size, tokens=tokens):
        found = response_logprobs(model, samples.rows(rows), temperature=temperature).logprobs
        out[rows, : found.shape[1]] = found.to(out)
    return out


@contextmanager
def _watched(head: Any, *, skipped: bool) -> Iterator[list[Tensor]]:
    """While open, a list of what a head is given; skipped: the head hands a sliver of it on, and computes nothing."""
    seen: list[Tensor] = []
    if head is None:
        yield seen
        return
    hook = head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    if skipped:
        head.forward = lambda states: states[..., :1]
    try:
        yield seen
    finally:
        hook.remove()
        if skipped:
            del head.forward


_AFTER: WeakKeyDictionary[nn.Module, AfterHead | None] = WeakKeyDictionary()


def after_head(model: Any) -> AfterHead | None:
    """What a model makes of its head's output; None where only the model can say: it keeps its own forward pass.

    So do a head of another kind than nn.Linear (an adapter's, a quantized one), one with a hook, and one in shards.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear or "forward" in vars(head) or isinstance(model, FSDPModule):
        return None
    if head._forward_hooks or head.weight.shape != (head.out_features, head.in_features):
        return None
    if model not in _AFTER:
        _AFTER[model] = _asked(model, head)
    return _AFTER[model]


@torch.no_grad()
def _asked(model: Any, head: Any) -> AfterHead | None:
    """Asks the model itself: numbers stand in for its head's output, and what it makes of them is looked at."""
    device = head.weight.device
    places = torch.arange(head.out_features, device=device)
    numbers = torch.ldexp((1.0 - 2 * (places % 2)), places % 9 - 2)  # ±¼ to ±64, exact in any type
    head.forward = lambda states: numbers.expand(*states.shape[:-1], -1)
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    try:
        with torch.autocast(device.type, enabled=False):
            made = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return None  # a model that its head's output alone cannot be given to
    finally:
        del head.forward
    if made.shape[-1:] != numbers.shape:
        return None
    made = made.reshape(-1, len(numbers))[-1].float()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    for after in (AfterHead(float(made[0] / numbers[0])), AfterHead(1.0, softcap)):
        if torch.allclose(_capped(numbers.clone(), after, 1.0), made, rtol=1e-5, atol=1e-6):
            return after
    return None


def _capped(z: Tensor, after: AfterHead, temperature: float) -> Tensor:
    """A head's output (..., V) as logits at the temperature, in place."""
    if after.softcap is None:
        return z if after.scale == temperature else z.mul_(after.scale / temperature)
    return z.mul_(after.scale / after.softcap).tanh_().mul_(after.softcap / temperature)


def chunked_logprobs(
    states: Tensor,
    head: nn.Linear,
    tokens: Tensor,
    *,
    after: AfterHead = _NOTHING,
    temperature: float = 1.0,
    vocabulary: Vocabulary | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax at `tokens` and the entropy of what a head makes of N states, without their (N, V) logits at once.

    states: (N, H); tokens: (N,) int64. Returns (N,) twice in nats, float32, both with gradients.
    """
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
    holes = torch.tensor(vocabulary.holes, device=states.device) if vocabulary and vocabulary.holes else None
    size = head.out_features if vocabulary is None else vocabulary.size
    with torch.autocast(kind, enabled=False):  # what `dtype` says is enough: sums stay in float32
        found: Any = _Chunked.apply(states, head.weight, head.bias, tokens, (after, temperature, size, holes, dtype))
    return found


class _Chunked(torch.autograd.Function):
    """The gradients: ∂log p_a/∂z = 1[a] − p and ∂H/∂z = −p·(log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        how: tuple,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # of an entropy that is only logged
        ctx.how = how
        logprobs, entropies, total = (torch.empty(len(states), device=states.device) for _ in range(3))
        for here, _, z in _chunks(states, weight, bias, ctx.how):
            highest = z.amax(-1, keepdim=True)
            unscaled = (z - highest).exp_()
            mass = unscaled.sum(-1)
            total[here] = mass.log() + highest.squeeze(-1)
            logprobs[here] = z.gather(-1, tokens[here].unsqueeze(-1)).squeeze(-1) - total[here]
            entropies[here] = total[here] - torch.einsum("nv,nv->n", unscaled, z) / mass
        ctx.save_for_backward(states, weight, bias, tokens, total, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states, weight, bias, tokens, total, entropies = ctx.saved_tensors
        (scale, softcap), temperature, size, holes, dtype = ctx.how
        of_states, of_weight, of_bias = (
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) if needed else None
            for x, needed in zip((states, weight, bias), ctx.needs_input_grad, strict=False)
        )
        gain = torch.zeros_like(total) if by_logprob is None else by_logprob * (scale / temperature)
        for here, some, z in _chunks(states, weight, bias, ctx.how):
            slope = None if softcap is None else 1 - (z * (temperature / softcap)).square_()
            logp = z.sub_(total[here].unsqueeze(-1))
            chosen = gain[here].unsqueeze(-1)
            if by_entropy is None:
                grad = logp.exp_().mul_(-chosen)
            else:
                by_h = (by_entropy[here] * (scale / temperature)).unsqueeze(-1)
                p = logp.exp()
                grad = logp.mul_(p).mul_(-by_h).sub_(p.mul_(chosen + by_h * entropies[here].unsqueeze(-1)))
            grad.scatter_add_(-1, tokens[here].unsqueeze(-1), chosen)
            if slope is not None:
                grad.mul_(slope)
                if holes is not None:
                    grad.index_fill_(-1, holes, 0)  # 0·∞ there
            grad = grad.to(dtype)
            if of_states is not None:
                of_states[here] = (grad @ weight[:size].to(dtype)).float()
            if of_weight is not None and dtype == torch.float32:
                of_weight[:size].addmm_(grad.t(), some)
            elif of_weight is not None:
                of_weight[:size] += grad.t() @ some
            if of_bias is not None:
                of_bias[:size] += grad.sum(0, dtype=torch.float32)
        grads = zip((of_states, of_weight, of_bias), (states, weight, bias), strict=True)
        return *(None if grad is None else grad.to(x.dtype) for grad, x in grads), None, None


def _chunks(states: Tensor, weight: Tensor, bias: Tensor | None, how: tuple) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Places, states (n, H) and logits (n, V) float32 of a few tokens after the other."""
    after, temperature, size, holes, dtype = how
    weight = weight[:size].to(dtype)
    # Not −∞, as in `scaled`.
    bias = None if bias is None else bias[:size].to(dtype).clamp(min=-1e30)
    count = max(1, (CHUNK if states.device.type == "cpu" else CHUNK_ELSEWHERE) // size)
    for start in range(0, len(states), count):
        here = slice(start, start + count)
        some = states[here].to(dtype)
        z = _capped(functional.linear(some, weight, bias).float(), after, temperature)
        if holes is not None:
            z.index_fill_(-1, holes, torch.finfo(torch.float32).min / 2)
        yield here, some, z
