"""Decodes over a cache of fixed size, for a GPU: each shape of a step is captured once as a CUDA graph, then replayed.

A step of a small model launches hundreds of kernels, and launching them takes longer than running them. A graph
launches them all at once, but reads and writes the addresses that it was captured with. So keys, values and a step's
inputs are in buffers that keep their addresses. A step computes the first rows and columns of these, rounded up to a
few sizes (`bucket`). Rows that end become idle rows, whose results are not read, until the next smaller size suffices.

torch.compile(mode="reduce-overhead") would do the same, but it compiles each shape for many seconds, and its fused
kernels give log-probabilities that differ more from those of the training pass.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import StaticLayer

from .decoder import NextLogits, base_of, compaction_order, forward, prefill_prompts
from .kv_cache import can_join, new_cache

#: The number of columns in a step is a multiple of this.
COLUMNS = 128
#: The most graphs to keep. Beyond that the least recently used graph is dropped.
GRAPHS = 64

#: Maps a function that computes a step to one that repeats it and writes the output to the same tensors.
Capture = Callable[[Callable[[], NextLogits]], Callable[[], NextLogits]]


def bucket(rows: int) -> int:
    """Rounds a number of rows up to the next power of two, or to three quarters of it: 1, 2, 3, 4, 6, 8, 12, 16, 24.

    Args:
        rows: The number.
    """
    power = 1 << max(rows - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


def fixed_size(prompts: Sequence[Sequence[int]], length: int, max_tokens: int | None) -> tuple[int, int] | None:
    """Chooses the size of a cache.

    Args:
        prompts: Token lists.
        length: The most tokens of a completion.
        max_tokens: The most tokens that the cache may hold; None for no bound.

    Returns:
        Rows and columns; None if max_tokens is too small for one row.
    """
    columns = -(-(max(map(len, prompts)) + length) // COLUMNS) * COLUMNS
    rows = bucket(len(prompts))
    while max_tokens is not None and rows and rows * columns > max_tokens:
        rows = next((fewer for fewer in range(rows - 1, 0, -1) if bucket(fewer) == fewer), 0)
    return (rows, columns) if rows else None


def can_be_fixed(model: PreTrainedModel) -> bool:
    """Whether a model can decode over a cache of fixed size.

    It must have attention layers only, and transformers must mark it as compilable, so that no step reads a value on
    the host.

    Args:
        model: The policy.
    """
    unsharded = not any(isinstance(weight, DTensor) for weight in model.parameters())
    return unsharded and getattr(base_of(model), "_can_compile_fullgraph", False) and can_join(new_cache(model), model)


@dataclass
class _Place:
    """The column that a step writes, a scalar on the device, and the rows and columns that it computes."""

    column: Tensor
    rows: int = 0
    columns: int = 0


class FixedLayer(StaticLayer):
    """Keys and values of all rows at fixed addresses. A sliding window is applied by the mask alone."""

    keys: Any
    values: Any

    def __init__(self, size: int, columns: int, place: _Place) -> None:
        super().__init__(columns)
        self.size, self.place = size, place

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Allocates all rows and columns.

        Args:
            keys: The first ones, (rows, heads, columns, D), which determine shape and type.
            values: Likewise.
        """
        # Zeros, because a masked value is multiplied by 0, and 0·NaN is NaN. Under autocast, in the type of attention.
        shape, device_type = (self.size, keys.shape[1], self.max_cache_len), keys.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        self.keys, self.values = (x.new_zeros(*shape, x.shape[3], dtype=dtype) for x in (keys, values))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        column, columns = self.place.column.view(1), self.place.columns
        updated = []
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            updated.append(buffer[: self.place.rows, :, :columns].index_copy_(2, column, new.to(buffer.dtype)))
        return updated[0], updated[1]

    def get_seq_length(self) -> Any:
        return self.place.column

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.columns, 0


class FixedDecoder:
    """A decoder with at most `size` rows of at most `columns` columns, padding included. Later calls reuse it.

    All rows write the same column, the next one. The prompts of new rows end just before it.
    """

    def __init__(self, model: PreTrainedModel, size: int, columns: int, capture: Capture) -> None:
        self.model, self.size, self.columns, self._capture = model, size, columns, capture
        self._weights = _addresses(model)
        device = next(model.parameters()).device
        self._tokens, self._positions = (torch.zeros(size, 1, dtype=torch.long, device=device) for _ in range(2))
        self._mask = torch.zeros(size, columns, dtype=torch.long, device=device)
        self._place = place = _Place(torch.zeros((), dtype=torch.long, device=device))
        self._layers = [FixedLayer(size, columns, place) for _ in new_cache(model).layers]
        self._cache = Cache(layers=[*self._layers])
        self._graphs: OrderedDict[tuple[int, int], Callable[[], NextLogits]] = OrderedDict()
        self.rows = torch.zeros(0, dtype=torch.long, device=device)
        self._at = 0
        self._began: tuple[Tensor, Tensor, Cache] | None = None

    def fits(self, model: PreTrainedModel, size: int, columns: int) -> bool:
        """Whether a call can reuse this decoder: the size is the same, and the weights are where its graphs read them.

        Args:
            model: The policy.
            size: Rows.
            columns: Columns.
        """
        return (self.size, self.columns) == (size, columns) and self._weights == _addresses(model)

    def begin(self) -> FixedDecoder:
        """Drops the rows left by a call that ended with an error."""
        self.rows, self._at, self._began = self.rows[:0], 0, None
        return self

    def room(self, lengths: Sequence[int], left: Tensor) -> int:
        return min(len(lengths), self.size - len(self.rows))

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], pad_id: int) -> tuple[NextLogits, Tensor]:
        output, mask, cache = prefill_prompts(self.model, prompts, pad_id)
        row_ids = torch.tensor(list(rows), device=mask.device)
        self._began = row_ids, mask, cache
        return output, row_ids

    def step(self) -> tuple[NextLogits, Tensor]:
        count = len(self.rows)
        if self._at % COLUMNS == 0:  # a step needs more columns: first drop those that are padding in all rows
            self._shift(int(self._mask[:count, : self._at].sum(1).max()) - self._at)
        rows, columns = bucket(count), (self._at // COLUMNS + 1) * COLUMNS
        self._mask[:rows, self._at] = 1  # idle rows too: attention over no column gives NaN
        self._positions[count:rows] = 0  # a table of learned positions fails on a position past its end
        self._place.column.fill_(self._at)
        output = self._graph(rows, columns)().select(slice(count))
        self._at += 1
        self._positions[:count] += 1
        return output, self.rows

    def keep(self, tokens: Tensor, leaving: Tensor) -> None:
        order = compaction_order(leaving)
        if self._began is not None:
            self._enter(order, *self._began)
            self._tokens[len(self.rows) - len(order) : len(self.rows), 0] = tokens[order]
            self._began = None
            return
        if len(order) < len(leaving):
            moved = (order != torch.arange(len(order), device=order.device)).nonzero().squeeze(1)
            for tensor in self._held():
                tensor[moved] = tensor[order[moved]]
            self.rows = self.rows[order]
        self._tokens[: len(order), 0] = tokens[order]

    def _graph(self, rows: int, columns: int) -> Callable[[], NextLogits]:
        """Returns the step for this shape, and captures it if it is new."""
        shape = rows, columns
        if shape not in self._graphs:

            def step() -> NextLogits:
                self._place.rows, self._place.columns = shape
                inputs = self._tokens[:rows], self._mask[:rows, :columns], self._positions[:rows]
                return forward(self.model, *inputs, self._cache)

            self._graphs[shape] = self._capture(step)
            if len(self._graphs) > GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(shape)
        return self._graphs[shape]

    def _enter(self, chosen: Tensor, rows: Tensor, mask: Tensor, cache: Cache) -> None:
        """Adds the chosen rows of a prefill after the others."""
        count, width = len(self.rows), mask.shape[1]
        if not count:
            self._at = width
        elif self._at < width:
            self._shift(width - self._at)
        new_rows = slice(count, count + len(chosen))
        self._mask[new_rows] = 0
        self._mask[new_rows, self._at - width : self._at] = mask[chosen].long()
        self._positions[new_rows] = mask[chosen].sum(1, keepdim=True)
        prefilled_layer: Any
        for layer, prefilled_layer in zip(self._layers, cache.layers, strict=True):
            if not prefilled_layer.is_initialized:
                continue  # a layer that reads another's keys
            if not layer.is_initialized:
                layer.allocate(prefilled_layer.keys, prefilled_layer.values)
            for buffer, new in ((layer.keys, prefilled_layer.keys), (layer.values, prefilled_layer.values)):
                buffer[new_rows, :, self._at - new.shape[2] : self._at] = new[chosen]
        self.rows = torch.cat([self.rows, rows[chosen]])

    def _shift(self, by: int) -> None:
        """Moves the cache's columns to the right, or to the left for a negative number."""
        old = slice(max(0, -by), self._at)
        self._at += by
        new = slice(max(0, by), self._at)
        count = len(self.rows)
        for tensor in (by and self._of_columns()) or ():
            tensor[:count, ..., new, :] = tensor[:count, ..., old, :].clone()
        self._mask[:count, : new.start] = 0
        self._mask[:count, new.stop :] = 0

    def _held(self) -> list[Tensor]:
        """Returns all tensors with one entry per row."""
        return [self._positions, *self._of_columns()]

    def _of_columns(self) -> list[Tensor]:
        """Returns all tensors with columns, which are the dimension before the last."""
        layers = [layer for layer in self._layers if layer.is_initialized]
        return [self._mask.unsqueeze(-1), *(tensor for layer in layers for tensor in (layer.keys, layer.values))]


def _addresses(model: PreTrainedModel) -> list[int]:
    return [tensor.data_ptr() for group in (model.parameters(), model.buffers()) for tensor in group]


class CudaGraphs:
    """Captures steps as CUDA graphs that share their memory. Never run: it needs a GPU."""

    def __init__(self) -> None:
        # One stream for all captures, because libraries keep a workspace for each stream.
        self._pool, self._aside, self._works = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), True

    def __call__(self, step: Callable[[], NextLogits]) -> Callable[[], NextLogits]:
        if not self._works:
            return step
        try:
            return self._captured(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._works = False
            warnings.warn(
                f"A step of decoding was not captured as a CUDA graph ({str(error).splitlines()[0]}), so sampling is "
                "slower: rollout_graphs: false leaves graphs out.",
                stacklevel=2,
            )
            return step

    def _captured(self, step: Callable[[], NextLogits]) -> Callable[[], NextLogits]:
        current, aside = torch.cuda.current_stream(), self._aside
        cache_was_enabled = torch.is_autocast_cache_enabled()
        # The next update frees autocast's cached copies of the weights, so the graph must cast them itself.
        torch.set_autocast_cache_enabled(False)
        try:
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                step()  # libraries allocate what they need outside of the graph
            current.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
                output = step()
        finally:
            torch.set_autocast_cache_enabled(cache_was_enabled)
            torch.cuda.set_stream(current)  # a failed capture leaves its own stream current

        def replay() -> NextLogits:
            graph.replay()
            return output

        return replay
