"""The Retry-After header of HTTP."""

import email.utils
import re
import time


def seconds_to_wait(value: str | None) -> float | None:
    """Reads a Retry-After header.

    Args:
        value: A number of seconds, possibly with a fraction, or a date. None if the answer has no such header.

    Returns:
        Seconds from now, at least 0; None if the header holds neither.
    """
    if value is None:
        return None
    try:
        # RFC 9110 allows whole seconds only, but some servers send fractions.
        if re.fullmatch(r"\d+(\.\d+)?", value.strip()):
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
