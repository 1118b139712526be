"""The floor: `python -m speed.floor POINT` in benchmarks/.

The passes that an update of this algorithm cannot do without, in plain torch, the fastest form of each that we know.
Rows lie end to end, without padding, about `MOST` tokens in a pass; finished rows leave the batch, which is sorted by
lengths known beforehand; the head sees response positions alone, and its log-probabilities have a backward pass of
their own; weights of a kind are one matrix; AdamW is fused. Nothing is checked, logged, saved or decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import side
from .points import EPOCHS, POINTS, RATE, TEMPERATURE, Point, build_models

Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
BASE = 10_000.0  # of rotary positions, as Llama's configuration has it
MOST = 2_048
CLIP, VALUE_CLIP, VALUE_WEIGHT, KL_WEIGHT, LAMBDA = 0.2, 0.2, 0.1, 0.05, 0.95


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype))


class Trunk(nn.Module):
    """A Llama without its head, over tokens that lie end to end."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        self.dtype = dtype
        own = lambda *parts: nn.Parameter(torch.cat([part.weight.detach() for part in parts]).clone())  # noqa: E731
        self.embedding, self.norm = own(model.embed_tokens), own(model.norm)
        self.layers = nn.ModuleList()
        for layer in model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            part = nn.Module()
            part.qkv = own(attention.q_proj, attention.k_proj, attention.v_proj)
            part.out, part.down = own(attention.o_proj), own(mlp.down_proj)
            part.up = own(mlp.gate_proj, mlp.up_proj)
            part.norms = nn.ParameterList([own(layer.input_layernorm), own(layer.post_attention_layernorm)])
            self.layers.append(part)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the hidden states (N, H), normed.

        Args:
            ids: (N,).
            positions: (N,).
            attend: Called with q (N, heads, D), k and v (N, kv_heads, D), and the number of the layer.
        """
        x = F.embedding(ids, self.embedding)
        size = x.shape[-1] // self.heads
        turns = positions.unsqueeze(-1) / BASE ** (torch.arange(0, size, 2) / size)
        turns = torch.cat([turns, turns], -1).unsqueeze(1)
        cos, sin = turns.cos().to(self.dtype), turns.sin().to(self.dtype)

        def turned(y: Tensor) -> Tensor:
            one, other = y.chunk(2, -1)
            return y * cos + torch.cat([-other, one], -1) * sin

        for number, layer in enumerate(self.layers):
            normed = F.rms_norm(x, x.shape[-1:], layer.norms[0], 1e-6)
            heads = [self.heads, self.kv_heads, self.kv_heads]
            q, k, v = linear(normed, layer.qkv, self.dtype).view(len(ids), -1, size).split(heads, 1)
            seen = attend(turned(q), turned(k), v, number)
            x = x + linear(seen.reshape(len(ids), -1), layer.out, self.dtype)
            gate, up = linear(F.rms_norm(x, x.shape[-1:], layer.norms[1], 1e-6), layer.up, self.dtype).chunk(2, -1)
            x = x + linear(F.silu(gate) * up, layer.down, self.dtype)
        return F.rms_norm(x, x.shape[-1:], self.norm, 1e-6)


class LogProbs(torch.autograd.Function):
    """log π of tokens from hidden states (N, H): the logits are kept once, and become their own gradient in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        hidden, weight = (hidden / TEMPERATURE).to(dtype), weight.to(dtype)
        logits = torch.addmm((bias / TEMPERATURE).to(dtype), hidden, weight.t()).float()
        total = logits.logsumexp(-1)
        ctx.kept = hidden, weight, tokens, logits, total
        return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, logits, total = ctx.kept
        grad = grads[0]
        rows = torch.arange(len(tokens))
        inner = logits.sub_(total.unsqueeze(-1)).exp_().mul_(-grad.unsqueeze(-1))
        inner[rows, tokens] += grad
        inner = inner.to(weight.dtype)
        return (inner @ weight).float() / TEMPERATURE, (inner.t() @ hidden).float(), None, None, None


@dataclass
class Packed:
    """Prompts and responses end to end; `before` are the places whose hidden states foretell response tokens."""

    ids: Tensor
    positions: Tensor
    sizes: list[int]
    before: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Packed:
        ids, positions, before, sizes = [], [], [], []
        for prompt, response in zip(prompts, responses, strict=True):
            first = len(ids) + len(prompt) - 1
            before += range(first, first + len(response))
            ids += [*prompt, *response]
            sizes.append(len(prompt) + len(response))
            positions += range(sizes[-1])
        tokens = [token for response in responses for token in response]
        return cls(torch.tensor(ids), torch.tensor(positions), sizes, torch.tensor(before), torch.tensor(tokens))

    @classmethod
    def parts(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[Packed]:
        """In order, in as few parts of about equally many tokens as `MOST` asks for."""
        sizes = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        count, each = -(-sum(sizes) // MOST), [0, *accumulate(sizes)]
        cuts = sorted({min(range(len(each)), key=lambda row: abs(each[row] - part * each[-1] / count))
                       for part in range(count + 1)})  # fmt: skip
        return [cls.of(prompts[low:high], responses[low:high]) for low, high in pairwise(cuts)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _: int = 0) -> Tensor:
        """Each row attends to itself. With a batch of one, as torch has no kernel of attention without a batch."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        rows = zip(*(x.transpose(0, 1).unsqueeze(0).split(self.sizes, 2) for x in (q, k, v)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*row, is_causal=True) for row in rows], 2)[0].transpose(0, 1)

    def seen_by(self, trunk: Trunk) -> Tensor:
        """The hidden states of all tokens."""
        return trunk(self.ids, self.positions, self.attend)


@torch.no_grad()
def sample(
    trunk: Trunk, bias: Tensor, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> tuple[list[list[int]], list[list[Tensor]], list[list[Tensor]]]:
    """Responses of the given lengths, falling; with log π of their tokens and the hidden states before them."""
    packed, widest = Packed.of(prompts, [[] for _ in prompts]), max(map(len, prompts))
    size = trunk.embedding.shape[1] // trunk.heads
    shape = (len(trunk.layers), len(prompts), trunk.kv_heads, widest + lengths[0], size)
    keys, values = (torch.zeros(shape, dtype=trunk.dtype) for _ in range(2))
    real = torch.ones(len(prompts), 1, 1, shape[3], dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        real[row, ..., : widest - len(prompt)] = False

    def fill(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        for cache, new in ((keys, k), (values, v)):
            for row, part in enumerate(new.transpose(0, 1).split(packed.sizes, 1)):
                cache[layer, row, :, widest - part.shape[1] : widest] = part
        return packed.attend(q, k, v)

    def step(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        alive, end = len(q), widest + t
        keys[layer, :alive, :, end - 1], values[layer, :alive, :, end - 1] = k, v
        past = keys[layer, :alive, :, :end], values[layer, :alive, :, :end]
        # Heads that share keys are the queries of one head: there is no causal mask, as each sees all of the past.
        grouped = q.view(alive, trunk.kv_heads, -1, size)
        return F.scaled_dot_product_attention(grouped, *past, attn_mask=real[:alive, ..., :end]).view_as(q)

    ends = torch.tensor(packed.sizes)
    hidden = trunk(packed.ids, packed.positions, fill)[ends.cumsum(0) - 1]
    responses, logprobs, states = ([[] for _ in prompts] for _ in range(3))
    head, offset = trunk.embedding.t().to(trunk.dtype), (bias / TEMPERATURE).to(trunk.dtype)
    for t in range(1, lengths[0] + 1):
        logits = torch.addmm(offset, (hidden / TEMPERATURE).to(trunk.dtype), head).float()
        chances = logits.softmax(-1)
        sums = chances.cumsum(-1)
        tokens = torch.searchsorted(sums, torch.rand(len(sums), 1) * sums[:, -1:]).clamp_(max=sums.shape[1] - 1)
        drawn = chances.gather(-1, tokens).log().squeeze(-1)
        for row, token in enumerate(tokens.squeeze(-1).tolist()):
            responses[row].append(token)
            logprobs[row].append(drawn[row])
            states[row].append(hidden[row])
        alive = sum(length > t for length in lengths)
        if not alive:
            break
        hidden = trunk(tokens[:alive, 0], ends[:alive] + t - 1, step)
    return responses, logprobs, states


def advantages(rewards: Tensor, values: Tensor, lengths: Sequence[int]) -> Tensor:
    """GAE of responses that lie end to end."""
    result, start = [0.0] * len(values), 0
    paid, foretold = rewards.tolist(), values.tolist()
    for length in lengths:
        later = after = 0.0
        for place in reversed(range(start, start + length)):
            later = paid[place] + after - foretold[place] + LAMBDA * later
            after, result[place] = foretold[place], later
        start += length
    return torch.tensor(result)


class Floor:
    """The models of an update and its steps."""

    def __init__(self, point: Point, *, shared: bool, dtype: torch.dtype) -> None:
        built = build_models(point)
        self.policy, self.shared = Trunk(built.policy.model, dtype), shared
        self.bias = built.policy.lm_head.bias.detach()
        self.reference, self.reward = (
            Trunk(model.model, dtype).requires_grad_(False) for model in (built.reference, built.reward)
        )
        self.score = built.reward.score.weight.detach()
        self.critic = self.policy if shared else Trunk(built.value.model, dtype)
        self.value = nn.Parameter(built.value.score.weight.detach().clone())
        self.parts = [[*self.policy.parameters()], [*(() if shared else self.critic.parameters()), self.value]]
        self.optimizer = torch.optim.AdamW([{"params": part} for part in self.parts], lr=RATE, fused=True)

    def update(self, clock: side.Clock, prompts: Sequence[list[int]], lengths: Sequence[int]) -> None:
        """One update, by phase."""
        order = sorted(range(len(prompts)), key=lambda row: -lengths[row])
        prompts, lengths = [prompts[row] for row in order], [lengths[row] for row in order]
        dtype = self.policy.dtype
        with torch.no_grad():
            with clock.phase("rollout"):
                responses, logprobs, sampled = sample(self.policy, self.bias, prompts, lengths)
                old = torch.stack([each for row in logprobs for each in row])
                parts = Packed.parts(prompts, responses)
            with clock.phase("reference"):
                results = []
                for packed in parts:
                    hidden = packed.seen_by(self.reference)[packed.before]
                    results.append(LogProbs.apply(hidden, self.reference.embedding, self.bias, packed.tokens, dtype))
                ref = torch.cat(results)
            with clock.phase("values"):
                if self.shared:  # sampling has seen them
                    hidden = torch.stack([each for row in sampled for each in row])
                else:
                    hidden = torch.cat([packed.seen_by(self.critic)[packed.before] for packed in parts])
                values = (hidden.float() @ self.value.t()).squeeze(-1)
            with clock.phase("reward"):
                last = [packed.seen_by(self.reward)[torch.tensor(packed.sizes).cumsum(0) - 1] for packed in parts]
                scores = (torch.cat(last).float() @ self.score.t()).squeeze(-1)
        with clock.phase("update"):
            rewards = -KL_WEIGHT * (old - ref)
            rewards[torch.tensor(lengths).cumsum(0) - 1] += scores
            gains = advantages(rewards, values, lengths)
            returns, gains = gains + values, (gains - gains.mean()) / gains.std()
            for _ in range(EPOCHS):
                self.learn(parts, old, values, gains, returns)
        clock.tokens = len(old)

    def learn(self, parts: Sequence[Packed], *of_tokens: Tensor) -> None:
        """One optimizer step. of_tokens: log π_old, values, advantages and returns of all of them."""
        self.optimizer.zero_grad()
        shares = zip(*(each.split([len(packed.tokens) for packed in parts]) for each in of_tokens), strict=True)
        for packed, (old, values, gains, returns) in zip(parts, shares, strict=True):
            hidden = packed.seen_by(self.policy)[packed.before]
            new = LogProbs.apply(hidden, self.policy.embedding, self.bias, packed.tokens, self.policy.dtype)
            if not self.shared:
                hidden = packed.seen_by(self.critic)[packed.before]
            foretold = (hidden.float() @ self.value.t()).squeeze(-1)
            ratio = (new - old).exp()
            policy = torch.max(-gains * ratio, -gains * ratio.clamp(1 - CLIP, 1 + CLIP))
            near = foretold.clamp(values - VALUE_CLIP, values + VALUE_CLIP)
            value = torch.max((foretold - returns).square(), (near - returns).square()) / 2
            ((policy + VALUE_WEIGHT * value).sum() / len(of_tokens[0])).backward()
        for part in self.parts:
            nn.utils.clip_grad_norm_(part, 1.0)
        self.optimizer.step()


def main(arguments: Sequence[str] | None = None) -> None:
    given = side.asked(arguments)
    point, clock = POINTS[given.point], side.Clock()
    count = point.batch * (given.updates + 1)
    prompts, lengths = point.prompts(count), [min(length, point.response) for length in point.lengths(count)]
    floor = Floor(point, shared=given.shared, dtype=torch.bfloat16 if given.bf16 else torch.float32)
    for start in range(0, count, point.batch):
        rows = slice(start, start + point.batch)
        clock.begin()
        floor.update(clock, prompts[rows], lengths[rows])
        clock.end(rest="update")
        if clock.tokens != sum(lengths[rows]) or not math.isfinite(float(floor.value.detach().sum())):
            raise SystemExit("The floor did other work than was asked.")
    clock.report()


if __name__ == "__main__":
    main()
