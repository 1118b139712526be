"""The server's refusals. Each has an HTTP status, a sentence for the user, and possibly the Hub's error code."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from ...fileio import DISK_FULL_ERRNOS


class Fault(Exception):
    """A refusal.

    Args:
        status: The HTTP status.
        message: One sentence for the user.
        code: The X-Error-Code header, from which huggingface_hub picks its exception class.
        headers: Additional headers.
        body: Additional keys of the JSON body.
    """

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
    """A refusal because something in a repository cannot be read.

    Args:
        folder: The repository's folder, NAMESPACE/NAME.git.
        reason: A short phrase that says what is wrong.
    """

    def __init__(self, folder: Path, reason: str) -> None:
        # 410, not 500: clients repeat a request after a 500, which would not bring the files back.
        repository = f"Repository '{folder.parent.name}/{folder.name.removesuffix('.git')}'"
        message = f"{repository} is damaged on this Hub's disk ({reason}): restore it from a copy, or delete it."
        super().__init__(410, message, code="RepoDamaged")
        self.reason = reason


def bad_request(message: str) -> Fault:
    """Returns the refusal of a malformed request (400).

    Args:
        message: One sentence for the user.
    """
    return Fault(400, message)


def forbidden(message: str) -> Fault:
    """Returns the refusal of a request that is not allowed (403).

    Args:
        message: One sentence for the user.
    """
    return Fault(403, message)


def repo_not_found(repo: object, *, is_anonymous: bool) -> Fault:
    """Returns the refusal for a missing repository. As on the Hub, it is 401 for anonymous callers, else 404.

    Anonymous callers get the same answer for a private repository, so they cannot learn whether it exists.

    Args:
        repo: The repository.
        is_anonymous: Whether the request carried no token.
    """
    if is_anonymous:
        message = f"Repository '{repo}' was not found, or it is private and the request carried no token."
        return Fault(401, message, code="RepoNotFound")
    return Fault(404, f"Repository '{repo}' was not found on this Hub.", code="RepoNotFound")


def revision_not_found(revision: str) -> Fault:
    """Returns the refusal for a missing revision (404).

    Args:
        revision: The branch, tag or commit that the request named.
    """
    return Fault(404, f"Invalid rev id: there is no branch, tag or commit '{revision}'.", code="RevisionNotFound")


def entry_not_found(message: str, *, commit: str) -> Fault:
    """Returns the refusal for a missing file or folder (404).

    Args:
        message: One sentence for the user.
        commit: The commit id. The client caches the fact that this commit lacks the file.
    """
    return Fault(404, message, code="EntryNotFound", headers={"X-Repo-Commit": commit})


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed because of a full disk, a quota or a limit on file sizes.

    Args:
        error: The exception.
    """
    return error.errno in DISK_FULL_ERRNOS


def is_file_error(error: OSError) -> bool:
    """Whether an error concerns a single file, as opposed to the whole machine.

    Args:
        error: The exception.
    """
    return error.errno in (errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)


def disk_full(root: object) -> Fault:
    """Returns the refusal of a write to a full disk (507).

    Args:
        root: The Hub's folder.
    """
    message = f"The Hub's disk is full: free some space under {root} and push again; this push was not stored."
    return Fault(507, message)


def cannot_write(root: object, reason: str) -> Fault:
    """Returns the refusal of a write to a read-only folder (507).

    Args:
        root: The Hub's folder.
        reason: The system's reason.
    """
    message = f"The Hub cannot write under {root} ({reason}): make that folder writable again; nothing was stored."
    return Fault(507, message)


def disk_fault(error: OSError, root: Path, *, is_write: bool) -> Fault | None:
    """Turns an error of the file system into a refusal.

    Args:
        error: The error.
        root: The Hub's folder.
        is_write: Whether the request writes.

    Returns:
        507 if the disk is full or the folder cannot be written; 410 if a single file caused the error, because clients
        would repeat the request after a 500; None for any other error.
    """
    if is_disk_full(error):
        return disk_full(root)
    # A read without permission concerns one file. A write without permission means that the root is read-only.
    if error.errno == errno.EROFS or (is_write and error.errno in (errno.EACCES, errno.EPERM)):
        return cannot_write(root, os.strerror(error.errno or errno.EROFS))
    if is_file_error(error) or error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        message = f"A file or folder of this Hub is damaged ({error.strerror}); its log on stderr names it."
        return Fault(410, message, code="RepoDamaged")
    return None
