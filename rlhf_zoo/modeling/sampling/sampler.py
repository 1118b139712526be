"""Sampling that returns the log-probability of each sampled token, from one random stream per row.

`model.generate` draws a whole batch from one global generator: another row order, batch split or number of processes
samples other tokens, and so does a resumed run. Here row i draws from a stream keyed by (seed, key of the row, token
position) and by nothing else. Rows that have ended leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ZooError
from .decoder import Decoder, GrowingDecoder, base_of, forward, left_pad, takes
from .random import draw, uniforms

# Grows when the same seed, keys and weights would sample other tokens, or log-probabilities of other last bits, of
# sampling or of the passes over what was sampled.
SAMPLER = 6


# Of what a head reads, (N, H): V of the state before N tokens, (N,).
Critic = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that can be sampled: ids below `size` but for `holes`. A model may have more rows than tokens."""

    size: int
    holes: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *models: PreTrainedModel) -> Self:
        """The ids that the tokenizer names and every model has an embedding of."""
        tables: list[Any] = [model.get_input_embeddings() for model in models]
        rows = min(table.weight.shape[0] for table in tables)
        named = {index for index in tokenizer.get_vocab().values() if index < rows}
        size = max(named) + 1
        return cls(size, tuple(index for index in range(size) if index not in named))

    def __contains__(self, index: int) -> bool:
        return 0 <= index < self.size and index not in self.holes


@dataclass(frozen=True)
class Samples:
    """Prompts and their sampled completions. B rows, P prompt positions (left-padded), T response positions.

    prompt_ids (B, P) int64 with prompt_mask (B, P) bool; completion_ids (B, T) int64, right-padded, with mask (B, T)
    bool, True up to and including the end-of-sequence token; logprobs (B, T) of the sampled token at the sampling
    temperature, in nats, 0 outside the mask; ended (B,) bool: whether the row stopped by itself. vocabulary: what could
    be sampled, so that log-probabilities of these samples are of that distribution in every model; None: all rows.
    cut (B,) bool: which completions ended at a text, so without an end token; None: none did. values (B, T): what a
    critic on the policy's trunk said before each token; None: none was asked.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    mask: Tensor
    logprobs: Tensor
    ended: Tensor
    vocabulary: Vocabulary | None = None
    cut: Tensor | None = None
    values: Tensor | None = None

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    def rows(self, index: Tensor | slice) -> Samples:
        """The chosen rows, without columns that are padding in all of them."""
        known = {name: value for name, value in vars(self).items() if name != "vocabulary" and value is not None}
        chosen = {name: value[index] for name, value in known.items()}
        prompt = int(chosen["prompt_mask"].sum(1).max())
        response = int(chosen["mask"].sum(1).max())
        for name in ("prompt_ids", "prompt_mask"):
            chosen[name] = chosen[name][:, -prompt:]
        for name in {"completion_ids", "mask", "logprobs", "values"} & set(chosen):
            chosen[name] = chosen[name][:, :response]
        return Samples(**chosen, vocabulary=self.vocabulary)

    def to(self, device: torch.device | str) -> Samples:
        """The same, there."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    @classmethod
    def joined(cls, parts: Sequence[Samples], pad_id: int) -> Samples:
        """The rows of all parts, in their order, none of which is cut yet or has values."""
        if len(parts) == 1:
            return parts[0]
        widths = {name: max(getattr(part, name).shape[1] for part in parts) for name in ("prompt_mask", "mask")}

        def beside(name: str, like: str, fill: float) -> Tensor:
            """Prompts end and completions begin where they meet."""
            rows = [getattr(part, name) for part in parts]
            room = [widths[like] - row.shape[1] for row in rows]
            sides = [(more, 0) if like == "prompt_mask" else (0, more) for more in room]
            return torch.cat([pad(row, side, value=fill) for row, side in zip(rows, sides, strict=True)])

        return cls(
            beside("prompt_ids", "prompt_mask", pad_id),
            beside("prompt_mask", "prompt_mask", False),
            beside("completion_ids", "mask", pad_id),
            beside("mask", "mask", False),
            beside("logprobs", "mask", 0.0),
            torch.cat([part.ended for part in parts]),
            parts[0].vocabulary,
        )

    def prompt_lists(self) -> list[list[int]]:
        """Each prompt's tokens."""
        return [ids[keep].tolist() for ids, keep in zip(self.prompt_ids, self.prompt_mask, strict=True)]

    def token_lists(self) -> list[list[int]]:
        """Each completion's real tokens, the end-of-sequence token included."""
        return [ids[keep].tolist() for ids, keep in zip(self.completion_ids, self.mask, strict=True)]


@dataclass(frozen=True)
class SamplingRequest:
    """What the trainer asks of an engine: the arguments of `sample`, whose docstring says what they are."""

    prompts: Sequence[Sequence[int]]
    keys: Sequence[tuple[int, ...]]
    seed: int
    max_new_tokens: int
    stop_ids: Sequence[int]
    pad_id: int
    temperature: float
    vocabulary: Vocabulary
    max_tokens: int | None = None
    critic: Critic | None = None


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    keys: Sequence[tuple[int, ...]],
    seed: int,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    vocabulary: Vocabulary | None = None,
    max_tokens: int | None = None,
    critic: Critic | None = None,
    decoder: Decoder | None = None,
) -> Samples:
    """Samples one completion a prompt; a row ends with the first token among `stop_ids` or after `max_new_tokens`.

    prompts: B non-empty token lists; keys: B tuples of non-negative ints, the identity of each row's random stream.
    vocabulary: the tokens that can be sampled, None for every row of the logits; the rest has the probability 0. The
    log-probabilities are of this distribution at `temperature`, also when `top_p` < 1 cuts its tail off. max_tokens:
    the most tokens, padding included, that the cache may come to hold; the other prompts wait and take the places of
    rows that have ended. None: all at once. critic: asked about what the model's head reads before each token. decoder:
    what computes logits, over a cache of fixed size; None: one that grows. Raises ZooError for a model without the
    cache that sampling needs, and for a prompt that max_tokens has no room for.
    """
    check_cached(model)
    device = next(model.parameters()).device
    prompt_ids, prompt_mask = left_pad(prompts, pad_id, device)
    size = len(prompts)
    random = uniforms(seed, keys, max_new_tokens).to(device)
    completion = torch.full((size, max_new_tokens), pad_id, device=device)
    logprobs = torch.zeros((size, max_new_tokens), device=device)
    values = None if critic is None else torch.zeros_like(logprobs)
    ended = torch.zeros(size, dtype=torch.bool, device=device)
    drawn = torch.zeros(size, dtype=torch.long, device=device)
    stops = torch.tensor(list(stop_ids), device=device, dtype=torch.long)

    lengths, waiting = [len(prompt) for prompt in prompts], list(range(size))
    if max_tokens is not None:
        check_fits(lengths, max_new_tokens, max_tokens)
        waiting.sort(key=lengths.__getitem__)
    if decoder is None:
        decoder = GrowingDecoder(model, length=max_new_tokens, max_tokens=max_tokens)
    while waiting or len(decoder.rows):
        count, running = 0, len(decoder.rows)
        if waiting:
            count = decoder.room([lengths[row] for row in waiting], max_new_tokens - drawn[decoder.rows])
        # A prefill is a pass of its own, so few rows wait for more places beside many.
        if count and count >= min(len(waiting), running / 4):
            entering, waiting = waiting[:count], waiting[count:]
            found, rows = decoder.prefill([prompts[row] for row in entering], entering, pad_id)
        else:
            found, rows = decoder.step()
        at = drawn[rows]
        tokens, logps = draw(scaled(found.logits, temperature, vocabulary), random[rows, at], top_p=top_p)
        completion[rows, at], logprobs[rows, at] = tokens, logps
        if critic is not None and values is not None:
            values[rows, at] = critic(found.states)
        stopped = torch.isin(tokens, stops)
        ended[rows] = stopped
        drawn[rows] = at + 1
        decoder.keep(tokens, stopped | (at + 1 == max_new_tokens))
    mask = torch.arange(int(drawn.max()), device=device) < drawn.unsqueeze(1)
    width = mask.shape[1]
    values = None if values is None else values[:, :width]
    return Samples(
        prompt_ids, prompt_mask, completion[:, :width], mask, logprobs[:, :width], ended, vocabulary, values=values
    )


def check_fits(lengths: Iterable[int], room: int, max_tokens: int | None) -> None:
    """Raises ZooError where a prompt with a completion of `room` tokens would not fit into the cache by itself."""
    if max_tokens is not None and (longest := max(lengths)) + room > max_tokens:
        raise ZooError(
            f"max_rollout_batch_tokens is {max_tokens}, and a prompt of {longest} tokens with a completion of up to "
            f"{room} takes {longest + room}: give at least that."
        )


def scaled(logits: Tensor, temperature: float, vocabulary: Vocabulary | None) -> Tensor:
    """Logits (..., V) at the temperature, float32, of what can be sampled; a hole's probability is 0."""
    if vocabulary is None:
        return logits.float() / temperature
    kept = logits[..., : vocabulary.size].float() / temperature
    if not vocabulary.holes:
        return kept
    # Not −∞: in a sum Σ p·log p it would make NaN of 0·∞.
    holes = torch.tensor(vocabulary.holes, device=kept.device)
    return kept.index_fill(-1, holes, torch.finfo(torch.float32).min / 2)


def check_cached(model: PreTrainedModel) -> None:
    """Raises ZooError for a model that takes no `past_key_values`, and would forget all tokens but the last."""
    if not takes(model, "past_key_values"):
        raise ZooError(
            f"A {type(base_of(model)).__name__} takes no past_key_values, the cache that completions are sampled with: "
            "give a causal language model that does, as those with state-space layers beside attention do."
        )


def next_logits(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    cache: DynamicCache,
    length: int,
    temperature: float = 1.0,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """Logits of the next token after rows that have no padding, as `sample` has them.

    ids (B, I) int64: what `cache`, which this adds to, has not seen yet of rows of `length` tokens. Returns (B, V)
    float32, divided by the temperature.
    """
    size, new = ids.shape
    positions = torch.arange(length - new, length, device=ids.device).expand(size, new)
    found = forward(model, ids, ids.new_ones(size, length), positions, cache)
    return scaled(found.logits, temperature, vocabulary)
