"""What is raised when a Hub refuses or does not answer, or the disk is full, and how to say it to a user."""

import contextlib
import errno
from collections.abc import Iterator

from ..errors import ZooError

LONGEST_WAIT = 600.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def client_errors() -> tuple[type[Exception], ...]:
    """Every exception by which the client says that a request failed, whichever HTTP library it is built on."""
    from huggingface_hub import errors

    return (errors.HTTPError, errors.HFValidationError, OSError)


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
    if type(error).__name__ == "HFValidationError":
        return "no repository is called so, and no such folder is here"
    answer = getattr(error, "server_message", None) or str(error).strip() or type(error).__name__
    return answer.splitlines()[0].rstrip(".").replace(". ", "; ")


def retry_after(error: BaseException) -> float:
    """Seconds that a server asked to wait before the next try; 0 where it did not say."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    seconds = str(headers.get("Retry-After", "")).strip()
    return min(float(seconds), LONGEST_WAIT) if seconds.isdigit() else 0.0


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
