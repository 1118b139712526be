"""Describes the account and the server, and answers requests about discussions, which an embedded Hub does not have."""

import os

from .access import Api
from .describe import find_damage
from .faults import Fault, forbidden
from .messages import Request, Response, json_response
from .names import OWNER, RepoId
from .routing import Router

#: The path that answers {"service", "pid"} to every caller, so that commands can check whether a server still runs.
STATUS_PATH = "/api/rlhf-zoo"


class AccountApi(Api):
    """The account and the server itself."""

    def register(self, router: Router) -> None:
        router.add("GET", "/api/whoami-v2", self._whoami)
        router.add("GET", STATUS_PATH, self._status)
        router.add("GET", f"{STATUS_PATH}/damaged", self._list_damaged)
        router.add("GET", "/api/{repo}/discussions", self._discussions)
        router.add("GET POST", "/api/{repo}/discussions/{path*}", self._refuse_discussions)

    def _whoami(self, request: Request) -> Response:
        """Describes the only account. Lists every other namespace in use as an organization of this account."""
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
        """Identifies the server as an embedded Hub, and returns its process id."""
        return json_response({"service": "rlhf-zoo hub", "pid": os.getpid()})

    def _list_damaged(self, request: Request) -> Response:
        """Lists the damaged repositories of the requested authors, by default of all, with the reasons.

        Other lists leave out these repositories, or their metadata.
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
        """Returns an empty list of discussions."""
        self._access.require_read(request, repo)
        return json_response({"discussions": [], "count": 0, "start": 0, "numClosedDiscussions": 0})

    def _refuse_discussions(self, request: Request, repo: RepoId, path: str) -> Response:
        """Refuses every request about a discussion or pull request."""
        self._access.require_read(request, repo)
        raise forbidden("The embedded Hub has neither discussions nor pull requests: commit to a branch instead.")
