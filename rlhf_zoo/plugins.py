"""Loads objects that a recipe names, by entry point or as "module:attribute", with optional settings."""

import ast
import dataclasses
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ZooError

#: Groups of entry points in which packages register corpora, judges (of single completions or of pairs), preferences,
#: rewards and recipes. Packages depend on these names.
CORPORA = "rlhf_zoo.corpora"
JUDGES = "rlhf_zoo.judges"
PREFERENCES = "rlhf_zoo.preferences"
REWARDS = "rlhf_zoo.rewards"
RECIPES = "rlhf_zoo.recipes"
#: Words that other tools use -> the commands and keys that mean the same here.
SYNONYMS = {
    "train": "run", "evaluate": "eval", "upload": "push", "publish": "push", "download": "pull", "init": "new",
    "beta": "kl_coef", "kl_penalty": "kl_coef", "init_kl_coef": "kl_coef", "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size", "epochs": "num_train_epochs", "ppo_epochs": "num_ppo_epochs",
    "max_new_tokens": "response_length",
}  # fmt: skip


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Suggests the closest word, as the end of a sentence.

    Args:
        word: The unknown word.
        candidates: The words that exist.

    Returns:
        ", did you mean 'x'?" with the word's synonym or else the closest candidate; "" if no candidate is close.
    """
    words = sorted(candidates)
    closest = [SYNONYMS[word]] if SYNONYMS.get(word) in words else difflib.get_close_matches(word, words, n=1)
    return f", did you mean {closest[0]!r}?" if closest else ""


def _distribution_name(distribution: importlib.metadata.Distribution) -> str:
    # `distribution.metadata` parses the README in METADATA, which takes half a second for all installed packages.
    header = (distribution.read_text("METADATA") or "").partition("\n\n")[0]
    line = re.search(r"^Name:[ \t]*(\S+)", header, re.MULTILINE)
    return line[1] if line else str(distribution.metadata["Name"])


def entry_points(group: str, name: str | None = None) -> list[importlib.metadata.EntryPoint]:
    """Lists the entry points of a group that installed packages register.

    Python may also search the working directory, which can be a downloaded folder. A `*.dist-info` there is ignored,
    unless PYTHONPATH names the directory.

    Args:
        group: The group, such as `rlhf_zoo.rewards`.
        name: The name of a single entry point; None for all of them.

    Returns:
        The entry points. If distributions share a name, only the first on Python's path counts.
    """
    cwd = os.path.realpath(os.getcwd())
    python_path = {os.path.realpath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    path = [folder for folder in sys.path if os.path.realpath(folder) != cwd or (folder and cwd in python_path)]
    distributions: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(path=path):
        distributions.setdefault(re.sub(r"[-_.]+", "-", _distribution_name(distribution)).lower(), distribution)
    entries = (entry for distribution in distributions.values() for entry in distribution.entry_points)
    return [entry for entry in entries if entry.group == group and name in (None, entry.name)]


def registered_names(group: str) -> list[str]:
    """Lists the names, sorted, that installed packages register as entry points of a group.

    Args:
        group: The group, such as `rlhf_zoo.rewards`.
    """
    return sorted({entry.name for entry in entry_points(group)})


def check_registered(name: str, *, group: str) -> None:
    """Checks that a name is "module:attribute" or a registered entry point. Imports nothing.

    Args:
        name: The name, with or without settings.
        group: The group of entry points.

    Raises:
        ZooError: No installed package registers the name.
    """
    bare_name = name.partition("(")[0].strip()
    names = registered_names(group)
    if ":" not in bare_name and bare_name not in names:
        choices = f"choose one of {', '.join(names)}, or " if names else ""
        hint = did_you_mean(bare_name, names) or f": {choices}write module:attribute."
        raise ZooError(f"No installed package registers {bare_name!r} under {group!r}{hint}")


def load_object(name: str, *, group: str) -> Any:
    """Loads the object that a name refers to.

    If a module is not installed, the working directory is searched too. Importing a module runs its code, so
    `name` must come from the user; a name from a download must first pass `runs.trusted_names.check_object`.

    Args:
        name: "module:attribute" (dots allowed on both sides), or an entry point of `group`. "NAME(key=value, …)" calls
            NAME if it is a class or a function, or copies NAME with these fields if it is an instance of a dataclass.
            Values are Python literals, which are parsed and never evaluated.
        group: The group of entry points.

    Raises:
        ZooError: Nothing has that name, it is registered for two objects, or the settings do not fit.
    """
    bare_name, settings = split_settings(name)
    module, attribute = _import_target_module(bare_name, group)
    target = _get_attribute(module, attribute, bare_name)
    return target if settings is None else _apply_settings(target, settings, name)


def split_settings(name: str) -> tuple[str, dict[str, Any] | None]:
    """Splits "NAME(key=value, …)" into the name and its settings. Imports nothing.

    Args:
        name: The name, with or without settings.

    Returns:
        (the name alone, its settings). The settings are None for a name without parentheses.

    Raises:
        ZooError: The parentheses contain anything but keywords with literals.
    """
    bare_name, parenthesis, arguments = name.partition("(")
    return (bare_name.strip(), _parse_settings(arguments, name)) if parenthesis else (name, None)


def _parse_settings(arguments: str, name: str) -> dict[str, Any]:
    """Parses what follows the opening parenthesis of `name` as keyword arguments."""
    message = (
        f"{name!r} is not a name with settings: write NAME(key=value, …), with quotes around all of it in a YAML or "
        "JSON list."
    )
    try:
        call = ast.parse(f"_({arguments.strip()}", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ZooError(message) from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ZooError(message)
    settings: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ZooError(message)
        if keyword.arg in settings:
            raise ZooError(f"{name!r} sets {keyword.arg} twice: remove one.")
        try:
            settings[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, MemoryError, RecursionError) as error:
            raise ZooError(
                f"{keyword.arg} in {name!r} is not a literal: write a number, a quoted string, True, False, None or a "
                "list of these."
            ) from error
    return settings


def _apply_settings(target: Any, settings: Mapping[str, Any], name: str) -> Any:
    """Copies an instance of a dataclass with the settings as fields, or calls any other object with them."""
    is_instance = dataclasses.is_dataclass(target) and not isinstance(target, type)
    if not is_instance and not callable(target):
        kind = type(target).__name__
        raise ZooError(f"{name!r} has settings, but an object of type {kind} takes none: remove them.")
    try:
        signature = inspect.signature(type(target) if is_instance else target)
    except ValueError as error:  # some callables written in C have no signature
        raise ZooError(f"{name!r} has settings, but the object has no signature: wrap it in a function.") from error
    takes_any_key = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for key in settings:
        if key not in signature.parameters and not takes_any_key:
            hint = did_you_mean(key, signature.parameters) or f": it takes {', '.join(signature.parameters) or 'none'}."
            raise ZooError(f"There is no setting {key!r} for {name!r}{hint}")
    if not is_instance:
        try:
            signature.bind(**settings)
        except TypeError as error:
            raise ZooError(f"The settings of {name!r} do not fit: {error}.") from error
    try:
        return dataclasses.replace(target, **settings) if is_instance else target(**settings)
    except ValueError as error:
        raise ZooError(f"The settings of {name!r} do not work: {error}") from error


def import_module_of(name: str, *, group: str) -> ModuleType:
    """Imports the module of the object that a name refers to, as `load_object` does.

    Args:
        name: A name without settings.
        group: The group of entry points.

    Raises:
        ZooError: Nothing has that name, or it is registered for two objects.
    """
    return _import_target_module(name, group)[0]


def _import_target_module(name: str, group: str) -> tuple[ModuleType, str]:
    """Imports the module of the object called `name`. Returns the module and the object's name there."""
    if ":" in name:
        module_name, _, attribute = name.partition(":")
        _add_working_directory(module_name)
        return _import_module(module_name, name, group=group), attribute
    check_registered(name, group=group)
    entries = entry_points(group, name)
    targets = {entry.value for entry in entries}
    if len(targets) > 1:
        raise ZooError(
            f"Installed packages register {name!r} under {group!r} more than once, as {' and '.join(sorted(targets))}: "
            "write the target that you mean instead of the name."
        )
    return _import_module(entries[0].module, name, group=group), entries[0].attr


def _add_working_directory(module_name: str) -> None:
    """Adds the working directory to Python's path if the module that a user named is there and nowhere else.

    Console scripts do not search that directory. Always adding it would be dangerous, because it may be a downloaded
    folder: libraries that try to import an optional `wandb` would import a `wandb.py` from there. The directory is
    added at the end of the path, so that it hides no installed package.
    """
    top, here = module_name.partition(".")[0], Path.cwd()
    if not top.isidentifier() or str(here) in sys.path or "" in sys.path:
        return
    if importlib.util.find_spec(top) is None and ((here / f"{top}.py").is_file() or (here / top).is_dir()):
        sys.path.append(str(here))
        importlib.invalidate_caches()


def _import_module(module_name: str, name: str, *, group: str) -> ModuleType:
    if not module_name or module_name.startswith("."):
        raise ZooError(f"{name!r} does not name a module: write module:attribute, e.g. my_rewards:length.")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            _, _, attribute = name.partition(":")
            if entry_points(group, attribute):  # such as rule:grammar, a form that only --judge accepts
                raise ZooError(f"{group} has no {name!r}: write only {attribute!r}.") from error
            suggestion = did_you_mean(missing, _sibling_modules(missing))
            hint = suggestion or f": install it, or put {missing}.py into this directory."
            raise ZooError(f"There is no module {missing!r}, which {name!r} names{hint}") from error
        raise ZooError(f"{name!r} needs the module {missing!r}, which is not installed: install it.") from error


def _sibling_modules(module_name: str) -> list[str]:
    """Lists the full names of the modules in a missing module's package, or of all top-level modules if it has none."""
    parent = module_name.rpartition(".")[0]
    paths = getattr(sys.modules[parent], "__path__", []) if parent else None
    prefix = f"{parent}." if parent else ""
    return [prefix + module.name for module in pkgutil.iter_modules(paths)]


def _get_attribute(module: ModuleType, path: str, name: str) -> Any:
    if not path:
        raise ZooError(f"{name!r} names no attribute: write module:attribute, e.g. my_rewards:length.")
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError as error:
        public = [key for key in vars(module) if not key.startswith("_")]
        hint = did_you_mean(path, public) or f": {module.__name__} has {', '.join(sorted(public)[:10]) or 'none'}."
        raise ZooError(f"There is no {path!r} in the module {module.__name__!r}{hint}") from error


def call_judge(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a judge's function, and converts its exceptions to ZooError.

    Args:
        name: The judge's name, for the error.
        function: The function.
        *arguments: Its arguments.

    Returns:
        What the function returns.

    Raises:
        ZooError: The function raises an exception.
    """
    try:
        return function(*arguments)
    except ZooError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ZooError(
            f"The judge {name!r} raised {type(error).__name__}{f' ({reason[:200]})' if reason else ''}: fix it."
        ) from error


def call_list_judge(name: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls a judge's function that returns a list, an array or another iterable.

    Args:
        name: The judge's name, for the error.
        function: The function.
        *arguments: Its arguments.

    Raises:
        ZooError: The function raises an exception, or returns a text, a mapping or a single value.
    """
    result = call_judge(name, function, *arguments)
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise ZooError(f"The judge {name!r} returned a {type(result).__name__}: it must return a list of numbers.")
    return list(result)
