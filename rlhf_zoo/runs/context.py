"""The context that all stages of a run share: its directory, its Hub and its earlier stages."""

import importlib.metadata
import logging
import platform
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..errors import ZooError
from ..fileio import now, read_json, write_json
from ..hub.client.claims import RECIPE_FILE
from ..hub.client.connect import Hub
from ..hub.client.publish import PUBLISHED, checkpoint_files
from ..hub.client.refs import resolve
from ..hub.client.refusals import refusals_as
from ..hub.client.step_tags import tag_name
from ..modeling.integrity import check_integrity, weights_digest
from .data.layout import CUTS, HOLDS_OUT
from .models import ParentCheckpoint, model_from_elsewhere
from .recipe import Recipe
from .record import StageRecord, fingerprint, first_difference, write_complete
from .registry import STAGES
from .run_id import run_id
from .settings.parse import RecipeConfig, StageSettings, recipe_config, stage_settings

log = logging.getLogger(__name__)

#: Stages that a run of an ablation does itself. It shares the others with the run that it varies.
OWN = ("ppo", "eval")
#: `DATA_KEYS` are the keys of recipe.yaml that determine SFT's data; `MADE_BY`, all that determine its policy.
DATA_KEYS = ("corpus", "corpus_args", "dataset_name", "dataset_revision")
MADE_BY = ("architecture", *DATA_KEYS, "seed", "tokenizer")
PACKAGES = ("rlhf-zoo", "torch", "transformers", "trl", "huggingface-hub", "datasets", "peft", "accelerate")


def versions() -> dict[str, str]:
    """Returns what affects a run's results in addition to its settings.

    Returns:
        Name -> value: versions of packages, the processor's kind, torch's threads, the sampler, and environment
        variables that change rounding.
    """
    import torch

    from ..modeling.sampling.sampler import SAMPLER
    from .environment import recorded

    packages = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    machine = {"platform": f"{platform.system()} {platform.machine()}", "cpu": torch.backends.cpu.get_cpu_capability()}
    return packages | machine | {"threads": str(torch.get_num_threads()), "sampler": str(SAMPLER)} | recorded()


class Publisher(Protocol):
    """Sends what a run saves while it trains. A stage without a publisher publishes nothing."""

    def notify(self) -> None:
        """Announces something new on disk. Returns immediately and never raises."""

    def drain(self) -> None:
        """Waits until everything is sent.

        Raises:
            ZooError: Something cannot be sent.
        """


@dataclass(frozen=True)
class Round:
    """A later round of a run.

    Attributes:
        number: Number of the round, from 2 on.
        labels: Labeler of its new pairs: 'gold' or a judge's name.
        folder: Folder of the pairs that its reward model learns from.
        before: The PPO policy of the previous round.
    """

    number: int
    labels: str
    folder: Path
    before: ParentCheckpoint

    @property
    def lineage(self) -> dict[str, Any]:
        """The round as run.json and cards record it."""
        address = {name: self.before.lineage.get(name) for name in ("repo", "commit", "tag", "path")}
        return {"number": self.number, "labels": self.labels, "before": address}


def _check_same(checkpoint: Path, document: Mapping[str, Any], *, fix: str) -> None:
    """Raises ZooError if a complete checkpoint does not have the weights with which the stage finished.

    Nothing is compared with push_dtype, because weights restored from a repository may be rounded.
    """
    recorded = document.get("weights")
    if recorded is None or (document.get("resolved") or {}).get("push_dtype") is not None:
        return
    if weights_digest(checkpoint) != recorded:
        raise ZooError(
            f"{checkpoint} has other weights than run.json recorded when its stage finished: restore it, or {fix}."
        )


@dataclass(frozen=True)
class RunContext:
    """One run of one recipe.

    Attributes:
        recipe: The recipe.
        directory: The run directory.
        hub: The Hub that checkpoints are sent to.
        namespace: User or organization that owns the run's repositories.
        publish: Whether checkpoints are sent to `hub`.
        restart: Whether to delete earlier records first (--restart).
        command: The command line, for run.json.
        flags: Keys given on the command line, by stage; "recipe" holds those of recipe.yaml.
        private: Whether new repositories are private.
        fresh: Whether the run was started again (--restart), so that its repositories lose the earlier run's tags.
        overwrite: Whether to take over the repositories of another run (--overwrite_repo).
        pinned: {stage: REPOSITORY@COMMIT} to use if this directory has no finished run of the stage.
        stop_after: The step after whose checkpoint a stage stops training, with the status "stopped".
        base: For a run that is part of another, the directory of the stages that are not in its `own`.
        own: The stages that a run with a `base` trains itself.
        variant: Name of the run within an ablation, a sweep or a set of rounds; None for a recipe's main run.
        checked: Whether all checks before training have passed, so that the Hub need not be asked again.
        of_judge: Whether the run's reward model is the judge `same-labels`, which learns from pairs reserved for it.
        round: A later round of the run (`runs.rounds`); None in the first round.
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
    fresh: bool = False
    overwrite: bool = False
    pinned: Mapping[str, str] = field(default_factory=dict)
    stop_after: int | None = None
    base: Path | None = None
    own: tuple[str, ...] = OWN
    variant: str | None = None
    checked: bool = False
    of_judge: bool = False
    round: Round | None = None
    # Warnings that were logged. Copies made by `replace` share the set, so that a command logs each only once.
    _warned: set[str] = field(default_factory=set, repr=False, compare=False)
    # By stage. Copies made by `replace` start empty, because their recipe or flags may differ.
    _settings: dict[str, StageSettings] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def shared(self) -> RecipeConfig:
        """The keys of recipe.yaml, with the flags applied."""
        return recipe_config(self.recipe, self.flags.get("recipe", {}))

    def warn_once(self, text: str) -> None:
        """Logs a warning the first time only, because several stages of a command would repeat it.

        Args:
            text: The warning.
        """
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    def record(self, stage: str) -> StageRecord:
        """Returns the record of a stage, which is in `base` if the stage is not the run's own.

        Args:
            stage: Name of the stage, or "data".

        Returns:
            The record of the stage.
        """
        return StageRecord((self.directory if self.base is None or stage in self.own else self.base) / stage)

    def repo(self, stage: str) -> str:
        """Returns the repository of a stage.

        Args:
            stage: Name of the stage.

        Returns:
            NAMESPACE/RECIPE-STAGE, or NAMESPACE/RECIPE-VARIANT-STAGE for a variant's own stage.
        """
        suffix = f"-{self.variant}" if self.variant is not None and stage in self.own else ""
        return f"{self.namespace}/{self.recipe.name}{suffix}-{stage}"

    def head(self, stage: str, status: str, *, seed: int, resolved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the first fields of a stage's run.json.

        Args:
            stage: Name of the stage, or "data".
            status: Its status, such as "running".
            seed: Its seed.
            resolved: Its settings.

        Returns:
            The fields.
        """
        return {
            "stage": stage,
            "recipe": self.recipe.name,
            "status": status,
            "seed": seed,
            "fingerprint": fingerprint(resolved),
            "resolved": resolved,
            "versions": versions(),
        }

    def run_id(self, stage: str) -> str:
        """Returns the id of the run directory that may write to the stage's repository.

        Args:
            stage: Name of the stage.

        Returns:
            32 hex digits.
        """
        return run_id(self.record(stage).path.parent)

    def check_begun(self, stage: str, resolved: Mapping[str, Any]) -> None:
        """Checks that a stage's directory holds no run with other settings.

        Args:
            stage: Name of the stage, or "data".
            resolved: The settings of the new run.

        Raises:
            ZooError: It holds one. The message names the flags that a separate run needs, such as one of another seed.
        """
        record = self.record(stage)
        fix = "choose another --output_dir"
        if self.publish:  # a run may have been published under several namespaces, and its record names only the last
            fix += f" and, where {self.namespace} holds repositories of this run, another --namespace"
        record.check_fingerprint(
            resolved,
            recipe=self.recipe.name,
            called=self.recipe.called,
            fix=f"{fix}, or start again there with --restart",
        )

    def stage_command(self, stage: str, *flags: str) -> str:
        """Returns the command that trains a stage of this run, for a message.

        A run that is only sent again has no recipe. Then the command names it as the original command did.

        Args:
            stage: Name of the stage.
            *flags: Flags to append.

        Returns:
            The command.
        """
        called = self.recipe.called
        if not self.recipe.stages:
            called = _recipe_of(self.record(stage).read().get("command")) or self.recipe.name
        return " ".join(["rlhf-zoo", stage, called, "--output_dir", shlex.quote(str(self.directory)), *flags])

    def check_recipe(self, stages: Sequence[str]) -> None:
        """Checks that the records of stages belong to this recipe.

        Args:
            stages: Names of the stages.

        Raises:
            ZooError: One belongs to another recipe.
        """
        for stage in stages:
            self.record(stage).check_recipe(self.recipe.name)

    @property
    def dataset_repo(self) -> str:
        """The repository of the run's data set."""
        return f"{self.namespace}/{self.recipe.name}"

    def settings(self, stage: str) -> StageSettings:
        """Returns the checked settings of a stage, which are read only once.

        Args:
            stage: Name of the stage.

        Returns:
            The settings.

        Raises:
            ZooError: A key or value is not valid.
        """
        if stage not in self._settings:
            self._settings[stage] = self._read_settings(stage)
        return self._settings[stage]

    def _read_settings(self, stage: str) -> StageSettings:
        settings = stage_settings(
            self.recipe,
            stage,
            self.flags.get(stage, {}),
            shared_flags=self.flags.get("recipe", {}),
            output_dir=self.record(stage).path,
        )
        if "ppo" not in self.recipe.stages:
            return settings
        ppo, ppo_keys, resolved = settings if stage == "ppo" else self.settings("ppo"), {}, dict(settings.resolved)
        if stage == "reward":  # it samples as PPO does, so these keys affect its result too
            ppo_keys = {
                "dataset_config": ppo.data.dataset_config,
                "response_length": ppo.trainer.response_length,
                "temperature": ppo.trainer.temperature,
                **({key: getattr(ppo.trainer, key) for key in CUTS} if ppo.trainer.truncation else {}),
            }
        if ppo.data.held_out_share is not None:  # no stage trains on the prompts that PPO holds out
            if stage != "ppo":
                ppo_keys |= {key: getattr(ppo.data, key) for key in HOLDS_OUT}
            split = settings.recipe.evaluation.dataset_test_split
            # If the evaluation has its own split, all held-out prompts go to validation and simulated pairs.
            if split is not None and (stage == "ppo" or getattr(settings.data, "simulated_pairs", None) is not None):
                resolved["evaluation"] = {"dataset_test_split": split}
        return replace(settings, resolved=resolved | ({"ppo": ppo_keys} if ppo_keys else {}))

    def checkpoint(self, stage: str, *, step: int | None = None) -> ParentCheckpoint:
        """Finds the finished checkpoint of a stage in this run directory, otherwise on the Hub at its tag `best`.

        In a recipe without SFT the checkpoint "sft" is the model that PPO names to start from.

        Args:
            stage: Name of the stage.
            step: Step of a checkpoint on disk; None for the one that the release rule chose.

        Returns:
            The checkpoint and its lineage.

        Raises:
            ZooError: There is no such checkpoint, its files differ from what was saved, or it belongs to another run.
        """
        if stage == "sft" and (start := self.named_start) is not None:
            return model_from_elsewhere(start, self.hub, recipe=self.recipe.name)
        record = self.record(stage)
        document = record.read()
        chosen = record.chosen_checkpoint() if step is None else record.checkpoint_path(step)
        if document.get("status") == "finished" and chosen is not None:
            check_integrity(chosen)
            if step is None:
                _check_same(
                    chosen, document, fix=f"train it again with `rlhf-zoo {stage} {self.recipe.called} --restart`"
                )
            sent = read_json(chosen / PUBLISHED) if (chosen / PUBLISHED).is_file() else {}
            return ParentCheckpoint(
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

    @property
    def named_start(self) -> str | None:
        """The model that PPO starts from if the recipe has no SFT stage; otherwise None."""
        stages = self.recipe.stages
        if "sft" in stages or "sft" in self.pinned or "ppo" not in stages:
            return None
        name: str | None = self.settings("ppo").model.model_name_or_path
        return None if name == "sft" else name

    def check_shared(self) -> None:
        """Checks that recipe.yaml has not changed since the SFT policy of this directory was trained.

        Otherwise a later stage would record settings that its policy was not trained with. Keys given as flags of this
        command are deliberate, so they are not compared.

        Raises:
            ZooError: A key that determines the policy has changed.
        """
        record = self.record("sft")
        trained_with = (record.read().get("resolved") or {}).get("recipe") or {}
        flags = self.flags.get("recipe", {})
        # If the stage has its own data set, such as people's votes, it does not read the policy's data.
        unread = DATA_KEYS if "dataset_name" in flags else ()
        keys = [key for key in MADE_BY if key in trained_with and key not in flags and key not in unread]
        old, new = ({key: of[key] for key in keys} for of in (trained_with, asdict(self.shared)))
        key = first_difference(old, new)
        if key is not None:
            raise ZooError(
                f"{self.recipe.source('recipe')} has another {key} than when the policy in {record.path} was trained: "
                f"restore it, set --{key.partition('.')[0]} as that command did, or choose another --output_dir."
            )

    def restore_chosen(self, stage: str) -> None:
        """Downloads the chosen checkpoint of a finished stage if it is missing on disk.

        Later stages start from it, and the stage's last card needs it.

        Args:
            stage: Name of the stage.

        Raises:
            ZooError: The Hub does not have it, or has another run's checkpoint.
        """
        record = self.record(stage)
        document = record.read()
        if document.get("status") != "finished" or not document.get("chosen") or record.chosen_checkpoint():
            return
        step = document["chosen"]["step"]
        target, tag = record.checkpoint_path(step), tag_name(step)
        # A downloaded run.json could name a private repository of the user who pushes it, so it is not trusted.
        on_this_hub = document.get("hub") == self.hub.label and record.is_own()
        published = (document.get("repo") or {}).get("id") if on_this_hub else None
        repo = published or self.repo(stage)
        problem = f"{target}, which the finished stage {stage} chose, is missing and cannot be loaded from {repo}@{tag}"
        fix = f"restore it, or train it again with `{self.stage_command(stage, '--restart')}` and its other flags."
        with refusals_as(problem, fix):
            folder = self.hub.snapshot(repo, revision=tag)
        recipe = folder / RECIPE_FILE
        if not recipe.is_file() or fingerprint(read_json(recipe)) != document["fingerprint"]:
            raise ZooError(f"{problem}, which is of another run: {fix}")
        for name, path in checkpoint_files(folder).items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / name)
        write_complete(target)
        note = {"hub": self.hub.label, "repo": repo, "commit": folder.name, "tag": tag, "time": now()}
        write_json(target / PUBLISHED, note)
        dtype = document["resolved"].get("push_dtype")
        rounded = f", with weights rounded to {dtype}" if dtype else ""
        log.warning("%s was missing and was restored from %s@%s%s.", target, repo, tag, rounded)

    def _pulled(self, stage: str) -> ParentCheckpoint:
        """Finds the stage's checkpoint on the target Hub, because the source Hub has no stages of this run."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        repo, _, revision = self.pinned.get(stage, f"{self.repo(stage)}@best").partition("@")
        try:
            checkpoint = resolve(f"{repo}@{revision}", self.hub, own=True)
        except ZooError as error:
            if not isinstance(error.__cause__, (RepositoryNotFoundError, RevisionNotFoundError)):
                raise
            raise ZooError(
                f"There is no finished {stage} checkpoint in {self.directory} nor under {repo}@{revision} on "
                f"{self.hub.described}: run `{self.stage_command(stage)}` first."
            ) from error.__cause__
        # Computed from the published settings, so that a run has the same fingerprint without its local stages.
        settings = checkpoint.path / RECIPE_FILE
        run_fingerprint = fingerprint(read_json(settings)) if settings.is_file() else checkpoint.commit
        return ParentCheckpoint(
            checkpoint.path,
            {"repo": repo, "commit": checkpoint.commit, "tag": revision, "path": None, "fingerprint": run_fingerprint},
        )


def _recipe_of(command: str | None) -> str | None:
    """Returns the recipe that a recorded training command names."""
    words = shlex.split(command or "")[1:]
    names_recipe = len(words) > 1 and words[0] in ("run", *STAGES) and not words[1].startswith("-")
    return shlex.quote(words[1]) if names_recipe else None
