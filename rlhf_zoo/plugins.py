"""Objects that a recipe names: an entry point's name, or "module:attribute"."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Iterable
from functools import reduce
from types import ModuleType
from typing import Any

from rlhf_zoo.errors import ZooError

__all__ = ["did_you_mean", "load_object", "registered"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence's tail that offers the nearest known word, ", did you mean 'x'?", or nothing where none is near."""
    near = difflib.get_close_matches(word, sorted(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def registered(group: str) -> list[str]:
    """The names that installed packages registered as entry points of a group, sorted."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=group)})


def load_object(name: str, *, group: str) -> Any:
    """The object called `name`: "module:attribute" (dots allowed on both sides), or an entry point of `group`.

    A module that is not installed is also looked for in the working directory. Importing a module runs it, so `name`
    must come from the user, never from a download. Raises ZooError where nothing of that name is found.
    """
    if ":" in name:
        module_name, _, attribute = name.partition(":")
        return _attribute(_import(module_name, name), attribute, name)
    entries = importlib.metadata.entry_points(group=group, name=name)
    if not entries:
        names = registered(group)
        hint = did_you_mean(name, names) or f": it knows {', '.join(names) or 'none'}; or write module:attribute."
        raise ZooError(f"No installed package registers {name!r} under {group!r}{hint}")
    entry = next(iter(entries))
    return _attribute(_import(entry.module, name), entry.attr, name)


def _import(module_name: str, name: str) -> ModuleType:
    if not module_name or module_name.startswith("."):
        raise ZooError(f"{name!r} does not name a module: write module:attribute, e.g. my_rewards:length.")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # A console script does not search the working directory; last, so that it can hide no installed package.
        sys.path.append(here)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            hint = did_you_mean(missing, _beside(missing)) or f": install it, or put {missing}.py into this directory."
            raise ZooError(f"There is no module {missing!r}, which {name!r} names{hint}") from error
        raise ZooError(f"{name!r} needs the module {missing!r}, which is not installed: install it.") from error


def _beside(module_name: str) -> list[str]:
    """The full names of the modules that lie where a missing one was looked for."""
    parent = module_name.rpartition(".")[0]
    paths = getattr(sys.modules[parent], "__path__", []) if parent else None
    prefix = f"{parent}." if parent else ""
    return [prefix + module.name for module in pkgutil.iter_modules(paths)]


def _attribute(module: ModuleType, path: str, name: str) -> Any:
    if not path:
        raise ZooError(f"{name!r} names no attribute: write module:attribute, e.g. my_rewards:length.")
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError as error:
        public = [key for key in vars(module) if not key.startswith("_")]
        hint = did_you_mean(path, public) or f": {module.__name__} offers {', '.join(sorted(public)[:10]) or 'none'}."
        raise ZooError(f"There is no {path!r} in the module {module.__name__!r}{hint}") from error
