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
    """The rules: strangers read what is public, any token reads everything, a write token writes everything.

    The bytes of an upload arrive without a token, but with a signature that was given to a sender with a write token.
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

    def read(self, request: Request, repo: RepoId) -> Settings:
        """Returns the repository's settings.

        Args:
            request: The request.
            repo: The repository.

        Raises:
            Fault: The caller may not read it.
        """
        anonymous = request.role is None
        try:
            settings = self.storage.settings(repo)
        except Fault as fault:
            if isinstance(fault, Damaged) and not anonymous:
                raise
            # A damaged repository may have been private, so strangers get the same answer as for a missing one.
            raise repo_not_found(repo, anonymous=anonymous) from None
        if not self.can_see(request, settings):
            raise repo_not_found(repo, anonymous=anonymous)
        return settings

    def write(self, request: Request, repo: RepoId) -> Settings:
        """Returns the repository's settings.

        Args:
            request: The request.
            repo: The repository.

        Raises:
            Fault: The caller may not change it.
        """
        # Reading comes first: a stranger must get "not found" for a private repository, not "needs a write token".
        settings = self.read(request, repo)
        request.require_write()
        return settings

    def new_name(self, request: Request, repo: RepoId) -> RepoId | None:
        """Returns the present name of a renamed repository; None if there is none that the caller may know of.

        Args:
            request: The request.
            repo: The requested name.
        """
        target = self.storage.new_name(repo)
        return target if target is not None and self.can_see(request, self.storage.settings(target)) else None

    def is_signed(self, signature: str, permission: str, repo: RepoId, *parts: str) -> bool:
        """Whether a signature is valid, not expired, and made for this repository.

        Args:
            signature: As `Signer.sign` made it.
            permission: The kind of permission, which is the first part that was signed.
            repo: The repository. A later one of the same name does not match.
            parts: The further parts that were signed.
        """
        try:
            settings = self.storage.settings(repo)
        except Fault:  # a stranger must not learn what exists
            return False
        return self.signer.verify(signature, permission, *signed_identity(repo, settings), *parts)


def signed_identity(repo: RepoId, settings: Settings) -> tuple[str, str]:
    """Returns the parts of a signature that name this repository, and no later one of the same name.

    Args:
        repo: The repository.
        settings: Its settings.
    """
    return f"{repo.plural}/{repo}", settings.created


class Api(ABC):
    """The handlers of some routes. `register` adds the routes."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._storage = access.storage

    @abstractmethod
    def register(self, router: Router) -> None: ...


def resolve_commit(git: GitRepository, revision: str) -> str:
    """Returns the commit of a revision.

    Args:
        git: The repository, open.
        revision: A branch, tag or commit.

    Raises:
        Fault: 404 RevisionNotFound.
    """
    if revision == MAIN:  # a repository without main is damaged, which is not the caller's mistake
        return git.head()
    commit = git.resolve(revision)
    if commit is None:
        raise revision_not_found(revision)
    return commit
