"""What every stage of a run shares: where it writes, which Hub it talks to, and its earlier stages."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ZooError
from ..hub.connect import Hub
from ..hub.publish import PUBLISHED, RECIPE_FILE
from ..hub.refusals import refusals_as
from ..recipes import Recipe
from ..record import StageRecord, fingerprint, read_json
from .settings import RecipeConfig, StageSettings, recipe_config, stage_settings

if TYPE_CHECKING:
    from .outbox import Outbox

__all__ = ["Checkpoint", "RunContext", "versions"]

#: Stages that a run of an ablation has of its own.
OWN = ("ppo", "eval")
PACKAGES = ("rlhf-zoo", "torch", "transformers", "trl", "huggingface-hub", "datasets", "peft", "accelerate")


def versions() -> dict[str, str]:
    """What decides, beside its settings, what a run computes: versions, the kind of processor, and torch's threads."""
    import torch

    found = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    machine = {"platform": f"{platform.system()} {platform.machine()}", "cpu": torch.backends.cpu.get_cpu_capability()}
    return found | machine | {"threads": str(torch.get_num_threads())}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to start from: where it lies, and its name for run.json and cards."""

    path: Path
    lineage: Mapping[str, Any]


@dataclass(frozen=True)
class RunContext:
    """One run of one recipe. `publish` says whether checkpoints are sent to `hub`, under `namespace`.

    pinned: stage -> REPOSITORY@COMMIT that takes its place where this directory holds no finished run of it.
    stop_after: end a stage's training with the checkpoint of this step, with the status "stopped".
    base: for a run that is part of another, where the stages lie that are not its `own`; variant: its name among the
    runs of an ablation.
    outbox: sends what is saved; without one, `publish` only says where what was sent before lies. checked: the
    repositories were looked at, and the Hub need not answer before a stage trains.
    """

    recipe: Recipe
    directory: Path
    hub: Hub
    namespace: str
    publish: bool
    restart: bool = False
    command: str = ""
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    private: bool = False
    overwrite: bool = False
    pinned: Mapping[str, str] = field(default_factory=dict)
    stop_after: int | None = None
    base: Path | None = None
    own: tuple[str, ...] = OWN
    variant: str | None = None
    outbox: Outbox | None = None
    checked: bool = False

    @property
    def shared(self) -> RecipeConfig:
        return recipe_config(self.recipe, self._shared_flags)

    @property
    def _shared_flags(self) -> dict[str, Any]:
        return dict(self.flags.get("recipe", {}))

    def record(self, stage: str) -> StageRecord:
        return StageRecord((self.directory if self.base is None or stage in self.own else self.base) / stage)

    def repo(self, stage: str) -> str:
        """NAMESPACE/RECIPE-STAGE; NAMESPACE/RECIPE-VARIANT-ppo for a run of an ablation."""
        own = f"-{self.variant}" if self.variant is not None and stage in self.own else ""
        return f"{self.namespace}/{self.recipe.name}{own}-{stage}"

    def check_recipe(self, stages: Sequence[str]) -> None:
        """Raises ZooError where the record of one of these stages is of another recipe."""
        for stage in stages:
            self.record(stage).check_recipe(self.recipe.name)

    def notify(self) -> None:
        """Something new is there to be sent."""
        if self.outbox is not None:
            self.outbox.notify()

    @property
    def dataset_repo(self) -> str:
        return f"{self.namespace}/{self.recipe.name}"

    def settings(self, stage: str) -> StageSettings:
        settings = stage_settings(
            self.recipe,
            stage,
            self.flags.get(stage, {}),
            shared_flags=self._shared_flags,
            output_dir=self.record(stage).path,
        )
        if stage != "reward" or "ppo" not in self.recipe.stages:
            return settings
        # A reward model's samples are drawn as PPO will draw them, so these are its settings too.
        ppo = self.settings("ppo")
        drawn = {
            "dataset_config": ppo.data.dataset_config,
            "response_length": ppo.trainer.response_length,
            "temperature": ppo.trainer.temperature,
        }
        return replace(settings, resolved={**settings.resolved, "ppo": drawn})

    def checkpoint(self, stage: str) -> Checkpoint:
        """The finished checkpoint of a stage: from this run directory, else from the Hub at its tag `best`.

        Raises ZooError when there is neither.
        """
        record = self.record(stage)
        document = record.read()
        chosen = record.chosen_checkpoint()
        if document.get("status") == "finished" and chosen is not None:
            sent = read_json(chosen / PUBLISHED) if (chosen / PUBLISHED).is_file() else {}
            return Checkpoint(
                chosen,
                {
                    "repo": sent.get("repo"),
                    "commit": sent.get("commit"),
                    "tag": sent.get("tag"),
                    "hub": sent.get("hub", self.hub.label),
                    "path": chosen.name,
                    "fingerprint": document["fingerprint"],
                },
            )
        return self._pulled(stage)

    def _pulled(self, stage: str) -> Checkpoint:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        repo, _, revision = self.pinned.get(stage, f"{self.repo(stage)}@best").partition("@")
        with refusals_as(f"{repo} cannot be fetched from {self.hub.described}", "try again when it answers."):
            try:
                commit = HfApi().model_info(repo, revision=revision).sha
                path = snapshot_download(repo, revision=commit)
            except (RepositoryNotFoundError, RevisionNotFoundError) as error:
                raise ZooError(
                    f"There is no finished {stage} checkpoint in {self.directory} nor under {repo}@{revision} on "
                    f"{self.hub.described}: run `rlhf-zoo {stage} {self.recipe.name}` first."
                ) from error
        # The same run has the same fingerprint, whether its stages lie here or on the Hub.
        told = Path(path) / RECIPE_FILE
        known = fingerprint(read_json(told)) if told.is_file() else commit
        return Checkpoint(
            Path(path), {"repo": repo, "commit": commit, "tag": revision, "path": None, "fingerprint": known}
        )
