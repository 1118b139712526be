"""What the server answers when it refuses: a status, a sentence, and the Hub's error code."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path


class Fault(Exception):
    """A refusal. `code` becomes the X-Error-Code header, from which huggingface_hub picks its exception class."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = dict(headers or {})
        self.body = dict(body or {})


class Damaged(Fault):
    """What cannot be read of the repository whose files lie in NAMESPACE/NAME.git; `reason`: in a few words why.

    410 and no 500: clients ask again after a 500, and no repetition brings it back.
    """

    def __init__(self, folder: Path, reason: str) -> None:
        what = f"Repository '{folder.parent.name}/{folder.name.removesuffix('.git')}'"
        message = f"{what} is damaged on this Hub's disk ({reason}): restore it from a copy, or delete it."
        super().__init__(410, message, code="RepoDamaged")
        self.reason = reason


def bad_request(message: str) -> Fault:
    return Fault(400, message)


def forbidden(message: str) -> Fault:
    return Fault(403, message)


def repo_not_found(repo: object, *, anonymous: bool) -> Fault:
    """401 to strangers and 404 to token holders, as the Hub does: strangers cannot tell private from missing."""
    if anonymous:
        message = f"Repository '{repo}' was not found, or it is private and the request carried no token."
        return Fault(401, message, code="RepoNotFound")
    return Fault(404, f"Repository '{repo}' was not found on this Hub.", code="RepoNotFound")


def revision_not_found(revision: str) -> Fault:
    return Fault(404, f"Invalid rev id: there is no branch, tag or commit '{revision}'.", code="RevisionNotFound")


def entry_not_found(message: str, *, commit: str) -> Fault:
    """404: no such file or folder in `commit`, which the client remembers as the commit without it."""
    return Fault(404, message, code="EntryNotFound", headers={"X-Repo-Commit": commit})


def is_disk_full(error: OSError) -> bool:
    """True when the disk, a quota or a file-size limit stopped a write."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_of_the_file(error: OSError) -> bool:
    """True when one file is to blame, and not the machine, whose other files may be as hard to read."""
    return error.errno in (errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)


def disk_full(root: object) -> Fault:
    message = f"The Hub's disk is full: free some space under {root} and push again; nothing of this push was kept."
    return Fault(507, message)


def cannot_write(root: object, reason: str) -> Fault:
    message = (
        f"The Hub cannot write under {root} ({reason}): make that folder writable again; nothing of this was kept."
    )
    return Fault(507, message)


def disk_fault(error: OSError, root: Path, *, changes: bool) -> Fault | None:
    """What is said of a file or folder under `root` that is not as a Hub keeps it; None for any other error.

    Args:
        error: What the system answered.
        root: The Hub's folder.
        changes: True for a request that was to change something.

    Returns:
        507 where the disk is full or nothing can be written there, 410 for the one file that is to blame: clients ask
        again after a 500, and no repetition mends it.
    """
    if is_disk_full(error):
        return disk_full(root)
    if error.errno == errno.EROFS or (changes and error.errno in (errno.EACCES, errno.EPERM)):
        return cannot_write(root, os.strerror(error.errno or errno.EROFS))
    if is_of_the_file(error) or error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        message = f"A file or folder of this Hub is not as it keeps it ({error.strerror}); its log on stderr names it."
        return Fault(410, message, code="RepoDamaged")
    return None
