"""Limits what a Hub can cost a client: waiting time, pages of a list, bytes of JSON.

huggingface_hub obeys any Retry-After in whole seconds, follows every next page and reads each answer to its end. A
broken or malicious Hub could keep a command waiting forever. Every request of the client passes through this module.
"""

import functools
import json
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .retry_after import seconds_to_wait

#: Longest wait in seconds: what a Hub may ask for, until an answer starts, and between two parts of an answer.
LONGEST_WAIT = 600.0
CONNECT_SECONDS = 30.0
#: Pages of one list. The Hub lists up to 1,000 entries a page.
MOST_PAGES = 1_000
#: Bytes of one JSON answer, and of a compressed one, which can grow a thousandfold when it is unpacked.
MOST_JSON = 64 * 2**20
MOST_COMPRESSED = 8 * 2**20

# Counts the pages of the list that each thread is reading.
_lists = threading.local()


def install() -> None:
    """Applies these limits to huggingface_hub's client, and so to transformers and datasets."""
    from huggingface_hub import set_client_factory

    set_client_factory(_bounded_client)


def requested_wait(headers: Any) -> tuple[float, str | None]:
    """Reads how long an answer asks the client to wait.

    Args:
        headers: The answer's headers, a mapping.

    Returns:
        The seconds to wait, 0 if the answer does not say, and the name of the exhausted quota from the Hub's RateLimit
        headers, or None.
    """
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    quota = parse_ratelimit_headers(headers)
    if quota is not None and quota.remaining == 0:
        return float(quota.reset_in_seconds), str(quota.resource_type)
    # Plain dictionaries come here too, and they tell upper case from lower case.
    value = next((headers[name] for name in headers if name.lower() == "retry-after"), None)
    return seconds_to_wait(value) or 0.0, None


def _bounded_client() -> Any:
    from huggingface_hub.utils._http import default_client_factory

    client: Any = default_client_factory()
    # The class of the timeout is the HTTP library's, which differs between versions of huggingface_hub.
    client.timeout = type(client.timeout)(LONGEST_WAIT, connect=CONNECT_SECONDS)
    hooks = client.event_hooks
    client.event_hooks = {**hooks, "response": [*hooks["response"], _check]}
    return client


def _check(response: Any) -> None:
    """Raises HfHubHTTPError for an answer beyond a limit. Every caller reports that error as one sentence."""
    from huggingface_hub.errors import HfHubHTTPError

    if response.status_code >= 400:
        seconds, _ = requested_wait(response.headers)
        if seconds > LONGEST_WAIT:
            raise HfHubHTTPError(
                f"it answers {response.status_code} and asks for a wait of {seconds:.0f} s", response=response
            )
        if (
            "Retry-After" in response.headers
        ):  # the client reads whole seconds only, and a clock may run ahead of a date
            response.headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    next_page = (response.links.get("next") or {}).get("url")
    # If this thread requests the page that its last answer named, it is still reading the same list.
    page = _lists.page + 1 if str(response.request.url) == getattr(_lists, "next", None) else 1
    _lists.next, _lists.page = next_page and str(response.request.url.join(next_page)), page
    if next_page and page >= MOST_PAGES:
        raise HfHubHTTPError(f"its list of {response.request.url.path} has over {MOST_PAGES} pages", response=response)
    if "json" in response.headers.get("Content-Type", ""):
        response.stream = _bounded(response)
    response.json = functools.partial(_json, response, response.json)


@functools.cache
def _not_json() -> type[Exception]:
    """The exception for an answer that is not JSON. It counts as a connection error, because no Hub answered."""
    from httpx2 import DecodingError

    # The client catches JSONDecodeError wherever it can do without the answer.
    class NotJSON(DecodingError, json.JSONDecodeError):
        def __init__(self, message: str) -> None:
            json.JSONDecodeError.__init__(self, message, "", 0)
            self.args = (message,)  # without the ": line 1 column 1 (char 0)" that JSONDecodeError appends

        def __str__(self) -> str:
            return str(self.args[0])

    return NotJSON


def _json(response: Any, read: Callable[..., Any], **options: Any) -> Any:
    """The answer's JSON. Raises HTTPError if it is a proxy's or login page instead, or JSON nested too deep."""
    path = response.request.url.path
    try:
        return read(**options)
    except RecursionError as error:
        raise _not_json()(f"its answer to {path} is JSON that is nested too deep") from error
    except ValueError as error:
        kind = response.headers.get("Content-Type", "").partition(";")[0] or "nothing"
        description = f"claims to be {kind}" if "json" in kind else f"is {kind}"
        raise _not_json()(
            f"its answer to {path} {description} but is not JSON; it may come from a login page or a proxy"
        ) from error


def _bounded(response: Any) -> Any:
    """A stream of the answer's bytes that raises HfHubHTTPError once there are too many."""
    from httpx2 import SyncByteStream
    from huggingface_hub.errors import HfHubHTTPError

    class Bounded(SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            # These are the bytes on the wire. The client unpacks them later, so compressed ones have a lower limit.
            left = MOST_COMPRESSED if response.headers.get("Content-Encoding") else MOST_JSON
            for part in stream:
                left -= len(part)
                if left < 0:
                    raise HfHubHTTPError(f"its answer to {response.request.url.path} is too large", response=response)
                yield part

        def close(self) -> None:
            stream.close()

    stream = response.stream
    return Bounded()
