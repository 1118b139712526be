"""A cache of loaded models that drops the least recently used ones."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor, nn

from ...modeling.devices import free_cache

M = TypeVar("M")


class ModelCache(Generic[M]):
    """Caches the most recently used models, up to a maximum number and total size. Threads may share it.

    If the cache is full, it drops the least recently used model before it loads another. After the load, it drops more
    models if all together exceed `max_bytes`, but always keeps the one just loaded. The memory of a dropped model is
    freed when its last user has finished.

    Args:
        load: Loads a model by its name. It is called once even if several threads request the model at the same time.
        size: Returns the size of a model in bytes.
        max_models: Largest number of models in the cache.
        max_bytes: Largest size of all models together, in bytes; None for no bound.
    """

    def __init__(
        self, load: Callable[[str], M], *, size: Callable[[M], int], max_models: int = 4, max_bytes: int | None = None
    ) -> None:
        if max_models < 1:
            raise ValueError(f"max_models is {max_models}; it must be at least 1")
        self._load, self._size = load, size
        self._max_models, self._max_bytes = max_models, max_bytes
        self._models: OrderedDict[str, tuple[M, int]] = OrderedDict()
        self._table_lock = threading.Lock()  # held briefly, so that cached models are returned while another loads
        self._load_lock = threading.Lock()  # one load at a time, because loading takes the most memory

    def get(self, name: str) -> M:
        """Returns the model of this name. Loads it first if it is not cached.

        Args:
            name: The name to pass to `load`.

        Raises:
            Exception: Any error of `load`. The next call tries again.
        """
        if (model := self._find(name)) is not None:
            return model
        with self._load_lock:
            if (model := self._find(name)) is not None:  # another thread has loaded it meanwhile
                return model
            with self._table_lock:
                self._evict(free_slots=1)
            model = self._load(name)
            with self._table_lock:
                self._models[name] = (model, self._size(model))
                self._evict(free_slots=0)
            return model

    @property
    def names(self) -> list[str]:
        """The names of the cached models, the least recently used first."""
        with self._table_lock:
            return list(self._models)

    def _find(self, name: str) -> M | None:
        with self._table_lock:
            if name not in self._models:
                return None
            self._models.move_to_end(name)
            return self._models[name][0]

    def _sum_sizes(self) -> int:
        return sum(size for _, size in self._models.values())

    def _evict(self, *, free_slots: int) -> None:
        count_before = len(self._models)
        while len(self._models) > self._max_models - free_slots:
            self._models.popitem(last=False)
        while self._max_bytes is not None and len(self._models) > 1 and self._sum_sizes() > self._max_bytes:
            self._models.popitem(last=False)
        if len(self._models) < count_before:
            free_cache()


def model_bytes(*models: nn.Module | None) -> int:
    """Returns the size of models' parameters and buffers in bytes. Shared tensors count once.

    Args:
        *models: The models; None is skipped.
    """
    tensors: dict[int, Tensor] = {}
    for model in models:
        if model is not None:
            tensors |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
