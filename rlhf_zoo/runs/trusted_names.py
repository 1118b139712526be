"""Decides which names from a download, or from another user's run, may be imported.

Recipes, cards and run.json name Python objects: corpora, preferences, reward functions, judges. Importing an object
runs code. A name that the user wrote may be anything that Python can import. A name from outside may only be an entry
point that an installed package registers, or an attribute of this package that is listed here. Settings of a listed
attribute must not accept the name of an object, a path or an address; `tests/unit/test_payloads.py` tries them all.
Settings of other packages' entry points may hold only numbers, because nobody has checked what they do.
"""

import shlex
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ZooError
from ..hub.client.run_signature import TRUST_RUN_FLAG
from ..plugins import CORPORA, JUDGES, PREFERENCES, REWARDS, registered_names, split_settings

#: Group of code that loads reward models. No package can register such code: the user must allow each loader by name.
LOADERS = "rlhf_zoo.loaders"
_WORLD = "rlhf_zoo.runs.corpora.tiny_world_2"
_CORPORA = (
    "arguments", "instructions", "product_remarks", "remarks_count", "reviews", "tiny_sums", "tiny_world_2",
)  # fmt: skip
_VERIFIABLE = "rlhf_zoo.rewards.verifiable"
#: Attributes of this package that a name from outside may refer to, by group of entry points.
OWN_OBJECTS: Mapping[str, frozenset[str]] = {
    CORPORA: frozenset(f"rlhf_zoo.runs.corpora.{name}:prepare" for name in _CORPORA),
    PREFERENCES: frozenset([f"{_WORLD}:preference"]),
    REWARDS: frozenset(
        [
            f"{_WORLD}:gold",
            "rlhf_zoo.runs.corpora.remarks_count:item_count",
            "rlhf_zoo.runs.corpora.tiny_sums:anywhere",
            "rlhf_zoo.runs.corpora.tiny_sums:shows_work",
            *(f"rlhf_zoo.rewards.instructions:{name}" for name in ("instructions_followed", "InstructionsFollowed")),
            *(f"rlhf_zoo.rewards.prose:{name}" for name in ("grammar", "refuses", "vader")),
            *(f"rlhf_zoo.rewards.prose:{name}" for name in ("Grammar", "Refuses", "Vader")),
            *(f"{_VERIFIABLE}:{name}" for name in ("exact_match", "length", "numeric_match", "repetition")),
            *(f"{_VERIFIABLE}:{name}" for name in ("ExactMatch", "FormatMatch", "Length", "NumericMatch")),
            *(f"{_VERIFIABLE}:{name}" for name in ("Repetition", "SoftOverlong")),
        ]
    ),
    JUDGES: frozenset([f"{_WORLD}:judge", "rlhf_zoo.runs.corpora.remark_judge:learn"]),
}
#: Entry points of this package whose settings are harmless. `relevance` is not among them, because its setting `model`
#: may name any folder or repository; a download may use it only with its default settings.
OWN_ENTRIES = frozenset((
    "exact_match", "format_match", "grammar", "instructions_followed", "length", "numeric_match", "refuses",
    "repetition", "soft_overlong", "vader",
))  # fmt: skip


def may_import(name: str, group: str) -> bool:
    """Whether a name from outside may be imported. The check itself imports nothing.

    Args:
        name: "module:attribute" or the name of an entry point, optionally with settings in parentheses.
        group: The entry-point group that the key's names belong to.

    Returns:
        True for a name in `OWN_OBJECTS`, and for an entry point of an installed package, except that its settings may
        hold only numbers unless `OWN_ENTRIES` has the name. False for other and malformed names.
    """
    try:
        object_name, settings = split_settings(name)
    except ZooError:
        return False
    if object_name in OWN_OBJECTS.get(group, ()):
        return True
    if group == LOADERS or ":" in object_name or object_name not in registered_names(group):
        return False
    return (group == REWARDS and object_name in OWN_ENTRIES) or all(map(holds_only_numbers, (settings or {}).values()))


def holds_only_numbers(value: Any) -> bool:
    """Whether a value holds only numbers, booleans and nulls, at any depth, so that it cannot name code or files.

    Args:
        value: A value from outside, of any type.
    """
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and holds_only_numbers(item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(holds_only_numbers, value))
    return value is None or isinstance(value, bool | int | float)


def check_object(
    name: Any, group: str, *, key: str, where: str, flag: str, allowed_names: Collection[str] = ()
) -> None:
    """Refuses a name from outside that is neither known to be harmless nor allowed by the user.

    Args:
        name: "module:attribute" or the name of an entry point, optionally with settings; any other type is refused.
        group: The entry-point group that the key's names belong to.
        key: The key that holds the name.
        where: The file that holds the key, for the message.
        flag: The option that lets the user allow the name.
        allowed_names: Names that the user allowed by that option.

    Raises:
        ZooError: The name is refused.
    """
    text = name if isinstance(name, str) else repr(name)
    if text in allowed_names or (isinstance(name, str) and may_import(name, group)):
        return
    raise ZooError(
        f"{where} sets {key} to {text}, which may import code that is neither part of rlhf-zoo nor registered by an "
        "installed package: if you trust it, add "
        f"{flag if flag == TRUST_RUN_FLAG else f'{flag} {shlex.quote(text)}'}."
    )


def may_use_judge(name: str) -> bool:
    """Whether a judge whose name comes from outside may be used: it must neither import unknown code nor cost money.

    Args:
        name: The name, such as `rule:NAME`.
    """
    kind, colon, argument = name.partition(":")
    if not colon or kind not in ("reward", "rule", "llm", "pairs", "votes", "unlabeled"):
        return name in ("classifier", "same-labels") or may_import(name, JUDGES)
    if kind == "llm":  # calls an endpoint that the user pays for
        return False
    if kind in ("pairs", "unlabeled"):
        return may_import(argument, JUDGES)
    return kind != "rule" or may_import(argument, REWARDS)
