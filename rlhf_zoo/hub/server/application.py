"""The Hub without its sockets: answers requests from the contents of a root folder."""

from __future__ import annotations

from email.message import Message
from pathlib import Path

from ...errors import ZooError
from .access import Access
from .account_api import AccountApi
from .collections_api import CollectionsApi
from .commits_api import CommitsApi
from .faults import Fault
from .files_api import FilesApi
from .lfs_api import LfsApi
from .messages import Request, Response, bearer_token
from .pages import PagesApi
from .refs_api import RefsApi
from .repos_api import ReposApi
from .routing import Router
from .spaces_api import SpacesApi
from .storage import Storage
from .tokens import Signer, TokenFile
from .xet_api import TELEMETRY_PATH, XET_PREFIX, XetApi


class Application:
    """Answers every request of one Hub.

    Args:
        root: The Hub's folder. It exists and can be written to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        storage = Storage(root)
        self.sweep = storage.sweep
        self.sweep()
        access = Access(storage, Signer(root))
        self._tokens = TokenFile(root)
        self._router = Router(storage.exists, access.current_name)
        # Routes are tried in this order. LFS addresses, which end in `.git/info/lfs/...`, must not match as pages.
        for api in (
            CollectionsApi, SpacesApi, LfsApi, XetApi, CommitsApi, FilesApi, RefsApi, ReposApi, AccountApi, PagesApi,
        ):  # fmt: skip
            api(access).register(self._router)

    def find_role(self, path: str, headers: Message[str, str]) -> str | None:
        """Returns the role of a request's sender.

        Args:
            path: Path of the request.
            headers: Headers of the request.

        Returns:
            "read" or "write"; None without a token.

        Raises:
            Fault: 401 for a token that this Hub did not issue, or that has expired or been revoked; 410 if the file of
                tokens is damaged.
        """
        header = headers.get("Authorization")
        # Xet requests carry a different kind of token, which `xet_api` checks.
        if header is None or path.startswith((XET_PREFIX, TELEMETRY_PATH)):
            return None
        token = bearer_token(header)
        try:
            role = self._tokens.role(token) if token is not None else None
        except ZooError as error:
            raise Fault(410, str(error)) from error  # clients repeat a request after a 500, which would not help
        if role is None:
            raise Fault(401, "Invalid credentials in Authorization header")
        return role

    def answer(self, request: Request) -> Response:
        """Answers a request.

        Args:
            request: The request.

        Raises:
            Fault: For a refusal.
        """
        return self._router.dispatch(request)
