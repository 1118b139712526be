"""Classifies exceptions of the Hub's client (a refusal, an outage, a full disk), and describes them to users."""

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from ...errors import ZooError
from .bounds import MAX_WAIT_SECONDS, requested_wait

if TYPE_CHECKING:
    from .connect import Hub

log = logging.getLogger(__name__)

MAX_WAITS = 3  # in one call of `after_waiting`
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0  # in seconds, of `pause_after`
Result = TypeVar("Result")
_CLIENT_LIBRARIES = ("huggingface_hub", "datasets", "fsspec")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def client_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions by which huggingface_hub reports a failed request."""
    # `errors.HTTPError` belongs to the HTTP library that this version of huggingface_hub uses.
    from huggingface_hub import errors

    return (errors.HTTPError, errors.HFValidationError, OSError)


def is_misread(error: BaseException) -> bool:
    """Whether a client library failed on a response whose JSON is not what a Hub sends.

    Args:
        error: The exception, with its traceback.
    """
    if not isinstance(error, TypeError | KeyError | AttributeError | ValueError | IndexError):
        return False
    # The innermost frame tells whose code failed. A TypeError in our own code is a defect and must stay visible.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in _CLIENT_LIBRARIES


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an exception, or one of its causes, means that the disk or a disk quota of this machine is full.

    Args:
        error: The exception; None counts as no.
    """
    visited: set[int] = set()
    while error is not None and id(error) not in visited:  # an exception can be its own cause
        visited.add(id(error))
        # safetensors raises exceptions without errno, which have the code in their text.
        if getattr(error, "errno", None) in DISK_FULL or any(f"(os error {code})" in str(error) for code in DISK_FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def reason(error: BaseException) -> str:
    """Returns in a few words why a request failed.

    Args:
        error: The client's exception.

    Returns:
        The server's message, else the first line of the exception, else the name of its class; without a final period.
    """
    if status_of(error) == 429 and any(rate_limit := _requested_wait(error)):
        seconds, quota = rate_limit
        limit = f"the quota {quota!r} is used up" if quota else "too many requests"
        return f"{limit}, retry in {seconds:.0f} s"
    if type(error).__name__ == "HFValidationError":
        return "it is neither the name of a repository nor a folder here"
    message = getattr(error, "server_message", None) or str(error).strip() or type(error).__name__
    # Callers put this into parentheses within a sentence, so it must not end with a period.
    return message.splitlines()[0].rstrip(".").replace(". ", "; ")


def retry_after(error: BaseException) -> float:
    """Returns the seconds that a server asks the client to wait, at most MAX_WAIT_SECONDS; 0 if it does not ask.

    Args:
        error: The client's exception.
    """
    return min(_requested_wait(error)[0], MAX_WAIT_SECONDS)


def _requested_wait(error: BaseException | None) -> tuple[float, str | None]:
    """(seconds that the response asks the client to wait, name of the exhausted quota)."""
    headers = getattr(getattr(error, "response", None), "headers", None)
    return requested_wait(headers) if headers else (0.0, None)


def after_waiting(call: Callable[[], Result], *, hub: str) -> Result:
    """Calls a function. If a Hub's rate limit refuses the call, waits as long as the Hub asks, and repeats it.

    Args:
        call: The function. It reports a refusal by a ZooError whose `__cause__` is the client's error.
        hub: The Hub's name, for the log.

    Returns:
        The result of `call`.

    Raises:
        ZooError: The one that `call` raised: after MAX_WAITS waits, or at once if the Hub asks for more than
            MAX_WAIT_SECONDS or refuses for another reason.
    """
    for _ in range(MAX_WAITS):
        try:
            return call()
        except ZooError as error:
            refusal = error.__cause__
            seconds, _ = _requested_wait(refusal)
            if refusal is None or status_of(refusal) != 429 or not 0 < seconds <= MAX_WAIT_SECONDS:
                raise
            log.warning("%s: %s. Waiting.", hub, reason(refusal))
            time.sleep(seconds)
    return call()


def pause_after(error: BaseException, failures: int) -> float:
    """Returns the seconds until the next attempt: doubled after each failure, or more if the server asks for more.

    Args:
        error: The last failure.
        failures: Number of failures in a row.
    """
    return max(min(FIRST_PAUSE * 2 ** min(failures - 1, 10), MAX_PAUSE), retry_after(error))


def status_of(error: BaseException | None) -> int | None:
    """Returns the HTTP status of an exception; None if no Hub answered.

    Args:
        error: The client's exception.
    """
    return getattr(getattr(error, "response", None), "status_code", None)


def is_outage(error: BaseException) -> bool:
    """Whether a Hub did not answer, as opposed to refusing the request.

    Args:
        error: The client's exception.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        # 5xx often comes from a proxy in front of a Hub that is down.
        return (status_of(error) or 500) >= 500
    return isinstance(error, HTTPError | OfflineModeIsEnabled)


@contextlib.contextmanager
def refusals_as(failure: str, remedy: str) -> Iterator[None]:
    """Turns exceptions of the client inside the context into ZooError("FAILURE (reason): REMEDY").

    Args:
        failure: What failed; begins the message.
        remedy: What the user can do; ends the message.

    Raises:
        ZooError: The client raised an error, or failed on the Hub's response.
        OSError: The disk is full.
    """
    try:
        yield
    except client_errors() as error:
        if is_disk_full(error):
            raise
        raise ZooError(f"{failure} ({reason(error)}): {remedy}") from error
    except Exception as error:
        if not is_misread(error):
            raise
        raise ZooError(f"{failure} (its answer is not a Hub's: {error!r:.200}): {remedy}") from error


@contextlib.contextmanager
def lookup(
    subject: str, hub: "Hub", remedy: str, *, repo: str | None = None, repo_type: str = "model"
) -> Iterator[None]:
    """Turns exceptions of the client while it looks for something on a Hub into a ZooError.

    A Hub that cannot be reached is reported as that, and not as a mistake in the name. If the embedded Hub has the
    repository, the message says so.

    Args:
        subject: What is looked for; begins the message.
        hub: The Hub.
        remedy: What the user can do if the Hub does not have it; ends the message.
        repo: NAMESPACE/NAME[@REVISION] of the repository, if the command has --source_hub; otherwise None.
        repo_type: "model" or "dataset".

    Raises:
        ZooError: The Hub does not have it, cannot be reached, or does not answer like a Hub.
        OSError: The disk is full.
    """
    try:
        with refusals_as(f"{subject} cannot be found on {hub.name}", remedy):
            yield
    except ZooError as error:
        cause = error.__cause__
        if cause is None or not (is_outage(cause) or is_missing(cause)):
            raise
        if remedy_here := _remedy_on_embedded_hub(hub, repo, repo_type):
            raise ZooError(f"{subject} cannot be found on {hub.address} ({reason(cause)}), {remedy_here}") from cause
        if is_missing(cause):
            raise
        raise unreachable(hub, cause, f"so {subject[:1].lower()}{subject[1:]} cannot be looked up") from cause


def is_missing(error: BaseException) -> bool:
    """Whether a Hub answered that it has no such repository, or none that this token may know of.

    Args:
        error: The client's exception.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    # A gated repository exists, and a repository of the same name on another Hub could differ from it.
    return isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)


def _remedy_on_embedded_hub(hub: "Hub", repo: str | None, *repo_types: str) -> str | None:
    """Returns the end of a message for a repository that the embedded Hub has and `hub` does not; None otherwise."""
    from ...fileio import home
    from ..server.faults import Fault
    from ..server.names import parse_repo_id
    from ..server.storage import repository_folder
    from .connect import SOURCE_FLAG

    if repo is None or hub.name == "the embedded Hub":
        return None
    namespace, _, name = repo.partition("@")[0].partition("/")
    try:
        folders = [repository_folder(home() / "hub", parse_repo_id(kind, namespace, name)) for kind in repo_types]
    except Fault:  # a name that no Hub allows
        return None
    is_there = any(folder.is_dir() for folder in folders)
    return f"but it is on the embedded Hub: add {SOURCE_FLAG} local." if is_there else None


def unreachable(hub: "Hub", cause: BaseException, consequence: str) -> ZooError:
    """Returns the error for a Hub that does not answer.

    Args:
        hub: The Hub.
        cause: The client's exception.
        consequence: What cannot be done, as the rest of a sentence.
    """
    name = "The embedded Hub" if hub.name == "the embedded Hub" else f"The Hub {hub.address}"
    remedy = "or pass --hub local" if hub.flag == "--hub" else "or name a folder"
    return ZooError(
        f"{name} cannot be reached ({reason(cause)}), {consequence}: check the network, HF_ENDPOINT and {hub.flag}, "
        f"{remedy}."
    )


def check_reachable(hub: "Hub", name: str) -> None:
    """Asks a Hub whether it answers, before imports that take seconds.

    Args:
        hub: The Hub.
        name: The model or data set that will be looked up there.

    Raises:
        ZooError: The Hub cannot be reached.
    """
    outage = hub.outage()
    if outage is not None:
        if remedy := _remedy_on_embedded_hub(hub, name, "model", "dataset"):
            raise ZooError(f"{name} cannot be looked up on {hub.address} ({reason(outage)}), {remedy}") from outage
        raise unreachable(hub, outage, f"so {name} cannot be looked up") from outage
