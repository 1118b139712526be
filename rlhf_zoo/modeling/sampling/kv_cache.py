"""A key-value cache for sampling. It grows in place, drops columns of padding, and appends rows of another cache."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

#: The number of columns that are allocated in advance.
SPARE_COLUMNS = 32


class InPlaceLayer(DynamicLayer):
    """A DynamicLayer whose keys and values are views of larger buffers.

    Normally, a step writes only its own column; full buffers are copied into larger ones. When rows finish, only the
    rows that replace them are copied.
    """

    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, ...] = ()
        self._begin = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new_states = key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(*new_states)
        length, new_columns = self.get_seq_length(), key_states.shape[-2]
        # Write into a buffer, because concatenating a column, as DynamicLayer does, would copy the cache in every step.
        if not self._buffers or self._begin + length + new_columns > self._buffers[0].shape[-2]:
            old_states = (self.keys, self.values) if length else tuple(x[:, :, :0] for x in new_states)
            self._buffers = tuple(
                x.new_empty(*x.shape[:2], length + new_columns + SPARE_COLUMNS, x.shape[3]) for x in new_states
            )
            self._begin = 0
            for buffer, states in zip(self._buffers, old_states, strict=True):
                buffer[:, :, :length] = states
        self._set_views(len(key_states), length + new_columns)
        self.keys[:, :, length:], self.values[:, :, length:] = new_states
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Any) -> None:
        if not self._buffers or len(beam_idx) > len(self.keys):
            self.replace(self.keys[beam_idx], self.values[beam_idx])
            return
        # Most rows stay in place (see `compaction_order`), so only the rows that move are copied.
        moved_rows = (beam_idx != torch.arange(len(beam_idx), device=beam_idx.device)).nonzero().squeeze(1)
        for states in (self.keys, self.values):
            states[moved_rows] = states[beam_idx[moved_rows]]
        self._set_views(len(beam_idx), self.get_seq_length())

    def drop_columns(self, count: int) -> None:
        """Drops the first `count` columns."""
        if not self._buffers:
            self.replace(self.keys[:, :, count:], self.values[:, :, count:])
            return
        length = self.get_seq_length() - count
        # This copies nothing: only the views move over the buffers.
        self._begin += count
        self._set_views(len(self.keys), length)

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Replaces keys and values. The next step copies them into new buffers.

        Args:
            keys: (rows, heads, columns, D).
            values: (rows, heads, columns, D).
        """
        self.keys, self.values, self._buffers, self._begin = keys, values, (), 0

    def _set_views(self, rows: int, columns: int) -> None:
        window = slice(self._begin, self._begin + columns)
        self.keys, self.values = (buffer[:rows, :, window] for buffer in self._buffers)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Makes an empty cache. Layers that grow without bound are `InPlaceLayer`; all others are transformers' own."""
    cache = DynamicCache(config=model.config)
    cache.layers = [InPlaceLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def can_join(cache: DynamicCache, model: PreTrainedModel) -> bool:
    """Whether `drop_columns` and `join` support all layers. They support no recurrent states and no chunked attention.

    Args:
        cache: A cache of the model.
        model: The model.
    """
    all_supported = all(type(layer) in (InPlaceLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    chunk_size = getattr(model.config.get_text_config(decoder=True), "attention_chunk_size", None)
    return bool(cache.layers) and all_supported and chunk_size is None


def drop_columns(cache: DynamicCache, count: int) -> None:
    """Drops the first columns, which must be padding in all rows.

    Args:
        cache: The cache, which is changed.
        count: The number of columns.
    """
    layer: Any
    for layer in cache.layers:
        if not layer.is_initialized:
            continue  # this layer uses the keys of another layer
        if isinstance(layer, InPlaceLayer):
            layer.drop_columns(count)
        else:
            # A sliding window holds only the newest columns, so the columns to drop may have left it already.
            layer.cumulative_length -= count
            surplus = max(layer.keys.shape[2] - layer.cumulative_length, 0)
            layer.keys, layer.values = layer.keys[:, :, surplus:], layer.values[:, :, surplus:]


def join(cache: DynamicCache, other: DynamicCache) -> None:
    """Appends the rows of another cache. The shorter cache gets columns of padding on the left.

    Args:
        cache: The cache, which is changed.
        other: A cache of the same model, with at least one row.
    """
    ours: Any
    theirs: Any
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        if not ours.is_initialized:
            continue  # this layer uses the keys of another layer
        width = max(ours.keys.shape[2], theirs.keys.shape[2])
        keys, values = (
            torch.cat([pad(x, (0, 0, width - x.shape[2], 0)) for x in pair])
            for pair in ((ours.keys, theirs.keys), (ours.values, theirs.values))
        )
        if isinstance(ours, InPlaceLayer):
            ours.replace(keys, values)
        else:
            ours.keys, ours.values = keys, values
            ours.cumulative_length = max(ours.cumulative_length, theirs.cumulative_length)
