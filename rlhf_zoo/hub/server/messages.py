"""The requests that the API's handlers get, and the responses that they return. A request's body is streamed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from io import BufferedIOBase
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlencode

from .faults import Fault, bad_request, forbidden

#: Maximum bytes of a body without the contents of files, such as the description of a new repository.
SMALL_BODY = 2**20
_CHUNK_BYTES = 2**20
_MAX_LINE_BYTES = 16 * 2**20
_MAX_DRAIN_BYTES = 8 * 2**20
_MAX_TRAILERS = 32
# Maximum digits of a whole number. 18 digits fit into 64 bits, and Python takes quadratic time for very long numbers.
_MAX_DIGITS = 18
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_Value = TypeVar("_Value")
_Item = TypeVar("_Item")


class Body:
    """A request's body, plain or chunked. It is read once, in pieces of at most 1 MiB.

    Args:
        stream: The connection, at the start of the body.
        headers: Headers of the request.

    Raises:
        Fault: 400 if the headers do not say unambiguously where the body ends.
    """

    def __init__(self, stream: BufferedIOBase, headers: Message[str, str]) -> None:
        self._stream = stream
        self.limit = 0  # bytes that may be read: none until the route sets it
        # Bytes to read and drop after a refusal, for clients that read the answer only after they have sent the body.
        self.drain_limit = _MAX_DRAIN_BYTES
        # Two different lengths would let a request hide inside another request (request smuggling).
        codings, lengths = headers.get_all("Transfer-Encoding", []), headers.get_all("Content-Length", [])
        self.is_chunked = bool(codings)
        if self.is_chunked and (lengths or [coding.strip().lower() for coding in codings] != ["chunked"]):
            raise bad_request("A body must have either one Content-Length or the Transfer-Encoding chunked.")
        if len(lengths) > 1 or not all(re.fullmatch(r"[0-9]{1,18}", length.strip()) for length in lengths):
            raise bad_request("The Content-Length header is not a single number.")
        self.length = None if self.is_chunked else int(lengths[0] if lengths else 0)
        self._remaining_bytes = self.length or 0  # bytes of the body, or of the current chunk
        self._received_bytes = 0
        self._has_ended = not self.is_chunked and self._remaining_bytes == 0
        self._has_timed_out = False

    def pieces(self) -> Iterator[memoryview]:
        """Yields the body in pieces. They share a buffer, so each piece is valid only until the next is requested.

        Raises:
            Fault: 413 if the body exceeds the limit, 408 if the sender is too slow.
            ConnectionError: The connection ended before the body did, or a chunk is malformed.
        """
        refusal = Fault(413, f"The request's body is larger than {self.limit} bytes.")
        if (self.length or 0) > self.limit:  # refuse without reading
            raise refusal
        for piece in self._unlimited_pieces():
            if self._received_bytes > self.limit:
                raise refusal
            yield piece

    def _unlimited_pieces(self) -> Iterator[memoryview]:
        try:
            yield from self._read_pieces()
        except TimeoutError as error:
            self._has_timed_out = True
            raise Fault(408, "The request's body arrives too slowly; send it again.") from error

    def _read_pieces(self) -> Iterator[memoryview]:
        # All pieces share a buffer, so that a body of gigabytes needs no more memory.
        view = memoryview(bytearray(_CHUNK_BYTES if self.is_chunked else min(self._remaining_bytes, _CHUNK_BYTES)))
        while not self._has_ended:
            if self._remaining_bytes == 0 and not self._begin_chunk():
                return
            count = self._stream.readinto(view[: self._remaining_bytes])
            if not count:
                raise ConnectionError("the sender closed the connection in the middle of a body")
            self._remaining_bytes -= count
            self._received_bytes += count
            if self._remaining_bytes == 0:
                if not self.is_chunked:
                    self._has_ended = True
                elif self._stream.readline(3) != b"\r\n":
                    raise ConnectionError("a chunk of the body is longer than its size")
            yield view[:count]

    def _begin_chunk(self) -> bool:
        """Reads the size of the next chunk. Returns False for the last chunk, which is empty."""
        size = self._stream.readline(256).split(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", size):
            raise ConnectionError("a chunk of the body has no size")
        self._remaining_bytes = int(size, 16)
        if self._remaining_bytes == 0:
            for _ in range(_MAX_TRAILERS):
                if self._stream.readline(65536) in (b"\r\n", b"\n", b""):
                    break
            else:
                raise ConnectionError("the body has too many trailers")
            self._has_ended = True
        return self._remaining_bytes > 0

    def allow(self, size: int) -> None:
        """Sets the limit to `size` bytes. Called once the sender has proved that it may send them.

        Also lets `drain` drop as many more bytes after a refusal.

        Args:
            size: Bytes that the sender may send.
        """
        self.limit, self.drain_limit = size, _MAX_DRAIN_BYTES + size

    def read(self) -> bytes:
        """Returns the whole body. Raises the same exceptions as `pieces`."""
        content = bytearray()
        for piece in self.pieces():
            content += piece
        return bytes(content)

    def lines(self) -> Iterator[bytes]:
        """Yields the body's lines without their newlines. Raises Fault 413 for a line above 16 MiB."""
        line = bytearray()  # as far as it has arrived
        for piece in self.pieces():
            line += piece
            # Search only the new piece; otherwise a long line would be searched again with each piece.
            if line.find(b"\n", len(line) - len(piece)) >= 0:
                *lines, tail = bytes(line).split(b"\n")
                yield from lines
                line = bytearray(tail)
            if len(line) > _MAX_LINE_BYTES:
                raise Fault(
                    413, f"A line of the commit has more than {_MAX_LINE_BYTES} bytes; such a file belongs to LFS."
                )
        if line:
            yield bytes(line)

    def drain(self) -> bool:
        """Reads and drops the rest of the body, up to `drain_limit` bytes, so that the connection can be reused.

        Returns:
            False if the end was not reached, so that the connection must be closed.
        """
        if self._has_timed_out or (not self.is_chunked and self._remaining_bytes > self.drain_limit):
            return False
        end = self._received_bytes + self.drain_limit
        try:
            return all(self._received_bytes <= end for _ in self._unlimited_pieces())
        except Fault:  # too slow; the answer is still sent before the connection closes
            return False


@dataclass(frozen=True)
class Request:
    """A request.

    Args:
        method: GET, POST and so on.
        path: The raw path, percent-encoded.
        query: The parameters in the query.
        headers: The headers.
        body: The body, unread.
        role: "read" or "write"; None without a token.
        base_url: The address that the client used for this server, for links in answers.
    """

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Message[str, str]
    body: Body
    role: str | None
    base_url: str

    def value(self, name: str) -> str | None:
        """Returns the last value of a query parameter; None if it is missing.

        Args:
            name: Name of the parameter.
        """
        values = self.query.get(name) or self.query.get(f"{name}[]")
        return values[-1] if values else None

    def values(self, name: str) -> list[str]:
        """Returns all values of a query parameter, which may be written `name` or `name[]`.

        Args:
            name: Name of the parameter.
        """
        return [*self.query.get(name, []), *self.query.get(f"{name}[]", [])]

    def flag(self, name: str) -> bool:
        """Whether a query parameter is "true", in any case, or "1".

        Args:
            name: Name of the parameter.
        """
        return (self.value(name) or "").lower() in ("true", "1")

    def number(self, name: str, default: int, *, maximum: int) -> int:
        """Reads a query parameter that is a whole number of at least 1.

        Args:
            name: Name of the parameter.
            default: The result if the parameter is missing.
            maximum: The result for any larger value.

        Raises:
            Fault: 400 for anything but a whole number of at least 1.
        """
        value = self.value(name)
        if value is None:
            return default
        if not re.fullmatch(r"\d{1,9}", value) or int(value) < 1:
            raise bad_request(f"The query parameter {name}={value[:40]} must be a whole number of at least 1.")
        return min(int(value), maximum)

    def next_page_header(self, path: str, cursor: int | None = None) -> dict[str, str]:
        """Returns the Link header that names the next page.

        Args:
            path: Path of the next page.
            cursor: Query parameter `cursor` of the next page; None to keep this request's cursor.
        """
        fields: dict[str, object] = {**self.query}
        if cursor is not None:
            fields["cursor"] = cursor
        return {"Link": f'<{self.base_url}{path}?{urlencode(fields, doseq=True)}>; rel="next"'}

    def page(self, items: list[_Item], max_size: int, path: str | None = None) -> tuple[list[_Item], dict[str, str]]:
        """Selects the page of a list that the query parameters `limit` and `cursor` ask for.

        Args:
            items: All items.
            max_size: Maximum number of items on a page.
            path: Path of the next page; None for this request's path.

        Returns:
            The items of the page, and headers with the link to the next page.
        """
        size = self.number("limit", max_size, maximum=max_size)
        start = self.number("cursor", 1, maximum=10**9) - 1
        end = start + size
        headers = self.next_page_header(path or self.path, cursor=end + 1) if len(items) > end else {}
        return items[start:end], headers

    def json(self) -> dict[str, Any]:
        """Returns the body as a JSON object; empty for an empty body. Raises Fault 400 for anything else."""
        try:
            value = parse_plain_json(self.body.read() or b"{}")
        except ValueError as error:
            raise bad_request(f"The request's body is not JSON: {error}.") from error
        if not isinstance(value, dict):
            raise bad_request("The request's body must be a JSON object.")
        return value

    def form(self) -> dict[str, list[str]]:
        """Returns name -> values of the body, a form or a JSON object. Raises Fault 400 for anything else."""
        # huggingface_hub sends a form for some calls and JSON for others.
        if "json" in self.headers.get("Content-Type", ""):
            return {
                name: [str(item) for item in value] if isinstance(value, list) else [str(value)]
                for name, value in self.json().items()
            }
        try:
            fields = self.body.read().decode()
            return parse_qs(fields, keep_blank_values=True, max_num_fields=5000)
        except ValueError as error:
            raise bad_request("The request's body is not a form.") from error

    def require_write(self) -> None:
        """Raises Fault 401 without a token, and Fault 403 for a token that may only read."""
        if self.role is None:
            raise Fault(401, "This needs a write token: set HF_TOKEN to one made by `rlhf-zoo hub token --role write`.")
        if self.role != "write":
            raise forbidden("Your token may only read: make another with `rlhf-zoo hub token --role write`")

    def require_token(self) -> None:
        """Raises Fault 401 without a token."""
        if self.role is None:
            raise Fault(401, "This needs a token: set HF_TOKEN to one made by `rlhf-zoo hub token --role read`.")


@dataclass(frozen=True)
class FilePart:
    """`count` bytes of a file, starting at `offset`. The kernel sends them without a copy in Python."""

    path: Path
    offset: int
    count: int


@dataclass(frozen=True)
class Response:
    """An answer: status, headers and content."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes | FilePart = b""

    @property
    def length(self) -> int:
        return self.content.count if isinstance(self.content, FilePart) else len(self.content)


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with a JSON value.

    Args:
        value: The JSON value.
        status: HTTP status.
        headers: Additional headers.
    """
    content = json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()
    return Response(status, {"Content-Type": "application/json; charset=utf-8", **(headers or {})}, content)


def parse_plain_json(raw: bytes) -> Any:
    """Parses JSON, and checks that its strings can be stored as UTF-8 and its numbers are finite.

    Args:
        raw: UTF-8 text.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or contains a lone surrogate, NaN, an infinity or a
            whole number with too many digits.
    """
    try:
        text = raw.decode()
        value = json.loads(text, parse_int=_parse_integer, parse_float=_parse_finite, parse_constant=_parse_finite)
        # Only an escape can produce a lone surrogate, so most documents skip this expensive check.
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it contains half a character (a lone surrogate)") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _parse_integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"it holds a number of more than {_MAX_DIGITS} digits")
    return int(digits)


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it holds the number {text[:40]}, which JSON does not have")
    return number


def member(fields: Mapping[str, object], key: str, expected_type: type[_Value]) -> _Value | None:
    """Returns a member of a JSON object.

    Args:
        fields: The object.
        key: The member's key.
        expected_type: The type that the value must have.

    Returns:
        The value; None if the member is absent or null.

    Raises:
        Fault: 400 for a value of any other type.
    """
    value = fields.get(key)
    if value is not None and not isinstance(value, expected_type):
        raise bad_request(f"'{key}' must be a {_TYPE_NAMES[expected_type]}; it is {value!r:.80}.")
    return value


_TYPE_NAMES: dict[type, str] = {str: "string", int: "whole number", list: "list", dict: "JSON object"}


def object_list(fields: Mapping[str, object], key: str, *, max_count: int) -> list[dict[str, Any]]:
    """Returns a member of a JSON object that is a list of JSON objects.

    Args:
        fields: The object.
        key: The member's key.
        max_count: Maximum number of entries in the list.

    Returns:
        The list; empty if the member is absent or null.

    Raises:
        Fault: 400 for any other value.
    """
    values = member(fields, key, list) or []
    if len(values) > max_count:
        raise bad_request(f"'{key}' holds {len(values)} entries; send at most {max_count} at once.")
    for value in values:
        if not isinstance(value, dict):
            raise bad_request(f"'{key}' must hold JSON objects; one entry is {value!r:.80}.")
    return values


def bearer_token(header: str) -> str | None:
    """Returns the token of an Authorization header; None for a scheme other than Bearer.

    Args:
        header: The Authorization header.
    """
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None
