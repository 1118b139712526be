"""Facts about a stage for its card, from run.json, metrics.jsonl, the checkpoints, ../eval and ../baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import hub_id, is_finite, read_json
from ...hub.client.publish import read_publication
from ...hub.client.step_tags import tag_name
from ...runs.record import StageRecord, checkpoint_step
from ...runs.registry import STAGES, starts_from_base
from .estimates import estimate_at, is_better_than_ppo
from .markdown import NOT_EVALUATED, NOT_MEASURED
from .run_files import (
    describe_foreign_evaluation,
    is_transformers_class,
    published_commits,
    read_evaluation,
    read_frontier,
    without_private_keys,
)

#: File in a run's directory with the results of baselines.
FRONTIER = "baseline/frontier.json"
#: Keys of run.json that hold measurements.
_RUN_METRICS = ("reward_model", "cut_rows", "seconds")
#: Roles of parents that a run directory may hold, each in a folder of that name.
_PARENT_FOLDERS = ("sft", "reward", "data")


@dataclass(frozen=True)
class CheckpointRow:
    """A row of the checkpoint table.

    Attributes:
        step: The checkpoint's step.
        tag: The tag that it has, or will have, on the Hub.
        commit: Its commit on the Hub; None if it was not sent.
        metrics: The metrics that were logged at the step.
    """

    step: int
    tag: str
    commit: str | None
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class StageFacts:
    """The facts about a stage, up to a step.

    Attributes:
        path: The stage's directory.
        run: Its run.json.
        metrics: Rows of its metrics.jsonl, up to `step`.
        step: The described step; None for the end of the run.
        evaluation: The content of ../eval/evaluation.json; {} if there is none, if it is of other weights, if `step`
            is not None, or if the run is not trusted.
        samples: Rows of ../eval/samples.jsonl; [] where `evaluation` is {}.
        ignored_evaluation: A phrase for what ../eval measured, if that is not the end of this run; None otherwise.
        merged: Whether the facts describe the branch `merged`, which holds the checkpoint with its adapter merged.
        frontier: The content of ../baseline/frontier.json; {} where `evaluation` is {}, or if the baselines belong to
            another evaluation.
        is_trusted: Whether this user wrote the run or trusts it. If not, its metrics are not read.
    """

    path: Path
    run: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    step: int | None
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    ignored_evaluation: str | None = None
    merged: bool = False
    frontier: Mapping[str, Any] = field(default_factory=dict)
    is_trusted: bool = True

    @classmethod
    def read(cls, path: Path, step: int | None, *, merged: bool = False, is_trusted: bool = True) -> StageFacts:
        """Reads a stage's directory.

        Args:
            path: The directory.
            step: The last step to read; None for the end of the run.
            merged: Whether to describe the branch `merged`.
            is_trusted: Whether to read metrics. If not, the facts are settings, lineage and checkpoints.

        Raises:
            ZooError: The directory holds no run of a stage that has a card, or the run has no such step.
        """
        record = StageRecord(path)
        run = record.read()
        if run.get("stage") not in STAGES:
            raise ZooError(
                f"{path} holds no run that has a card: name the directory of a stage, such as runs/tiny-world/ppo."
            )
        rows = record.metrics() if is_trusted else []
        if not is_trusted:
            run = {key: value for key, value in run.items() if key not in _RUN_METRICS}
            if run.get("chosen"):
                run["chosen"] = {**run["chosen"], "value": None}
        if step is None and not is_trusted:
            return cls(path, run, rows, None, merged=merged, is_trusted=False)
        if step is None:
            eval_run = StageRecord(path.parent / "eval").read()
            if ignored_evaluation := describe_foreign_evaluation(record, run, eval_run):
                return cls(path, run, rows, None, ignored_evaluation=ignored_evaluation, merged=merged)
            evaluation, samples = read_evaluation(path.parent / "eval")
            frontier = read_frontier(path.parent / FRONTIER, eval_run)
            return cls(path, run, rows, None, evaluation=evaluation, samples=samples, merged=merged, frontier=frontier)
        steps_on_disk = {
            checkpoint_step(folder)
            for folder in path.glob("checkpoint-*")
            if folder.name.removeprefix("checkpoint-").isdigit()
        }
        steps = {row["step"] for row in rows} | steps_on_disk | {*published_commits(run)}
        if step not in steps:
            raise ZooError(f"{path} has no step {step}: it has {', '.join(map(str, sorted(steps))) or 'none yet'}.")
        return cls(path, run, [row for row in rows if row["step"] <= step], step, is_trusted=is_trusted)

    @property
    def stage(self) -> str:
        """Name of the stage."""
        return self.run["stage"]

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return str(self.run.get("recipe", "unknown"))

    @property
    def plot_marker_step(self) -> int | None:
        """The step to mark in plots: the described one; None if the metrics end there."""
        step, last_step = self.described_step, self.last_step
        return step if step is not None and last_step is not None and step < last_step else None

    @property
    def describes_finished_run(self) -> bool:
        """Whether the facts describe the end of a finished run."""
        return self.step is None and self.run.get("status") == "finished"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the stage in run.json, without secrets and without folders of outputs, logs and caches."""
        return without_private_keys(self.run.get("resolved", {}))

    def setting(self, key: str, default: Any = None) -> Any:
        """Returns a setting of the stage, or else of recipe.yaml.

        Args:
            key: The key.
            default: The value if neither sets it.
        """
        shared = self.settings.get("recipe")
        value = self.settings.get(key, shared.get(key) if isinstance(shared, Mapping) else None)
        return default if value is None else value

    @property
    def is_simulated(self) -> bool:
        """Whether a program simulates the preferences."""
        return bool(self.setting("simulated"))

    @property
    def repo_id(self) -> str | None:
        """The repository that the stage is published in; None if it is not published."""
        return hub_id((self.run.get("repo") or {}).get("id"))

    @property
    def title(self) -> str:
        """Name of the model."""
        return self.repo_id.rpartition("/")[2] if self.repo_id else f"{self.recipe}-{self.stage}"

    @property
    def hub_label(self) -> str:
        """'local', or the address of the Hub."""
        return self.run.get("hub") or "local"

    @property
    def choice(self) -> Mapping[str, Any] | None:
        """{step, rule, metric, value} of the chosen checkpoint; None until one is chosen, and if `step` is not None."""
        choice = self.run.get("chosen") if self.describes_finished_run else None
        return None if choice and choice.get("provisional") else choice

    @property
    def awaits_evaluation(self) -> bool:
        """Whether the run is finished, but the evaluation that chooses `main` is still to come."""
        return self.describes_finished_run and bool((self.run.get("chosen") or {}).get("provisional"))

    @cached_property
    def described_step(self) -> int | None:
        """The step that the card describes: `step`, or else the chosen step, the last saved or the last logged one."""
        if self.step is not None:
            return self.step
        if self.choice:
            return self.choice["step"]
        saved_steps = [checkpoint.step for checkpoint in self.checkpoints]
        return max(saved_steps or [row["step"] for row in self.metrics], default=None)

    @cached_property
    def last_step(self) -> int | None:
        """The last step that was logged."""
        return max((row["step"] for row in self.metrics), default=None)

    @cached_property
    def latest_metrics(self) -> dict[str, Any]:
        """Metric -> its last logged value up to `described_step`."""
        return {key: value for key, (_, value) in self._latest_entries.items()}

    def step_of_latest(self, key: str) -> int | None:
        """Returns the step at which `latest_metrics[key]` was logged; None if the metric never was.

        Args:
            key: The metric.
        """
        return self._latest_entries[key][0] if key in self._latest_entries else None

    @cached_property
    def _latest_entries(self) -> dict[str, tuple[int, Any]]:
        newest: dict[str, tuple[int, Any]] = {}
        for row in self.metrics:
            if self.described_step is None or row["step"] <= self.described_step:
                newest.update({key: (row["step"], value) for key, value in row.items() if value is not None})
        return newest

    def first_value(self, key: str) -> Any:
        """Returns the first logged value of a metric; None if the metric was never logged.

        Args:
            key: The metric.
        """
        return next((row[key] for row in self.metrics if row.get(key) is not None), None)

    @cached_property
    def parents(self) -> dict[str, dict[str, Any]]:
        """Role -> {repo, commit}; for local parents also `folder` (name) and `files` (digest); of GGUF files `gguf`."""
        parents = {**(self.run.get("parents") or {}), "data": self._dataset}
        if self.stage == "sft" and "base" not in parents and hub_id(self.setting("model_name_or_path")):
            parents["base"] = {"repo": self.setting("model_name_or_path"), "commit": self.setting("model_revision")}
        recorded_parents = {role: parent for role, parent in parents.items() if parent}
        return {
            role: {key: parent.get(key) for key in ("repo", "commit")}
            | {key: parent[key] for key in ("folder", "files", "gguf") if parent.get(key)}
            for role, parent in recorded_parents.items()
        }

    def _parent_run(self, role: str, parent: Mapping[str, Any]) -> dict[str, Any]:
        """Returns run.json of the stage that trained a parent; {} if neither this run nor an enclosing run has it.

        The folders of rounds, and of runs of an ablation or a sweep, lie one or two levels below the run that trained
        their SFT policy.
        """
        if role not in _PARENT_FOLDERS:
            return {}
        run, fingerprint = StageRecord(self.path.parent / role).read(), parent.get("fingerprint")
        # A fingerprint that is not recorded does not rule the run out.
        if run and (fingerprint is None or run.get("fingerprint") in (None, fingerprint)):
            return run
        # For a run that is not trusted, do not read other folders of this machine.
        parent_folders = self.path.parents[1:3] if self.is_trusted else []
        parent_runs = (StageRecord(folder / role).read() for folder in parent_folders)
        return next((other for other in parent_runs if other and other.get("fingerprint") == fingerprint), {})

    @property
    def _dataset(self) -> Mapping[str, Any] | None:
        dataset = self.run.get("dataset") or (self.run.get("parents") or {}).get("data")
        dataset_name = self.setting("dataset_name")
        if hub_id(dataset_name) and not dataset:
            return {"repo": dataset_name, "commit": self.setting("dataset_revision")}
        if dataset_name and not hub_id(dataset_name) and not self.setting("corpus"):
            return {"folder": Path(dataset_name).name, **(dataset or {})}
        return dataset

    @cached_property
    def sft_base_model(self) -> Mapping[str, Any] | None:
        """{repo, commit} of the model that SFT started from, or that PPO did if `ppo_starts_from_base`.

        A local model has `folder` and repo None. Random weights have neither. None if the run does not record it.
        """
        if "base" in self.parents:
            return self.parents["base"]
        if self.stage == "sft":
            name = self.settings.get("model_name_or_path")
            if name is None:
                return {"repo": None, "commit": None} if self.settings else None
            return {"repo": None, "commit": None, "folder": Path(name).name}
        if self.ppo_starts_from_base:
            return self.parents.get("sft")
        sft = (self.run.get("parents") or {}).get("sft")
        sft_run = self._parent_run("sft", sft) if sft else {}
        if sft_run.get("stage") != "sft":
            return None
        return StageFacts(self.path.parent / "sft", sft_run, [], None).sft_base_model

    @property
    def ppo_starts_from_base(self) -> bool:
        """Whether PPO started from a model that the recipe names, not from the SFT stage of its run."""
        return starts_from_base(self.stage, self.settings)

    @property
    def initial_policy(self) -> str:
        """What sentences call the policy that PPO started from: "SFT", or "the base" if `ppo_starts_from_base`."""
        return "the base" if self.ppo_starts_from_base else "SFT"

    @property
    def initial_policy_title(self) -> str:
        """`initial_policy` as the heading of a column: "SFT" or "base"."""
        return self.initial_policy.removeprefix("the ")

    @property
    def parent_model(self) -> dict[str, Any] | None:
        """The parent that the stage started from; None if that parent is not published.

        If the parent has a branch `merged`, the commit is the branch's.
        """
        for role in STAGES[self.stage].starts_from:
            parent = self.parents.get(role)
            if parent is not None and hub_id(parent["repo"]):
                parent_run = self._parent_run(role, (self.run.get("parents") or {}).get(role) or {})
                return {**parent, "commit": parent_run["merged"]} if parent_run.get("merged") is not None else parent
        return None

    @property
    def remote_code(self) -> list[dict[str, Any]]:
        """Custom code of models that training ran: {model, commit, files}; model is None for a local folder."""
        return [{**code, "model": hub_id(code["model"])} for code in self.run.get("remote_code") or ()]

    @property
    def dataset_ids(self) -> list[str]:
        """The id of the data set's repository, in a list for the Hub's metadata; [] if it is not published."""
        name = hub_id(self.parents.get("data", {}).get("repo"))
        return [name] if name else []

    @property
    def benchmark(self) -> Mapping[str, Any] | None:
        """The content of the data set's eval.yaml; None if the data set is not registered as a benchmark."""
        benchmark = (self.run.get("dataset") or {}).get("benchmark")
        return benchmark if isinstance(benchmark, Mapping) else None

    @cached_property
    def is_adapter(self) -> bool:
        """Whether the weights are a LoRA adapter, according to the checkpoint or, without one, the settings."""
        if self.merged:
            return False
        step = self.described_step
        checkpoint = StageRecord(self.path).checkpoint_path(step) if step is not None else None
        if checkpoint is not None and checkpoint.is_dir():
            return (checkpoint / "adapter_config.json").is_file()
        return bool(self.setting("use_peft"))

    @cached_property
    def is_chat(self) -> bool:
        """Whether the model was trained on conversations, according to its checkpoint or, without one, the settings."""
        step = self.described_step
        template = StageRecord(self.path).checkpoint_path(step) / "chat_template.jinja" if step is not None else None
        if template is not None and template.is_file():
            return template.read_text(encoding="utf-8").startswith("{#- rlhf-zoo ")
        return bool(self.setting("conversational"))

    @property
    def has_critic(self) -> bool:
        """Whether the published checkpoint holds a critic that is a separate model and that transformers can load."""
        if self.settings.get("push_critic") is False:
            return False
        step = self.described_step
        folder = StageRecord(self.path).checkpoint_path(step) if step is not None else self.path
        config = folder / "critic" / "config.json"
        return config.is_file() and any(map(is_transformers_class, read_json(config).get("architectures") or []))

    @property
    def reward_function_weights(self) -> dict[str, float | None]:
        """Name of each reward function of PPO in the recipe -> its weight; None if the weight is not recorded."""
        names = [str(name) for name in self.setting("reward_funcs", [])]
        model_count = 1 if self.has_reward_model else 0  # its weight comes before those of the functions
        weights = self.setting("reward_weights") or [1.0] * (model_count + len(names))
        function_weights = weights[model_count:] if len(weights) == model_count + len(names) else [None] * len(names)
        return dict(zip(names, function_weights, strict=True))

    @property
    def has_reward_model(self) -> bool:
        """Whether a reward model is part of PPO's reward."""
        return "reward" in self.parents

    @property
    def sweep_tag(self) -> str | None:
        """The tag of a run of a sweep; None for any other run."""
        return self.run.get("cell")

    @property
    def step_in_this_commit(self) -> int | None:
        """The step of the checkpoint that is sent in one commit with this card; None if the card is sent later.

        Such a card cannot contain the id of its commit. A run of a sweep sends only the checkpoint that it describes.
        """
        return self.described_step if self.sweep_tag is not None else self.step

    @cached_property
    def checkpoints(self) -> list[CheckpointRow]:
        """Checkpoints that were sent or are complete on disk, by step, plus the checkpoint being saved at `step`."""
        commits = published_commits(self.run)
        folders = {checkpoint_step(folder): folder for folder in StageRecord(self.path).checkpoints()}
        for step, folder in folders.items():
            publication = read_publication(folder)
            # The checkpoint may have been sent to another Hub or namespace.
            if publication.get("hub") == self.hub_label and publication.get("repo") == self.repo_id:
                commits[step] = publication["commit"]
        steps = {*commits, *folders}
        if self.step is not None and StageRecord(self.path).checkpoint_path(self.step).is_dir():
            steps.add(self.step)
        metrics: dict[int, dict[str, Any]] = {}
        for row in self.metrics:
            metrics.setdefault(row["step"], {}).update(row)
        return [
            CheckpointRow(step, self._tag_of(step), commits.get(step), metrics.get(step, {}))
            for step in sorted(steps)
            if self.step is None or step <= self.step
        ]

    @property
    def described_checkpoint(self) -> CheckpointRow | None:
        """The checkpoint at `described_step`; None if `checkpoints` has none there."""
        return next((row for row in self.checkpoints if row.step == self.described_step), None)

    def _tag_of(self, step: int) -> str:
        is_chosen = self.sweep_tag is not None and step == (self.run.get("chosen") or {}).get("step")
        return str(self.sweep_tag) if is_chosen else tag_name(step)

    @property
    def missing_metric_text(self) -> str:
        """Text in place of a missing held-out metric. Steps before the end of a run are never evaluated."""
        return NOT_MEASURED if self.step is None else NOT_EVALUATED

    @cached_property
    def evaluated_at(self) -> str | None:
        """When the held-out metrics were measured, in ISO 8601; None if they were not."""
        if self.stage == "reward":
            return self.run.get("finished")
        return StageRecord(self.path.parent / "eval").read().get("finished") if self.evaluation else None

    def estimate(self, *path: str) -> Mapping[str, Any] | None:
        """Returns the estimate {value, ci95, n} at a path in evaluation.json; None if it was not measured.

        Args:
            *path: The keys of the path.
        """
        return estimate_at(self.evaluation, *path)

    @property
    def defects(self) -> list[str]:
        """Names of the defects whose share of completions the evaluation measured."""
        return list(self.evaluation.get("defects") or {})

    @property
    def best_filter(self) -> Mapping[str, Any] | None:
        """The simple filter of SFT's samples to compare PPO with, as in evaluation.json; None if no filters were tried.

        Of the filters shown to score higher than PPO, it is the one that the judge rates highest. If there are none, it
        is evaluation.json's best.
        """
        filters = self.evaluation.get("filters") or {}
        entries = filters.get("tried") or ()
        if better_entries := [entry for entry in entries if is_better_than_ppo(entry)]:
            return max(better_entries, key=lambda entry: entry["judge"]["value"])
        return next((entry for entry in entries if entry["name"] == filters["best"]), None)

    @property
    def reward_report(self) -> Mapping[str, Any]:
        """Measurements of this stage's reward model, or of PPO's, on held-out pairs; {} without any."""
        own_report = self.run.get("reward_model") if self.stage == "reward" and self.step is None else None
        has_model = self.stage == "reward" or self.has_reward_model
        return own_report or (self.evaluation.get("reward_model") if has_model else None) or {}

    @property
    def accuracy(self) -> Mapping[str, Any] | None:
        """The accuracy in `reward_report`, as {value, ci95, n}; None if it was not measured."""
        report = self.reward_report
        if not is_finite(report.get("accuracy")):
            return None
        return {"value": report["accuracy"], "ci95": report.get("ci95"), "n": report.get("n")}

    @property
    def score_statistics(self) -> dict[str, Any]:
        """{score_mean, score_std} of a reward model over SFT samples; {} if they were not measured."""
        record = StageRecord(self.path)
        if self.step is None:
            sources, folders = [self.run.get("reward_model") or {}], record.checkpoints()[::-1]
        else:
            sources, folders = [], [record.checkpoint_path(self.step)]
        configs = [folder / "config.json" for folder in folders]
        sources += [read_json(config).get("rlhf_zoo") or {} for config in configs if config.is_file()]
        source = next((source for source in sources if "score_mean" in source), {})
        return {key: source[key] for key in ("score_mean", "score_std")} if source else {}
