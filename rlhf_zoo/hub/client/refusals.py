"""Classifies the exceptions of the Hub's client (a refusal, an outage, a full disk) and describes them to users."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from ...errors import ZooError
from ...fileio import DISK_FULL_ERRNOS
from .bounds import MAX_WAIT_SECONDS, requested_wait

if TYPE_CHECKING:
    from .connect import Hub

log = logging.getLogger(__name__)

MAX_WAITS = 3  # in one call of `retry_when_rate_limited`
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0  # seconds, in `pause_after`
Result = TypeVar("Result")
_CLIENT_LIBRARIES = ("huggingface_hub", "datasets", "fsspec")


def client_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions by which huggingface_hub reports a failed request."""
    # `errors.HTTPError` belongs to the HTTP library that this version of huggingface_hub uses.
    from huggingface_hub import errors

    return (errors.HTTPError, errors.HFValidationError, OSError)


def is_malformed_answer(error: BaseException) -> bool:
    """Whether a client library probably failed because a response's JSON does not have the form that a Hub sends.

    Args:
        error: The exception, with its traceback.
    """
    if not isinstance(error, TypeError | KeyError | AttributeError | ValueError | IndexError):
        return False
    # The innermost frame tells whose code failed. A TypeError in rlhf-zoo's own code is a bug and must stay visible.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in _CLIENT_LIBRARIES


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an exception, or one of its causes, means that this machine's disk or a disk quota is full.

    Args:
        error: The exception. For None, the result is False.
    """
    visited_ids: set[int] = set()
    while error is not None and id(error) not in visited_ids:  # an exception can be its own cause
        visited_ids.add(id(error))
        # The exceptions of safetensors have no errno, but their text contains the code.
        codes_in_text = (code for code in DISK_FULL_ERRNOS if f"(os error {code})" in str(error))
        if getattr(error, "errno", None) in DISK_FULL_ERRNOS or any(codes_in_text):
            return True
        error = error.__cause__ or error.__context__
    return False


def reason(error: BaseException) -> str:
    """Returns a short phrase that says why a request failed.

    Args:
        error: The client's exception.

    Returns:
        A fixed phrase for a rate limit with a stated wait and for an invalid name. Otherwise the first line of the
        server's message, else of the exception's, else the name of its class; without a final period.
    """
    seconds, quota = _requested_wait(error)
    if status_of(error) == 429 and (seconds or quota):
        limit = f"the quota {quota!r} is used up" if quota else "too many requests"
        return f"{limit}, retry in {seconds:.0f} s"
    if type(error).__name__ == "HFValidationError":
        return "it is neither the name of a repository nor a folder here"
    message = getattr(error, "server_message", None) or str(error).strip() or type(error).__name__
    # Callers put this in parentheses within a sentence, so it must not contain the end of a sentence.
    return message.splitlines()[0].rstrip(".").replace(". ", "; ")


def retry_after(error: BaseException) -> float:
    """Returns the seconds that a server asks the client to wait, at most MAX_WAIT_SECONDS; 0 if it does not ask.

    Args:
        error: The client's exception.
    """
    return min(_requested_wait(error)[0], MAX_WAIT_SECONDS)


def _requested_wait(error: BaseException | None) -> tuple[float, str | None]:
    """Returns (seconds that the failed response asks the client to wait, name of the exhausted quota or None)."""
    headers = getattr(getattr(error, "response", None), "headers", None)
    return requested_wait(headers) if headers else (0.0, None)


def retry_when_rate_limited(call: Callable[[], Result], *, hub_name: str) -> Result:
    """Calls a function. If the Hub refuses because of a rate limit and states a wait, waits and calls it again.

    Args:
        call: The function. It reports a refusal as a ZooError whose `__cause__` is the client's error.
        hub_name: The Hub's name, for the log.

    Returns:
        The result of `call`.

    Raises:
        ZooError: The error of `call`: after MAX_WAITS waits; or at once if the Hub states no wait or one above
            MAX_WAIT_SECONDS, or refuses for another reason.
    """
    for _ in range(MAX_WAITS):
        try:
            return call()
        except ZooError as error:
            refusal = error.__cause__
            seconds, _ = _requested_wait(refusal)
            if refusal is None or status_of(refusal) != 429 or not 0 < seconds <= MAX_WAIT_SECONDS:
                raise
            log.warning("%s: %s. Waiting.", hub_name, reason(refusal))
            time.sleep(seconds)
    return call()


def pause_after(error: BaseException, failure_count: int) -> float:
    """Returns the seconds to wait: doubled after each failure up to MAX_PAUSE, but at least what the server asks for.

    Args:
        error: The last failure.
        failure_count: Number of failures in a row.
    """
    return max(min(FIRST_PAUSE * 2 ** min(failure_count - 1, 10), MAX_PAUSE), retry_after(error))


def status_of(error: BaseException | None) -> int | None:
    """Returns the HTTP status of an exception; None if no server answered.

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
def translate_hub_errors(failure: str, remedy: str) -> Iterator[None]:
    """Turns the client's exceptions inside the context into ZooError("FAILURE (reason): REMEDY").

    Args:
        failure: Start of the message, which says what failed.
        remedy: End of the message, which says what the user can do.

    Raises:
        ZooError: The client raised an error, or could not read the Hub's response.
        OSError: The disk is full.
    """
    try:
        yield
    except client_errors() as error:
        if is_disk_full(error):
            raise
        raise ZooError(f"{failure} ({reason(error)}): {remedy}") from error
    except Exception as error:
        if not is_malformed_answer(error):
            raise
        raise ZooError(f"{failure} (its answer is not a Hub's: {error!r:.200}): {remedy}") from error


@contextlib.contextmanager
def translate_lookup_errors(
    subject: str, hub: "Hub", remedy: str, *, repo: str | None = None, repo_type: str = "model"
) -> Iterator[None]:
    """Turns the client's exceptions into a ZooError while the context looks up a model or data set on a Hub.

    If the Hub cannot be reached, the message says so, and does not blame the name. If the embedded Hub has the
    repository, the message says so too.

    Args:
        subject: Start of the message, which names the model or data set.
        hub: The Hub.
        remedy: End of the message, which says what the user can do if the Hub does not have the repository.
        repo: NAMESPACE/NAME[@REVISION], to suggest `--source_hub local`; None if the command lacks that option.
        repo_type: "model" or "dataset".

    Raises:
        ZooError: The Hub does not have the repository, cannot be reached, or does not answer like a Hub.
        OSError: The disk is full.
    """
    try:
        with translate_hub_errors(f"{subject} cannot be found on {hub.name}", remedy):
            yield
    except ZooError as error:
        cause = error.__cause__
        if cause is None or not (is_outage(cause) or is_missing(cause)):
            raise
        if suggestion := _remedy_on_embedded_hub(hub, repo, repo_type):
            raise ZooError(f"{subject} cannot be found on {hub.address} ({reason(cause)}), {suggestion}") from cause
        if is_missing(cause):
            raise
        raise unreachable_error(hub, cause, f"so {subject[:1].lower()}{subject[1:]} cannot be looked up") from cause


def is_missing(error: BaseException) -> bool:
    """Whether a Hub answered that it has no such repository, or that this token may not see it.

    Args:
        error: The client's exception.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    # If a repository is missing, callers ask the next Hub. A gated one exists, so they must not.
    return isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)


def _remedy_on_embedded_hub(hub: "Hub", repo: str | None, *repo_types: str) -> str | None:
    """Returns a clause that points to the embedded Hub, if it has the repository and is not `hub`; otherwise None."""
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


def unreachable_error(hub: "Hub", cause: BaseException, consequence: str) -> ZooError:
    """Returns the error for a Hub that does not answer.

    Args:
        hub: The Hub.
        cause: The client's exception.
        consequence: What cannot be done, as a clause that continues the message.
    """
    name = "The embedded Hub" if hub.name == "the embedded Hub" else f"The Hub {hub.address}"
    remedy = "or pass --hub local" if hub.flag == "--hub" else "or name a folder"
    return ZooError(
        f"{name} cannot be reached ({reason(cause)}), {consequence}: check the network, HF_ENDPOINT and {hub.flag}, "
        f"{remedy}."
    )


def check_reachable(hub: "Hub", name: str) -> None:
    """Checks that a Hub answers. Callers do this before imports that take seconds.

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
        raise unreachable_error(hub, outage, f"so {name} cannot be looked up") from outage
