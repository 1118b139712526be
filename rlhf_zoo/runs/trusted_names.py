"""What a name that came from outside, in a download or a run of somebody else's, may stand for: data, never code.

Recipes, cards and run.json name Python objects: corpora, preferences, reward functions, judges. A name of the user's
own may be anything that Python can import, and importing runs it. A name from outside resolves only to what an
installed package registers as an entry point, or to the attributes of this package that are listed here. None of the
listed ones takes the name of an object, a path or an address, whatever settings stand in its parentheses: whoever adds
one answers for that, and `tests/unit/test_payloads.py` tries each. What a package registers is not known so well, so
its settings may hold numbers alone.
"""

import shlex
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ZooError
from ..hub.client.run_signature import FLAG as TRUST_RUN
from ..plugins import CORPORA, JUDGES, PREFERENCES, REWARDS, registered, split_settings

#: For code that loads a reward model, which no package registers: the user must allow each by its name.
LOADERS = "rlhf_zoo.loaders"
_WORLD = "rlhf_zoo.runs.corpora.tiny_world_2"
_VERIFIABLE = "rlhf_zoo.rewards.verifiable"
#: This package's own attributes that a name from outside may stand for, by the group of entry points.
OWN: Mapping[str, frozenset[str]] = {
    CORPORA: frozenset(
        f"rlhf_zoo.runs.corpora.{name}:prepare"
        for name in ("arguments", "product_remarks", "remarks_count", "tiny_sums", "tiny_world_2")
    ),
    PREFERENCES: frozenset([f"{_WORLD}:preference"]),
    REWARDS: frozenset(
        [
            f"{_WORLD}:gold",
            "rlhf_zoo.runs.corpora.remarks_count:item_count",
            "rlhf_zoo.runs.corpora.tiny_sums:anywhere",
            "rlhf_zoo.runs.corpora.tiny_sums:shows_work",
            *(f"{_VERIFIABLE}:{name}" for name in ("exact_match", "length", "numeric_match", "repetition")),
            *(f"{_VERIFIABLE}:{name}" for name in ("ExactMatch", "FormatMatch", "Length", "NumericMatch")),
            *(f"{_VERIFIABLE}:{name}" for name in ("Repetition", "SoftOverlong")),
        ]
    ),
    JUDGES: frozenset([f"{_WORLD}:judge", "rlhf_zoo.runs.corpora.remark_judge:learn"]),
}
#: Entry points of this package, whose settings are known as those of `OWN` are.
OWN_ENTRIES = frozenset({"exact_match", "format_match", "length", "numeric_match", "repetition", "soft_overlong"})


def is_vouched(name: str, group: str) -> bool:
    """Whether a name from outside may be imported: it is one of `OWN`, or an installed package registers it.

    Args:
        name: "module:attribute" or an entry point's name, each also with settings in parentheses.
        group: the group of entry points that its key takes names of.

    Returns:
        False also for what is no name at all. Nothing is imported to find out.
    """
    try:
        bare, settings = split_settings(name)
    except ZooError:
        return False
    if bare in OWN.get(group, ()):
        return True
    if group == LOADERS or ":" in bare or bare not in registered(group):
        return False
    return (group == REWARDS and bare in OWN_ENTRIES) or all(map(is_figure, (settings or {}).values()))


def is_figure(value: Any) -> bool:
    """Whether a value holds numbers, truth values and nulls alone, also in lists and mappings: nothing that names."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_figure(item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_figure, value))
    return value is None or isinstance(value, bool | int | float)


def check_object(name: Any, group: str, *, key: str, where: str, flag: str, allowed: Collection[str] = ()) -> None:
    """Refuses a name from outside that nobody vouches for.

    Args:
        name: as `is_vouched` takes it.
        group: as `is_vouched` takes it.
        key: of the settings, that holds it.
        where: what holds the settings, for the message.
        flag: the option by which the user may allow it.
        allowed: what the user allowed by it.

    Raises:
        ZooError: for a name that is neither vouched for nor allowed.
    """
    text = name if isinstance(name, str) else repr(name)
    if text in allowed or (isinstance(name, str) and is_vouched(name, group)):
        return
    raise ZooError(
        f"{where} takes its {key} from {text}, which is neither rlhf-zoo's own nor registered by an installed package, "
        "or has settings that may name code, and no code that a download names is imported unasked: add "
        f"{flag if flag == TRUST_RUN else f'{flag} {shlex.quote(text)}'} if you trust it."
    )


def is_vouched_judge(name: str) -> bool:
    """Whether a judge's name from outside may be obeyed: it imports nothing unvouched and spends no money."""
    kind, colon, argument = name.partition(":")
    if not colon or kind not in ("reward", "rule", "llm", "pairs", "votes", "unlabeled"):
        return name in ("classifier", "same-labels") or is_vouched(name, JUDGES)
    if kind == "llm":  # asks an endpoint that the user pays for
        return False
    if kind in ("pairs", "unlabeled"):
        return is_vouched(argument, JUDGES)
    return kind != "rule" or is_vouched(argument, REWARDS)
