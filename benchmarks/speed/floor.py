"""The floor: `python -m speed.floor POINT` in benchmarks/.

It does only the passes that an update of this algorithm needs, in plain torch, each in the fastest form that we know.
Rows are concatenated without padding, with about `PASS_TOKENS` tokens in a pass. Finished rows leave the batch, which
is sorted by response lengths, known in advance. The head only sees response positions, and its log-probabilities have
a custom backward pass. The Q, K and V weights are one matrix, and so are the MLP's gate and up weights. AdamW is fused.
Nothing is checked, logged, saved or decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import side
from .points import EPOCHS, LEARNING_RATE, POINTS, TEMPERATURE, Point, build_models

Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
ROTARY_BASE = 10_000.0  # Llama's default
PASS_TOKENS = 2_048
CLIP, VALUE_CLIP, VALUE_WEIGHT, KL_WEIGHT, LAMBDA = 0.2, 0.2, 0.1, 0.05, 0.95


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype))


class Trunk(nn.Module):
    """A Llama without its head, over concatenated rows."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        self.dtype = dtype
        join = lambda *parts: nn.Parameter(torch.cat([part.weight.detach() for part in parts]).clone())  # noqa: E731
        self.embedding, self.norm = join(model.embed_tokens), join(model.norm)
        self.layers = nn.ModuleList()
        for layer in model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            part = nn.Module()
            part.qkv = join(attention.q_proj, attention.k_proj, attention.v_proj)
            part.out, part.down = join(attention.o_proj), join(mlp.down_proj)
            part.up = join(mlp.gate_proj, mlp.up_proj)
            part.norms = nn.ParameterList([join(layer.input_layernorm), join(layer.post_attention_layernorm)])
            self.layers.append(part)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the hidden states (N, H) after the last norm.

        Args:
            ids: Token ids (N,).
            positions: Position of each token in its row (N,).
            attend: Called with q (N, heads, D), k and v (N, kv_heads, D), and the index of the layer.
        """
        x = F.embedding(ids, self.embedding)
        size = x.shape[-1] // self.heads
        angles = positions.unsqueeze(-1) / ROTARY_BASE ** (torch.arange(0, size, 2) / size)
        angles = torch.cat([angles, angles], -1).unsqueeze(1)
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

        def rotate(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat([-second, first], -1) * sin

        for layer_index, layer in enumerate(self.layers):
            normed = F.rms_norm(x, x.shape[-1:], layer.norms[0], 1e-6)
            heads = [self.heads, self.kv_heads, self.kv_heads]
            q, k, v = linear(normed, layer.qkv, self.dtype).view(len(ids), -1, size).split(heads, 1)
            attended = attend(rotate(q), rotate(k), v, layer_index)
            x = x + linear(attended.reshape(len(ids), -1), layer.out, self.dtype)
            gate, up = linear(F.rms_norm(x, x.shape[-1:], layer.norms[1], 1e-6), layer.up, self.dtype).chunk(2, -1)
            x = x + linear(F.silu(gate) * up, layer.down, self.dtype)
        return F.rms_norm(x, x.shape[-1:], self.norm, 1e-6)


class LogProbs(torch.autograd.Function):
    """Computes log π of tokens from hidden states (N, H). Saves the logits once; their gradient overwrites them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        hidden, weight = (hidden / TEMPERATURE).to(dtype), weight.to(dtype)
        logits = torch.addmm((bias / TEMPERATURE).to(dtype), hidden, weight.t()).float()
        total = logits.logsumexp(-1)
        ctx.saved = hidden, weight, tokens, logits, total
        return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, logits, total = ctx.saved
        grad = grads[0]
        rows = torch.arange(len(tokens))
        logit_grad = logits.sub_(total.unsqueeze(-1)).exp_().mul_(-grad.unsqueeze(-1))
        logit_grad[rows, tokens] += grad
        logit_grad = logit_grad.to(weight.dtype)
        return (logit_grad @ weight).float() / TEMPERATURE, (logit_grad.t() @ hidden).float(), None, None, None


@dataclass
class Packed:
    """Concatenated prompts and responses.

    Attributes:
        ids: All tokens.
        positions: The position of each token in its row.
        sizes: The length of each row.
        predictors: The indices of the tokens whose hidden states predict response tokens.
        tokens: The response tokens.
    """

    ids: Tensor
    positions: Tensor
    sizes: list[int]
    predictors: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Packed:
        ids, positions, predictors, sizes = [], [], [], []
        for prompt, response in zip(prompts, responses, strict=True):
            first = len(ids) + len(prompt) - 1
            predictors += range(first, first + len(response))
            ids += [*prompt, *response]
            sizes.append(len(prompt) + len(response))
            positions += range(sizes[-1])
        tokens = [token for response in responses for token in response]
        return cls(torch.tensor(ids), torch.tensor(positions), sizes, torch.tensor(predictors), torch.tensor(tokens))

    @classmethod
    def split(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[Packed]:
        """Splits rows, in order, into the fewest parts of about `PASS_TOKENS` tokens or fewer, about equally large."""
        sizes = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        count, starts = -(-sum(sizes) // PASS_TOKENS), [0, *accumulate(sizes)]
        cuts = sorted({min(range(len(starts)), key=lambda row: abs(starts[row] - part * starts[-1] / count))
                       for part in range(count + 1)})  # fmt: skip
        return [cls.of(prompts[low:high], responses[low:high]) for low, high in pairwise(cuts)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _: int = 0) -> Tensor:
        """Lets each row attend to itself, as a batch of one: torch has no attention kernel without a batch."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        rows = zip(*(x.transpose(0, 1).unsqueeze(0).split(self.sizes, 2) for x in (q, k, v)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*row, is_causal=True) for row in rows], 2)[0].transpose(0, 1)

    def hidden_states(self, trunk: Trunk) -> Tensor:
        """Returns a trunk's hidden states of all tokens."""
        return trunk(self.ids, self.positions, self.attend)


@torch.no_grad()
def sample(
    trunk: Trunk, bias: Tensor, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> tuple[list[list[int]], list[list[Tensor]], list[list[Tensor]]]:
    """Samples responses of descending lengths; returns also log π and the hidden state that predicts each token."""
    packed, longest = Packed.of(prompts, [[] for _ in prompts]), max(map(len, prompts))
    size = trunk.embedding.shape[1] // trunk.heads
    shape = (len(trunk.layers), len(prompts), trunk.kv_heads, longest + lengths[0], size)
    keys, values = (torch.zeros(shape, dtype=trunk.dtype) for _ in range(2))
    is_real = torch.ones(len(prompts), 1, 1, shape[3], dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        is_real[row, ..., : longest - len(prompt)] = False

    def fill(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        for cache, new in ((keys, k), (values, v)):
            for row, part in enumerate(new.transpose(0, 1).split(packed.sizes, 1)):
                cache[layer, row, :, longest - part.shape[1] : longest] = part
        return packed.attend(q, k, v)

    def step(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        alive, end = len(q), longest + t
        keys[layer, :alive, :, end - 1], values[layer, :alive, :, end - 1] = k, v
        past = keys[layer, :alive, :, :end], values[layer, :alive, :, :end]
        # Query heads that share keys form the queries of one head. Each attends to all past tokens, so no causal mask.
        grouped = q.view(alive, trunk.kv_heads, -1, size)
        return F.scaled_dot_product_attention(grouped, *past, attn_mask=is_real[:alive, ..., :end]).view_as(q)

    ends = torch.tensor(packed.sizes)
    hidden = trunk(packed.ids, packed.positions, fill)[ends.cumsum(0) - 1]
    responses, logprobs, states = ([[] for _ in prompts] for _ in range(3))
    head, offset = trunk.embedding.t().to(trunk.dtype), (bias / TEMPERATURE).to(trunk.dtype)
    for t in range(1, lengths[0] + 1):
        logits = torch.addmm(offset, (hidden / TEMPERATURE).to(trunk.dtype), head).float()
        probabilities = logits.softmax(-1)
        sums = probabilities.cumsum(-1)
        tokens = torch.searchsorted(sums, torch.rand(len(sums), 1) * sums[:, -1:]).clamp_(max=sums.shape[1] - 1)
        token_logprobs = probabilities.gather(-1, tokens).log().squeeze(-1)
        for row, token in enumerate(tokens.squeeze(-1).tolist()):
            responses[row].append(token)
            logprobs[row].append(token_logprobs[row])
            states[row].append(hidden[row])
        alive = sum(length > t for length in lengths)
        if not alive:
            break
        hidden = trunk(tokens[:alive, 0], ends[:alive] + t - 1, step)
    return responses, logprobs, states


def advantages(rewards: Tensor, values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Computes GAE of concatenated responses, with γ = 1."""
    result, start = [0.0] * len(values), 0
    reward_list, value_list = rewards.tolist(), values.tolist()
    for length in lengths:
        advantage = next_value = 0.0
        for index in reversed(range(start, start + length)):
            advantage = reward_list[index] + next_value - value_list[index] + LAMBDA * advantage
            next_value, result[index] = value_list[index], advantage
        start += length
    return torch.tensor(result)


class Floor:
    """The four models, the optimizer, and the steps of an update."""

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
        self.groups = [[*self.policy.parameters()], [*(() if shared else self.critic.parameters()), self.value]]
        groups = [{"params": group} for group in self.groups]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)

    def update(self, clock: side.Clock, prompts: Sequence[list[int]], lengths: Sequence[int]) -> None:
        """Makes one update, and times its phases."""
        order = sorted(range(len(prompts)), key=lambda row: -lengths[row])
        prompts, lengths = [prompts[row] for row in order], [lengths[row] for row in order]
        dtype = self.policy.dtype
        with torch.no_grad():
            with clock.phase("rollout"):
                responses, logprobs, sampled = sample(self.policy, self.bias, prompts, lengths)
                old = torch.stack(list(chain(*logprobs)))
                parts = Packed.split(prompts, responses)
            with clock.phase("reference"):
                ref_parts = []
                for packed in parts:
                    hidden = packed.hidden_states(self.reference)[packed.predictors]
                    ref_parts.append(LogProbs.apply(hidden, self.reference.embedding, self.bias, packed.tokens, dtype))
                ref = torch.cat(ref_parts)
            with clock.phase("values"):
                if self.shared:  # sampling has computed them
                    hidden = torch.stack(list(chain(*sampled)))
                else:
                    hidden = torch.cat([packed.hidden_states(self.critic)[packed.predictors] for packed in parts])
                values = (hidden.float() @ self.value.t()).squeeze(-1)
            with clock.phase("reward"):
                last = [packed.hidden_states(self.reward)[torch.tensor(packed.sizes).cumsum(0) - 1] for packed in parts]
                scores = (torch.cat(last).float() @ self.score.t()).squeeze(-1)
        with clock.phase("update"):
            rewards = -KL_WEIGHT * (old - ref)
            rewards[torch.tensor(lengths).cumsum(0) - 1] += scores
            gains = advantages(rewards, values, lengths)
            returns, gains = gains + values, (gains - gains.mean()) / gains.std()
            for _ in range(EPOCHS):
                self.learn(parts, old, values, gains, returns)
        clock.tokens = len(old)

    def learn(self, parts: Sequence[Packed], *token_figures: Tensor) -> None:
        """Makes one optimizer step.

        Args:
            parts: The rows.
            token_figures: log π_old, values, advantages and returns of all response tokens.
        """
        self.optimizer.zero_grad()
        sizes = [len(packed.tokens) for packed in parts]
        by_part = zip(*(figures.split(sizes) for figures in token_figures), strict=True)
        for packed, (old, values, gains, returns) in zip(parts, by_part, strict=True):
            hidden = packed.hidden_states(self.policy)[packed.predictors]
            new = LogProbs.apply(hidden, self.policy.embedding, self.bias, packed.tokens, self.policy.dtype)
            if not self.shared:
                hidden = packed.hidden_states(self.critic)[packed.predictors]
            new_values = (hidden.float() @ self.value.t()).squeeze(-1)
            ratio = (new - old).exp()
            policy = torch.max(-gains * ratio, -gains * ratio.clamp(1 - CLIP, 1 + CLIP))
            clipped = new_values.clamp(values - VALUE_CLIP, values + VALUE_CLIP)
            value = torch.max((new_values - returns).square(), (clipped - returns).square()) / 2
            ((policy + VALUE_WEIGHT * value).sum() / len(token_figures[0])).backward()
        for group in self.groups:
            nn.utils.clip_grad_norm_(group, 1.0)
        self.optimizer.step()


def main(arguments: Sequence[str] | None = None) -> None:
    options = side.parse_options(arguments)
    point, clock = POINTS[options.point], side.Clock()
    count = point.batch * (options.updates + 1)
    prompts, lengths = point.prompts(count), [min(length, point.response) for length in point.lengths(count)]
    floor = Floor(point, shared=options.shared, dtype=torch.bfloat16 if options.bf16 else torch.float32)
    for start in range(0, count, point.batch):
        rows = slice(start, start + point.batch)
        clock.begin()
        floor.update(clock, prompts[rows], lengths[rows])
        clock.end(other_phase="update")
        if clock.tokens != sum(lengths[rows]) or not math.isfinite(float(floor.value.detach().sum())):
            raise SystemExit("The floor sampled another number of tokens, or its weights are not finite.")
    clock.print_report()


if __name__ == "__main__":
    main()
