"""The key-value cache of sampling: it grows in place, drops columns of padding, and joins rows."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Number of columns to allocate in advance.
ROOM = 32


class InPlaceLayer(DynamicLayer):
    """A DynamicLayer whose keys and values are views of larger buffers.

    A step writes only its own column. When a row leaves, the last row takes its place.
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
        length, new = self.get_seq_length(), key_states.shape[-2]
        # Concatenating a column per token would copy the cache in every step.
        if not self._buffers or self._begin + length + new > self._buffers[0].shape[-2]:
            old = (self.keys, self.values) if length else tuple(x[:, :, :0] for x in new_states)
            self._buffers = tuple(x.new_empty(*x.shape[:2], length + new + ROOM, x.shape[3]) for x in new_states)
            self._begin = 0
            for buffer, states in zip(self._buffers, old, strict=True):
                buffer[:, :, :length] = states
        self._show(len(key_states), length + new)
        self.keys[:, :, length:], self.values[:, :, length:] = new_states
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Any) -> None:
        if not self._buffers or len(beam_idx) > len(self.keys):
            self.replace(self.keys[beam_idx], self.values[beam_idx])
            return
        # Most rows stay in place (see `compaction_order`), so only the ones that move are copied.
        moved = (beam_idx != torch.arange(len(beam_idx), device=beam_idx.device)).nonzero().squeeze(1)
        for states in (self.keys, self.values):
            states[moved] = states[beam_idx[moved]]
        self._show(len(beam_idx), self.get_seq_length())

    def cut(self, columns: int) -> None:
        """Drops the first columns.

        Args:
            columns: How many.
        """
        if not self._buffers:
            self.replace(self.keys[:, :, columns:], self.values[:, :, columns:])
            return
        length = self.get_seq_length() - columns
        # Only the view moves over the buffer. Nothing is copied.
        self._begin += columns
        self._show(len(self.keys), length)

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Replaces keys and values; the next step copies them into buffers.

        Args:
            keys: (rows, heads, columns, D).
            values: (rows, heads, columns, D).
        """
        self.keys, self.values, self._buffers, self._begin = keys, values, (), 0

    def _show(self, rows: int, columns: int) -> None:
        window = slice(self._begin, self._begin + columns)
        self.keys, self.values = (buffer[:rows, :, window] for buffer in self._buffers)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Makes an empty cache. Layers other than plain attention are transformers' own.

    Args:
        model: The model.
    """
    cache = DynamicCache(config=model.config)
    cache.layers = [InPlaceLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def can_join(cache: DynamicCache, model: PreTrainedModel) -> bool:
    """Whether `cut` and `join` support each layer. They do not support recurrent states or chunked attention.

    Args:
        cache: A cache of the model.
        model: The model.
    """
    supported = all(type(layer) in (InPlaceLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    chunked = getattr(model.config.get_text_config(decoder=True), "attention_chunk_size", None)
    return bool(cache.layers) and supported and chunked is None


def cut(cache: DynamicCache, columns: int) -> None:
    """Drops the first columns, which must be padding in all rows.

    Args:
        cache: It is changed.
        columns: How many.
    """
    layer: Any
    for layer in cache.layers:
        if not layer.is_initialized:
            continue  # a layer that reads another's keys
        if isinstance(layer, InPlaceLayer):
            layer.cut(columns)
        else:
            # A sliding window holds only its newest columns, so a cut may lie before all of them.
            layer.cumulative_length -= columns
            past = max(layer.keys.shape[2] - layer.cumulative_length, 0)
            layer.keys, layer.values = layer.keys[:, :, past:], layer.values[:, :, past:]


def join(cache: DynamicCache, other: DynamicCache) -> None:
    """Appends the rows of another cache. The shorter cache gets columns of padding on the left.

    Args:
        cache: It is changed.
        other: The other one.
    """
    ours: Any
    theirs: Any
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        if not ours.is_initialized:
            continue
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
