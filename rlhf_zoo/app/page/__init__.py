"""The comparison page: SFT and PPO side by side, over training, as a blind test, and the card."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["PageModels", "Tally", "build", "read_model_names", "serve_page", "start"]

# Name -> its module, imported on first use, because gradio is optional and slow to import.
_MODULES = {
    "PageModels": ".models",
    "Tally": ".vote_counts",
    "build": ".layout",
    "read_model_names": "..space.model_names",
    "serve_page": ".serve",
    "start": ".serve",
}

if TYPE_CHECKING:
    from ..space.model_names import read_model_names
    from .layout import build
    from .models import PageModels
    from .serve import serve_page, start
    from .vote_counts import Tally


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name], __name__), name)
