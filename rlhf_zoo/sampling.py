"""Sampling that returns the log-probability of each sampled token, from one random stream per row.

`model.generate` draws a whole batch from one global generator: another row order, batch split or number of processes
samples other tokens, and so does a resumed run. Here row i draws from a stream keyed by (seed, key of the row, token
position) and by nothing else. Rows that have ended leave the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .draws import draw, uniforms
from .errors import ZooError
from .kv_cache import can_join, cut, join, new_cache

__all__ = [
    "SAMPLER",
    "Samples",
    "Vocabulary",
    "base_of",
    "check_cached",
    "check_fits",
    "left_pad",
    "next_logits",
    "positions_of",
    "sample",
    "scaled",
    "takes",
]

# Grows when the same seed, keys and weights would sample other tokens, or log-probabilities of other last bits.
# 1: to 2026-11; 2: the cache grows in place, padding is cut, equal prompts are computed once, log π is log p.
SAMPLER = 2


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
    cut (B,) bool: which completions ended at a text, so without an end token; None: none did.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    mask: Tensor
    logprobs: Tensor
    ended: Tensor
    vocabulary: Vocabulary | None = None
    cut: Tensor | None = None

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
        for name in ("completion_ids", "mask", "logprobs"):
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
        """The rows of all parts, in their order, none of which is cut yet."""
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

    def token_lists(self) -> list[list[int]]:
        """Each completion's real tokens, the end-of-sequence token included."""
        return [ids[keep].tolist() for ids, keep in zip(self.completion_ids, self.mask, strict=True)]


def left_pad(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Token lists -> ids (B, P) int64 and mask (B, P) bool, padded on the left."""
    width = max(len(s) for s in sequences)
    ids = [[pad_id] * (width - len(s)) + list(s) for s in sequences]
    mask = [[False] * (width - len(s)) + [True] * len(s) for s in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def positions_of(mask: Tensor) -> Tensor:
    """Where each token stands in its row, of which padding is no part. mask: (B, L) bool. Returns (B, L) int64."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


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
) -> Samples:
    """Samples one completion a prompt; a row ends with the first token among `stop_ids` or after `max_new_tokens`.

    prompts: B non-empty token lists; keys: B tuples of non-negative ints, the identity of each row's random stream.
    vocabulary: the tokens that can be sampled, None for every row of the logits; the rest has the probability 0. The
    log-probabilities are of this distribution at `temperature`, also when `top_p` < 1 cuts its tail off. max_tokens:
    the most tokens, padding included, that the cache may come to hold; the other prompts wait and take the places of
    rows that have ended. None: all at once. Raises ZooError for a model without the cache that sampling needs, and for
    a prompt that max_tokens has no room for.
    """
    check_cached(model)
    device = next(model.parameters()).device
    prompt_ids, prompt_mask = left_pad(prompts, pad_id, device)
    size = len(prompts)
    random = uniforms(seed, keys, max_new_tokens).to(device)
    completion = torch.full((size, max_new_tokens), pad_id, device=device)
    logprobs = torch.zeros((size, max_new_tokens), device=device)
    ended = torch.zeros(size, dtype=torch.bool, device=device)
    drawn = torch.zeros(size, dtype=torch.long, device=device)
    stops = torch.tensor(list(stop_ids), device=device, dtype=torch.long)

    decoder = _Decoder(model)
    queue = _Queue([len(prompt) for prompt in prompts], max_new_tokens, max_tokens)
    running: _Running | None = None
    while queue or running is not None:
        entering = queue.next(running, drawn)
        if entering:
            logits, now = decoder.prefill([prompts[row] for row in entering], entering, pad_id)
        else:
            assert running is not None
            logits, now, running = decoder.step(running), running, None
        at = drawn[now.rows]
        tokens, logps = draw(scaled(logits, temperature, vocabulary), random[now.rows, at], top_p=top_p)
        completion[now.rows, at], logprobs[now.rows, at] = tokens, logps
        stopped = torch.isin(tokens, stops)
        ended[now.rows] = stopped
        drawn[now.rows] = at + 1
        now.tokens = tokens
        left = now.without(stopped | (at + 1 == max_new_tokens))
        running = left if running is None else running if left is None else running.joined(left)
    mask = torch.arange(int(drawn.max()), device=device) < drawn.unsqueeze(1)
    width = mask.shape[1]
    return Samples(prompt_ids, prompt_mask, completion[:, :width], mask, logprobs[:, :width], ended, vocabulary)


@dataclass
class _Running:
    """R rows under way: which of the call they are (R,), the columns that count (R, L), and each one's last token (R,).

    The last token is not in the cache yet, and its column not in `seen`.
    """

    rows: Tensor
    cache: Any
    seen: Tensor
    tokens: Tensor
    joins: bool

    def without(self, leaving: Tensor) -> _Running | None:
        """The rows that stay, without the columns that are padding in all of them; None for no row."""
        count = len(leaving) - int(leaving.sum())
        if count == len(leaving):
            return self
        if not count:
            return None
        # The last rows take the places of those that leave, so that the others need not move.
        order = torch.arange(count, device=leaving.device)
        order[leaving[:count]] = (~leaving[count:]).nonzero().squeeze(1) + count
        self.cache.reorder_cache(order)
        self.rows, self.seen, self.tokens = self.rows[order], self.seen[order], self.tokens[order]
        padding = self.seen.shape[1] - int(self.seen.sum(1).max())
        if padding and self.joins:
            cut(self.cache, padding)
            self.seen = self.seen[:, padding:]
        return self

    def joined(self, other: _Running) -> _Running:
        """The rows of both, the shorter ones padded on the left."""
        join(self.cache, other.cache)
        width = max(self.seen.shape[1], other.seen.shape[1])
        seen = torch.cat([pad(each.seen, (width - each.seen.shape[1], 0)) for each in (self, other)])
        rows, tokens = torch.cat([self.rows, other.rows]), torch.cat([self.tokens, other.tokens])
        return _Running(rows, self.cache, seen, tokens, self.joins)


class _Decoder:
    """Logits (R, V) of the next token of each row."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._last = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], pad_id: int) -> tuple[Tensor, _Running]:
        """Rows that begin. Equal prompts are computed once."""
        places: dict[tuple[int, ...], int] = {}
        place = [places.setdefault(tuple(prompt), len(places)) for prompt in prompts]
        ids, mask = left_pad(list(places), pad_id, next(self.model.parameters()).device)
        cache: Any = new_cache(self.model)
        logits = self._forward(ids, mask, positions_of(mask), cache)
        _check_filled(cache, self.model)
        if len(places) < len(prompts):
            again = torch.tensor(place, device=mask.device)
            cache.reorder_cache(again)
            logits, mask = logits[again], mask[again]
        where = torch.tensor(list(rows), device=mask.device)
        return logits, _Running(where, cache, mask, where, can_join(cache, self.model))

    def step(self, running: _Running) -> Tensor:
        """One token further."""
        running.seen = pad(running.seen, (0, 1), value=True)
        positions = running.seen.sum(1, keepdim=True) - 1
        return self._forward(running.tokens.unsqueeze(1), running.seen, positions, running.cache)

    def _forward(self, ids: Tensor, seen: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        out = self.model(
            input_ids=ids,
            attention_mask=seen.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **self._last,
        )
        return out.logits[:, -1]


def check_fits(lengths: Iterable[int], room: int, max_tokens: int | None) -> None:
    """Raises ZooError where a prompt with a completion of `room` tokens would not fit into the cache by itself."""
    if max_tokens is not None and (longest := max(lengths)) + room > max_tokens:
        raise ZooError(
            f"max_rollout_batch_tokens is {max_tokens}, and a prompt of {longest} tokens with a completion of up to "
            f"{room} takes {longest + room}: give at least that."
        )


class _Queue:
    """The rows that wait for a place in the cache, the shortest prompts first; without a bound, all begin at once."""

    def __init__(self, lengths: Sequence[int], room: int, max_tokens: int | None) -> None:
        self._lengths, self._room, self._most = lengths, room, max_tokens
        self._waiting = list(range(len(lengths)))
        if max_tokens is None:
            return
        self._waiting.sort(key=lengths.__getitem__)
        check_fits(lengths, room, max_tokens)

    def __len__(self) -> int:
        return len(self._waiting)

    def next(self, running: _Running | None, drawn: Tensor) -> list[int]:
        """The rows that begin now. A prefill is a pass of its own, so few rows wait for more places beside many."""
        count, rest = len(self._waiting), [] if running is None else [self._room] * len(running.rows)
        if self._most is not None and count:
            if running is not None and not running.joins:
                return []
            width = 0
            if running is not None:
                width = running.seen.shape[1]
                rest = (self._room - drawn[running.rows]).tolist()
            while count and self._at_most(count, width, rest) > self._most:
                count -= 1
            if count < min(len(self._waiting), len(rest) / 4):
                return []
        entering, self._waiting = self._waiting[:count], self._waiting[count:]
        return entering

    def _at_most(self, new: int, width: int, rest: Sequence[int]) -> int:
        """Tokens that the cache may come to hold: `new` rows, beside those of `width` that may draw `rest` more."""
        width = max(width, self._lengths[self._waiting[new - 1]])
        left = sorted([*rest, *[self._room] * new], reverse=True)
        return max(rows * (width + more) for rows, more in enumerate(left, start=1))


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


def base_of(model: Any) -> Any:
    """The model under an adapter; the model itself where there is none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def takes(model: Any, argument: str) -> bool:
    """Whether a model's forward has an argument of this name."""
    return argument in inspect.signature(base_of(model).forward).parameters


def check_cached(model: PreTrainedModel) -> None:
    """Raises ZooError for a model that takes no `past_key_values`, and would forget all tokens but the last."""
    if not takes(model, "past_key_values"):
        raise ZooError(
            f"A {type(base_of(model)).__name__} takes no past_key_values, the cache that completions are sampled with: "
            "give a causal language model that does, as those with state-space layers beside attention do."
        )


def _check_filled(cache: DynamicCache, model: Any) -> None:
    """Raises ZooError where a layer of linear attention left its place in the cache empty: its state is elsewhere."""
    for layer in cache.layers:
        states = [getattr(layer, f"is_{kind}_states_initialized", {}) for kind in ("conv", "recurrent")]
        if any(states) and not any(filled for each in states for filled in each.values()):
            raise ZooError(
                f"A {type(base_of(model)).__name__} keeps the state of its recurrent layers in its modules and not in "
                "past_key_values, so the rows of a batch would mix: give another architecture."
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
    out = model(
        input_ids=ids,
        attention_mask=ids.new_ones(size, length),
        position_ids=torch.arange(length - new, length, device=ids.device).expand(size, new),
        past_key_values=cache,
        use_cache=True,
        **({"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}),
    )
    return scaled(out.logits[:, -1], temperature, vocabulary)
