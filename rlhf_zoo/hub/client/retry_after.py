"""The Retry-After header of HTTP."""

import email.utils
import re
import time


def seconds_to_wait(value: str | None) -> float | None:
    """Reads a Retry-After header.

    Args:
        value: Seconds, also with a fraction, or a date. None where the answer has no such header.

    Returns:
        Seconds from now, at least 0; None where the header says neither.
    """
    if value is None:
        return None
    try:
        if re.fullmatch(r"\d+(\.\d+)?", value.strip()):
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
