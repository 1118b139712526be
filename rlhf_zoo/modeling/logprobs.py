"""Log-probabilities of sampled tokens under a model, from a forward pass over prompts and completions.

The plain path makes the logits (B, T, V) in float32 and keeps them for the backward pass: `response_logits`, then the
formulas. The chunked one gives the same numbers, but for rounding, of a few rows of the vocabulary's width at a time,
where a model's head is one linear layer, and scales or caps its logits at most. The backward pass makes these again;
but where a loss is given, in which each token stands alone, what it needs of them is made in the forward pass.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from transformers import PreTrainedModel

from ..functional import entropy, selected_logprobs
from .packed_attention import lies_end_to_end, packed_inputs
from .sampling.decoder import filled, positions_of, watched
from .sampling.sampler import Samples, Vocabulary, scaled, takes

# Numbers in a chunk of logits: on a CPU what its caches hold, elsewhere what keeps the device busy.
CHUNK, CHUNK_ELSEWHERE = 2**22, 2**26


class AfterHead(NamedTuple):
    """What a model makes of the output z of its head: z·scale, or softcap·tanh(z·scale/softcap)."""

    scale: float = 1.0
    softcap: float | None = None


_NOTHING = AfterHead()
# From log π and entropy, of one shape: a scalar loss, and the terms to log, by name. No token's share of the loss may
# depend on other tokens.
TokenLoss = Callable[[Tensor, Tensor], tuple[Tensor, Mapping[str, Tensor]]]


class PolicyOutput(NamedTuple):
    """What a policy says of each response token: log π and the entropy, (B, T) in nats, 0 outside the mask.

    states (B, T, H): what its head reads there; logits (B, T, V), loss, loss_terms: where they were asked for. With a
    loss log π and entropy have no gradients: the loss has them.
    """

    logprobs: Tensor
    entropy: Tensor
    states: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None
    loss_terms: Mapping[str, Tensor] | None = None


def in_batches(
    samples: Samples,
    rows: Tensor | None = None,
    *,
    size: int,
    tokens: int | None = None,
    even: bool = False,
    end_to_end: bool = False,
) -> list[Tensor]:
    """Splits `rows`, by default all, into batches of at most `size`, alike in length: less padding is computed.

    tokens: the most that a batch may have, its padding included; a row that has more is alone. even: of the fewest
    batches those with the least padding, instead of batches each as full as can be from the shortest row on.
    end_to_end: rows lie end to end, and none is padded: the fewest batches, of about as many tokens.
    """
    if rows is None:
        rows = torch.arange(len(samples), device=samples.mask.device)
    lengths = (samples.prompt_mask[rows].sum(1) + samples.mask[rows].sum(1)).tolist()
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    if (even or end_to_end) and tokens is not None:
        bounds = (_level if end_to_end else _even)([lengths[row] for row in order], size=size, tokens=tokens)
        return [rows[order[begin:end]] for begin, end in pairwise(bounds)]
    batches: list[list[int]] = []
    for row in order:  # the longest so far
        full = not batches or len(batches[-1]) == size
        if full or (tokens is not None and (len(batches[-1]) + 1) * lengths[row] > tokens):
            batches.append([])
        batches[-1].append(row)
    return [rows[batch] for batch in batches]


def _even(lengths: Sequence[int], *, size: int, tokens: int) -> list[int]:
    """Where to cut rows of rising lengths, 0 and their number included, for the fewest batches and then padding."""
    best = [(0, 0, 0)]  # of the first rows: batches, tokens in them, and where the last batch begins
    for end, longest in enumerate(lengths, start=1):
        begins = range(max(end - min(size, max(tokens // longest, 1)), 0), end)
        best.append(min((best[begin][0] + 1, best[begin][1] + (end - begin) * longest, begin) for begin in begins))
    bounds = [len(lengths)]
    while bounds[-1]:
        bounds.append(best[bounds[-1]][2])
    return bounds[::-1]


def _level(lengths: Sequence[int], *, size: int, tokens: int) -> list[int]:
    """Where to cut rows, 0 and their number included, for the fewest batches, the largest as small as can be."""

    def bounds(most: int) -> list[int]:
        found, filled = [0], 0
        for row, length in enumerate(lengths):
            if row > found[-1] and (filled + length > most or row - found[-1] == size):
                found.append(row)
                filled = 0
            filled += length
        return [*found, len(lengths)]

    fewest = len(bounds(tokens))
    return bounds(bisect_left(range(tokens), True, key=lambda most: len(bounds(most)) == fewest))


def tokens_of(samples: Samples, rows: Tensor, *, end_to_end: bool = False) -> int:
    """Tokens of a pass over these rows, padding included; end to end they have none."""
    lengths = samples.prompt_mask[rows].sum(1) + samples.mask[rows].sum(1)
    return int(lengths.sum() if end_to_end else len(rows) * lengths.max())


def response_outputs(model: PreTrainedModel, samples: Samples) -> Tensor:
    """What the model's head gives at the position before each response token; it runs on these positions only.

    Returns (B, T, V) of a policy, (B, T, 1) of a critic, in the model's type; outside the mask it says nothing.
    """
    given, before_responses = _outputs(model, samples)
    return before_responses(given)


def _outputs(model: PreTrainedModel, samples: Samples) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What the model gives, and how to take what a pass has at its positions for (B, T, ·), before response tokens.

    Padding stands before a row alone, and as little as there can be; of rows end to end there is none.
    """
    ids = torch.cat([samples.prompt_ids, samples.completion_ids], dim=1)
    seen = torch.cat([samples.prompt_mask, samples.mask], dim=1)
    if lies_end_to_end(model):
        return _end_to_end(model, ids, seen, samples.mask)
    length, width = samples.mask.shape[1], int(seen.sum(1).max())
    places = torch.arange(-width, 0, device=ids.device) + (ids.shape[1] - _behind(samples))
    seen = seen.gather(1, places.clamp(min=0)) & (places >= 0)
    out = model(
        input_ids=filled(ids.gather(1, places.clamp(min=0)), seen),
        attention_mask=seen.long(),
        position_ids=positions_of(seen),
        use_cache=False,
        **({"logits_to_keep": length + 1} if takes(model, "logits_to_keep") else {}),
    )
    return out.logits, lambda x: _by_token(x[:, -length - 1 : -1], samples)


def _end_to_end(
    model: PreTrainedModel, ids: Tensor, seen: Tensor, mask: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    places = (seen.flatten().cumsum(0) - 1).view_as(seen)[:, -mask.shape[1] :][mask] - 1
    kept = takes(model, "logits_to_keep")
    given = packed_inputs(ids, seen, positions_of(seen)) | ({"logits_to_keep": places} if kept else {})

    def before_responses(x: Tensor) -> Tensor:
        found = x[0] if kept else x[0, places]
        return x.new_zeros(*mask.shape, x.shape[-1]).masked_scatter(mask.unsqueeze(-1), found)

    return model(**given, use_cache=False).logits, before_responses


def _behind(samples: Samples) -> Tensor:
    """Padding behind each response, (B, 1)."""
    return (~samples.mask).sum(1, keepdim=True)


def _by_token(outputs: Tensor, samples: Samples) -> Tensor:
    """(B, T, ·) of rows that end together -> of rows whose responses begin together."""
    length = samples.mask.shape[1]
    places = (torch.arange(length, device=outputs.device) + _behind(samples)).clamp(max=length - 1)
    return outputs.take_along_dim(places.unsqueeze(-1), dim=1)


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
    loss: TokenLoss | None = None,
) -> PolicyOutput:
    """log π and entropy of the response tokens, and what else is asked for. entropy_learns: it has a gradient.

    loss: what to take of both, (B, T), with its gradients. Chunked where no logits are asked for and `after_head` knows
    the model.
    """
    after, mask = None if logits else after_head(model), samples.mask
    head: Any = model.get_output_embeddings() if states or after else None
    with watched(head, skipped=after is not None) as seen:
        given, before_responses = _outputs(model, samples)
    read = before_responses(seen[-1]) if seen else None
    if after is None or read is None:
        made = scaled(before_responses(given), temperature, samples.vocabulary)
        logprobs = selected_logprobs(made, samples.completion_ids)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_learns):
            entropies = entropy(made)
        # Padding has log-probabilities too, some of −∞ whose gradients are no numbers.
        logprobs, entropies = (x.masked_fill(~mask, 0) for x in (logprobs, entropies))
        kept = made if logits else None
        if loss is None:
            return PolicyOutput(logprobs, entropies, read, kept)
        value, with_gradients = loss(logprobs, entropies)
        detached = {name: term.detach() for name, term in with_gradients.items()}
        return PolicyOutput(logprobs.detach(), entropies.detach(), read, kept, value, detached)

    places = mask.flatten().nonzero().squeeze(1)  # found once: on a GPU the CPU waits for it

    def padded(flat: Tensor) -> Tensor:
        return torch.zeros(mask.numel(), device=mask.device).index_copy(0, places, flat).view(mask.shape)

    logprobs, entropies, total, terms = chunked_logprobs(
        read.flatten(0, 1).index_select(0, places),
        head,
        samples.completion_ids.flatten()[places],
        after=after,
        temperature=temperature,
        vocabulary=samples.vocabulary,
        loss=None if loss is None else lambda *flat: loss(*map(padded, flat)),
    )
    entropies = padded(entropies)
    entropies = entropies if entropy_learns else entropies.detach()
    return PolicyOutput(padded(logprobs), entropies, read, loss=total, loss_terms=terms)


def response_states(model: PreTrainedModel, samples: Samples) -> Tensor:
    """What the model's head reads at the position before each response token, (B, T, H)."""
    with watched(model.get_output_embeddings(), skipped=after_head(model) is not None) as seen:
        _, before_responses = _outputs(model, samples)
    return before_responses(seen[-1])


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
    for rows in in_batches(samples, size=batch_size, tokens=tokens, end_to_end=lies_end_to_end(model)):
        found = response_logprobs(model, samples.rows(rows), temperature=temperature).logprobs
        out[rows, : found.shape[1]] = found.to(out)
    return out


def text_logprobs(model: PreTrainedModel, ids: Tensor, attention: Tensor) -> Tensor:
    """log π of each next token of whole texts, at temperature 1. Returns (B, L−1) in nats, 0 where attention is not.

    ids: (B, L) int64; attention: (B, L) bool. Chunked where `after_head` knows the model.
    """
    after, mask = after_head(model), attention[:, 1:]
    head: Any = model.get_output_embeddings() if after else None
    with watched(head, skipped=after is not None) as seen:
        logits = model(input_ids=filled(ids, attention), attention_mask=attention.long(), use_cache=False).logits
    if after is None:
        return selected_logprobs(logits[:, :-1].float(), ids[:, 1:]).masked_fill(~mask, 0)
    found = chunked_logprobs(seen[-1][:, :-1][mask], head, ids[:, 1:][mask], after=after)[0]
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, found)


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
    loss: TokenLoss | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Mapping[str, Tensor] | None]:
    """log softmax at `tokens` and the entropy of what a head makes of N states, without their (N, V) logits at once.

    states: (N, H); tokens: (N,) int64. Returns (N,) twice in nats, float32, both with gradients; with a loss these have
    none, and the loss of both is the third, whose gradients are made in this pass; its terms are the fourth.
    """
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
    holes = torch.tensor(vocabulary.holes, device=states.device) if vocabulary and vocabulary.holes else None
    size = head.out_features if vocabulary is None else vocabulary.size
    given = states, head.weight, head.bias, tokens, (after, temperature, size, holes, dtype)
    with torch.autocast(kind, enabled=False):  # what `dtype` says is enough: sums stay in float32
        found: Any = (_Chunked.apply(*given), None) if loss is None else _ChunkedLoss.apply(*given, loss)
    return (*found[0], None, None) if loss is None else found


class _Chunked(torch.autograd.Function):
    """log π and entropy; the backward pass makes the logits again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # of an entropy that is only logged
        *tensors, ctx.how = given
        ctx.save_for_backward(*tensors)
        return _pass_of(given)

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tokens = ctx.saved_tensors[3]
        by_logprob = torch.zeros(tokens.shape, device=tokens.device) if by_logprob is None else by_logprob
        sums = _Gradients(ctx.saved_tensors, ctx.needs_input_grad)
        _pass_of((*ctx.saved_tensors, ctx.how), sums, lambda *_: (by_logprob, by_entropy))
        return *sums.of_inputs(), None, None


class _ChunkedLoss(torch.autograd.Function):
    """A loss of log π and entropy. What a token's gradient is, its own two numbers say: so one pass makes both."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Tensor]]:
        *inputs, loss = given

        def slopes(*spoken: Tensor) -> tuple[Tensor, Tensor | None]:
            with torch.enable_grad():
                spoken = tuple(x.clone().requires_grad_() for x in spoken)
                by = torch.autograd.grad(loss(*spoken)[0], spoken, allow_unused=True)
            return (torch.zeros_like(spoken[0]) if by[0] is None else by[0]), by[1]

        sums = _Gradients(inputs, ctx.needs_input_grad)
        logprobs, entropies = _pass_of(inputs, sums, slopes)
        ctx.sums = sums
        ctx.mark_non_differentiable(logprobs, entropies)
        return logprobs, entropies, *loss(logprobs, entropies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None  # as large as the head: whoever takes them may write into them
        return *sums.of_inputs(grads[2]), None, None, None


class _Gradients:
    """Sums of the gradients of states, weight and bias, in float32: None for what needs none."""

    def __init__(self, given: Sequence[Any], needed: Sequence[bool]) -> None:
        self._types = [None if x is None else x.dtype for x in given[:3]]
        self.of_states, self.of_weight, self.of_bias = (
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) if need else None
            for x, need in zip(given[:3], needed, strict=False)
        )

    def add(self, here: slice, states: Tensor, weight: Tensor, grad: Tensor) -> None:
        """states (n, H), weight (V, H), grad (n, V): by the head's output, all in the type of its product."""
        size = len(weight)
        if self.of_states is not None:
            self.of_states[here] = (grad @ weight).float()
        if self.of_weight is not None and grad.dtype == torch.float32:
            self.of_weight[:size].addmm_(grad.t(), states)
        elif self.of_weight is not None:
            self.of_weight[:size] += grad.t() @ states
        if self.of_bias is not None:
            self.of_bias[:size] += grad.sum(0, dtype=torch.float32)

    def of_inputs(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """In the inputs' types. factor: a scalar that all are multiplied by, in place."""
        sums = [self.of_states, self.of_weight, self.of_bias]
        if factor is not None:
            sums = [None if x is None else x.mul_(factor) for x in sums]
        return [None if x is None else x.to(dtype) for x, dtype in zip(sums, self._types, strict=True)]


def rows_at_once(states: Tensor, size: int) -> int:
    """How many states' logits of a vocabulary of this size are held at once.

    As many as a state has numbers, or more: then they weigh as much as the gradient of the head's weight, all of which
    is added to for each of them.
    """
    return max(states.shape[1], (CHUNK if states.device.type == "cpu" else CHUNK_ELSEWHERE) // size)


def _pass_of(
    given: Sequence[Any],
    sums: _Gradients | None = None,
    slopes: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None,
) -> tuple[Tensor, Tensor]:
    """log π and entropy, a few tokens' logits (n, V) after the other; adds gradients to `sums`, if given.

    slopes: from log π and entropy as far as they are made, the loss's derivatives by both, (N,), or by log π alone. By
    the logits z: ∂log p_a/∂z = 1[a] − p and ∂H/∂z = −p·(log p + H).
    """
    states, weight, bias, tokens, (after, temperature, size, holes, dtype) = given
    weight = weight[:size].to(dtype)
    # Not −∞, as in `scaled`.
    bias = None if bias is None else bias[:size].to(dtype).clamp(min=-1e30)
    logprobs, entropies = (torch.zeros(len(states), device=states.device) for _ in range(2))
    count = rows_at_once(states, size)
    for start in range(0, len(states), count):
        here = slice(start, start + count)
        some, chosen = states[here].to(dtype), tokens[here].unsqueeze(-1)
        z = _capped(functional.linear(some, weight, bias).float(), after, temperature)
        if holes is not None:
            z.index_fill_(-1, holes, torch.finfo(torch.float32).min / 2)
        bends = None
        if sums is not None and after.softcap is not None:
            bends = 1 - (z * (temperature / after.softcap)).square_()
        # Σ exp(z − max z) by torch.sum, whose rounding does not grow with the vocabulary as softmax's own sum does.
        z.sub_(z.amax(-1, keepdim=True))
        logprobs[here] = z.gather(-1, chosen).squeeze(-1)
        p = z.exp()
        total = p.sum(-1)
        normalizer = total.log()
        logprobs[here] -= normalizer
        z.mul_(p)  # p·z from here on
        entropies[here] = normalizer - z.sum(-1) / total
        if sums is None or slopes is None:
            del z, p  # before the next chunk is made
            continue
        gain = after.scale / temperature
        by_logprob, by_entropy = slopes(logprobs, entropies)
        by_logprob = gain * by_logprob[here]
        by_p = -by_logprob
        if by_entropy is not None:
            by_entropy = gain * by_entropy[here]
            by_p = by_p - by_entropy * (entropies[here] - normalizer)
        grad = p.mul_((by_p / total).unsqueeze(-1))
        if by_entropy is not None:
            grad.addcmul_(z, (-by_entropy / total).unsqueeze(-1))
        grad.scatter_add_(-1, chosen, by_logprob.unsqueeze(-1))
        if bends is not None:
            grad.mul_(bends)
            if holes is not None:
                grad.index_fill_(-1, holes, 0)  # 0·∞ there
        sums.add(here, some, weight, grad.to(dtype))
        del z, p, grad, bends
    return logprobs, entropies
