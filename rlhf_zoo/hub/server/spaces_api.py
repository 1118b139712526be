"""Stores, describes and configures Spaces. Nothing here runs them."""

import re
from functools import partial

from .access import Api
from .describe import stopped_runtime
from .faults import Fault, bad_request
from .messages import SMALL_BODY, Request, Response, json_response, member
from .names import RepoId
from .routing import Router
from .storage import now


class SpacesApi(Api):
    """The runtime, variables and secrets of Spaces."""

    def register(self, router: Router) -> None:
        router.add("GET", "/api/{space}/runtime", self._runtime)
        for action in ("restart", "pause"):
            router.add("POST", f"/api/{{space}}/{action}", partial(self._runtime, needs_write=True))
        for action in ("hardware", "sleeptime", "dev-mode", "volumes"):
            router.add("POST PUT DELETE", f"/api/{{space}}/{action}", partial(self._refuse, action=action))
        for kind in ("variables", "secrets"):
            router.add("GET", f"/api/{{space}}/{kind}", partial(self._get, kind=kind))
            router.add("POST", f"/api/{{space}}/{kind}", partial(self._put, kind=kind), max_body=SMALL_BODY)
            router.add("DELETE", f"/api/{{space}}/{kind}", partial(self._remove, kind=kind), max_body=SMALL_BODY)

    def _runtime(self, request: Request, repo: RepoId, needs_write: bool = False) -> Response:
        """Answers that the Space is stopped, with the reason."""
        # Restart and pause succeed without effect, so that a script that publishes a Space does not fail.
        (self._access.require_write if needs_write else self._access.require_read)(request, repo)
        return json_response(stopped_runtime())

    def _refuse(self, request: Request, repo: RepoId, action: str) -> Response:
        """Refuses a request that makes sense only for a running Space."""
        self._access.require_write(request, repo)
        raise bad_request(f"The embedded Hub stores Spaces and does not run them: it has no {action} for a Space.")

    def _get(self, request: Request, repo: RepoId, kind: str) -> Response:
        """Lists the variables with their values, or the secrets without their values."""
        settings = self._access.require_read(request, repo)
        request.require_token()  # even for a public Space, because its variables are not public
        return json_response(getattr(settings, kind))

    def _put(self, request: Request, repo: RepoId, kind: str) -> Response:
        """Sets a variable or a secret. Does not store a secret's value, because nothing would ever read it."""
        self._access.require_write(request, repo)
        fields = request.json()
        key = _check_variable_name(fields)
        entry: dict[str, object] = {"key": key, "updatedAt": now()}
        if kind == "variables":
            entry["value"] = member(fields, "value", str)
            if entry["value"] is None:
                raise bad_request(f"The variable '{key}' needs a value that is text.")
        if member(fields, "description", str):
            entry["description"] = fields["description"]
        # Hold the lock while reading and writing, so that no change is lost if two requests arrive at once.
        with self._storage.lock(repo):
            entries = {**getattr(self._storage.settings(repo), kind), key: entry}
            self._storage.change_settings(repo, **{kind: entries})
        return json_response(entries)

    def _remove(self, request: Request, repo: RepoId, kind: str) -> Response:
        """Removes a variable or a secret. Fault 404 if it does not exist."""
        self._access.require_write(request, repo)
        key = _check_variable_name(request.json())
        with self._storage.lock(repo):
            entries = dict(getattr(self._storage.settings(repo), kind))
            if entries.pop(key, None) is None:
                raise Fault(404, f"The Space '{repo}' has no {kind.removesuffix('s')} '{key}'.")
            self._storage.change_settings(repo, **{kind: entries})
        return json_response(entries)


def _check_variable_name(fields: dict[str, object]) -> str:
    key = fields.get("key")
    if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", key):
        raise bad_request(f"{str(key)[:60]!r} cannot name a variable: use letters, digits and '_', no digit first.")
    return key
