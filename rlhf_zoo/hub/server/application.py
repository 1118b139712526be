"""The Hub without its sockets: a root folder, and an answer to every request."""

from __future__ import annotations

from email.message import Message
from pathlib import Path

from rlhf_zoo.hub.server.access import Access
from rlhf_zoo.hub.server.account_api import AccountApi
from rlhf_zoo.hub.server.collections_api import CollectionsApi
from rlhf_zoo.hub.server.commits_api import CommitsApi
from rlhf_zoo.hub.server.faults import Fault
from rlhf_zoo.hub.server.files_api import FilesApi
from rlhf_zoo.hub.server.lfs_api import PART_SIZE, LfsApi
from rlhf_zoo.hub.server.messages import Request, Response
from rlhf_zoo.hub.server.refs_api import RefsApi
from rlhf_zoo.hub.server.repos_api import ReposApi
from rlhf_zoo.hub.server.routing import Router
from rlhf_zoo.hub.server.spaces_api import SpacesApi
from rlhf_zoo.hub.server.storage import Storage
from rlhf_zoo.hub.server.tokens import Signer, TokenFile

__all__ = ["Application"]


class Application:
    """Everything under `root`, an existing folder that can be written to. part_size: bytes, see `lfs_api`."""

    def __init__(self, root: Path, *, part_size: int = PART_SIZE) -> None:
        self.root = root
        storage = Storage(root)
        storage.sweep()
        access = Access(storage)
        self._tokens = TokenFile(root)
        self._router = Router(storage.exists)
        for api in (
            CollectionsApi(access),
            SpacesApi(access),
            LfsApi(access, Signer(root), part_size=part_size),
            CommitsApi(access),
            FilesApi(access),
            RefsApi(access),
            ReposApi(access),
            AccountApi(access),
        ):
            api.register(self._router)

    def role(self, headers: Message[str, str]) -> str | None:
        """read or write; None without a token; Fault 401 for a token that this Hub did not give out."""
        header = headers.get("Authorization")
        if header is None:
            return None
        scheme, _, token = header.partition(" ")
        role = self._tokens.role(token.strip()) if scheme.lower() == "bearer" else None
        if role is None:
            raise Fault(401, "Invalid credentials in Authorization header")
        return role

    def answer(self, request: Request) -> Response:
        """The response, or a Fault."""
        return self._router.dispatch(request)
