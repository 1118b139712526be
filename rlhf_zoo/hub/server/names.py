"""Checks names before they become files on disk: names of repositories, paths inside them, branches and tags."""

import re
from dataclasses import dataclass

from .faults import bad_request

#: Kind of repository -> its plural, in URLs and folders.
KINDS = {"model": "models", "dataset": "datasets", "space": "spaces"}

#: The only account of an embedded Hub. Other namespaces count as its organizations.
OWNER = "local"

# huggingface_hub allows 96 characters for each part of an id. Names of files made of both parts stay below 255 bytes.
_NAME = re.compile(r"(?![-.])[A-Za-z0-9_.-]{1,96}(?<![-.])")
_DRIVE = re.compile(r"[A-Za-z]:")
_OID = re.compile(r"[0-9a-f]{64}")
_MAX_SEGMENT_BYTES = 255
_MAX_PATH_BYTES = 1024
_MAX_REF_BYTES = 200


@dataclass(frozen=True, order=True)
class RepoId:
    """The id of a repository. `parse_repo_id` has checked its parts.

    Args:
        kind: model, dataset or space.
        namespace: The account or organization.
        name: The name within the namespace.
    """

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def plural(self) -> str:
        """The kind in URLs and folders: models, datasets or spaces."""
        return KINDS[self.kind]

    @property
    def page_path(self) -> str:
        """The path of the repository's page. Models are at the root, other repositories below their plural."""
        return str(self) if self.kind == "model" else f"{self.plural}/{self}"


def parse_repo_id(kind: object, namespace: object, name: object) -> RepoId:
    """Checks the parts of a repository's id against the Hub's own rules.

    Args:
        kind: model, dataset or space.
        namespace: The account or organization; None for the account of this Hub.
        name: The name within the namespace.

    Returns:
        The id. Its parts are safe to use as names of folders.

    Raises:
        Fault: 400 if a part is missing or not allowed.
    """
    owner = OWNER if namespace is None else namespace
    if not isinstance(kind, str) or kind not in KINDS:
        raise bad_request(f"Repository type '{kind}' is unknown; use model, dataset or space.")
    if not isinstance(name, str) or not isinstance(owner, str):
        raise bad_request("A repository needs a name: give it as NAMESPACE/NAME.")
    # The client's cache and the Hub's lock files join the parts with "--", so no part may contain it.
    for part in (owner, name):
        if not _NAME.fullmatch(part) or "--" in part or ".." in part or part.endswith(".git"):
            raise bad_request(
                f"'{part[:120]}' cannot name a repository: use 1 to 96 letters, digits, '-', '_' or '.', "
                "without '-' or '.' at either end, without '--' or '..', and not ending in .git."
            )
    if len(owner) + len(name) + 1 > 192:
        raise bad_request("The repository's id is longer than 192 characters; shorten it.")
    return RepoId(kind, owner, name)


def check_path(path: object) -> str:
    """Checks a path inside a repository.

    Args:
        path: The path that the client sent, of any type.

    Returns:
        The path. A checkout on Linux, macOS or Windows writes it neither outside its folder nor over git's own files.

    Raises:
        Fault: 400 for any other path, and for a path that is too long.
    """
    from dulwich.index import validate_path_element_hfs, validate_path_element_ntfs

    if not isinstance(path, str) or not path:
        raise bad_request("A file needs a path inside the repository.")
    excerpt = path[:120]
    if any(ord(char) < 32 or 0xD800 <= ord(char) <= 0xDFFF or ord(char) == 127 for char in path):
        raise bad_request(f"The path {excerpt!r} contains control characters; rename the file.")
    if len(path.encode()) > _MAX_PATH_BYTES:
        raise bad_request(f"The path '{excerpt}…' is longer than {_MAX_PATH_BYTES} bytes; shorten it.")
    if "\\" in path or _DRIVE.match(path):
        raise bad_request(
            f"The path '{excerpt}' has another meaning on Windows; write it with '/', without drive letters."
        )
    # NTFS and HFS+ treat names such as "git~1" as ".git", so a checkout there could overwrite git's own files.
    for segment in path.split("/"):
        segment_bytes = segment.encode()
        if not validate_path_element_ntfs(segment_bytes) or not validate_path_element_hfs(segment_bytes):
            raise bad_request(
                f"The path '{excerpt}' has an empty part, '.', '..' or git's own folder in it; rename it."
            )
        if segment.lower() == ".gitmodules":
            raise bad_request(f"The path '{excerpt}' is git's list of submodules, which this Hub does not support.")
        if len(segment_bytes) > _MAX_SEGMENT_BYTES:
            raise bad_request(f"A part of the path '{excerpt}…' is longer than {_MAX_SEGMENT_BYTES} bytes; shorten it.")
    return path


def check_ref(name: object, *, kind: str) -> str:
    """Checks the short name of a branch or tag against git's rules, and returns the name.

    Args:
        name: The name that the client sent, of any type.
        kind: What the name is for, such as "branch" or "tag", for messages.

    Raises:
        Fault: 400 for a name that git does not allow, that is too long, or that looks like an option or a commit.
    """
    from dulwich.refs import Ref, check_ref_format

    if not isinstance(name, str) or not name:
        raise bad_request(f"The {kind} needs a name.")
    name_bytes = name.encode(errors="replace")
    if len(name_bytes) > _MAX_REF_BYTES:
        raise bad_request(f"The {kind} name '{name[:80]}…' is longer than {_MAX_REF_BYTES} bytes; shorten it.")
    if name.startswith("-") or name == "HEAD" or not check_ref_format(Ref(b"refs/heads/" + name_bytes)):
        raise bad_request(f"git does not allow the {kind} name '{name}'; see git help check-ref-format.")
    if re.fullmatch(r"[0-9a-fA-F]{40}", name):
        raise bad_request(f"The {kind} name '{name}' looks like a commit; choose another.")
    return name


def check_oid(oid: object) -> str:
    """Checks that an LFS object's id is a sha256 in lower-case hexadecimal digits, and returns the id.

    Args:
        oid: The id that the client sent, of any type.

    Raises:
        Fault: 400 for any other value.
    """
    if not isinstance(oid, str) or not _OID.fullmatch(oid):
        raise bad_request("An LFS object is named by its sha256: 64 lower-case hexadecimal digits.")
    return oid
