"""What the name of a judge says, by its words alone."""

import difflib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ...errors import ZooError
from ...plugins import JUDGES, REWARDS, check_word, did_you_mean, registered

SAME_LABELS = "same-labels"
KINDS = ("reward", "rule", "llm", "pairs", "votes", "unlabeled")


def kind_of(name: str) -> tuple[str, str]:
    """(kind, argument) of a judge's name."""
    if name in ("classifier", SAME_LABELS):
        return name, ""
    kind, colon, argument = name.partition(":")
    if not colon or kind not in KINDS:
        return "function", name
    if not argument:
        raise ZooError(f"The judge {name!r} names nothing after its colon: write {kind}:NAME.")
    return kind, argument


def check_judge_name(name: str, *, also: Sequence[str] = ()) -> None:
    """Raises ZooError for a word that is no judge's and no module's, with the one that may be meant.

    It imports nothing, so that this is said at once. also: other words that may stand there.
    """
    meant, argument = kind_of(name)
    if meant == "rule":
        check_word(argument, group=REWARDS)
    if meant != "function":
        return
    known = [*also, "classifier", SAME_LABELS, *registered(JUDGES)]
    if ":" not in name and name.partition("(")[0].strip() not in known:
        near = (
            did_you_mean(name, known) or f": write {', '.join([*also, 'classifier', 'KIND:NAME'])} or MODULE:FUNCTION."
        )
        raise ZooError(f"There is no judge {name!r}{near}")
    kind, colon, rest = name.partition(":")
    alike = difflib.get_close_matches(kind, KINDS, n=1) if colon and kind.isidentifier() else []
    here = (Path(kind), Path(f"{kind}.py"))
    if alike and not any(path.exists() for path in here) and importlib.util.find_spec(kind) is None:
        raise ZooError(
            f"There is no kind of judge {kind!r} and no module of that name, did you mean '{alike[0]}:{rest}'?"
        )
