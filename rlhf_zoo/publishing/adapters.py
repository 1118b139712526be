"""Makes published adapters name a base that others can download, and checks before training that there is one."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import ZooError
from ..fileio import read_json, write_json
from ..hub.client.connect import Hub
from ..hub.client.publish import MERGED_MODEL, checkpoint_files, hub_content_id, local_content_id
from ..hub.client.refs import ADAPTER_CONFIGS, hub_lineage, try_hub_then_source
from ..hub.client.refusals import translate_lookup_errors
from ..modeling.integrity import WEIGHTS_SUFFIX
from ..runs.context import RunContext
from ..runs.models import ParentCheckpoint
from ..runs.record import StageRecord
from ..runs.registry import STAGES
from .rounding import write_rounded

if TYPE_CHECKING:
    from huggingface_hub import RepoFile


def check_base(context: RunContext, stage: str, parents: Mapping[str, ParentCheckpoint]) -> None:
    """Checks, before a stage with use_peft trains, that others will be able to download the base of its adapters.

    Args:
        context: The run.
        stage: Name of a stage with use_peft.
        parents: Role -> the checkpoint of that parent.

    Raises:
        ZooError: The base is on no Hub, and this run will not publish it.
    """
    if stage == "sft" or _local_base(context, stage) is not None:
        check_planned_base(context, stage)
        return
    base = parents["sft"]
    # Only a checkpoint of the run's own SFT stage has such a path.
    is_own_sft = str(base.lineage.get("path")).startswith("checkpoint-")
    will_be_published = is_own_sft and context.record("sft").read().get("publish")
    if not base.lineage.get("repo") and not will_be_published:
        raise ZooError(
            f"The adapter of the stage {stage} (use_peft) cannot be published, because its base, the SFT model, is on "
            f"no Hub: publish it first (`rlhf-zoo push {context.directory}`), or remove use_peft."
        )
    if will_be_published:
        check_planned_base(context, stage)
    elif (base.path / ADAPTER_CONFIGS[0]).is_file():
        raise _merged_base_missing(stage, f"name {base.lineage['repo']}@{MERGED_MODEL}, if it has that branch")


def check_planned_base(context: RunContext, stage: str) -> None:
    """Checks, before any stage trains, that others will be able to download the base of a stage's adapters, if any.

    Args:
        context: The run.
        stage: Name of the stage.

    Raises:
        ZooError: The base is on no Hub, and this run will not publish it.
    """
    settings = context.settings(stage)
    if not settings.model.use_peft:
        return
    if (folder := _local_base(context, stage)) is not None:
        raise ZooError(
            f"The adapter of the stage {stage} (use_peft) cannot be published, because its base, the model in "
            f"{folder}, is on no Hub: upload it (`hf upload NAMESPACE/NAME {folder}`; for the embedded Hub "
            f"`rlhf-zoo hub add {folder} NAMESPACE/NAME`) and name it in model_name_or_path, or train "
            "without --hub and --push_to_hub."
        )
    if stage == "sft":
        if settings.model.model_name_or_path is None:
            raise ZooError(
                "The adapter of the stage sft (use_peft) cannot be published, because its base has random weights: "
                "name a model in model_name_or_path, or remove use_peft."
            )
    elif "sft" in context.recipe.stages:
        sft = context.settings("sft")
        starts_from_own_sft = stage == "reward" or settings.model.model_name_or_path in (None, "sft")
        if starts_from_own_sft and sft.model.use_peft and not sft.release.push_merged:
            raise _merged_base_missing(stage, "set push_merged in sft.yaml")


def _local_base(context: RunContext, stage: str) -> str | None:
    """Returns the local folder with the base of a stage's adapter, as the recipe names it.

    None if the stage trains no adapter, if the base is the run's SFT model or not a folder, or if `push --base`
    recorded the base's repository.
    """
    model = context.settings(stage).model
    name = model.model_name_or_path
    has_named_base = model.use_peft and stage != "reward" and name not in (None, "sft")
    return name if has_named_base and Path(name).is_dir() and not _is_published(context, Path(name)) else None


def _is_published(context: RunContext, folder: Path) -> bool:
    """Whether run.json records a repository for the model in a folder, and the stage is published on this Hub."""
    for document in (context.record(stage).read() for stage in STAGES):
        if (document.get("publish") or {}).get("hub") != context.hub.label:
            continue
        parents = (document.get("parents") or {}).values()
        if any(parent.get("repo") and parent.get("folder") == folder.resolve().name for parent in parents):
            return True
    return False


def reason_not_to_publish(context: RunContext) -> str | None:
    """Returns why a run with a local folder as the base of an adapter cannot be published; None without such a base.

    Args:
        context: The run.
    """
    for stage, keys in context.recipe.stages.items():
        if not {**keys, **context.flags.get(stage, {})}.get("use_peft"):
            continue
        if (folder := _local_base(context, stage)) is not None:
            return (
                f"the base of the adapter of the stage {stage}, the model in {folder}, is on no Hub. Once it is, "
                f"`rlhf-zoo push {shlex.quote(str(context.directory))} --base NAMESPACE/NAME` publishes the run."
            )
    return None


def record_base_repository(context: RunContext, stages: Sequence[str], name: str) -> None:
    """Records the repository of a local model that is the base of a run's adapters.

    Args:
        context: The run, with the Hub to publish to.
        stages: The stages to publish.
        name: NAMESPACE/NAME[@REVISION] of the model.

    Raises:
        ZooError: No adapter has a local base, no Hub has such a model, or its weights differ from the folder's.
    """
    repo, _, revision = name.partition("@")

    def commit_on(hub: Hub) -> str:
        with translate_lookup_errors(f"The model {name}", hub, "check --base and --hub."):
            return str(hub.api().model_info(repo, revision=revision or None).sha)

    has_local_base = False
    for record in map(context.record, stages):
        document = record.read()
        for role, parent in (document.get("parents") or {}).items():
            base = _base_in_folder(record, parent)
            if base is None or role not in ("base", "sft"):
                continue
            hub, commit = try_hub_then_source(repo, context.hub, commit_on)
            # The adapter was trained on the weights in the folder, so the repository must have the same weights.
            weights = {path.name: path for path in base.glob(f"*{WEIGHTS_SUFFIX}")}
            remote_files = cast("list[RepoFile]", hub.api().get_paths_info(repo, [*weights], revision=commit))
            equal_files = {
                entry.path
                for entry in remote_files
                if local_content_id(weights[entry.path], entry) == hub_content_id(entry)
            }
            if not weights or equal_files != set(weights):
                raise ZooError(
                    f"{name} on {hub.name} has other weights than {base}, the base of the adapters in {record.path}: "
                    f"upload that folder (`hf upload {repo} {base}`), or name another model with --base."
                )
            pinned_parent = {**parent, "repo": repo, "commit": commit, **hub_lineage(hub, context.hub)}
            # `publish` makes the stages that train later go to the same Hub and namespace.
            destination = {"hub": context.hub.label, "namespace": context.namespace, "private": context.private}
            record.write(
                parents={**document["parents"], role: pinned_parent}, publish=document.get("publish") or destination
            )
            has_local_base = True
    if not has_local_base:
        raise ZooError(f"No adapter in {context.directory} has a local base: remove --base.")


def _base_in_folder(record: StageRecord, parent: Mapping[str, Any]) -> Path | None:
    """Returns the local folder of the base of the stage's adapters; None if `parent` is not that base."""
    for checkpoint in record.checkpoints() if parent.get("folder") else ():
        if (checkpoint / ADAPTER_CONFIGS[0]).is_file():
            base = Path(read_json(checkpoint / ADAPTER_CONFIGS[0]).get("base_model_name_or_path") or "")
            return base if base.resolve().name == parent["folder"] else None
    return None


def _merged_base_missing(stage: str, remedy: str) -> ZooError:
    return ZooError(
        f"The adapter of the stage {stage} (use_peft) cannot be published, because its base, the SFT adapter merged "
        f"into its model, is on no Hub: {remedy}, or remove use_peft from {stage}.yaml."
    )


def file_overrides(context: RunContext, record: StageRecord, checkpoint: Path, folder: Path) -> dict[str, Path | None]:
    """Writes files that replace those of a checkpoint when it is published.

    Adapters name their base by repository, push_dtype rounds the weights, and `push_critic: false` drops the critic.

    Args:
        context: The run.
        record: The stage's directory.
        checkpoint: Folder of the checkpoint.
        folder: Folder to write the changed files into.

    Returns:
        Path in the repository -> the file to send instead; None for a file to leave out.

    Raises:
        ZooError: The base of an adapter is on no Hub.
    """
    document = record.read()
    settings: Mapping[str, Any] = document.get("resolved") or {}
    files = checkpoint_files(checkpoint)
    overrides: dict[str, Path | None] = {}
    if settings.get("push_critic", True) is False:
        overrides = {name: None for name in files if name.startswith("critic/")}
    if (dtype := settings.get("push_dtype")) is not None:
        remaining_files = {name: path for name, path in files.items() if name not in overrides}
        overrides |= write_rounded(remaining_files, dtype, folder)
    configs = _write_adapter_configs(context, document, checkpoint, folder)
    return {name: folder / name for name in configs} | overrides


def _write_adapter_configs(
    context: RunContext, document: Mapping[str, Any], checkpoint: Path, folder: Path
) -> list[str]:
    """Writes a checkpoint's adapter configurations into `folder`, with the repository and commit of the base.

    In the checkpoint, the configurations name the folder that the base was loaded from. Configurations whose base is
    not a published parent of the stage are skipped. Returns the names of the written files.

    Raises ZooError if the run is to be published and the policy's base is a local parent that is on no Hub.
    """
    parents, written_files = document.get("parents") or {}, []
    for name in ADAPTER_CONFIGS:
        if not (checkpoint / name).is_file():
            continue
        config = read_json(checkpoint / name)
        if not (base := config.get("base_model_name_or_path")):
            continue
        locations = (_location_if_base(context, role, parent, Path(base)) for role, parent in parents.items())
        if location := next(filter(None, locations), None):
            config["base_model_name_or_path"], config["revision"] = location
            write_json(folder / name, config)
            written_files.append(name)
        elif name == ADAPTER_CONFIGS[0] and context.publish:
            folders = [parent.get("folder") for parent in parents.values() if not parent.get("repo")]
            if Path(base).resolve().name in folders:
                raise ZooError(
                    f"The base of the adapter in {checkpoint}, the model in {base}, is on no Hub: upload it "
                    f"(`hf upload NAMESPACE/NAME {base}`), and run `rlhf-zoo push {context.directory} --base "
                    "NAMESPACE/NAME`."
                )
    return written_files


def _location_if_base(context: RunContext, role: str, parent: Mapping[str, Any], base: Path) -> tuple[str, str] | None:
    """Returns (repository, commit) of a published parent if an adapter names it as `base`, a folder or repository.

    None for any other parent.
    """
    repo, commit = parent.get("repo"), parent.get("commit")
    if not repo or not commit:
        return None
    record = context.record(role)
    checkpoint = record.path / str(parent.get("path"))
    if base.resolve() == (checkpoint / MERGED_MODEL).resolve():
        merged_commit = record.read().get("merged")
        return (repo, merged_commit) if merged_commit else None
    # A downloaded model is in the client's cache, in a folder named after its commit.
    is_match = commit in (base.name, base.parent.name) or base.resolve() == checkpoint.resolve()
    is_match |= parent.get("folder") == base.resolve().name  # a folder whose repository `push --base` recorded
    return (repo, commit) if is_match or base.as_posix() == repo else None
