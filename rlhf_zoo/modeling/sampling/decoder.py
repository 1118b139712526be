"""Decoders: they hold the key-value cache of the rows in progress and compute the rows' next-token logits."""

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
from .kv_cache import can_join, drop_columns, join, new_cache


class NextLogits(NamedTuple):
    """Next-token logits of N rows.

    Attributes:
        logits: (N, V).
        states: (N, H), the input of the model's head; None if the model has no head.
    """

    logits: Tensor
    states: Tensor | None

    def select(self, indices: Tensor | slice) -> NextLogits:
        """Selects rows."""
        return NextLogits(self.logits[indices], None if self.states is None else self.states[indices])


class Decoder(Protocol):
    """Decodes rows in progress. After each pass (a prefill or a step), the caller draws tokens and calls `advance`.

    Attributes:
        row_ids: (R,) the ids of the rows in progress.
    """

    @property
    def row_ids(self) -> Tensor: ...

    def count_startable(self, lengths: Sequence[int], remaining: Tensor) -> int:
        """Counts how many of the first waiting prompts may start now.

        Args:
            lengths: The lengths of the waiting prompts in tokens, in the order in which the prompts start.
            remaining: (R,) the number of tokens that each row in progress may still draw.
        """

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], pad_id: int) -> tuple[NextLogits, Tensor]:
        """Starts N rows: runs the model on their prompts.

        Args:
            prompts: N token lists.
            rows: The ids of the rows.
            pad_id: The id of PAD.

        Returns:
            The logits of the completions' first tokens, and the ids of the rows, (N,).
        """

    def step(self) -> tuple[NextLogits, Tensor]:
        """Computes the next-token logits of all rows in progress. Returns them and the ids of the rows, (R,)."""

    def advance(self, tokens: Tensor, finished: Tensor) -> None:
        """Takes the tokens that were drawn after the last pass, and drops finished rows.

        Args:
            tokens: (N,) token ids.
            finished: (N,) bool, True for rows that draw no more tokens.
        """


class GrowingDecoder:
    """A decoder whose cache grows and shrinks with the rows in progress.

    Args:
        model: The policy.
        max_new_tokens: The maximum number of tokens in a completion.
        max_tokens: The maximum number of tokens in the cache, padding included; None for no limit.
    """

    def __init__(self, model: PreTrainedModel, *, max_new_tokens: int, max_tokens: int | None) -> None:
        self.model, self.max_new_tokens, self.max_tokens = model, max_new_tokens, max_tokens
        self._no_rows = torch.zeros(0, dtype=torch.long, device=next(model.parameters()).device)
        self._active_rows: _ActiveRows | None = None
        self._pending_rows: _ActiveRows | None = None

    @property
    def row_ids(self) -> Tensor:
        return self._no_rows if self._active_rows is None else self._active_rows.row_ids

    def count_startable(self, lengths: Sequence[int], remaining: Tensor) -> int:
        if self.max_tokens is None:
            return len(lengths)
        # Recurrent states and chunked attention allow no padding on the left, so new rows wait until all others end.
        if self._active_rows is not None and not self._active_rows.can_join:
            return 0
        width = 0 if self._active_rows is None else self._active_rows.mask.shape[1]
        for count in range(len(lengths), 0, -1):
            # Assume the worst case, that no row ends early. The last n rows are the n with the most tokens to draw, and
            # the cache is widest when the nth of them ends. Prompts start in order of length: the last is longest.
            remaining_descending = sorted([*remaining.tolist(), *[self.max_new_tokens] * count], reverse=True)
            columns = max(width, lengths[count - 1])
            peak = max(rows * (columns + tokens) for rows, tokens in enumerate(remaining_descending, start=1))
            if peak <= self.max_tokens:
                return count
        return 0

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], pad_id: int) -> tuple[NextLogits, Tensor]:
        output, mask, cache = prefill_prompts(self.model, prompts, pad_id)
        row_ids = torch.tensor(list(rows), device=mask.device)
        # `advance` replaces the tokens, which are not drawn yet.
        self._pending_rows = _ActiveRows(row_ids, cache, mask, row_ids, can_join(cache, self.model))
        return output, row_ids

    def step(self) -> tuple[NextLogits, Tensor]:
        rows, self._active_rows = self._active_rows, None
        assert rows is not None
        rows.mask = pad(rows.mask, (0, 1), value=True)  # the column of the last tokens
        # Do not count padding in positions, so that a row's logits are the same in every batch.
        positions = rows.mask.sum(1, keepdim=True) - 1
        self._pending_rows = rows
        return forward(self.model, rows.tokens.unsqueeze(1), rows.mask, positions, rows.cache), rows.row_ids

    def advance(self, tokens: Tensor, finished: Tensor) -> None:
        assert self._pending_rows is not None
        self._pending_rows.tokens = tokens
        unfinished_rows, self._pending_rows = self._pending_rows.drop_rows(finished), None
        # After a step, `_active_rows` is None. After a prefill, the new rows join the active rows.
        if self._active_rows is None:
            self._active_rows = unfinished_rows
        elif unfinished_rows is not None:
            self._active_rows = self._active_rows.merge(unfinished_rows)


class _ActiveRows:
    """R rows in progress: ids (R,), a cache of L columns and its mask (R, L), and the rows' last tokens (R,).

    The last tokens are not yet in the cache, and their column is not yet in `mask`.
    """

    def __init__(self, row_ids: Tensor, cache: Any, mask: Tensor, tokens: Tensor, can_join: bool) -> None:
        self.row_ids, self.cache, self.mask, self.tokens, self.can_join = row_ids, cache, mask, tokens, can_join

    def drop_rows(self, finished: Tensor) -> _ActiveRows | None:
        """Returns the unfinished rows, without columns that are padding in all rows; None if all rows are finished."""
        order = compaction_order(finished)
        if len(order) == len(finished):
            return self
        if not len(order):
            return None
        self.cache.reorder_cache(order)
        self.row_ids, self.mask, self.tokens = self.row_ids[order], self.mask[order], self.tokens[order]
        padding = self.mask.shape[1] - int(self.mask.sum(1).max())
        if padding and self.can_join:
            drop_columns(self.cache, padding)
            self.mask = self.mask[:, padding:]
        return self

    def merge(self, other: _ActiveRows) -> _ActiveRows:
        """Returns the rows of both, with shorter rows padded on the left."""
        join(self.cache, other.cache)
        # Pad on the left, so that the last column stays the newest of every row.
        width = max(self.mask.shape[1], other.mask.shape[1])
        mask = torch.cat([pad(rows.mask, (width - rows.mask.shape[1], 0)) for rows in (self, other)])
        row_ids, tokens = torch.cat([self.row_ids, other.row_ids]), torch.cat([self.tokens, other.tokens])
        return _ActiveRows(row_ids, self.cache, mask, tokens, self.can_join)


def compaction_order(finished: Tensor) -> Tensor:
    """Returns the indices of the unfinished rows. The last of them fill the gaps, so that the others need not move.

    Args:
        finished: (R,) bool.
    """
    count = len(finished) - int(finished.sum())
    order = torch.arange(count, device=finished.device)
    if count < len(finished):
        order[finished[:count]] = (~finished[count:]).nonzero().squeeze(1) + count
    return order


def prefill_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_id: int
) -> tuple[NextLogits, Tensor, DynamicCache]:
    """Runs the model on prompts and fills a new cache. Equal prompts are computed only once.

    Args:
        model: The policy.
        prompts: B token lists.
        pad_id: The id of PAD.

    Returns:
        The next-token logits after the prompts, the prompts' mask (B, P) bool, and their cache.

    Raises:
        ZooError: The model keeps recurrent states outside the cache.
    """
    unique_prompts: dict[tuple[int, ...], int] = {}
    # With num_generations above 1, several rows have the same prompt.
    prompt_indices = [unique_prompts.setdefault(tuple(prompt), len(unique_prompts)) for prompt in prompts]
    ids, mask = left_pad(list(unique_prompts), pad_id, next(model.parameters()).device)
    cache = new_cache(model)
    output = forward(model, replace_padding(ids, mask), mask, positions_of(mask), cache)
    _check_states_cached(cache, model)
    if len(unique_prompts) < len(prompts):
        row_indices: Any = torch.tensor(prompt_indices, device=mask.device)
        cache.reorder_cache(row_indices)
        output, mask = output.select(row_indices), mask[row_indices]
    return output, mask, cache


def forward(model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> NextLogits:
    """Runs the model on tokens that are not yet in the cache.

    Args:
        model: The policy.
        ids: (B, I) token ids.
        mask: (B, L), 0 for padding, with L = columns in the cache + I.
        positions: (B, I) int64.
        cache: The cache, to which the tokens are added.

    Returns:
        The next-token logits after the last of `ids`.
    """
    with record_inputs(model.get_output_embeddings()) as states:
        output = model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            # Only the last position's logits are needed, and the logits of a long prompt would fill the memory.
            **({"logits_to_keep": 1} if accepts_argument(model, "logits_to_keep") else {}),
        )
    return NextLogits(output.logits[:, -1], states[-1][:, -1] if states else None)


@contextmanager
def record_inputs(head: Any, *, skip_head: bool = False) -> Iterator[list[Tensor]]:
    """Records the inputs of a model's head while this context is open.

    Args:
        head: The head; None to record nothing.
        skip_head: Whether to skip the head's computation. It then returns a slice of its input.

    Yields:
        A list, to which each call of the head appends its input.
    """
    inputs: list[Tensor] = []
    if head is None:
        yield inputs
        return
    # Use a hook, because the last entry of output_hidden_states includes the final norm only in some architectures.
    hook = head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    if skip_head:
        # This instance attribute hides the class's method until it is deleted below.
        head.forward = lambda states: states[..., :1]
    try:
        yield inputs
    finally:
        hook.remove()
        if skip_head:
            del head.forward


def left_pad(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Pads token lists on the left.

    Args:
        sequences: B token lists.
        pad_id: The id of PAD.
        device: The device of the result.

    Returns:
        ids (B, P) int64, and mask (B, P) bool, False for padding.
    """
    width = max(map(len, sequences))
    ids = [[pad_id] * (width - len(tokens)) + list(tokens) for tokens in sequences]
    mask = [[False] * (width - len(tokens)) + [True] * len(tokens) for tokens in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def replace_padding(ids: Tensor, mask: Tensor) -> Tensor:
    """Replaces padding with each row's first real token, which makes passes on a CPU faster.

    The embedding of PAD starts at zero, and training may move it slightly. From such values a model computes subnormal
    numbers, which a CPU multiplies far more slowly. No real token attends to padding, so results stay the same. The
    exception is a mixture of experts, which computes padding together with real tokens: there, the last bits of
    gradients change.

    Args:
        ids: (B, L) token ids.
        mask: (B, L) bool, False for padding.
    """
    return torch.where(mask, ids, ids.gather(1, mask.long().argmax(1, keepdim=True)))


def positions_of(mask: Tensor) -> Tensor:
    """Returns each token's position in its row, (B, L) int64. Padding does not count.

    Args:
        mask: (B, L) bool, False for padding.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def base_of(model: Any) -> Any:
    """Returns the model under an adapter; without an adapter, the model itself.

    Args:
        model: A model with or without an adapter.
    """
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def accepts_argument(model: PreTrainedModel, argument: str) -> bool:
    """Whether a model's forward has an argument of this name.

    Args:
        model: A model with or without an adapter.
        argument: The argument's name.
    """
    model_class: Any = type(base_of(model))
    return argument in _forward_arguments(model_class)


@functools.cache  # called in every step, and inspecting a signature takes as long as computing a layer
def _forward_arguments(model_class: Any) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.forward).parameters)


def _check_states_cached(cache: Cache, model: PreTrainedModel) -> None:
    """Raises ZooError if a recurrent layer did not store its state in the cache."""
    for layer in cache.layers:
        flags_by_kind = [getattr(layer, f"is_{kind}_states_initialized", {}) for kind in ("conv", "recurrent")]
        initialized_flags = [flag for flags in flags_by_kind for flag in flags.values()]
        if initialized_flags and not any(initialized_flags):
            raise ZooError(
                f"A {type(base_of(model)).__name__} keeps the state of its recurrent layers in its modules instead "
                "of past_key_values, so the rows of a batch would mix: choose another architecture."
            )
