"""The context that all stages of a run share: its directory, Hub, settings and earlier stages."""

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
from ..hub.client.publish import PUBLISHED_FILE, checkpoint_files, read_publication
from ..hub.client.refs import resolve
from ..hub.client.refusals import translate_hub_errors
from ..hub.client.step_tags import tag_name
from ..modeling.integrity import check_integrity, weights_digest
from .data.layout import HELD_OUT_KEYS, STOP_KEYS, TRUNCATION_KEYS
from .models import ParentCheckpoint, model_from_elsewhere
from .recipe import Recipe
from .record import StageRecord, fingerprint, first_difference, write_complete
from .registry import STAGES
from .run_id import run_id
from .settings.parse import RecipeConfig, StageSettings, recipe_config, stage_settings

log = logging.getLogger(__name__)

#: The stages that an ablation run trains itself. It reuses the base run's other stages.
VARIANT_STAGES = ("ppo", "eval")
#: The keys of recipe.yaml that name SFT's data.
DATA_KEYS = ("corpus", "corpus_args", "dataset_name", "dataset_revision")
#: The keys of recipe.yaml that determine the SFT policy.
SFT_POLICY_KEYS = ("architecture", *DATA_KEYS, "seed", "tokenizer")
#: The packages whose versions run.json records.
PACKAGES = ("rlhf-zoo", "torch", "transformers", "trl", "huggingface-hub", "datasets", "peft", "accelerate")


def environment_info() -> dict[str, str]:
    """Describes the parts of the environment that affect a run's results.

    Returns:
        Name -> value: package versions, the CPU's instructions, the GPU if there is one, the number of torch's threads,
        the sampler's version, and environment variables that change rounding.
    """
    import torch

    from ..modeling.sampling.sampler import SAMPLER_VERSION
    from .environment import recorded_variables

    packages = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    machine = {"platform": f"{platform.system()} {platform.machine()}", "cpu": torch.backends.cpu.get_cpu_capability()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    machine |= {"threads": str(torch.get_num_threads()), "sampler": str(SAMPLER_VERSION)}
    return packages | machine | recorded_variables()


class Publisher(Protocol):
    """Sends what a run saves while it trains. A stage without a publisher publishes nothing."""

    def notify(self) -> None:
        """Announces new files on disk. Returns immediately and never raises."""

    def drain(self) -> None:
        """Waits until everything is sent.

        Raises:
            ZooError: A file cannot be sent.
        """


@dataclass(frozen=True)
class Round:
    """A later round of a run.

    Attributes:
        number: Number of the round, at least 2.
        labeler: The labeler of the round's new pairs: 'gold' or a judge's name.
        folder: Folder of the pairs that the round's reward model learns from.
        previous_policy: The PPO policy of the previous round.
    """

    number: int
    labeler: str
    folder: Path
    previous_policy: ParentCheckpoint

    @property
    def lineage(self) -> dict[str, Any]:
        """The round as run.json and cards record it."""
        policy = {name: self.previous_policy.lineage.get(name) for name in ("repo", "commit", "tag", "path")}
        return {"number": self.number, "labels": self.labeler, "before": policy}


def _check_final_weights(checkpoint: Path, run_json: Mapping[str, Any], *, fix: str) -> None:
    """Raises ZooError if a checkpoint does not have the weights that run.json recorded at the end of the stage.

    Does nothing if run.json records no weights, or if push_dtype is set, because weights restored from a repository may
    be rounded.
    """
    recorded_digest = run_json.get("weights")
    if recorded_digest is None or (run_json.get("resolved") or {}).get("push_dtype") is not None:
        return
    if weights_digest(checkpoint) != recorded_digest:
        raise ZooError(
            f"{checkpoint} does not have the weights that run.json recorded at the end of the stage: restore them, or "
            f"{fix}."
        )


@dataclass(frozen=True)
class RunContext:
    """One run of one recipe.

    Attributes:
        recipe: The recipe.
        directory: The run directory.
        hub: The Hub that models and data are read from, and that checkpoints are sent to if `publish` is true.
        namespace: User or organization that owns the run's repositories.
        publish: Whether checkpoints are sent to `hub`.
        restart: Whether each stage deletes its earlier record first (--restart).
        command: The command line, for run.json.
        flags: Keys given on the command line, by stage; "recipe" holds those of recipe.yaml.
        private: Whether new repositories are private.
        drop_old_tags: Whether publishing deletes the earlier run's tags, because the run was restarted (--restart).
        overwrite: Whether to claim repositories that another run has claimed (--overwrite_repo).
        pinned_checkpoints: Stage -> REPOSITORY@COMMIT to load if this directory has no finished run of the stage.
        stop_after: Step at which a stage saves a checkpoint and stops, with the status "stopped"; None never stops
            early.
        base: The run directory with the stages that are not in `own_stages`; None if the run trains all of its stages.
        own_stages: The stages that a run with a `base` trains itself.
        variant: Name of the run within an ablation, a sweep or a set of rounds; None for a recipe's main run.
        preflight_passed: Whether all checks before training have passed, so that stages need not repeat them.
        trains_judge: Whether the reward stage trains the judge `same-labels`, on the pairs reserved for it.
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
    drop_old_tags: bool = False
    overwrite: bool = False
    pinned_checkpoints: Mapping[str, str] = field(default_factory=dict)
    stop_after: int | None = None
    base: Path | None = None
    own_stages: tuple[str, ...] = VARIANT_STAGES
    variant: str | None = None
    preflight_passed: bool = False
    trains_judge: bool = False
    round: Round | None = None
    # Warnings already logged. Copies made by `replace` share the set, so that a command logs each warning only once.
    _warned: set[str] = field(default_factory=set, repr=False, compare=False)
    # Settings by stage. Copies made by `replace` start empty, because their recipe or flags may differ.
    _settings: dict[str, StageSettings] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def shared(self) -> RecipeConfig:
        """The keys of recipe.yaml, with the flags applied."""
        return recipe_config(self.recipe, self.flags.get("recipe", {}))

    def warn_once(self, text: str) -> None:
        """Logs a warning only once, even if several stages of a command repeat it.

        Args:
            text: The warning.
        """
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    def record(self, stage: str) -> StageRecord:
        """Returns the record of a stage, which is in `base` if the run does not train the stage itself.

        Args:
            stage: Name of the stage, or "data".
        """
        return StageRecord((self.directory if self.base is None or stage in self.own_stages else self.base) / stage)

    def repo(self, stage: str) -> str:
        """Returns the repository of a stage.

        Args:
            stage: Name of the stage.

        Returns:
            NAMESPACE/RECIPE-STAGE, or NAMESPACE/RECIPE-VARIANT-STAGE for a variant's own stage.
        """
        suffix = f"-{self.variant}" if self.variant is not None and stage in self.own_stages else ""
        return f"{self.namespace}/{self.recipe.name}{suffix}-{stage}"

    def run_json_header(self, stage: str, status: str, *, seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the first fields of a stage's run.json.

        Args:
            stage: Name of the stage, or "data".
            status: Status of the stage, such as "running".
            seed: Seed of the stage.
            settings: Settings of the stage.
        """
        return {
            "stage": stage,
            "recipe": self.recipe.name,
            "status": status,
            "seed": seed,
            "fingerprint": fingerprint(settings),
            "resolved": settings,
            "versions": environment_info(),
        }

    def run_id(self, stage: str) -> str:
        """Returns the id of the run directory to which a stage belongs. Only that run may write to its repository.

        Args:
            stage: Name of the stage.

        Returns:
            32 hex digits.
        """
        return run_id(self.record(stage).path.parent)

    def check_settings_unchanged(self, stage: str, settings: Mapping[str, Any]) -> None:
        """Checks that a stage's directory has no run with other settings.

        Args:
            stage: Name of the stage, or "data".
            settings: The settings of the new run.

        Raises:
            ZooError: The directory has a run with other settings. The message suggests flags for a separate run.
        """
        record = self.record(stage)
        fix = "choose another --output_dir"
        if self.publish:  # a run may have been published under several namespaces, and its record names only the last
            fix += f" and, if this run is already published under {self.namespace}, another --namespace"
        record.check_fingerprint(
            settings,
            recipe=self.recipe.name,
            cli_name=self.recipe.cli_name,
            fix=f"{fix}, or start again there with --restart",
        )

    def stage_command(self, stage: str, *flags: str) -> str:
        """Returns the command that trains a stage of this run, for a message.

        A command that only publishes a run does not load the recipe. The recipe's name is then taken from the command
        that run.json records.

        Args:
            stage: Name of the stage, or another command that trains, such as "run".
            *flags: Flags to append.
        """
        name = self.recipe.cli_name
        if not self.recipe.stages:
            name = _recipe_of_command(self.record(stage).read().get("command")) or self.recipe.name
        directory = self.record(stage).path.parent  # `base` if the run does not train the stage itself
        return " ".join(["rlhf-zoo", stage, name, "--output_dir", shlex.quote(str(directory)), *flags])

    def check_recipe(self, stages: Sequence[str]) -> None:
        """Checks that the records of stages belong to this recipe.

        Args:
            stages: Names of the stages.

        Raises:
            ZooError: A record belongs to another recipe.
        """
        for stage in stages:
            self.record(stage).check_recipe(self.recipe.name)

    @property
    def dataset_repo(self) -> str:
        """The repository of the run's data set."""
        return f"{self.namespace}/{self.recipe.name}"

    def settings(self, stage: str) -> StageSettings:
        """Returns the checked settings of a stage, which are cached.

        Args:
            stage: Name of the stage.

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
        ppo = settings if stage == "ppo" else self.settings("ppo")
        resolved = dict(settings.resolved)
        ppo_keys: dict[str, Any] = {}
        if stage == "reward":  # the reward stage samples with PPO's settings, so they affect its result too
            keys = ["response_length", "temperature"]
            keys += TRUNCATION_KEYS if ppo.trainer.truncation else ()
            keys += STOP_KEYS if ppo.trainer.configured_stop_ids is not None else ()
            ppo_keys = {"dataset_config": ppo.data.dataset_config} | {key: getattr(ppo.trainer, key) for key in keys}
        if ppo.data.held_out_share is not None:  # no stage trains on the prompts that PPO holds out
            if stage != "ppo":
                ppo_keys |= {key: getattr(ppo.data, key) for key in HELD_OUT_KEYS}
            split = settings.recipe.evaluation.dataset_test_split
            # If the evaluation has its own split, all held-out prompts go to validation and simulated pairs.
            if split is not None and (stage == "ppo" or getattr(settings.data, "simulated_pairs", None) is not None):
                resolved["evaluation"] = {"dataset_test_split": split}
        return replace(settings, resolved=resolved | ({"ppo": ppo_keys} if ppo_keys else {}))

    def checkpoint(self, stage: str, *, step: int | None = None) -> ParentCheckpoint:
        """Finds the finished checkpoint of a stage: on disk (see `record`), otherwise on the Hub.

        On the Hub this is the stage's pinned commit, or the tag `best` if no commit is pinned. For the stage "sft" of a
        recipe without SFT, the result is the model that PPO starts from.

        Args:
            stage: Name of the stage.
            step: Step of a checkpoint on disk; None for the checkpoint that the release rule chose.

        Raises:
            ZooError: There is no such checkpoint, its files differ from what was saved, or its weights from those that
                run.json records.
        """
        if stage == "sft" and (base_model := self.ppo_base_model) is not None:
            return model_from_elsewhere(base_model, self.hub, recipe=self.recipe.name)
        record = self.record(stage)
        run_json = record.read()
        checkpoint = record.chosen_checkpoint() if step is None else record.checkpoint_path(step)
        if run_json.get("status") == "finished" and checkpoint is not None:
            check_integrity(checkpoint)
            if step is None:
                fix = f"train the stage again with `{self.stage_command(stage, '--restart')}`"
                _check_final_weights(checkpoint, run_json, fix=fix)
            publication = read_publication(checkpoint)
            lineage = {key: publication.get(key) for key in ("repo", "commit", "tag")}
            lineage |= {"hub": publication.get("hub", self.hub.label), "path": checkpoint.name}
            return ParentCheckpoint(checkpoint, {**lineage, "fingerprint": run_json["fingerprint"]})
        return self._resolve_on_hub(stage)

    @property
    def ppo_base_model(self) -> str | None:
        """The model that PPO starts from if the recipe has no SFT stage; otherwise None."""
        stages = self.recipe.stages
        if "sft" in stages or "sft" in self.pinned_checkpoints or "ppo" not in stages:
            return None
        name: str | None = self.settings("ppo").model.model_name_or_path
        return None if name == "sft" else name

    def check_policy_keys_unchanged(self) -> None:
        """Checks that the keys of recipe.yaml that determine the SFT policy have not changed since it was trained.

        Otherwise a later stage would record settings that its policy was not trained with. Keys that this command's
        flags set are not compared, because such a change is deliberate.

        Raises:
            ZooError: A key that determines the policy has changed.
        """
        record = self.record("sft")
        recorded_keys = (record.read().get("resolved") or {}).get("recipe") or {}
        flags = self.flags.get("recipe", {})
        # With --dataset_name, later stages train on other data than the policy did, so the data keys may differ.
        ignored_keys = DATA_KEYS if "dataset_name" in flags else ()
        keys = [key for key in SFT_POLICY_KEYS if key in recorded_keys and key not in {*flags, *ignored_keys}]
        current = asdict(self.shared)
        key = first_difference({key: recorded_keys[key] for key in keys}, {key: current[key] for key in keys})
        if key is not None:
            raise ZooError(
                f"{key} in {self.recipe.yaml_file('recipe')} has changed since the policy in {record.path} was "
                f"trained: restore it, pass the earlier value by --{key.partition('.')[0]}, or choose another "
                "--output_dir."
            )

    def restore_chosen_checkpoint(self, stage: str) -> None:
        """Downloads the chosen checkpoint of a finished stage if it is missing on disk.

        Later stages start from this checkpoint, and the stage's last card needs it.

        Args:
            stage: Name of the stage.

        Raises:
            ZooError: The Hub does not have the checkpoint, or has another run's checkpoint.
        """
        record = self.record(stage)
        run_json = record.read()
        if run_json.get("status") != "finished" or not run_json.get("chosen") or record.chosen_checkpoint():
            return
        step = run_json["chosen"]["step"]
        target, tag = record.checkpoint_path(step), tag_name(step)
        # Use the repository in run.json only if this user wrote that file: a downloaded one could name a private
        # repository of the user, whose checkpoint would then be published.
        is_trusted = run_json.get("hub") == self.hub.label and record.is_own()
        published_repo = (run_json.get("repo") or {}).get("id") if is_trusted else None
        repo = published_repo or self.repo(stage)
        problem = f"{target}, which the finished stage {stage} chose, is missing"
        fix = f"restore it, or train it again with `{self.stage_command(stage, '--restart')}` and its other flags."
        with translate_hub_errors(f"{problem} and cannot be loaded from {repo}@{tag}", fix):
            folder = self.hub.snapshot(repo, revision=tag)
        settings_file = folder / RECIPE_FILE
        if not settings_file.is_file() or fingerprint(read_json(settings_file)) != run_json["fingerprint"]:
            raise ZooError(f"{problem}, and {repo}@{tag} belongs to another run: {fix}")
        for name, path in checkpoint_files(folder).items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / name)
        write_complete(target)
        publication = {"hub": self.hub.label, "repo": repo, "commit": folder.name, "tag": tag, "time": now()}
        write_json(target / PUBLISHED_FILE, publication)
        dtype = run_json["resolved"].get("push_dtype")
        rounding = f", with weights rounded to {dtype}" if dtype else ""
        log.warning("%s was missing and was restored from %s@%s%s.", target, repo, tag, rounding)

    def _resolve_on_hub(self, stage: str) -> ParentCheckpoint:
        """Finds the stage's checkpoint on `hub`, not on its source Hub, which never has stages of this run."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        repo, _, revision = self.pinned_checkpoints.get(stage, f"{self.repo(stage)}@best").partition("@")
        try:
            checkpoint = resolve(f"{repo}@{revision}", self.hub, skip_source=True)
        except ZooError as error:
            if not isinstance(error.__cause__, (RepositoryNotFoundError, RevisionNotFoundError)):
                raise
            raise ZooError(
                f"There is no finished {stage} checkpoint in {self.directory} nor under {repo}@{revision} on "
                f"{self.hub.description}: run `{self.stage_command(stage)}` first."
            ) from error.__cause__
        # The digest of the published settings makes the lineage the same whether the parent is local or on the Hub.
        settings_file = checkpoint.path / RECIPE_FILE
        run_fingerprint = fingerprint(read_json(settings_file)) if settings_file.is_file() else checkpoint.commit
        return ParentCheckpoint(
            checkpoint.path,
            {"repo": repo, "commit": checkpoint.commit, "tag": revision, "path": None, "fingerprint": run_fingerprint},
        )


def _recipe_of_command(command: str | None) -> str | None:
    """Returns the recipe that a recorded training command names; None if the command does not name a recipe."""
    words = shlex.split(command or "")[1:]
    names_recipe = len(words) > 1 and words[0] in ("run", *STAGES) and not words[1].startswith("-")
    return shlex.quote(words[1]) if names_recipe else None


def stages_to_train(context: RunContext) -> dict[str, StageSettings]:
    """Returns the settings of the stages that a command for all stages will train: neither finished nor pinned.

    With --restart, finished stages are trained again.

    Args:
        context: The run.
    """
    stages = [stage for stage in context.recipe.stages if stage not in context.pinned_checkpoints]
    if not context.restart:
        stages = [stage for stage in stages if context.record(stage).read().get("status") != "finished"]
    return {stage: context.settings(stage) for stage in stages}
