"""Finds the handler for a path.

Patterns match the percent-encoded path, and each segment is decoded afterwards: a branch `exp/a` arrives as `exp%2Fa`
and stays one segment.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlencode

from .faults import Damaged, Fault, bad_request, repo_not_found
from .messages import Request, Response, json_response
from .names import KINDS, RepoId, parse_repo_id

Handler = Callable[..., Response]
_KIND_BY_PLURAL = {plural: kind for kind, plural in KINDS.items()}
# The segments that may follow a repository's id in an address of the API or of a page.
_ACTIONS = "revision|tree|refs|resolve|commits?|preupload|paths-info|branch|tag|settings|discussions|auth-check"


@dataclass(frozen=True)
class _Route:
    """A route. `max_body` is the size in bytes of the largest body that the handler reads."""

    method: str
    pattern: re.Pattern[str]
    handler: Handler
    max_body: int


class Router:
    """Calls the handler whose pattern matches. Routes are tried in the order in which they were added.

    In a pattern, `{name}` is one segment and `{path*}` is the rest, which may be empty. `{repo}` is
    `KIND/NAMESPACE/NAME`, `{space}` is the same for Spaces only, and `{page}` is the same in the addresses of pages,
    where models have no KIND. The handler gets `{repo}`, `{space}` and `{page}` as `repo`, a RepoId.

    Args:
        exists: Returns whether a repository exists.
        current_name: Returns the current name of a renamed repository; None if it was not renamed.
    """

    def __init__(
        self, exists: Callable[[RepoId], bool], current_name: Callable[[Request, RepoId], RepoId | None]
    ) -> None:
        self._exists, self._current_name = exists, current_name
        self._routes: list[_Route] = []

    def add(self, methods: str, pattern: str, handler: Handler, *, max_body: int = 0) -> None:
        """Adds a route.

        Args:
            methods: HTTP methods, separated by spaces.
            pattern: The pattern of the address, as the class describes it.
            handler: Called with the request, and with the variable parts of the address as keywords.
            max_body: Maximum size of the body in bytes. A larger body is refused with 413.
        """
        kind = rf"(?P<repo_kind>{'|'.join(_KIND_BY_PLURAL)})/"
        repo = r"(?P<repo_namespace>[^/]+)/(?P<repo_name>[^/]+?)"
        source = pattern.replace(".", r"\.")
        source = source.replace("{repo}", kind + repo).replace("{page}", f"(?:{kind})?{repo}")
        source = source.replace("{space}", f"(?P<repo_kind>spaces)/{repo}")
        source = re.sub(r"/\{(\w+)\*\}", r"(?:/(?P<\1>.*))?", source)
        source = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", source)
        for method in methods.split():
            self._routes.append(_Route(method, re.compile(source), handler, max_body))

    def dispatch(self, request: Request) -> Response:
        """Finds the handler and calls it.

        Args:
            request: The request.

        Returns:
            The handler's answer, or a redirect to the new name of a repository.

        Raises:
            Fault: 404 if no route has this address, 405 if only routes for other methods have it; or the handler's own.
        """
        allowed_methods = set()
        for route in self._routes:
            match = route.pattern.fullmatch(request.path)
            # Pages share the root with the API, so without this check /api/x would be a page of the namespace "api".
            if not match or (request.path.startswith("/api/") and not route.pattern.pattern.startswith("/api/")):
                continue
            if route.method == request.method or (route.method == "GET" and request.method == "HEAD"):
                parts = _parse_parts(match)
                return self._redirect(route, request, match, parts) or self._call(route, request, parts)
            allowed_methods.add(route.method)
        if allowed_methods:
            methods = ", ".join(sorted(allowed_methods))
            raise Fault(405, f"{request.method} is not possible here, only {methods}.", headers={"Allow": methods})
        # Ids without a namespace ("gpt2") are valid on the real Hub, but no repository here has one.
        bare_name = re.fullmatch(
            rf"/(?:api/(?:{'|'.join(_KIND_BY_PLURAL)})/)?([^/]+)(?:/(?:{_ACTIONS})(?:/.*)?)?", request.path
        )
        if bare_name and bare_name[1] != "api":
            raise repo_not_found(_decode_segment(bare_name[1]), is_anonymous=request.role is None)
        raise Fault(404, "The embedded Hub has no such address; it serves models, datasets, Spaces and collections.")

    def _redirect(
        self, route: _Route, request: Request, match: re.Match[str], parts: dict[str, Any]
    ) -> Response | None:
        """Returns a redirect (307) to this address under the repository's new name; None if it was not renamed."""
        repo = parts.get("repo")
        # Addresses that begin with "_" are signed for a repository under a single name.
        if repo is None or request.path.startswith("/_") or self._exists(repo):
            return None
        target = self._current_name(request, repo)
        if target is None:
            return None
        if request.role == "write":
            request.body.allow(route.max_body)  # read the rest of the body, so that the sender sees the answer
        start, end = match.start("repo_namespace"), match.end("repo_name")
        query = f"?{urlencode(request.query, doseq=True)}" if request.query else ""
        location = f"{request.path[:start]}{target}{request.path[end:]}{query}"
        return json_response({"url": location}, status=307, headers={"Location": location})

    def _call(self, route: _Route, request: Request, parts: dict[str, Any]) -> Response:
        request.body.limit = route.max_body
        try:
            return route.handler(request, **parts)
        except (FileNotFoundError, Damaged):
            repo = parts.get("repo")
            if repo is None or self._exists(repo):
                raise
            # The repository was deleted or moved while the request was in progress.
            raise repo_not_found(repo, is_anonymous=request.role is None) from None


def _parse_parts(match: re.Match[str]) -> dict[str, Any]:
    """Returns the keywords for a route's handler."""
    parts: dict[str, Any] = {key: _decode_segment(value or "") for key, value in match.groupdict().items()}
    if "repo_name" in parts:
        kind = _KIND_BY_PLURAL.get(parts.pop("repo_kind"), "model")
        parts["repo"] = parse_repo_id(kind, parts.pop("repo_namespace"), parts.pop("repo_name"))
    return parts


def _decode_segment(segment: str) -> str:
    """Decodes the percent-encoding of one segment of a path."""
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError as error:
        raise bad_request("The request's path is not UTF-8.") from error
