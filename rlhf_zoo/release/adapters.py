"""What of a checkpoint is sent otherwise than it lies on the disk: its adapters name a base that others find."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..hub.publish import MERGED, checkpoint_files
from ..hub.refs import ADAPTERS
from ..record import StageRecord, read_json, write_json
from ..runs.context import ParentCheckpoint, RunContext
from .rounding import rounded

CRITIC = "critic"


def check_bases(context: RunContext, stage: str, parents: Mapping[str, ParentCheckpoint]) -> None:
    """Raises ZooError, before the stage trains, where its adapters would be published without their base."""
    if stage == "sft":
        check_plan(context, stage)
        return
    base = parents["sft"]
    here = str(base.lineage.get("path")).startswith("checkpoint-") and context.record("sft").read().get("publish")
    if not base.lineage.get("repo") and not here:
        raise ZooError(
            f"use_peft of the stage {stage} cannot be published, as its adapter would lie on an SFT model that no Hub "
            f"has: publish that first (`rlhf-zoo push {context.directory}`), or leave use_peft out."
        )
    if here:
        check_plan(context, stage)
    elif (base.path / ADAPTERS[0]).is_file():
        raise _on_merged(stage, f"name {base.lineage['repo']}@{MERGED}, if it has that branch")


def check_plan(context: RunContext, stage: str) -> None:
    """Raises ZooError, before any stage trains, where a recipe's adapters would be published without their base."""
    settings = context.settings(stage)
    if not settings.model.use_peft:
        return
    if stage == "sft":
        name = settings.model.model_name_or_path
        if name is None or Path(name).is_dir():
            raise ZooError(
                "use_peft of the stage sft cannot be published, as its adapter would lie on a model that no Hub has: "
                "name one of the Hub in model_name_or_path (`hf upload` sends a folder there), or leave use_peft out."
            )
    elif "sft" in context.recipe.stages:
        sft = context.settings("sft")
        own = stage == "reward" or settings.model.model_name_or_path in (None, "sft")
        if own and sft.model.use_peft and not sft.release.push_merged:
            raise _on_merged(stage, "set push_merged in sft.yaml")


def _on_merged(stage: str, mend: str) -> ZooError:
    return ZooError(
        f"use_peft of the stage {stage} cannot be published, as its adapter would lie on an SFT adapter merged into "
        f"its base, which no Hub has: {mend}, or leave use_peft out of {stage}.yaml."
    )


def sent_instead(context: RunContext, record: StageRecord, checkpoint: Path, folder: Path) -> dict[str, Path | None]:
    """Path in the repository -> the file of `folder` that is sent there instead, None for what is left out.

    Weights are rounded by push_dtype, and the critic is left out by push_critic.
    """
    document = record.read()
    settings: Mapping[str, Any] = document.get("resolved") or {}
    files = checkpoint_files(checkpoint)
    found: dict[str, Path | None] = {}
    if settings.get("push_critic", True) is False:
        found = {name: None for name in files if name.startswith(f"{CRITIC}/")}
    if (dtype := settings.get("push_dtype")) is not None:
        others = {name: path for name, path in files.items() if name not in found}
        found |= rounded(others, dtype, folder)
    named = {name: folder / name for name in _name_bases(context, document, checkpoint, folder) if name not in found}
    return {**found, **named}


def _name_bases(context: RunContext, document: Mapping[str, Any], checkpoint: Path, folder: Path) -> list[str]:
    """Writes a checkpoint's adapter configurations into `folder`, each naming its base by repository and commit.

    On the disk they name the folder that it was loaded from. What has no adapter, or a base that no parent is, is left.
    Returns the names of those it wrote.
    """
    parents, written = document.get("parents") or {}, []
    for name in ADAPTERS:
        if not (checkpoint / name).is_file():
            continue
        config = read_json(checkpoint / name)
        if not (base := config.get("base_model_name_or_path")):
            continue
        named = (_published(context, role, parent, Path(base)) for role, parent in parents.items())
        if found := next(filter(None, named), None):
            config["base_model_name_or_path"], config["revision"] = found
            write_json(folder / name, config)
            written.append(name)
    return written


def _published(context: RunContext, role: str, parent: Mapping[str, Any], base: Path) -> tuple[str, str] | None:
    """(repository, commit) of a parent, if it is what lies at the path `base`."""
    repo, commit = parent.get("repo"), parent.get("commit")
    if not repo or not commit:
        return None
    record = context.record(role)
    own = record.path / str(parent.get("path"))
    if base.resolve() == (own / MERGED).resolve():
        merged = record.read().get("merged")
        return (repo, merged) if merged else None
    # A model that was pulled lies in the client's cache, in a folder named by its commit.
    lies_there = commit in (base.name, base.parent.name) or base.resolve() == own.resolve()
    return (repo, commit) if lies_there or base.as_posix() == repo else None
