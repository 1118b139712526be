"""What a run directory says about a stage, for its card.

Reads run.json, metrics.jsonl and the checkpoints of the stage, and ../eval beside it where there is one.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_zoo.errors import ZooError
from rlhf_zoo.record import StageRecord, checkpoint_step, read_json

__all__ = ["Checkpoint", "Facts", "finite", "hub_id"]

_STAGES = ("sft", "reward", "ppo")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_BASE_ROLES = {"sft": ("base",), "reward": ("sft", "base"), "ppo": ("sft", "base")}
# Of this machine or secret: nothing that a card should carry.
_PRIVATE = re.compile(r"(^|_)(token|api_key|password)$|^(output|logging|cache|home)_dir$|^resume_from_checkpoint$")
_PUBLIC_TOKENS = ("stop_token", "eos_token", "pad_token", "bos_token", "unk_token")


@dataclass(frozen=True)
class Checkpoint:
    """One row of the checkpoint table. `commit` is None where it was not sent."""

    step: int
    tag: str
    commit: str | None
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """What a run directory says about a stage, up to `step`."""

    path: Path
    run: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    step: int | None
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, step: int | None) -> Facts:
        record = StageRecord(path)
        run = record.read()
        if run.get("stage") not in _STAGES:
            raise ZooError(
                f"{path} holds no run that has a card: name the directory of a stage, such as runs/tiny-world/ppo."
            )
        rows = record.metrics()
        if step is None:
            return cls(path, run, rows, None, *_evaluation(path.parent / "eval"))
        folders = {checkpoint_step(folder) for folder in path.glob("checkpoint-*") if folder.name[11:].isdigit()}
        known = {row["step"] for row in rows} | folders | {at for at, _ in _step_tags(run)}
        if step not in known:
            raise ZooError(f"{path} has no step {step}: it has {', '.join(map(str, sorted(known))) or 'none yet'}.")
        return cls(path, run, [row for row in rows if row["step"] <= step], step)

    @property
    def stage(self) -> str:
        return self.run["stage"]

    @property
    def recipe(self) -> str:
        return str(self.run.get("recipe", "unknown"))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved settings of the stage, without what is private to the machine."""
        return _without_private(self.run.get("resolved", {}))

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the stage, or else of what its recipe's stages share (`recipe` in the resolved settings)."""
        shared = self.settings.get("recipe")
        value = self.settings.get(key, shared.get(key) if isinstance(shared, Mapping) else None)
        return default if value is None else value

    @property
    def simulated(self) -> bool:
        return bool(self.setting("simulated"))

    @property
    def repo_id(self) -> str | None:
        """The repository it is published in, if it is."""
        return hub_id((self.run.get("repo") or {}).get("id"))

    @property
    def title(self) -> str:
        return self.repo_id.rpartition("/")[2] if self.repo_id else f"{self.recipe}-{self.stage}"

    @property
    def hub_flag(self) -> str:
        hub = self.run.get("hub") or "local"
        return f"--hub {shlex.quote(hub)}"

    @property
    def embedded(self) -> bool:
        return (self.run.get("hub") or "local") == "local"

    @property
    def parents(self) -> dict[str, dict[str, Any]]:
        """Role -> {repo, commit}; where a parent lay on this machine is left out."""
        parents = {**(self.run.get("parents") or {}), "data": self._dataset}
        if self.stage == "sft" and "base" not in parents and hub_id(self.setting("model_name_or_path")):
            parents["base"] = {"repo": self.setting("model_name_or_path"), "commit": self.setting("model_revision")}
        return {
            role: {"repo": parent.get("repo"), "commit": parent.get("commit")}
            for role, parent in parents.items()
            if parent
        }

    @property
    def _dataset(self) -> Mapping[str, Any] | None:
        recorded = self.run.get("dataset") or (self.run.get("parents") or {}).get("data")
        named = self.setting("dataset_name")
        return recorded or ({"repo": named, "commit": self.setting("dataset_revision")} if hub_id(named) else None)

    @property
    def base(self) -> dict[str, Any] | None:
        """The parent whose weights it started from."""
        found = (self.parents[role] for role in _BASE_ROLES[self.stage] if role in self.parents)
        return next((parent for parent in found if hub_id(parent["repo"])), None)

    @property
    def datasets(self) -> list[str]:
        name = hub_id(self.parents.get("data", {}).get("repo"))
        return [name] if name else []

    @property
    def last(self) -> dict[str, Any]:
        """The newest value of every metric."""
        newest: dict[str, Any] = {}
        for row in self.metrics:
            newest.update({key: value for key, value in row.items() if value is not None})
        return newest

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """By step: those that were sent, and those complete on disk; at `step` also the one that is being saved."""
        sent = dict(_step_tags(self.run))
        steps = {checkpoint_step(folder): folder for folder in StageRecord(self.path).checkpoints()}
        for at, folder in steps.items():
            published = folder / "published.json"
            if published.is_file():
                sent[at] = read_json(published).get("commit")
        every = {*sent, *steps} | ({self.step} if self.step is not None else set())
        rows: dict[int, dict[str, Any]] = {}
        for row in self.metrics:
            rows.setdefault(row["step"], {}).update(row)
        return [
            Checkpoint(at, f"step-{at:06d}", sent.get(at), rows.get(at, {}))
            for at in sorted(every)
            if self.step is None or at <= self.step
        ]

    def figure(self, *path: str) -> Mapping[str, Any] | None:
        """The estimate at a path in evaluation.json, or None."""
        found: Any = self.evaluation
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) and finite(found.get("value")) else None

    @property
    def accuracy(self) -> Mapping[str, Any] | None:
        """A reward model's accuracy on held-out pairs, as an estimate; without interval if only training knows it."""
        recorded = self.run.get("reward_model") if self.step is None else None
        for measured in (self.evaluation.get("reward_model"), recorded):
            if measured and finite(measured.get("accuracy")):
                return {"value": measured["accuracy"], "ci95": measured.get("ci95"), "n": measured.get("n")}
        return None

    @property
    def score(self) -> dict[str, Any]:
        """{score_mean, score_std} of a reward model over SFT samples, from run.json or a checkpoint's config.json."""
        record = StageRecord(self.path)
        kept: list[Mapping[str, Any]] = [self.run.get("reward_model") or {}] if self.step is None else []
        for folder in reversed(record.checkpoints()) if self.step is None else [record.checkpoint_path(self.step)]:
            if (folder / "config.json").is_file():
                kept.append(read_json(folder / "config.json").get("rlhf_zoo") or {})
        return next(({key: one[key] for key in ("score_mean", "score_std")} for one in kept if "score_mean" in one), {})

    @property
    def foreign_evaluation(self) -> str | None:
        """The commit that ../eval evaluated, where it is none of this run's: the directory may hold an older one."""
        repo = self.run.get("repo") or {}
        own = {repo.get("commit"), *(repo.get("tags") or {}).values()} - {None}
        if not self.evaluation or not own:
            return None
        parents = StageRecord(self.path.parent / "eval").read().get("parents") or {}
        commit = (parents.get(self.stage) or {}).get("commit")
        return commit if commit and commit not in own else None


def hub_id(name: Any) -> str | None:
    """`name` if a Hub could have it as the id of a repository; not a path on this machine."""
    return name if isinstance(name, str) and _REPO_ID.fullmatch(name) else None


def finite(value: Any) -> bool:
    """Whether a value read from JSON is a number that can be shown."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _evaluation(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """evaluation.json and the rows of samples.jsonl, where the evaluation has been run."""
    if not (folder / "evaluation.json").is_file():
        return {}, []
    samples = folder / "samples.jsonl"
    rows = []
    if samples.is_file():
        for number, line in enumerate(samples.read_text(encoding="utf-8").split("\n"), start=1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise ZooError(
                    f"Line {number} of {samples} is not JSON ({error}): run the evaluation again."
                ) from error
    return read_json(folder / "evaluation.json"), rows


def _step_tags(run: Mapping[str, Any]) -> list[tuple[int, str]]:
    """(step, commit) of every tag named step-N."""
    tags = (run.get("repo") or {}).get("tags") or {}
    return [(int(tag[5:]), commit) for tag, commit in tags.items() if tag.startswith("step-") and tag[5:].isdigit()]


def _without_private(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_private(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key in _PUBLIC_TOKENS or not _PRIVATE.search(key)
    }
