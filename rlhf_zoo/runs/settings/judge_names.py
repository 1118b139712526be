"""Parses and checks the names of judges, without importing anything."""

import difflib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ...errors import ZooError
from ...plugins import JUDGES, REWARDS, check_registered, did_you_mean, registered_names

SAME_LABELS = "same-labels"
KINDS = ("reward", "rule", "llm", "pairs", "votes", "unlabeled")


def split_judge_name(name: str) -> tuple[str, str]:
    """Splits a judge's name into kind and argument.

    Args:
        name: The name, such as `reward:MODEL`, `classifier` or `module:function`.

    Returns:
        (kind, argument). The kind of `module:function` and of registered names is "function".

    Raises:
        ZooError: The argument is empty.
    """
    if name in ("classifier", SAME_LABELS):
        return name, ""
    kind, colon, argument = name.partition(":")
    if not colon or kind not in KINDS:
        return "function", name
    if not argument:
        raise ZooError(f"The judge {name!r} names nothing after its colon: write {kind}:NAME.")
    return kind, argument


def check_judge_name(name: str, *, words: Sequence[str] = ()) -> None:
    """Checks a judge's name without importing anything, so that a typo is reported at once.

    MODULE:FUNCTION passes even if there is no such module, unless MODULE looks like a misspelled kind of judge.

    Args:
        name: The name, as in the recipe.
        words: Words that are allowed instead of a judge's name.

    Raises:
        ZooError: There is no such judge, kind of judge or registered reward function. The message suggests the closest
            name.
    """
    judge_kind, argument = split_judge_name(name)
    if judge_kind == "rule":
        check_registered(argument, group=REWARDS)
    if judge_kind != "function":
        return
    judges = [*words, "classifier", SAME_LABELS, *registered_names(JUDGES)]
    if ":" not in name and name.partition("(")[0].strip() not in judges:
        suggestion = (
            did_you_mean(name, judges)
            or f": write {', '.join([*words, 'classifier', 'KIND:NAME'])} or MODULE:FUNCTION, where KIND is "
            f"{', '.join(KINDS[:-1])} or {KINDS[-1]}."
        )
        raise ZooError(f"There is no judge {name!r}{suggestion}")
    kind, colon, target = name.partition(":")
    close_kinds = difflib.get_close_matches(kind, KINDS, n=1) if colon and kind.isidentifier() else []
    local_modules = (Path(kind), Path(f"{kind}.py"))
    if close_kinds and not any(path.exists() for path in local_modules) and importlib.util.find_spec(kind) is None:
        raise ZooError(
            f"There is no kind of judge {kind!r} and no module of that name, did you mean '{close_kinds[0]}:{target}'?"
        )
