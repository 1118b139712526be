"""Decides who may read and write which repository."""

from abc import ABC, abstractmethod

from .faults import Damaged, Fault, repo_not_found, revision_not_found
from .git import MAIN, GitRepository
from .messages import Request
from .names import RepoId
from .routing import Router
from .storage import Settings, Storage
from .tokens import Signer


class Access:
    """Checks each request's rights.

    Without a token, a caller may read public repositories. With any token, it may read all repositories. With a write
    token, it may also write. Uploads of large files instead carry a signature, which a caller gets with a write token.
    """

    def __init__(self, storage: Storage, signer: Signer) -> None:
        self.storage, self.signer = storage, signer

    def can_see(self, request: Request, settings: Settings) -> bool:
        """Whether the caller may know that the repository exists.

        Args:
            request: The request.
            settings: The repository's settings.
        """
        return request.role is not None or not settings.private

    def require_read(self, request: Request, repo: RepoId) -> Settings:
        """Checks that the caller may read a repository, and returns its settings.

        Args:
            request: The request.
            repo: The repository.

        Raises:
            Fault: The caller may not read it.
        """
        is_anonymous = request.role is None
        try:
            settings = self.storage.settings(repo)
        except Fault as fault:
            if isinstance(fault, Damaged) and not is_anonymous:
                raise
            # A damaged repository may have been private, so answer anonymous callers as for a missing repository.
            raise repo_not_found(repo, is_anonymous=is_anonymous) from None
        if not self.can_see(request, settings):
            raise repo_not_found(repo, is_anonymous=is_anonymous)
        return settings

    def require_write(self, request: Request, repo: RepoId) -> Settings:
        """Checks that the caller may change a repository, and returns its settings.

        Args:
            request: The request.
            repo: The repository.

        Raises:
            Fault: The caller may not change it.
        """
        # Check reading first: for a private repository, anonymous callers must get "not found", not "needs a token".
        settings = self.require_read(request, repo)
        request.require_write()
        return settings

    def current_name(self, request: Request, repo: RepoId) -> RepoId | None:
        """Returns the current name of a renamed repository; None if it was not renamed, or the caller may not see it.

        Args:
            request: The request.
            repo: The name in the request.
        """
        target = self.storage.current_name(repo)
        return target if target is not None and self.can_see(request, self.storage.settings(target)) else None

    def is_signed(self, signature: str, permission: str, repo: RepoId, *parts: str) -> bool:
        """Whether a signature is valid, has not expired, and was made for this repository.

        Args:
            signature: A result of `Signer.sign`.
            permission: The kind of permission, which was signed as the first part.
            repo: The repository. A signature for an earlier repository of the same name does not match.
            parts: The other signed parts.
        """
        try:
            settings = self.storage.settings(repo)
        except Fault:  # anonymous callers must not learn which repositories exist
            return False
        return self.signer.verify(signature, permission, *signed_identity(repo, settings), *parts)


def signed_identity(repo: RepoId, settings: Settings) -> tuple[str, str]:
    """Returns the parts of a signature that identify this repository, and no other repository of the same name.

    Args:
        repo: The repository.
        settings: Its settings.
    """
    return f"{repo.plural}/{repo}", settings.created


class Api(ABC):
    """A part of the API: handlers and their routes."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._storage = access.storage

    @abstractmethod
    def register(self, router: Router) -> None:
        """Adds the routes that lead to the handlers.

        Args:
            router: Receives the routes.
        """


def resolve_commit(git: GitRepository, revision: str) -> str:
    """Returns the commit of a revision.

    Args:
        git: The open repository.
        revision: A branch, tag or commit.

    Raises:
        Fault: 404 if there is no such revision, 400 if the ids of several commits begin with it.
    """
    if revision == MAIN:  # a repository without main is damaged, which is not the caller's mistake
        return git.head()
    commit = git.resolve(revision)
    if commit is None:
        raise revision_not_found(revision)
    return commit
