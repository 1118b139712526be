"""Limits the page to the routes that Gradio's front end and the Gradio client use.

Gradio also serves routes that the page does not need: uploads and recordings, which fill the disk (a recording also
runs ffmpeg on a visitor's bytes), files, copies of a session's state, a proxy, traffic statistics, and an editor.
"""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from html import escape
from typing import Any
from urllib.parse import urlsplit

from gradio.route_utils import API_PREFIX
from starlette.exceptions import HTTPException

#: Served paths, with or without a trailing slash. Gradio itself requests startup-events when it launches.
PATHS = frozenset({"/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt"}) | {
    f"{API_PREFIX}/{name}"
    for name in ("app_id", "cancel", "info", "queue/data", "queue/join", "reset", "startup-events")
}
#: Prefixes of the other served paths: files of Gradio's package, and calls of functions by name.
PREFIXES = ("/assets/", "/static/", "/svelte/", *(f"{API_PREFIX}/{name}/" for name in ("call", "heartbeat", "run")))
#: Largest body of a request, in bytes. The longest prompt has 120,000 if every character is escaped.
MAX_BODY = 2**20

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def _is_served(path: str) -> bool:
    """Whether the page serves a path. The path is decoded and lacks a proxy's prefix."""
    return (path.rstrip("/") or "/") in PATHS or path.startswith(PREFIXES)


def _without_prefix(path: str, prefix: str) -> str:
    """Removes the prefix under which a proxy serves the page, if the path still has it."""
    return path.removeprefix(prefix) or "/" if f"{path}/".startswith(f"{prefix}/") else path


class ServedRoutes:
    """ASGI middleware that answers 404 to paths that are not served, and 413 to bodies over MAX_BODY.

    Args:
        app: The application that answers the other requests.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one connection, as ASGI calls an application.

        Args:
            scope: The scope of the connection.
            receive: Returns the next message of the client.
            send: Sends a message to the client.
        """
        # Gradio's root_path may be a URL or end with a slash. Starlette would then not recognize it in a path.
        prefix = urlsplit(scope.get("root_path", "")).path.rstrip("/")
        scope = {**scope, "root_path": prefix}
        if scope["type"] == "http" and not _is_served(_without_prefix(scope["path"], prefix)):
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 404, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"detail":"Not Found"}'})
            return
        received_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > MAX_BODY:
                raise HTTPException(413)
            return message

        await self._app(scope, receive_bounded, send)


# Gradio's page begins with Gradio's own description and a picture on another host. Programs use the first description.
_DESCRIPTION = re.compile(rb'<meta\s+(?:property="og:|name="(?:twitter:|description"))[^>]*>\s*')


class LinkPreview:
    """ASGI middleware that replaces Gradio's description in the page's head element.

    Chat programs and search engines show the description beside a link to the page.

    Args:
        app: The application that answers requests.
        title: Title of the page.
        description: What the page shows, in a sentence or two.
    """

    def __init__(self, app: Application, title: str, description: str) -> None:
        self._app = app
        values = {
            "og:title": title, "og:description": description, "og:type": "website", "twitter:card": "summary",
            "twitter:title": title, "twitter:description": description, "description": description,
        }  # fmt: skip
        self._tags = "".join(
            f'<meta {"property" if name.startswith("og:") else "name"}="{name}" content="{escape(value)}" />'
            for name, value in values.items()
        ).encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one connection, as ASGI calls an application.

        Args:
            scope: The scope of the connection.
            receive: Returns the next message of the client.
            send: Sends a message to the client.
        """
        if scope["type"] != "http" or _without_prefix(scope["path"], scope["root_path"]) != "/":
            await self._app(scope, receive, send)
            return
        start_message: Message = {}
        body = b""

        async def send_with_description(message: Message) -> None:
            nonlocal start_message, body
            if message["type"] == "http.response.start":
                start_message = message
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            described_body = self._replace_description(body)
            length = (b"content-length", str(len(described_body)).encode())
            headers = [
                length if name.lower() == b"content-length" else (name, value)
                for name, value in start_message["headers"]
            ]
            await send({**start_message, "headers": headers})
            await send({"type": "http.response.body", "body": described_body})

        await self._app(scope, receive, send_with_description)

    def _replace_description(self, page: bytes) -> bytes:
        """Replaces the description before the first script. The page after it is unchanged."""
        head, script, content = page.partition(b"<script")
        charset = b'<meta charset="utf-8" />'
        if charset not in head:  # not Gradio's page, such as a redirect
            return page
        return _DESCRIPTION.sub(b"", head).replace(charset, charset + self._tags, 1) + script + content
