"""Who may read and write which repository."""

from abc import ABC, abstractmethod

from .faults import Damaged, Fault, repo_not_found, revision_not_found
from .git import MAIN, GitRepository
from .messages import Request
from .names import RepoId
from .routing import Router
from .storage import Settings, Storage
from .tokens import Signer


class Access:
    """Strangers read what is public; any token reads everything; a write token writes everything.

    The bytes of an upload come without a token: what lets them in was signed before, for one that may write.
    """

    def __init__(self, storage: Storage, signer: Signer) -> None:
        self.storage, self.signer = storage, signer

    def sees(self, request: Request, settings: Settings) -> bool:
        """True where the caller may know that the repository exists."""
        return request.role is not None or not settings.private

    def read(self, request: Request, repo: RepoId) -> Settings:
        """The repository's settings; a Fault where the caller may not read it."""
        anonymous = request.role is None
        try:
            settings = self.storage.settings(repo)
        except Fault as fault:
            if isinstance(fault, Damaged) and not anonymous:
                raise
            raise repo_not_found(repo, anonymous=anonymous) from None  # nobody can tell whether it was private
        if not self.sees(request, settings):
            raise repo_not_found(repo, anonymous=anonymous)
        return settings

    def write(self, request: Request, repo: RepoId) -> Settings:
        """The repository's settings; a Fault where the caller may not change it."""
        settings = self.read(request, repo)
        request.require_write()
        return settings

    def moved(self, request: Request, repo: RepoId) -> RepoId | None:
        """What a repository of that old name is called now; None where there is none that the caller may know of."""
        target = self.storage.moved(repo)
        return target if target is not None and self.sees(request, self.storage.settings(target)) else None

    def is_signed(self, signature: str, what: str, repo: RepoId, *parts: str) -> bool:
        """True for what was signed here, is not too old, and not for an earlier repository of that name."""
        try:
            settings = self.storage.settings(repo)
        except Fault:  # a stranger is not to learn what exists
            return False
        return self.signer.verify(signature, what, *identity(repo, settings), *parts)


def identity(repo: RepoId, settings: Settings) -> tuple[str, str]:
    """What a signature names: this repository, and no later one of the same name."""
    return f"{repo.plural}/{repo}", settings.created


class Api(ABC):
    """The functions behind some of the routes; `register` says which."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._storage = access.storage

    @abstractmethod
    def register(self, router: Router) -> None: ...


def commit_of(git: GitRepository, revision: str) -> str:
    """The commit a revision stands for (Fault 404 RevisionNotFound)."""
    if revision == MAIN:
        return git.head()
    commit = git.resolve(revision)
    if commit is None:
        raise revision_not_found(revision)
    return commit
