"""Reads the Retry-After header of HTTP."""

import email.utils
import re
import time


def seconds_to_wait(value: str | None) -> float | None:
    """Returns how long a Retry-After header asks the client to wait.

    Args:
        value: The header's value: a number of seconds, possibly with a fraction, or a date. None without the header.

    Returns:
        Seconds from now, at least 0; None if the header has neither form.
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
