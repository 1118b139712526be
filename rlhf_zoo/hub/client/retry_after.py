"""Parses HTTP's Retry-After header."""

import email.utils
import re
import time


def seconds_to_wait(header: str | None) -> float | None:
    """Returns how long a Retry-After header asks the client to wait.

    Args:
        header: The value of the header: a number of seconds, possibly with a fraction, or a date. None if there is no
            such header.

    Returns:
        Seconds from now, at least 0; None if there is no header, or if it has neither form.
    """
    if header is None:
        return None
    try:
        # RFC 9110 allows whole seconds only, but some servers send fractions.
        if re.fullmatch(r"\d+(\.\d+)?", header.strip()):
            return float(header)
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
