"""Computes the logits of the next token for rows in progress, over a cache of keys and values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PreTrainedModel

from ...errors import ZooError
from .kv_cache import can_join, cut, join, new_cache


class Next(NamedTuple):
    """What the next token of N rows is drawn from.

    Attributes:
        logits: (N, V).
        states: (N, H), the input of the model's head; None where it has none.
    """

    logits: Tensor
    states: Tensor | None

    def rows(self, index: Tensor | slice) -> Next:
        """Selects rows.

        Args:
            index: The rows.
        """
        return Next(self.logits[index], None if self.states is None else self.states[index])


class Decoder(Protocol):
    """Decodes rows in progress. Each pass is a prefill or a step, and a call of `keep` follows it.

    Attributes:
        rows: (R,) the numbers of the rows in progress.
    """

    @property
    def rows(self) -> Tensor: ...

    def room(self, lengths: Sequence[int], left: Tensor) -> int:
        """Returns how many prompts may begin, the first ones of `lengths`.

        Args:
            lengths: Tokens of the prompts that wait.
            left: (R,) tokens that the rows in progress may still draw.
        """

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], pad_id: int) -> tuple[Next, Tensor]:
        """Begins N rows.

        Args:
            prompts: N token lists.
            rows: Their numbers.
            pad_id: PAD.

        Returns:
            What their first tokens are drawn from, and their numbers, (N,).
        """

    def step(self) -> tuple[Next, Tensor]:
        """Computes what the next token of each row is drawn from, and returns it with the rows' numbers, (R,)."""

    def keep(self, tokens: Tensor, leaving: Tensor) -> None:
        """Takes the tokens that were drawn after the last pass.

        Args:
            tokens: (N,) token ids.
            leaving: (N,) bool, True for rows that are done.
        """


class GrowingDecoder:
    """A decoder whose cache grows and shrinks with the rows in progress.

    Args:
        model: The policy.
        length: The most tokens of a completion.
        max_tokens: The most tokens that the cache may hold, padding included; None for no bound.
    """

    def __init__(self, model: PreTrainedModel, *, length: int, max_tokens: int | None) -> None:
        self.model, self.length, self.max_tokens = model, length, max_tokens
        self._nothing = torch.zeros(0, dtype=torch.long, device=next(model.parameters()).device)
        self._running: _Running | None = None
        self._now: _Running | None = None

    @property
    def rows(self) -> Tensor:
        return self._nothing if self._running is None else self._running.rows

    def room(self, lengths: Sequence[int], left: Tensor) -> int:
        if self.max_tokens is None:
            return len(lengths)
        # Recurrent states and chunked attention cannot be padded in front, so new rows wait for the end of all others.
        if self._running is not None and not self._running.joins:
            return 0
        width = 0 if self._running is None else self._running.mask.shape[1]
        for count in range(len(lengths), 0, -1):
            # Rows in the order in which they end last: while the first n run, the cache has n rows.
            more = sorted([*left.tolist(), *[self.length] * count], reverse=True)
            columns = max(width, lengths[count - 1])
            if max(rows * (columns + new) for rows, new in enumerate(more, start=1)) <= self.max_tokens:
                return count
        return 0

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], pad_id: int) -> tuple[Next, Tensor]:
        following, mask, cache = prefilled(self.model, prompts, pad_id)
        where = torch.tensor(list(rows), device=mask.device)
        self._now = _Running(where, cache, mask, where, can_join(cache, self.model))
        return following, where

    def step(self) -> tuple[Next, Tensor]:
        now, self._running = self._running, None
        assert now is not None
        now.mask = pad(now.mask, (0, 1), value=True)
        # Padding does not count, so that a row's logits are the same in every batch.
        positions = now.mask.sum(1, keepdim=True) - 1
        self._now = now
        return forward(self.model, now.tokens.unsqueeze(1), now.mask, positions, now.cache), now.rows

    def keep(self, tokens: Tensor, leaving: Tensor) -> None:
        assert self._now is not None
        self._now.tokens = tokens
        remaining, self._now = self._now.without(leaving), None
        if self._running is None:
            self._running = remaining
        elif remaining is not None:
            self._running = self._running.joined(remaining)


class _Running:
    """R rows in progress: their numbers (R,), the real columns (R, L), and each row's last token (R,).

    The last token is not in the cache yet, and its column is not in `mask`.
    """

    def __init__(self, rows: Tensor, cache: Any, mask: Tensor, tokens: Tensor, joins: bool) -> None:
        self.rows, self.cache, self.mask, self.tokens, self.joins = rows, cache, mask, tokens, joins

    def without(self, leaving: Tensor) -> _Running | None:
        """The rows that stay, without columns that are padding in all of them; None where no row stays."""
        # Each ended row would otherwise be computed until the last row ends.
        order = staying(leaving)
        if len(order) == len(leaving):
            return self
        if not len(order):
            return None
        self.cache.reorder_cache(order)
        self.rows, self.mask, self.tokens = self.rows[order], self.mask[order], self.tokens[order]
        padding = self.mask.shape[1] - int(self.mask.sum(1).max())
        if padding and self.joins:
            cut(self.cache, padding)
            self.mask = self.mask[:, padding:]
        return self

    def joined(self, other: _Running) -> _Running:
        """The rows of both, with the shorter ones padded on the left."""
        join(self.cache, other.cache)
        # Padding goes in front, so that the last column stays the newest token of every row.
        width = max(self.mask.shape[1], other.mask.shape[1])
        real = torch.cat([pad(each.mask, (width - each.mask.shape[1], 0)) for each in (self, other)])
        rows, tokens = torch.cat([self.rows, other.rows]), torch.cat([self.tokens, other.tokens])
        return _Running(rows, self.cache, real, tokens, self.joins)


def staying(leaving: Tensor) -> Tensor:
    """Returns which rows stay. The last ones take the places of those that leave, so that the others need not move.

    Args:
        leaving: (R,) bool.
    """
    count = len(leaving) - int(leaving.sum())
    order = torch.arange(count, device=leaving.device)
    if count < len(leaving):
        order[leaving[:count]] = (~leaving[count:]).nonzero().squeeze(1) + count
    return order


def prefilled(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_id: int
) -> tuple[Next, Tensor, DynamicCache]:
    """Prefills a cache. Equal prompts are computed once.

    Args:
        model: The policy.
        prompts: B token lists.
        pad_id: PAD.

    Returns:
        What follows the prompts, their mask (B, P) and their cache.

    Raises:
        ZooError: The model keeps states outside of the cache.
    """
    places: dict[tuple[int, ...], int] = {}
    # With num_generations above 1 several rows have the same prompt.
    place = [places.setdefault(tuple(prompt), len(places)) for prompt in prompts]
    ids, mask = left_pad(list(places), pad_id, next(model.parameters()).device)
    cache = new_cache(model)
    following = forward(model, filled(ids, mask), mask, positions_of(mask), cache)
    _check_filled(cache, model)
    if len(places) < len(prompts):
        again: Any = torch.tensor(place, device=mask.device)
        cache.reorder_cache(again)
        following, mask = following.rows(again), mask[again]
    return following, mask, cache


def forward(model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Next:
    """Runs the model on tokens that the cache does not have yet.

    Args:
        model: The policy.
        ids: (B, I) token ids.
        mask: (B, L), nonzero for real columns, those of the cache included.
        positions: (B, I).
        cache: It gets the new tokens.

    Returns:
        What follows the last of `ids`.
    """
    with watched(model.get_output_embeddings()) as states:
        out = model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            # One token is drawn per row, and logits of a long prompt over the vocabulary would fill the memory.
            **({"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}),
        )
    return Next(out.logits[:, -1], states[-1][:, -1] if states else None)


@contextmanager
def watched(head: Any, *, skipped: bool = False) -> Iterator[list[Tensor]]:
    """Records the inputs of a head while this context is open.

    Args:
        head: A module, or None, which records nothing.
        skipped: Whether to skip the head's own computation: it returns a slice of its input.

    Yields:
        The list of its inputs.
    """
    inputs: list[Tensor] = []
    if head is None:
        yield inputs
        return
    # A hook works for every architecture, while hidden_states with or without the final norm differ between them.
    hook = head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    if skipped:
        # An attribute of the instance hides the method of its class until it is deleted below.
        head.forward = lambda states: states[..., :1]
    try:
        yield inputs
    finally:
        hook.remove()
        if skipped:
            del head.forward


def left_pad(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Pads token lists on the left.

    Args:
        sequences: B token lists.
        pad_id: PAD.
        device: Of the result.

    Returns:
        ids (B, P) int64 and mask (B, P) bool.
    """
    width = max(len(s) for s in sequences)
    ids = [[pad_id] * (width - len(s)) + list(s) for s in sequences]
    mask = [[False] * (width - len(s)) + [True] * len(s) for s in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def filled(ids: Tensor, mask: Tensor) -> Tensor:
    """Replaces padding by each row's first real token. No real token attends to padding.

    The embedding of PAD begins at zero, and training may move it slightly. From such numbers a model computes subnormal
    ones, which a CPU multiplies far more slowly. The results of real tokens stay the same, except in a mixture of
    experts, which computes padding together with them: there the last bits of gradients change.

    Args:
        ids: (B, L) token ids.
        mask: (B, L) bool.
    """
    return torch.where(mask, ids, ids.gather(1, mask.long().argmax(1, keepdim=True)))


def positions_of(mask: Tensor) -> Tensor:
    """Returns each token's position in its row, without counting padding, (B, L) int64.

    Args:
        mask: (B, L) bool.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def base_of(model: Any) -> Any:
    """Returns the model under an adapter; the model itself where there is none.

    Args:
        model: A model.
    """
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def takes(model: PreTrainedModel, argument: str) -> bool:
    """Whether a model's forward has an argument of this name.

    Args:
        model: A model, with or without an adapter.
        argument: The name.
    """
    kind: Any = type(base_of(model))
    return argument in _arguments(kind)


@functools.cache  # called in every step, and inspecting a signature takes as long as some layers
def _arguments(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def _check_filled(cache: Cache, model: PreTrainedModel) -> None:
    """Raises ZooError where a layer of linear attention left its place in the cache empty: its state is elsewhere."""
    for layer in cache.layers:
        states = [getattr(layer, f"is_{kind}_states_initialized", {}) for kind in ("conv", "recurrent")]
        if any(states) and not any(filled for each in states for filled in each.values()):
            raise ZooError(
                f"A {type(base_of(model)).__name__} keeps the state of its recurrent layers in its modules instead "
                "of past_key_values, so the rows of a batch would mix: choose another architecture."
            )
