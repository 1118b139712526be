"""Bounds on what a Hub may cost us: how long it makes us wait, how many pages it lists, how much it sends as JSON.

huggingface_hub obeys any Retry-After in whole seconds, follows every next page and reads an answer to its end, so a Hub
that means harm, or is broken, could keep a command waiting for ever. Every request of its client passes here.
"""

import functools
import json
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .retry_after import seconds_to_wait

#: The longest wait that a Hub may ask for, in seconds; also for an answer, or between two parts of it.
LONGEST_WAIT = 600.0
CONNECT_SECONDS = 30.0
#: Pages of one list. The Hub lists up to 1,000 entries a page.
MOST_PAGES = 1_000
#: Bytes of one JSON answer, and of one that comes compressed, which may be a thousand times as long when it is read.
MOST_JSON = 64 * 2**20
MOST_COMPRESSED = 8 * 2**20

_lists = threading.local()


def install() -> None:
    """Makes huggingface_hub's client, and all that uses it (transformers, datasets), obey these bounds."""
    from huggingface_hub import set_client_factory

    set_client_factory(_bounded_client)


def wait_asked(headers: Any) -> tuple[float, str | None]:
    """How long an answer asks to wait.

    Args:
        headers: Of the answer, a mapping.

    Returns:
        Seconds, 0 where it does not say, and the quota that is used up, where it names one (the headers RateLimit of
        the Hub).
    """
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    quota = parse_ratelimit_headers(headers)
    if quota is not None and quota.remaining == 0:
        return float(quota.reset_in_seconds), str(quota.resource_type)
    value = next((headers[name] for name in headers if name.lower() == "retry-after"), None)
    return seconds_to_wait(value) or 0.0, None


def _bounded_client() -> Any:
    from huggingface_hub.utils._http import default_client_factory

    client: Any = default_client_factory()
    client.timeout = type(client.timeout)(LONGEST_WAIT, connect=CONNECT_SECONDS)
    hooks = client.event_hooks
    client.event_hooks = {**hooks, "response": [*hooks["response"], _check]}
    return client


def _check(response: Any) -> None:
    """Raises HfHubHTTPError, which every caller turns into a sentence, for an answer beyond a bound."""
    from huggingface_hub.errors import HfHubHTTPError

    if response.status_code >= 400:
        seconds, _ = wait_asked(response.headers)
        if seconds > LONGEST_WAIT:
            raise HfHubHTTPError(
                f"it answers {response.status_code} and asks to wait for {seconds:.0f} s", response=response
            )
        if seconds and "Retry-After" in response.headers:  # the client reads whole seconds alone
            response.headers["Retry-After"] = str(math.ceil(seconds))
    next_page = (response.links.get("next") or {}).get("url")
    # A request for the page that the last answer of this thread named is of the same list.
    page = _lists.page + 1 if str(response.request.url) == getattr(_lists, "next", None) else 1
    _lists.next, _lists.page = next_page and str(response.request.url.join(next_page)), page
    if next_page and page >= MOST_PAGES:
        raise HfHubHTTPError(f"its list of {response.request.url.path} has over {MOST_PAGES} pages", response=response)
    if "json" in response.headers.get("Content-Type", ""):
        response.stream = _bounded(response)
    response.json = functools.partial(_json, response, response.json)


@functools.cache
def _not_json() -> type[Exception]:
    """What is raised for an answer that is no JSON: an error of the connection, as no Hub answered."""
    from httpx2 import DecodingError

    class NotJSON(DecodingError, json.JSONDecodeError):  # the client catches the second where it can do without
        def __init__(self, message: str) -> None:
            json.JSONDecodeError.__init__(self, message, "", 0)
            self.args = (message,)

        def __str__(self) -> str:
            return str(self.args[0])

    return NotJSON


def _json(response: Any, read: Callable[..., Any], **how: Any) -> Any:
    """The answer's JSON. Raises HTTPError for what is none: the page of a proxy or a login, or one nested too deep."""
    path = response.request.url.path
    try:
        return read(**how)
    except RecursionError as error:
        raise _not_json()(f"its answer to {path} is JSON that is nested too deep") from error
    except ValueError as error:
        kind = response.headers.get("Content-Type", "").partition(";")[0] or "nothing"
        told = f"says that it is {kind}" if "json" in kind else f"is {kind}"
        raise _not_json()(
            f"its answer to {path} {told} and is no JSON, as a login page or a proxy in between gives"
        ) from error


def _bounded(response: Any) -> Any:
    """The bytes of a JSON answer as they come, up to a bound."""
    from httpx2 import SyncByteStream
    from huggingface_hub.errors import HfHubHTTPError

    class Bounded(SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            left = MOST_COMPRESSED if response.headers.get("Content-Encoding") else MOST_JSON
            for part in stream:
                left -= len(part)
                if left < 0:
                    raise HfHubHTTPError(f"its answer to {response.request.url.path} does not end", response=response)
                yield part

        def close(self) -> None:
            stream.close()

    stream = response.stream
    return Bounded()
