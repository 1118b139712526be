"""Describes the account and the server, and answers requests for discussions, which an embedded Hub does not have."""

import os

from .access import Api
from .describe import find_damage
from .faults import Fault, forbidden
from .messages import Request, Response, json_response
from .names import OWNER, RepoId
from .routing import Router

#: Returns {"service", "pid"} to anyone. Commands use it to check whether a recorded server still runs.
STATUS_PATH = "/api/rlhf-zoo"


class AccountApi(Api):
    """The account and the server itself."""

    def register(self, router: Router) -> None:
        router.add("GET", "/api/whoami-v2", self._whoami)
        router.add("GET", STATUS_PATH, self._status)
        router.add("GET", f"{STATUS_PATH}/damaged", self._damaged)
        router.add("GET", "/api/{repo}/discussions", self._discussions)
        router.add("GET POST", "/api/{repo}/discussions/{path*}", self._no_discussions)

    def _whoami(self, request: Request) -> Response:
        """Describes the only account. Every other namespace in use is listed as its organization."""
        if request.role is None:
            raise Fault(401, "Invalid username or password.")
        # `hf auth whoami` lists organizations as the namespaces to publish under.
        namespaces = {repo.namespace for repo in self._storage.repositories()} - {OWNER}
        answer: dict[str, object] = {
            "type": "user",
            "id": OWNER,
            "name": OWNER,
            "fullname": "Embedded Hub",
            "isPro": False,
            "canPay": False,
            "avatarUrl": "",
            "orgs": [{"type": "org", "id": name, "name": name, "roleInOrg": "admin"} for name in sorted(namespaces)],
            "auth": {
                "type": "access_token",
                "accessToken": {"displayName": f"embedded-{request.role}", "role": request.role},
            },
        }
        return json_response(answer)

    def _status(self, request: Request) -> Response:
        """Shows that this is an embedded Hub, and returns its process id."""
        return json_response({"service": "rlhf-zoo hub", "pid": os.getpid()})

    def _damaged(self, request: Request) -> Response:
        """Lists damaged repositories of the given authors, or of all authors, with the reasons.

        Other lists leave these repositories or their metadata out.
        """
        request.require_token()  # the reasons name files of private repositories
        storage, authors = self._storage, request.values("author")
        answer = []
        for repo in storage.repositories():
            reason = find_damage(storage, repo) if not authors or repo.namespace in authors else None
            if reason is not None:
                answer.append({"id": str(repo), "type": repo.kind, "reason": reason})
        return json_response(answer)

    def _discussions(self, request: Request, repo: RepoId) -> Response:
        """Answers with an empty list of discussions."""
        self._access.read(request, repo)
        return json_response({"discussions": [], "count": 0, "start": 0, "numClosedDiscussions": 0})

    def _no_discussions(self, request: Request, repo: RepoId, path: str) -> Response:
        """Refuses every discussion and pull request."""
        self._access.read(request, repo)
        raise forbidden("The embedded Hub has neither discussions nor pull requests: commit to a branch instead.")
