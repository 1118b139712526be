"""Sending checkpoints, cards and data sets: one commit each, and a tag by which a checkpoint can be pulled."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import ZooError
from ...fileio import now, write_json, write_text
from .claims import all_tags, check_claim, commit_on_head
from .connect import CLIENT, Hub
from .data_gate import find_outward_link
from .refusals import client_errors, reason, status_of

PUBLISHED = "published.json"
SENDING = "SENDING"
NOTHING: Mapping[str, Path | None] = {}
MERGED = "merged"  # a folder of a checkpoint, and the branch that it is published as
# What a checkpoint is to others.
SENT = (
    "*.py",  # of a model that brings its own code
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
# What training goes on from: it stays at home unless asked for. training_args.bin is a pickle, and never leaves.
RESUMED = ("optimizer.pt", "scheduler.pt", "rng_state*.pth", "trainer_state.json", "running_metrics.json")


def tag_name(step: int) -> str:
    """step-000040: sorts as text in the order of the steps."""
    return f"step-{step:06d}"


def check_access(namespace: str | None, *, hub: Hub = CLIENT) -> str:
    """Asks the Hub who we are, before anything is trained. Returns the namespace to publish under.

    Raises ZooError when the Hub cannot be reached or does not accept the token.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    token_from = hub.token_from
    try:
        api = hub.api()
        if api.token is False:  # of which `whoami` says what no user could mend
            raise LocalTokenNotFoundError
        me = api.whoami()
    except UnicodeEncodeError as error:
        raise ZooError(
            f"{token_from} holds characters that no token has, so {hub.address} cannot be asked: set it again."
        ) from error
    except LocalTokenNotFoundError as error:
        mend = "log in with `hf auth login`, or set HF_TOKEN" if token_from == "HF_TOKEN" else f"set {token_from}"
        raise ZooError(f"There is no token for {hub.address}: {mend}.") from error
    except HfHubHTTPError as error:
        status = status_of(error)
        if status in (401, 403):
            raise ZooError(
                f"{hub.address} does not accept the token: make a new one with the role write, and set {token_from}."
            ) from error
        raise ZooError(
            f"{hub.address} answers with an error ({status}): try again later, or use --hub local."
        ) from error
    except client_errors() as error:
        raise ZooError(
            f"The Hub {hub.address} cannot be reached ({reason(error)}): check the address and the network, or "
            "use --hub local."
        ) from error
    role = ((me.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise ZooError(f"The token for {hub.address} may only read: publishing needs one with the role write.")
    return namespace or me["name"]


def publish_folder(
    folder: Path, repo_id: str, *, repo_type: str, message: str, private: bool = False, hub: Hub = CLIENT
) -> str:
    """Sends a folder as one commit, creating the repository if need be. Returns the commit."""
    api = hub.api()
    api.create_repo(repo_id, repo_type=repo_type, exist_ok=True, private=private)
    return api.create_commit(repo_id, _added(_files(folder)), commit_message=message, repo_type=repo_type).oid


def publish_checkpoint(
    checkpoint: Path,
    repo_id: str,
    *,
    run: str,
    extra_files: Path,
    message: str,
    step: int,
    optimizer: bool = False,
    overwrite: bool = False,
    overrides: Mapping[str, Path | None] = NOTHING,
    hub: Hub = CLIENT,
) -> dict[str, str]:
    """Sends one complete checkpoint as one commit with one annotated tag, and notes it in published.json.

    The caller has checked that its files are what was saved. run: the id of the run, which holds the repository. step:
    of training, by which the tag is named. extra_files: a folder of further files (card, metrics, recipe).
    optimizer: send what training goes on from too. overwrite: put these weights under a tag that is of others, as a
    step that is trained again has. overrides: see `checkpoint_files`. Returns {hub, repo, commit, tag, time}. Where an
    earlier try was cut off before it heard an answer, nothing is sent twice: its commit is found again. Raises
    ZooError where another run took the repository, and where the tag is there with other weights: unasked a step's tag
    never moves.
    """
    files = checkpoint_files(checkpoint, optimizer=optimizer, overrides=overrides)
    tag, begun = tag_name(step), checkpoint / SENDING
    tagged = all_tags(repo_id, hub=hub).get(tag)
    commit = _made_before(repo_id, message, files, tagged=tagged, begun=begun.is_file(), hub=hub)
    if commit is None and tagged is not None and overwrite:
        check_claim(run, repo_id, hub=hub)
        hub.api().delete_tag(repo_id, tag=tag)
        tagged = None
    if commit is None and tagged is not None:
        raise ZooError(
            f"The tag {tag} of {repo_id} on {hub.name} is of other weights than {checkpoint}, and a step's tag never "
            "moves: publish under another --namespace, or give --overwrite_repo to replace what is there."
        )
    if commit is None:
        write_text(begun, message + "\n")
        commit = _commit_whole(run, repo_id, {**files, **_files(extra_files)}, message, hub=hub)
    if tagged is None:
        _tag(run, repo_id, tag, commit, message, hub)
    published = {"hub": hub.label, "repo": repo_id, "commit": commit, "tag": tag, "time": now()}
    write_json(checkpoint / PUBLISHED, published)
    begun.unlink(missing_ok=True)
    return published


def publish_release(
    checkpoint: Path,
    repo_id: str,
    *,
    run: str,
    extra_files: Path,
    message: str,
    tag_message: str | None,
    optimizer: bool = False,
    overrides: Mapping[str, Path | None] = NOTHING,
    hub: Hub = CLIENT,
) -> str:
    """Makes a checkpoint what `main` and `best` hold, with `extra_files`, in one commit. Returns the commit.

    tag_message: of the tag `best`; None: nothing is best, and there is no such tag.
    """
    files = checkpoint_files(checkpoint, optimizer=optimizer, overrides=overrides)
    commit = _commit_whole(run, repo_id, {**files, **_files(extra_files)}, message, hub=hub)
    before = all_tags(repo_id, hub=hub).get("best")
    if before != (commit if tag_message else None):
        check_claim(run, repo_id, hub=hub)
        if before is not None:
            hub.api().delete_tag(repo_id, tag="best")
    if tag_message and before != commit:
        _tag(run, repo_id, "best", commit, tag_message, hub)
    return commit


def publish_on_branch(
    folder: Path,
    repo_id: str,
    *,
    run: str,
    extra_files: Path,
    message: str,
    branch: str,
    tag: str | None = None,
    overrides: Mapping[str, Path | None] = NOTHING,
    hub: Hub = CLIENT,
) -> str:
    """Makes a model what a branch holds, by one commit, under a tag if one is given, which moves where it is there.

    One with its adapter merged goes to the branch `merged`: beside the adapter, in a folder, transformers would not
    find it, as adapter_config.json at the root sends it elsewhere. Returns the commit.
    """
    check_claim(run, repo_id, hub=hub)
    hub.api().create_branch(repo_id, branch=branch, exist_ok=True)
    files = {**checkpoint_files(folder, overrides=overrides), **_files(extra_files)}
    commit = _commit_whole(run, repo_id, files, message, revision=branch, hub=hub)
    if tag is not None:
        if tag in all_tags(repo_id, hub=hub):
            hub.api().delete_tag(repo_id, tag=tag)
        _tag(run, repo_id, tag, commit, message, hub)
    return commit


def checkpoint_files(
    checkpoint: Path, *, optimizer: bool = False, overrides: Mapping[str, Path | None] = NOTHING
) -> dict[str, Path]:
    """What is sent of a checkpoint: path in the repository -> local path.

    overrides: what is sent in place of a file; None leaves it out. Raises ZooError for a link that leads out of the
    checkpoint.
    """
    files = {name: path for name, path in _files(checkpoint).items() if _is_sent(name, optimizer=optimizer)}
    return {name: path for name, path in {**files, **overrides}.items() if path is not None}


def _files(folder: Path) -> dict[str, Path]:
    """Path in the repository -> local path of every file. Raises ZooError for a link that leads out of the folder."""
    if (link := find_outward_link(folder, hidden=True)) is not None:
        raise ZooError(
            f"{link} in {folder} is a link to outside of that folder, and what it leads to is not sent: put the file "
            "itself there, or remove the link."
        )
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _is_sent(name: str, *, optimizer: bool) -> bool:
    path = PurePosixPath(name)
    if str(path.parent) not in (".", "critic"):
        return False
    if path.suffix in (".pt", ".pth", ".bin"):
        return optimizer and any(path.match(pattern) for pattern in RESUMED)
    return any(path.match(pattern) for pattern in (*SENT, *(RESUMED if optimizer else ())))


def _is_ours(name: str) -> bool:
    """Whether a checkpoint's commit may have put this file into the repository."""
    if name.endswith(".py"):  # people put programs of their own there too
        return False
    return _is_sent(name, optimizer=True) or name.startswith(("plots/", "runs/", ".eval_results/"))


def _made_before(
    repo_id: str, message: str, files: Mapping[str, Path], *, tagged: str | None, begun: bool, hub: Hub
) -> str | None:
    """The commit `message` of these weights, or None: what the tag points at, or, once begun, a commit of `main`.

    The other files may differ: an adapter names the base that it was published with, here or in another namespace.
    """
    if tagged is None and not begun:
        return None
    weights = {name: path for name, path in files.items() if name.endswith(".safetensors")} or files
    api = hub.api()
    found = [commit.commit_id for commit in api.list_repo_commits(repo_id) if commit.title == message]
    for commit in [tagged] if tagged is not None else found:
        there = api.get_paths_info(repo_id, list(weights), revision=commit)
        same = {entry.path for entry in there if content_id(weights[entry.path], entry) == expected_id(entry)}
        if commit in found and same == set(weights):
            return commit
    return None


def expected_id(entry: Any) -> str:
    """What a Hub's listing names a file's content by: sha256 of a large file, git's blob id of another."""
    return entry.lfs.sha256 if entry.lfs else entry.blob_id


def content_id(path: Path, entry: Any) -> str:
    """`expected_id` of a local file, by the kind that the listing's entry is of."""
    from huggingface_hub.utils.sha import git_hash, sha_fileobj

    if entry.lfs is None:
        return git_hash(path.read_bytes())
    with path.open("rb") as file:
        return sha_fileobj(file).hex()


def is_step(tag: str) -> bool:
    """Whether a checkpoint was published under this tag."""
    return re.fullmatch(r"step-\d{6,}", tag) is not None


def _tag(run: str, repo_id: str, tag: str, commit: str, message: str, hub: Hub) -> None:
    """Tags a commit of the run that holds the repository; the Hub's protocol has no tag that is made on a condition."""
    check_claim(run, repo_id, hub=hub)
    hub.api().create_tag(repo_id, tag=tag, revision=commit, tag_message=message)
    try:
        check_claim(run, repo_id, hub=hub)
    except ZooError:  # taken in between: its new holder must not find this tag
        hub.api().delete_tag(repo_id, tag=tag)
        raise


def _added(files: Mapping[str, Path]) -> list[Any]:
    from huggingface_hub import CommitOperationAdd

    return [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in sorted(files.items())]


def _commit_whole(
    run: str, repo_id: str, files: Mapping[str, Path], message: str, *, revision: str | None = None, hub: Hub
) -> str:
    """One commit by the run that holds the repository, onto `revision` (None: main). Returns the commit.

    `files` are all that it is to hold of ours, so what an earlier one left (an adapter) goes. Raises ZooError where the
    repository is not this run's.
    """
    from huggingface_hub import CommitOperationDelete

    def operations(head: str) -> list[Any]:
        check_claim(run, repo_id, commit=None if revision else head, hub=hub)
        there = hub.api().list_repo_files(repo_id, revision=head)
        stale = [name for name in there if _is_ours(name) and name not in files]
        return [*_added(files), *(CommitOperationDelete(path_in_repo=name) for name in stale)]

    commit = commit_on_head(repo_id, operations, message, revision=revision, hub=hub)
    assert commit is not None
    return commit
