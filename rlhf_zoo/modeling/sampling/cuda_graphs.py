"""Decodes on a GPU over a cache of fixed size. A step of each shape is captured once as a CUDA graph, then replayed.

A step of a small model launches hundreds of kernels, and launching them takes longer than running them. A graph
launches them all at once, but reads and writes only the addresses with which it was captured. So keys, values and the
inputs of a step are in buffers that never move. A step computes the first rows and columns of these buffers. The
numbers of rows and columns are rounded up (`round_rows`, COLUMN_MULTIPLE), so that few graphs suffice. The extra rows
are idle: they are computed, but their results are not used.

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

from ...errors import first_line
from .decoder import NextLogits, base_of, compaction_order, forward, prefill_prompts
from .kv_cache import can_join, new_cache

#: The number of columns that a step computes is a multiple of this number.
COLUMN_MULTIPLE = 128
#: The maximum number of graphs. If there are more, the least recently used graph is dropped.
MAX_GRAPHS = 64

#: Captures a step: maps a function that computes it to a function that replays it into the same output tensors.
Capture = Callable[[Callable[[], NextLogits]], Callable[[], NextLogits]]


def round_rows(rows: int) -> int:
    """Rounds a number of rows up to a power of two, or to three quarters of one: 1, 2, 3, 4, 6, 8, 12, 16, 24."""
    power = 1 << max(rows - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


def fixed_cache_shape(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, max_tokens: int | None
) -> tuple[int, int] | None:
    """Chooses the shape of a cache of fixed size.

    Args:
        prompts: B token lists.
        max_new_tokens: The maximum number of tokens in a completion.
        max_tokens: The maximum number of tokens in the cache, padding included; None for no limit.

    Returns:
        (rows, columns); None if `max_tokens` is too small for one row.
    """
    columns = -(-(max(map(len, prompts)) + max_new_tokens) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    rows = round_rows(len(prompts))
    while max_tokens is not None and rows and rows * columns > max_tokens:
        rows = next((fewer for fewer in range(rows - 1, 0, -1) if round_rows(fewer) == fewer), 0)
    return (rows, columns) if rows else None


def supports_fixed_cache(model: PreTrainedModel) -> bool:
    """Whether a model can decode over a cache of fixed size.

    All of its layers must be attention. transformers must mark the model as compilable in one graph: then no step reads
    a tensor's value on the CPU, which a captured graph could not do. The model must not be sharded.
    """
    if any(isinstance(weight, DTensor) for weight in model.parameters()):
        return False
    return getattr(base_of(model), "_can_compile_fullgraph", False) and can_join(new_cache(model), model)


@dataclass
class _StepShape:
    """The shape of the step in progress, which all layers share."""

    column: Tensor  # the column to write, a scalar on the device, so that a graph reads its current value
    rows: int = 0  # how many rows and columns to compute
    columns: int = 0


class FixedLayer(StaticLayer):
    """Keys and values of `max_rows` rows at fixed addresses. Only the mask applies a sliding window."""

    keys: Any
    values: Any

    def __init__(self, max_rows: int, columns: int, shape: _StepShape) -> None:
        super().__init__(columns)
        self.max_rows, self.shape = max_rows, shape

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Allocates all rows and columns.

        Args:
            keys: The first keys, (rows, heads, columns, D), which determine heads, D and type.
            values: The first values, of the same shape except for D.
        """
        # Start with zeros, because a masked value is multiplied by 0, and 0·NaN is NaN.
        buffer_shape, device_type = (self.max_rows, keys.shape[1], self.max_cache_len), keys.device.type
        # Under autocast, attention computes in autocast's type.
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        self.keys, self.values = (x.new_zeros(*buffer_shape, x.shape[3], dtype=dtype) for x in (keys, values))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        def write_column(buffer: Tensor, states: Tensor) -> Tensor:
            computed_part = buffer[: self.shape.rows, :, : self.shape.columns]
            return computed_part.index_copy_(2, self.shape.column.view(1), states.to(buffer.dtype))

        return write_column(self.keys, key_states), write_column(self.values, value_states)

    def get_seq_length(self) -> Any:
        return self.shape.column

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.shape.columns, 0


class FixedDecoder:
    """A decoder over a cache of fixed size, which later rollouts reuse.

    All rows write the same column in a step. New rows are placed so that their prompts end just before that column.

    Args:
        model: The policy.
        max_rows: The maximum number of rows.
        columns: The maximum number of columns, padding included.
        capture: Captures the step of a new shape.
    """

    def __init__(self, model: PreTrainedModel, max_rows: int, columns: int, capture: Capture) -> None:
        self.model, self.max_rows, self.columns, self._capture = model, max_rows, columns, capture
        self._weights = _addresses(model)
        device = next(model.parameters()).device
        self._tokens, self._positions = (torch.zeros(max_rows, 1, dtype=torch.long, device=device) for _ in range(2))
        self._mask = torch.zeros(max_rows, columns, dtype=torch.long, device=device)
        self._shape = _StepShape(torch.zeros((), dtype=torch.long, device=device))
        self._layers = [FixedLayer(max_rows, columns, self._shape) for _ in new_cache(model).layers]
        self._cache = Cache(layers=[*self._layers])
        self._graphs: OrderedDict[tuple[int, int], Callable[[], NextLogits]] = OrderedDict()
        self.row_ids = torch.zeros(0, dtype=torch.long, device=device)
        self._next_column = 0
        self._prefilled_rows: tuple[Tensor, Tensor, Cache] | None = None

    def fits(self, model: PreTrainedModel, max_rows: int, columns: int) -> bool:
        """Whether a rollout can reuse this decoder: the shape is the same, and the weights have not moved."""
        return (self.max_rows, self.columns) == (max_rows, columns) and self._weights == _addresses(model)

    def reset(self) -> FixedDecoder:
        """Drops the rows that remain if a rollout ended with an error. Returns the decoder itself."""
        self.row_ids, self._next_column, self._prefilled_rows = self.row_ids[:0], 0, None
        return self

    def count_startable(self, lengths: Sequence[int], remaining: Tensor) -> int:
        return min(len(lengths), self.max_rows - len(self.row_ids))

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], pad_id: int) -> tuple[NextLogits, Tensor]:
        output, mask, cache = prefill_prompts(self.model, prompts, pad_id)
        row_ids = torch.tensor(list(rows), device=mask.device)
        self._prefilled_rows = row_ids, mask, cache
        return output, row_ids

    def step(self) -> tuple[NextLogits, Tensor]:
        count = len(self.row_ids)
        if self._next_column % COLUMN_MULTIPLE == 0:  # the next step would compute more columns
            # First shift rows to the left, over columns that are padding in all rows.
            self._shift(int(self._mask[:count, : self._next_column].sum(1).max()) - self._next_column)
        rows, columns = round_rows(count), (self._next_column // COLUMN_MULTIPLE + 1) * COLUMN_MULTIPLE
        # Unmask the column for idle rows too, because attention over no columns gives NaN.
        self._mask[:rows, self._next_column] = 1
        # Reset the positions of idle rows, because they could exceed a table of learned positions.
        self._positions[count:rows] = 0
        self._shape.column.fill_(self._next_column)
        output = self._captured_step(rows, columns)().select(slice(count))
        self._next_column += 1
        self._positions[:count] += 1
        return output, self.row_ids

    def advance(self, tokens: Tensor, finished: Tensor) -> None:
        order = compaction_order(finished)
        if self._prefilled_rows is not None:
            self._add_rows(order, *self._prefilled_rows)
            self._tokens[len(self.row_ids) - len(order) : len(self.row_ids), 0] = tokens[order]
            self._prefilled_rows = None
            return
        if len(order) < len(finished):
            moved_rows = (order != torch.arange(len(order), device=order.device)).nonzero().squeeze(1)
            for tensor in (self._positions, *self._column_tensors()):
                tensor[moved_rows] = tensor[order[moved_rows]]
            self.row_ids = self.row_ids[order]
        self._tokens[: len(order), 0] = tokens[order]

    def _captured_step(self, rows: int, columns: int) -> Callable[[], NextLogits]:
        """Returns the captured step of this shape. Captures it if the shape is new."""
        shape = rows, columns
        if shape not in self._graphs:

            def step() -> NextLogits:
                self._shape.rows, self._shape.columns = shape
                inputs = self._tokens[:rows], self._mask[:rows, :columns], self._positions[:rows]
                return forward(self.model, *inputs, self._cache)

            self._graphs[shape] = self._capture(step)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(shape)
        return self._graphs[shape]

    def _add_rows(self, indices: Tensor, row_ids: Tensor, mask: Tensor, cache: Cache) -> None:
        """Adds the chosen rows of a prefill after the rows in progress."""
        count, width = len(self.row_ids), mask.shape[1]
        if not count:
            self._next_column = width
        elif self._next_column < width:
            # The new prompts are longer than all rows in progress, so shift these rows right to end at the same column.
            self._shift(width - self._next_column)
        new_rows = slice(count, count + len(indices))
        self._mask[new_rows] = 0
        self._mask[new_rows, self._next_column - width : self._next_column] = mask[indices].long()
        self._positions[new_rows] = mask[indices].sum(1, keepdim=True)
        prefilled_layer: Any
        for layer, prefilled_layer in zip(self._layers, cache.layers, strict=True):
            if not prefilled_layer.is_initialized:
                continue  # this layer uses the keys of another layer
            if not layer.is_initialized:
                layer.allocate(prefilled_layer.keys, prefilled_layer.values)
            for buffer, states in ((layer.keys, prefilled_layer.keys), (layer.values, prefilled_layer.values)):
                buffer[new_rows, :, self._next_column - states.shape[2] : self._next_column] = states[indices]
        self.row_ids = torch.cat([self.row_ids, row_ids[indices]])

    def _shift(self, distance: int) -> None:
        """Shifts all rows by a number of columns: to the right, or to the left if the number is negative."""
        source = slice(max(0, -distance), self._next_column)
        self._next_column += distance
        target = slice(max(0, distance), self._next_column)
        count = len(self.row_ids)
        for tensor in self._column_tensors() if distance else ():
            tensor[:count, ..., target, :] = tensor[:count, ..., source, :].clone()  # because source and target overlap
        self._mask[:count, : target.start] = 0
        self._mask[:count, target.stop :] = 0

    def _column_tensors(self) -> list[Tensor]:
        """Returns all tensors with columns. The columns are the dimension before the last."""
        layers = [layer for layer in self._layers if layer.is_initialized]
        return [self._mask.unsqueeze(-1), *(tensor for layer in layers for tensor in (layer.keys, layer.values))]


def _addresses(model: PreTrainedModel) -> list[int]:
    return [tensor.data_ptr() for group in (model.parameters(), model.buffers()) for tensor in group]


class CudaGraphs:
    """Captures steps as CUDA graphs that share their memory. docs/gpu.md has measurements."""

    def __init__(self) -> None:
        # Use the same stream for all captures, because libraries keep a workspace for each stream.
        self._pool, self._capture_stream, self._can_capture = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), True

    def __call__(self, step: Callable[[], NextLogits]) -> Callable[[], NextLogits]:
        if not self._can_capture:
            return step
        try:
            return self._capture(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._can_capture = False  # other shapes would fail too
            warnings.warn(
                f"A step of decoding was not captured as a CUDA graph ({first_line(error)}), so sampling is "
                "slower: set rollout_graphs: false to decode without graphs.",
                stacklevel=2,
            )
            return step

    def _capture(self, step: Callable[[], NextLogits]) -> Callable[[], NextLogits]:
        current_stream, capture_stream = torch.cuda.current_stream(), self._capture_stream
        cache_was_enabled = torch.is_autocast_cache_enabled()
        # The next update frees autocast's cached copies of the weights, so the graph must cast the weights itself.
        torch.set_autocast_cache_enabled(False)
        try:
            capture_stream.wait_stream(current_stream)
            with torch.cuda.stream(capture_stream):
                step()  # a warm-up, so that libraries allocate their memory before the capture
            current_stream.wait_stream(capture_stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=capture_stream, capture_error_mode="thread_local"):
                output = step()
        finally:
            torch.set_autocast_cache_enabled(cache_was_enabled)
            torch.cuda.set_stream(current_stream)  # because a failed capture leaves its own stream current

        def replay() -> NextLogits:
            graph.replay()
            return output

        return replay
