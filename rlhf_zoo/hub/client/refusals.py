"""What is raised when a Hub refuses or does not answer, or the disk is full, and how to say it to a user."""

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ...errors import ZooError
from .bounds import LONGEST_WAIT, wait_asked

log = logging.getLogger(__name__)

WAITS = 3
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
T = TypeVar("T")
_CLIENTS = ("huggingface_hub", "datasets", "fsspec")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def client_errors() -> tuple[type[Exception], ...]:
    """Every exception by which the client says that a request failed, whichever HTTP library it is built on."""
    from huggingface_hub import errors

    return (errors.HTTPError, errors.HFValidationError, OSError)


def is_misread(error: BaseException) -> bool:
    """Whether a client stumbled over what a Hub answered: JSON of another shape than a Hub gives."""
    if not isinstance(error, TypeError | KeyError | AttributeError | ValueError | IndexError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in _CLIENTS


def is_disk_full(error: BaseException | None) -> bool:
    """Whether this machine's disk (or a quota) is to blame, and no Hub, by an exception or what caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # `raise error from error` is its own cause
        seen.add(id(error))
        # safetensors raises an exception of its own, with the system's words in it.
        if getattr(error, "errno", None) in FULL or any(f"(os error {code})" in str(error) for code in FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def reason(error: BaseException) -> str:
    """Why, in a few words: what the server answered, else the first line of the exception, else its name."""
    if status_of(error) == 429 and any(asked := _asked(error)):
        seconds, quota = asked
        limit = f"the quota {quota!r} is used up" if quota else "too many requests"
        return f"{limit}, ask again in {seconds:.0f} s"
    if type(error).__name__ == "HFValidationError":
        return "no repository is called so, and no such folder is here"
    answer = getattr(error, "server_message", None) or str(error).strip() or type(error).__name__
    return answer.splitlines()[0].rstrip(".").replace(". ", "; ")


def retry_after(error: BaseException) -> float:
    """Seconds that a server asked to wait before the next try, at most LONGEST_WAIT; 0 where it did not say."""
    return min(_asked(error)[0], LONGEST_WAIT)


def _asked(error: BaseException | None) -> tuple[float, str | None]:
    """(the seconds that an answer asks to wait, the quota that is used up)."""
    headers = getattr(getattr(error, "response", None), "headers", None)
    return wait_asked(headers) if headers else (0.0, None)


def after_waiting(call: Callable[[], T], *, hub: str) -> T:
    """What `call` returns. Where a Hub limits the rate of requests, it is called again once the Hub's wait is over.

    Args:
        call: Raises a ZooError, whose cause is the client's error.
        hub: The Hub's name, for the line that says what is waited for.

    Raises:
        ZooError: As `call`; also after WAITS waits, and at once where the Hub asks for more than LONGEST_WAIT.
    """
    for _ in range(WAITS):
        try:
            return call()
        except ZooError as error:
            refusal = error.__cause__
            seconds, _ = _asked(refusal)
            if refusal is None or status_of(refusal) != 429 or not 0 < seconds <= LONGEST_WAIT:
                raise
            log.warning("%s: %s. Waiting.", hub, reason(refusal))
            time.sleep(seconds)
    return call()


def pause_after(error: BaseException, failures: int) -> float:
    """Seconds until the next try after so many failures in a row: doubling, unless the server asks for more."""
    return max(min(FIRST_PAUSE * 2 ** min(failures - 1, 10), LONGEST_PAUSE), retry_after(error))


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status that a Hub refused with; None where no Hub answered."""
    return getattr(getattr(error, "response", None), "status_code", None)


def is_silence(error: BaseException) -> bool:
    """Whether a Hub gave no answer, rather than a refusal."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return (status_of(error) or 500) >= 500
    return isinstance(error, HTTPError | OfflineModeIsEnabled)


@contextlib.contextmanager
def refusals_as(what: str, mend: str) -> Iterator[None]:
    """Raises ZooError "WHAT (reason): MEND" for what the client raises inside; a full disk stays an OSError."""
    try:
        yield
    except client_errors() as error:
        if is_disk_full(error):
            raise
        raise ZooError(f"{what} ({reason(error)}): {mend}") from error
    except Exception as error:
        if not is_misread(error):
            raise
        raise ZooError(f"{what} (it answers what no Hub does: {error!r:.200}): {mend}") from error
