"""Limits how long a Hub can make a client wait, how many pages of a list it can send, and how much JSON.

huggingface_hub obeys any Retry-After in whole seconds, follows every next page and reads each response in full, so a
broken or malicious Hub could keep a command waiting forever. Once `install` has run, these limits apply to every
request that huggingface_hub makes.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from .retry_after import seconds_to_wait

if TYPE_CHECKING:
    from httpx2 import Client, Response, SyncByteStream

#: Maximum seconds that a client waits: when a Hub asks it to, for the start of a response, and between its parts.
MAX_WAIT_SECONDS = 600.0
MAX_CONNECT_SECONDS = 30.0
#: Maximum number of pages in one list. The Hub puts up to 1,000 entries on a page.
MAX_PAGES = 1_000
#: Maximum bytes of a JSON response, and of a compressed one, which can grow a thousandfold when it is unpacked.
MAX_JSON_BYTES = 64 * 2**20
MAX_COMPRESSED_BYTES = 8 * 2**20

# For each thread, which page of a list it has read (`page`), and the address of the next page (`next_address`).
_current_list = threading.local()


def install() -> None:
    """Applies these limits to every request of huggingface_hub, including those for transformers and datasets."""
    from huggingface_hub import set_client_factory

    set_client_factory(_bounded_client)


def requested_wait(headers: Mapping[str, str]) -> tuple[float, str | None]:
    """Reads how long a response asks the client to wait.

    Args:
        headers: The response's headers. The case of their names does not matter.

    Returns:
        (seconds, quota): the seconds to wait, 0 if the response does not say; and the name of the exhausted quota in
        the Hub's RateLimit headers, or None.
    """
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    quota = parse_ratelimit_headers(headers)
    if quota is not None and quota.remaining == 0:
        return float(quota.reset_in_seconds), str(quota.resource_type)
    # Callers may pass a plain dict, where lookups are case-sensitive.
    retry_after = next((headers[name] for name in headers if name.lower() == "retry-after"), None)
    return seconds_to_wait(retry_after) or 0.0, None


def _bounded_client() -> Client:
    from httpx2 import Timeout
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    client.timeout = Timeout(MAX_WAIT_SECONDS, connect=MAX_CONNECT_SECONDS)
    hooks = client.event_hooks
    client.event_hooks = {**hooks, "response": [*hooks["response"], _limit_response]}
    return client


def _limit_response(response: Response) -> None:
    """Checks a response's headers against the limits. If it is JSON, also limits its content as it is read.

    Raises HfHubHTTPError if a response exceeds a limit, because every caller reports that error as one sentence.
    """
    from huggingface_hub.errors import HfHubHTTPError

    if response.status_code >= 400:
        seconds, _ = requested_wait(response.headers)
        if seconds > MAX_WAIT_SECONDS:
            raise HfHubHTTPError(
                f"it answers {response.status_code} and asks for a wait of {seconds:.0f} s", response=response
            )
        # huggingface_hub reads whole seconds only. Wait at least 1: this clock may be ahead of the header's date.
        if "Retry-After" in response.headers:
            response.headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    next_address = (response.links.get("next") or {}).get("url")
    # If this thread requests the page that its last response named, it is still reading the same list.
    is_same_list = str(response.request.url) == getattr(_current_list, "next_address", None)
    _current_list.page = _current_list.page + 1 if is_same_list else 1
    _current_list.next_address = next_address and str(response.request.url.join(next_address))
    if next_address and _current_list.page >= MAX_PAGES:
        raise HfHubHTTPError(f"its list of {response.request.url.path} has over {MAX_PAGES} pages", response=response)
    if "json" in response.headers.get("Content-Type", ""):
        response.stream = _limited_stream(response)
    response.json = functools.partial(_parse_json, response, response.json)  # type: ignore[method-assign]


@functools.cache
def _not_json_error() -> type[Exception]:
    """Returns the exception class for a response that is not JSON. `is_outage` is true of it: no Hub answered."""
    from httpx2 import DecodingError

    # It is also a JSONDecodeError, which huggingface_hub catches where it does not need the response.
    class NotJSON(DecodingError, json.JSONDecodeError):
        def __init__(self, message: str) -> None:
            json.JSONDecodeError.__init__(self, message, "", 0)
            self.args = (message,)  # without the ": line 1 column 1 (char 0)" that JSONDecodeError appends

        def __str__(self) -> str:
            return str(self.args[0])

    return NotJSON


def _parse_json(response: Response, parse: Callable[..., Any], **options: Any) -> Any:
    """Parses a response's JSON. Raises NotJSON if it is not JSON, such as a login page, or is nested too deeply."""
    path = response.request.url.path
    try:
        return parse(**options)
    except RecursionError as error:
        raise _not_json_error()(f"its answer to {path} is JSON that is nested too deeply") from error
    except ValueError as error:
        content_type = response.headers.get("Content-Type", "").partition(";")[0] or "nothing"
        description = f"claims to be {content_type}" if "json" in content_type else f"is {content_type}"
        raise _not_json_error()(
            f"its answer to {path} {description} but is not JSON; it may come from a login page or a proxy"
        ) from error


def _limited_stream(response: Response) -> SyncByteStream:
    """Returns the response's stream of bytes with a limit. It raises HfHubHTTPError once more bytes arrive."""
    from httpx2 import SyncByteStream
    from huggingface_hub.errors import HfHubHTTPError

    stream = cast("SyncByteStream", response.stream)  # the client is synchronous

    class LimitedStream(SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            # The stream may be compressed, and the client unpacks it later, so compressed bytes have a lower limit.
            remaining_bytes = MAX_COMPRESSED_BYTES if response.headers.get("Content-Encoding") else MAX_JSON_BYTES
            for piece in stream:
                remaining_bytes -= len(piece)
                if remaining_bytes < 0:
                    raise HfHubHTTPError(f"its answer to {response.request.url.path} is too large", response=response)
                yield piece

        def close(self) -> None:
            stream.close()

    return LimitedStream()
