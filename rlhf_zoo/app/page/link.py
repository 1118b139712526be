"""Links to the page that contain prompt, sampling parameters and step, so that they show the same completions again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, urlencode

from ..engine import Snapshot
from .sampling import SamplingDefaults

MAX_LINK_LENGTH = 2000  # in characters; some programs cut off longer links


@dataclass(frozen=True)
class Link:
    """The content of a link. The page checks it like a visitor's input.

    Attributes:
        prompt: The prompt.
        sampling: Name of each sampling parameter in the link -> its value.
        step: The training step to show in the tab "Over training"; None for the tab "Side by side".
        run: The run that has the step; None for the run of the compared checkpoint.
        kl: "on" or "off" for the run with or without KL penalty; None for the compared checkpoint.
    """

    prompt: str
    sampling: Mapping[str, float]
    step: int | None = None
    run: str | None = None
    kl: str | None = None

    @classmethod
    def parse(cls, query: object) -> Link | None:
        """Reads the query of the page's address.

        Args:
            query: The query, with or without "?". It is not trusted.

        Returns:
            The link; None if the query has no prompt.
        """
        try:
            fields = parse_qs(str(query or "").removeprefix("?"), max_num_fields=32)
        except ValueError:  # more fields than max_num_fields
            return None
        texts = {name: values[-1] for name, values in fields.items()}
        if "prompt" not in texts:
            return None
        numbers = {name: _parse_number(texts.get(name)) for name in _DEFAULTS}
        sampling = {name: value for name, value in numbers.items() if value is not None}
        step = _parse_number(texts.get("step"))
        return cls(texts["prompt"], sampling, None if step is None else int(step), texts.get("run"), texts.get("kl"))


#: Name of a sampling parameter in a link -> its default. A link leaves out parameters that have their default. The seed
#: has no default, so every link contains it. The defaults of temperature and tokens come from `SamplingDefaults`.
_DEFAULTS: Mapping[str, float | None] = {
    "seed": None, "temperature": None, "top_p": 1.0, "tokens": None, "n": 1
}  # fmt: skip


def link_address(
    snapshot: Snapshot,
    defaults: SamplingDefaults,
    *,
    step: int | None = None,
    run: str | None = None,
    kl: str | None = None,
) -> str | None:
    """Returns the relative address of a link.

    Args:
        snapshot: The completions that the link shows.
        defaults: The page's initial sampling parameters.
        step: See `Link`.
        run: See `Link`.
        kl: See `Link`.

    Returns:
        The address; None if it would be longer than `MAX_LINK_LENGTH`, or if no address can hold the prompt.
    """
    link_defaults = {**_DEFAULTS, "temperature": defaults.temperature, "tokens": defaults.length}
    values = {
        "seed": snapshot.seed,
        "temperature": snapshot.temperature,
        "top_p": snapshot.top_p,
        "tokens": snapshot.max_new_tokens,
        "n": snapshot.n,
    }
    fields = {
        "prompt": snapshot.prompt,
        **{name: value for name, value in values.items() if value != link_defaults[name]},
    }
    fields |= {name: value for name, value in {"step": step, "run": run, "kl": kl}.items() if value is not None}
    try:
        address = f"?{urlencode(fields)}"
    except UnicodeEncodeError:  # the prompt has a lone surrogate, which no address can hold
        return None
    return address if len(address) <= MAX_LINK_LENGTH else None


def _parse_number(value: str | None) -> float | None:
    """Parses a number, as an int if it is whole; None for other text, and for numbers beyond ±1e15."""
    try:
        number = float(value or "")
    except ValueError:
        return None
    if not -1e15 < number < 1e15:  # also false for NaN
        return None
    return int(number) if number == int(number) else number
