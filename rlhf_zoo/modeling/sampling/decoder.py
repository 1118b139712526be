"""Logits of the next token of rows under way, over a cache of keys and values: what `sampling` draws tokens from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache

from ...errors import ZooError
from .kv_cache import can_join, cut, join, new_cache


class Next(NamedTuple):
    """Of the next token of N rows: logits (N, V), and what the model's head read, (N, H); None where it has none."""

    logits: Tensor
    states: Tensor | None

    def rows(self, index: Tensor | slice) -> Next:
        return Next(self.logits[index], None if self.states is None else self.states[index])


class Decoder(Protocol):
    """Rows under way. A pass is a prefill or a step, and `keep` follows it.

    rows: which of the call are under way, (R,).
    """

    @property
    def rows(self) -> Tensor: ...

    def room(self, lengths: Sequence[int], rest: Tensor) -> int:
        """How many prompts may begin, the first of `lengths`; rest (R,): tokens that rows may still draw."""

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], pad_id: int) -> tuple[Next, Tensor]:
        """Rows that begin: what their first tokens are drawn from, and which of the call they are, (N,)."""

    def step(self) -> tuple[Next, Tensor]:
        """One token further, and which rows of the call it is of, (R,)."""

    def keep(self, tokens: Tensor, leaving: Tensor) -> None:
        """tokens drawn from the logits of the last pass, (N,); rows whose `leaving` is True are done."""


class GrowingDecoder:
    """A cache of as many rows and columns as are under way. max_tokens: the most it may come to hold."""

    def __init__(self, model: Any, *, length: int, max_tokens: int | None) -> None:
        self.model, self.length, self.max_tokens = model, length, max_tokens
        self._nothing = torch.zeros(0, dtype=torch.long, device=next(model.parameters()).device)
        self._running: _Running | None = None
        self._now: _Running | None = None

    @property
    def rows(self) -> Tensor:
        return self._nothing if self._running is None else self._running.rows

    def room(self, lengths: Sequence[int], rest: Tensor) -> int:
        if self.max_tokens is None:
            return len(lengths)
        if self._running is not None and not self._running.joins:
            return 0
        width, left = 0 if self._running is None else self._running.seen.shape[1], rest.tolist()
        for count in range(len(lengths), 0, -1):
            more = sorted([*left, *[self.length] * count], reverse=True)
            columns = max(width, lengths[count - 1])
            if max(rows * (columns + new) for rows, new in enumerate(more, start=1)) <= self.max_tokens:
                return count
        return 0

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], pad_id: int) -> tuple[Next, Tensor]:
        found, mask, cache = prefilled(self.model, prompts, pad_id)
        where = torch.tensor(list(rows), device=mask.device)
        self._now = _Running(where, cache, mask, where, can_join(cache, self.model))
        return found, where

    def step(self) -> tuple[Next, Tensor]:
        now, self._running = self._running, None
        assert now is not None
        now.seen = pad(now.seen, (0, 1), value=True)
        positions = now.seen.sum(1, keepdim=True) - 1
        self._now = now
        return forward(self.model, now.tokens.unsqueeze(1), now.seen, positions, now.cache), now.rows

    def keep(self, tokens: Tensor, leaving: Tensor) -> None:
        assert self._now is not None
        self._now.tokens = tokens
        left, self._now = self._now.without(leaving), None
        if self._running is None:
            self._running = left
        elif left is not None:
            self._running = self._running.joined(left)


class _Running:
    """R rows under way: which of the call they are (R,), the columns that count (R, L), and each one's last token (R,).

    The last token is not in the cache yet, and its column not in `seen`.
    """

    def __init__(self, rows: Tensor, cache: Any, seen: Tensor, tokens: Tensor, joins: bool) -> None:
        self.rows, self.cache, self.seen, self.tokens, self.joins = rows, cache, seen, tokens, joins

    def without(self, leaving: Tensor) -> _Running | None:
        """The rows that stay, without the columns that are padding in all of them; None for no row."""
        order = staying(leaving)
        if len(order) == len(leaving):
            return self
        if not len(order):
            return None
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


def staying(leaving: Tensor) -> Tensor:
    """Which rows stay, in an order where the last ones take the places of those that leave: others need not move."""
    count = len(leaving) - int(leaving.sum())
    order = torch.arange(count, device=leaving.device)
    if count < len(leaving):
        order[leaving[:count]] = (~leaving[count:]).nonzero().squeeze(1) + count
    return order


def prefilled(model: Any, prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Next, Tensor, DynamicCache]:
    """What follows B prompts, their mask (B, P) and their cache. Equal prompts are computed once."""
    places: dict[tuple[int, ...], int] = {}
    place = [places.setdefault(tuple(prompt), len(places)) for prompt in prompts]
    ids, mask = left_pad(list(places), pad_id, next(model.parameters()).device)
    cache = new_cache(model)
    found = forward(model, filled(ids, mask), mask, positions_of(mask), cache)
    _check_filled(cache, model)
    if len(places) < len(prompts):
        again: Any = torch.tensor(place, device=mask.device)
        cache.reorder_cache(again)
        found, mask = found.rows(again), mask[again]
    return found, mask, cache


def forward(model: Any, ids: Tensor, seen: Tensor, positions: Tensor, cache: Cache) -> Next:
    """What follows the last of ids (B, I), which `cache` has not seen yet; seen (B, L): columns that count."""
    with watched(model.get_output_embeddings()) as states:
        out = model(
            input_ids=ids,
            attention_mask=seen.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **({"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}),
        )
    return Next(out.logits[:, -1], states[-1][:, -1] if states else None)


@contextmanager
def watched(head: Any, *, skipped: bool = False) -> Iterator[list[Tensor]]:
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


def left_pad(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Token lists -> ids (B, P) int64 and mask (B, P) bool, padded on the left."""
    width = max(len(s) for s in sequences)
    ids = [[pad_id] * (width - len(s)) + list(s) for s in sequences]
    mask = [[False] * (width - len(s)) + [True] * len(s) for s in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def filled(ids: Tensor, mask: Tensor) -> Tensor:
    """Token ids (B, L) with each row's first real token in place of its padding, which no real token looks at.

    The pad token's own embedding begins at zero, and training may move it just beside: of such numbers a model makes
    subnormal ones, and a CPU takes far longer to multiply these. No bit of real tokens changes, but in a mixture
    of experts, which computes padding among them: last bits of its gradients.
    """
    return torch.where(mask, ids, ids.gather(1, mask.long().argmax(1, keepdim=True)))


def positions_of(mask: Tensor) -> Tensor:
    """Where each token stands in its row, of which padding is no part. mask: (B, L) bool. Returns (B, L) int64."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def base_of(model: Any) -> Any:
    """The model under an adapter; the model itself where there is none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def takes(model: Any, argument: str) -> bool:
    """Whether a model's forward has an argument of this name."""
    kind: Any = type(base_of(model))
    return argument in _arguments(kind)


@functools.cache  # a step asks, and reading a signature takes as long as some layers
def _arguments(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def _check_filled(cache: Cache, model: Any) -> None:
    """Raises ZooError where a layer of linear attention left its place in the cache empty: its state is elsewhere."""
    for layer in cache.layers:
        states = [getattr(layer, f"is_{kind}_states_initialized", {}) for kind in ("conv", "recurrent")]
        if any(states) and not any(filled for each in states for filled in each.values()):
            raise ZooError(
                f"A {type(base_of(model)).__name__} keeps the state of its recurrent layers in its modules and not in "
                "past_key_values, so the rows of a batch would mix: give another architecture."
            )
