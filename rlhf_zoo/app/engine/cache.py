"""Models that are loaded when asked for, and let go when others are wanted more."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor, nn

from ...modeling.devices import free_cache

M = TypeVar("M")


class ModelCache(Generic[M]):
    """The most recently used models, bounded by their number and by their bytes; safe to share among threads.

    Before a model is loaded, the ones used longest ago are let go to make room. Such a model lives on until whoever is
    using it has finished. A single model over `max_bytes` is kept alone.

    Args:
        load: Loads a model by its name; called once however many threads ask.
        size: The bytes of a model.
        max_models: How many to keep.
        max_bytes: Bytes of all of them together; None for no bound.
    """

    def __init__(
        self,
        load: Callable[[str], M],
        *,
        size: Callable[[M], int],
        max_models: int = 4,
        max_bytes: int | None = None,
    ) -> None:
        """load: a model by its name, called once however many threads ask; size: the bytes of one."""
        if max_models < 1:
            raise ValueError(f"max_models is {max_models}, and a cache holds at least 1")
        self._load, self._size = load, size
        self._max_models, self._max_bytes = max_models, max_bytes
        self._held: OrderedDict[str, tuple[M, int]] = OrderedDict()
        self._table = threading.Lock()
        self._loading = threading.Lock()

    def get(self, name: str) -> M:
        """Returns the model of this name, and loads it first where it is not kept.

        Args:
            name: What `load` takes.

        Raises:
            Exception: Whatever `load` raises; the next call tries again.
        """
        if (held := self._look(name)) is not None:
            return held
        with self._loading:  # one at a time: loading is what takes the most memory
            if (held := self._look(name)) is not None:
                return held
            with self._table:
                self._trim(room=1)
            model = self._load(name)
            with self._table:
                self._held[name] = (model, self._size(model))
                self._trim(room=0)
            return model

    @property
    def names(self) -> list[str]:
        """The names of the kept models, the one used longest ago first."""
        with self._table:
            return list(self._held)

    @property
    def bytes(self) -> int:
        with self._table:
            return self._total()

    def _look(self, name: str) -> M | None:
        with self._table:
            if name not in self._held:
                return None
            self._held.move_to_end(name)
            return self._held[name][0]

    def _total(self) -> int:
        return sum(size for _, size in self._held.values())

    def _trim(self, *, room: int) -> None:
        before = len(self._held)
        while len(self._held) > self._max_models - room:
            self._held.popitem(last=False)
        while self._max_bytes is not None and len(self._held) > 1 and self._total() > self._max_bytes:
            self._held.popitem(last=False)
        if len(self._held) < before:
            free_cache()


def bytes_of(*models: nn.Module | None) -> int:
    """Counts the bytes of the parameters and buffers of models, shared ones once.

    Args:
        *models: Models; None counts nothing.
    """
    tensors: dict[int, Tensor] = {}
    for model in models:
        if model is not None:
            tensors |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
