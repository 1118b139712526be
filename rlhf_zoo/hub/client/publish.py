"""Publishes checkpoints, cards and data sets: one commit each, and one tag for each checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from ...errors import ZooError
from ...fileio import now, read_json, write_json, write_text
from .claims import check_claim, commit_on_head
from .connect import DEFAULT_HUB, Hub
from .links import find_outward_link
from .refusals import client_errors, reason, status_of
from .step_tags import tag_name

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, RepoFile

    from .claims import Operation

PUBLISHED_FILE = "published.json"
UPLOAD_MARKER = "SENDING"
NO_OVERRIDES: Mapping[str, Path | None] = {}
MERGED_MODEL = "merged"  # the folder of a checkpoint with the merged model, and the branch it is published on
# The files that anyone needs to use a checkpoint.
CHECKPOINT_PATTERNS = (
    "*.py",  # the code of models that transformers does not contain
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.*",
    "merges.txt",
    "ppo_state.json",
)
# The files from which training resumes, sent only on request. training_args.bin is a pickle and is never sent.
RESUME_PATTERNS = ("optimizer.pt", "scheduler.pt", "rng_state*.pth", "trainer_state.json", "running_metrics.json")


def read_publication(checkpoint: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint's published.json; {} if the checkpoint has none.

    Args:
        checkpoint: The checkpoint's folder.
    """
    try:
        return cast(dict[str, Any], read_json(checkpoint / PUBLISHED_FILE))
    except FileNotFoundError:
        return {}


def resolve_namespace(namespace: str | None, *, hub: Hub = DEFAULT_HUB) -> str:
    """Returns the namespace to publish under, after a check of the token. Call this before any training.

    Args:
        namespace: The namespace that the user named; None for the token's account.
        hub: The Hub to publish to.

    Raises:
        ZooError: The Hub cannot be reached or does not accept the token, or the token is read-only.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    variable = hub.token_variable
    try:
        api = hub.api()
        if api.token is False:  # `whoami` would complain about the argument `token`, which the user never passed
            raise LocalTokenNotFoundError
        account = api.whoami()
    except UnicodeEncodeError as error:
        raise ZooError(
            f"{variable} contains characters that are not allowed in a token: set it to the token for {hub.address}."
        ) from error
    except LocalTokenNotFoundError as error:
        remedy = f"log in with `hf auth login`, or set {variable}" if variable == "HF_TOKEN" else f"set {variable}"
        raise ZooError(f"There is no token for {hub.address}: {remedy}.") from error
    except HfHubHTTPError as error:
        status = status_of(error)
        if status in (401, 403):
            raise ZooError(
                f"{hub.address} does not accept the token: create one with the role write, and set {variable}."
            ) from error
        raise ZooError(f"{hub.address} answers with status {status}: try again later, or use --hub local.") from error
    except client_errors() as error:
        raise ZooError(
            f"The Hub {hub.address} cannot be reached ({reason(error)}): check the address and the network, or "
            "use --hub local."
        ) from error
    # The role of a fine-grained token does not show its rights, so refuse only a token that certainly cannot write.
    role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise ZooError(f"The token for {hub.address} is read-only: publish with a token of the role write.")
    return namespace or account["name"]


def publish_files(
    files: Mapping[str, Path] | Path,
    repo_id: str,
    *,
    repo_type: str,
    message: str,
    private: bool = False,
    hub: Hub = DEFAULT_HUB,
) -> str:
    """Sends files as one commit, and returns the commit's id. Creates the repository if it does not exist.

    Args:
        files: Path in the repository -> local path; or a folder, to send every file in it.
        repo_id: NAMESPACE/NAME.
        repo_type: model, dataset or space.
        message: The commit message.
        private: Whether a new repository is private.
        hub: The Hub to publish to.
    """
    operations = _make_add_operations(_list_local_files(files) if isinstance(files, Path) else files)
    api = hub.api()
    api.create_repo(repo_id, repo_type=repo_type, exist_ok=True, private=private)
    return api.create_commit(repo_id, operations, commit_message=message, repo_type=repo_type).oid


def publish_checkpoint(
    checkpoint: Path,
    repo_id: str,
    *,
    run_id: str,
    extra_files: Path,
    message: str,
    step: int,
    include_resume_files: bool = False,
    overwrite: bool = False,
    overrides: Mapping[str, Path | None] = NO_OVERRIDES,
    hub: Hub = DEFAULT_HUB,
) -> dict[str, str]:
    """Sends one complete checkpoint as one commit with one annotated tag, and records it in published.json.

    Safe to repeat: if an earlier attempt was interrupted before the Hub answered, its commit is found and reused.

    Args:
        checkpoint: The folder of the checkpoint. The caller has checked that its files are complete.
        repo_id: NAMESPACE/NAME.
        run_id: Id of the run that claimed the repository.
        extra_files: Folder of further files (card, metrics, recipe).
        message: The message of the commit and of the tag.
        step: The training step, which names the tag.
        include_resume_files: Whether to send the files from which training resumes.
        overwrite: Whether to move the step's tag if its commit has other weights or another message, for example
            because training was repeated.
        overrides: See `checkpoint_files`.
        hub: The Hub to publish to.

    Returns:
        {hub, repo, commit, tag, time}, the content of published.json.

    Raises:
        ZooError: Another run has claimed the repository; the tag's commit has other weights or another message, and
            `overwrite` is False; or a branch has the tag's name.
    """
    files = checkpoint_files(checkpoint, include_resume_files=include_resume_files, overrides=overrides)
    tag, marker = tag_name(step), checkpoint / UPLOAD_MARKER
    tag_commit = _find_tagged_commit(repo_id, tag, hub)
    commit = _find_earlier_commit(
        repo_id, message, files, tag_commit=tag_commit, upload_started=marker.is_file(), hub=hub
    )
    if commit is None and tag_commit is not None:
        if not overwrite:
            raise ZooError(
                f"The tag {tag} of {repo_id} on {hub.name} does not point to the commit of {checkpoint}, and moves "
                "only with --overwrite_repo: pass that option, or publish under another --namespace."
            )
        _delete_tag(repo_id, run_id, tag, hub)
        tag_commit = None
    if commit is None:
        # If this process is killed, the marker tells the next attempt to look for the commit before it sends anything.
        write_text(marker, message + "\n")
        commit = _replace_files(repo_id, run_id, {**files, **_list_local_files(extra_files)}, message, hub=hub)
    if tag_commit is None:
        _tag(repo_id, run_id, tag, commit, message, hub)
    record = {"hub": hub.label, "repo": repo_id, "commit": commit, "tag": tag, "time": now()}
    write_json(checkpoint / PUBLISHED_FILE, record)
    marker.unlink(missing_ok=True)
    return record


def publish_release(
    checkpoint: Path,
    repo_id: str,
    *,
    run_id: str,
    extra_files: Path,
    message: str,
    tag_message: str | None,
    include_resume_files: bool = False,
    overrides: Mapping[str, Path | None] = NO_OVERRIDES,
    hub: Hub = DEFAULT_HUB,
) -> str:
    """Publishes a checkpoint on `main` in one commit, tags the commit `best`, and returns the commit.

    Args:
        checkpoint: The folder of the checkpoint.
        repo_id: NAMESPACE/NAME.
        run_id: Id of the run that claimed the repository.
        extra_files: Folder of further files (card, metrics, recipe).
        message: The commit message.
        tag_message: The message of the tag `best`; None to remove the tag, because no checkpoint is best.
        include_resume_files: Whether to send the files from which training resumes.
        overrides: See `checkpoint_files`.
        hub: The Hub to publish to.

    Raises:
        ZooError: Another run has claimed the repository.
    """
    files = checkpoint_files(checkpoint, include_resume_files=include_resume_files, overrides=overrides)
    commit = _replace_files(repo_id, run_id, {**files, **_list_local_files(extra_files)}, message, hub=hub)
    tagged_commit = _find_tagged_commit(repo_id, "best", hub)
    keeps_tag = tag_message is not None and tagged_commit == commit
    if tagged_commit is not None and not keeps_tag:
        _delete_tag(repo_id, run_id, "best", hub)
    if tag_message is not None and not keeps_tag:
        _tag(repo_id, run_id, "best", commit, tag_message, hub)
    return commit


def publish_on_branch(
    folder: Path,
    repo_id: str,
    *,
    run_id: str,
    extra_files: Path,
    message: str,
    branch: str,
    tag: str | None = None,
    overrides: Mapping[str, Path | None] = NO_OVERRIDES,
    hub: Hub = DEFAULT_HUB,
) -> str:
    """Publishes a model on a branch in one commit, tags the commit if `tag` is set, and returns the commit.

    A model with a merged adapter goes to the branch `merged`. transformers would not find such a model in a subfolder,
    because adapter_config.json at the root takes precedence.

    Args:
        folder: The folder of the model.
        repo_id: NAMESPACE/NAME.
        run_id: Id of the run that claimed the repository.
        extra_files: Folder of further files (card, metrics, recipe).
        message: The message of the commit and of the tag.
        branch: The branch, created if it does not exist.
        tag: A tag for the commit, moved if it exists; None for no tag.
        overrides: See `checkpoint_files`.
        hub: The Hub to publish to.

    Raises:
        ZooError: Another run has claimed the repository.
    """
    check_claim(repo_id, run_id, hub=hub)
    hub.api().create_branch(repo_id, branch=branch, exist_ok=True)
    files = {**checkpoint_files(folder, overrides=overrides), **_list_local_files(extra_files)}
    commit = _replace_files(repo_id, run_id, files, message, revision=branch, hub=hub)
    if tag is not None:
        if _find_tagged_commit(repo_id, tag, hub) is not None:
            _delete_tag(repo_id, run_id, tag, hub)
        _tag(repo_id, run_id, tag, commit, message, hub)
    return commit


def checkpoint_files(
    checkpoint: Path, *, include_resume_files: bool = False, overrides: Mapping[str, Path | None] = NO_OVERRIDES
) -> dict[str, Path]:
    """Lists the files of a checkpoint to send.

    Args:
        checkpoint: The folder of the checkpoint.
        include_resume_files: Whether to include the files from which training resumes.
        overrides: Path in the repository -> the local file to send there; None to send no file.

    Returns:
        Path in the repository -> local path.

    Raises:
        ZooError: A link leads out of the checkpoint.
    """
    files = {
        name: path
        for name, path in _list_local_files(checkpoint).items()
        if _should_upload(name, include_resume_files=include_resume_files)
    }
    return {name: path for name, path in {**files, **overrides}.items() if path is not None}


def _list_local_files(folder: Path) -> dict[str, Path]:
    """Returns path in the repository -> local path. Raises ZooError for a link that leads out of the folder."""
    if (link := find_outward_link(folder, include_hidden=True)) is not None:
        raise ZooError(
            f"{link} in {folder} links to a file outside that folder, which is never sent: replace the link with the "
            "file, or remove it."
        )
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _should_upload(name: str, *, include_resume_files: bool) -> bool:
    path = PurePosixPath(name)
    if str(path.parent) not in (".", "critic"):  # other folders, such as `merged`, are published separately
        return False
    # Never send a pickle by accident: vocab.bin matches a pattern too.
    if path.suffix in (".pt", ".pth", ".bin"):
        return include_resume_files and any(path.match(pattern) for pattern in RESUME_PATTERNS)
    patterns = CHECKPOINT_PATTERNS + (RESUME_PATTERNS if include_resume_files else ())
    return any(path.match(pattern) for pattern in patterns)


def _is_replaceable(name: str) -> bool:
    """Whether a file is of a kind that rlhf-zoo publishes, so that a later commit may delete it."""
    if name.endswith(".py"):  # users add their own scripts, which a later commit must not delete
        return False
    return _should_upload(name, include_resume_files=True) or name.startswith(("plots/", "runs/", ".eval_results/"))


def _find_earlier_commit(
    repo_id: str, message: str, files: Mapping[str, Path], *, tag_commit: str | None, upload_started: bool, hub: Hub
) -> str | None:
    """Returns an earlier attempt's commit: the tagged commit or, if an upload started, one on `main`; else None.

    Only the message and the weights have to match. Other files may differ: an adapter's config names its base, which
    may meanwhile have been published in another namespace.
    """
    if tag_commit is None and not upload_started:
        return None
    # If there are no safetensors, compare every file.
    files_to_compare = {name: path for name, path in files.items() if name.endswith(".safetensors")} or files
    api = hub.api()
    commits = [commit.commit_id for commit in api.list_repo_commits(repo_id) if commit.title == message]
    for commit in commits if tag_commit is None else {tag_commit} & set(commits):
        # The Hub omits missing paths, so an incomplete commit yields fewer entries.
        entries = cast("list[RepoFile]", api.get_paths_info(repo_id, list(files_to_compare), revision=commit))
        local_ids = {entry.path: local_content_id(files_to_compare[entry.path], entry) for entry in entries}
        matching_paths = {entry.path for entry in entries if local_ids[entry.path] == hub_content_id(entry)}
        if matching_paths == set(files_to_compare):
            return commit
    return None


def hub_content_id(entry: RepoFile) -> str:
    """Returns the content id in a Hub's listing of a file: the sha256 of a large file, the git blob id of any other.

    Args:
        entry: The file in the Hub's listing.
    """
    return entry.lfs.sha256 if entry.lfs else entry.blob_id


def local_content_id(path: Path, entry: RepoFile) -> str:
    """Returns the content id of a local file, to compare with `hub_content_id`.

    Args:
        path: The local file.
        entry: The file in the Hub's listing, which determines whether the id is a sha256 or a git blob id.
    """
    from huggingface_hub.utils.sha import git_hash, sha_fileobj

    if entry.lfs is None:
        return git_hash(path.read_bytes())
    with path.open("rb") as file:
        return sha_fileobj(file).hex()


def _find_tagged_commit(repo_id: str, tag: str, hub: Hub) -> str | None:
    """Returns the commit of a tag; None if there is no such tag. Raises ZooError if a branch has the tag's name."""
    refs = hub.api().list_repo_refs(repo_id)
    if any(ref.name == tag for ref in refs.branches):
        raise ZooError(
            f"{repo_id} on {hub.name} has a branch named {tag}, which a pull could take for the tag: delete or rename "
            "that branch."
        )
    return next((ref.target_commit for ref in refs.tags if ref.name == tag), None)


def _delete_tag(repo_id: str, run_id: str, tag: str, hub: Hub) -> None:
    """Deletes a tag. Raises ZooError if another run has claimed the repository, because the tag may be its own."""
    check_claim(repo_id, run_id, hub=hub)
    hub.api().delete_tag(repo_id, tag=tag)


def _tag(repo_id: str, run_id: str, tag: str, commit: str, message: str, hub: Hub) -> None:
    """Tags a commit. Raises ZooError if the run does not hold the claim to the repository."""
    # The Hub's protocol cannot create a tag under a condition, so check the claim before and after.
    check_claim(repo_id, run_id, hub=hub)
    hub.api().create_tag(repo_id, tag=tag, revision=commit, tag_message=message)
    try:
        check_claim(repo_id, run_id, hub=hub)
    except ZooError:  # another run claimed the repository meanwhile, so this tag does not belong there
        hub.api().delete_tag(repo_id, tag=tag)
        raise


def _make_add_operations(files: Mapping[str, Path]) -> list[CommitOperationAdd]:
    from huggingface_hub import CommitOperationAdd

    return [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in sorted(files.items())]


def _replace_files(
    repo_id: str, run_id: str, files: Mapping[str, Path], message: str, *, revision: str | None = None, hub: Hub
) -> str:
    """Replaces rlhf-zoo's files on `revision` (None for main) with `files`, in one commit. Returns the commit.

    Deletes files of earlier checkpoints (an adapter, for example), so that no loader mixes two checkpoints. Raises
    ZooError if the run does not hold the claim to the repository.
    """
    from huggingface_hub import CommitOperationDelete

    def make_operations(head: str) -> list[Operation]:
        # claim.json is on main. For a commit to main, read the claim at the parent commit: if another run changes it
        # meanwhile, the Hub refuses the commit.
        check_claim(repo_id, run_id, commit=None if revision else head, hub=hub)
        existing_files = hub.api().list_repo_files(repo_id, revision=head)
        stale_files = [name for name in existing_files if _is_replaceable(name) and name not in files]
        return [*_make_add_operations(files), *(CommitOperationDelete(path_in_repo=name) for name in stale_files)]

    commit = commit_on_head(repo_id, make_operations, message, revision=revision, hub=hub)
    assert commit is not None  # `make_operations` never returns None
    return commit


def folders_have_same_weights(first: Path, second: Path, overrides: Mapping[str, Path | None] = NO_OVERRIDES) -> bool:
    """Whether the weight files that would be published for two checkpoints have the same names and contents.

    Two checkpoints without weights do not count as equal.

    Args:
        first: Folder of the first checkpoint.
        second: Folder of the second checkpoint.
        overrides: Name of a file in `second` -> the file that replaces it, or None to omit it.
    """

    def digests(files: Mapping[str, Path]) -> dict[str, str]:
        weights = {name: path for name, path in files.items() if name.endswith(".safetensors")}
        return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in weights.items()}

    first_digests = digests(checkpoint_files(first))
    return bool(first_digests) and first_digests == digests(checkpoint_files(second, overrides=overrides))
