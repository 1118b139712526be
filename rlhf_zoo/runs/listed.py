"""Values that a flag lists, with commas between them."""

import math

from ..errors import ZooError


def listed_numbers(flag: str, listed: str, *, example: str) -> list[float]:
    """The numbers of "0,0.02,0.1", each once, in that order.

    Raises ZooError for what is no list of numbers that are not negative.
    """
    found: list[float] = []
    for one in listed.split(","):
        try:
            value = float(one)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise ZooError(f"{flag} lists {one.strip()!r}: give numbers that are not negative, such as {example}.")
        found.append(value)
    return list(dict.fromkeys(found))
