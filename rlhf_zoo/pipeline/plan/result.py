"""The plan of a recipe. This module imports neither torch nor transformers, so that a cached plan appears quickly."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .devices import Device
from .memory import GIB, ModelMemory, PhaseMemory

#: Keys that make a stage train LoRA adapters on frozen bfloat16 weights (docs/models.md).
LORA: Mapping[str, Any] = {"use_peft": True, "lora_target_modules": ["all-linear"], "dtype": "bfloat16"}


@dataclass(frozen=True)
class Work:
    """The computations of an update in each process; `seconds` converts them to time.

    Attributes:
        prefill: FLOPs of the prompts' forward passes in sampling.
        decode: FLOPs of sampling the responses, including the head.
        layer_steps: Number of sequential sampling steps times number of layers. Each layer launches its own kernels.
        bytes_read: Bytes of weights and KV cache that sampling reads.
        forward_only: FLOPs of the passes of reference, critic and reward models before the update, without the head.
        forward_only_head: FLOPs of the reference's head in these passes.
        update: FLOPs of the update's forward and backward passes, without the head.
        update_head: FLOPs of the head in the update's passes.
        parameter_updates: Number of trained parameters times number of optimizer steps.
    """

    prefill: float = 0
    decode: float = 0
    layer_steps: float = 0
    bytes_read: float = 0
    forward_only: float = 0
    forward_only_head: float = 0
    update: float = 0
    update_head: float = 0
    parameter_updates: float = 0


@dataclass(frozen=True)
class StagePlan:
    """A stage's memory and work on each device.

    Attributes:
        stage: Name of the stage.
        models: Name of the model -> bytes that it takes outside of its passes.
        phases: Name of the phase -> bytes at its peak.
        batch: Name -> size that the plan assumes, such as the rows of a micro-batch or the number of updates.
        work: The computations of an update.
        bf16: Whether the stage computes in bfloat16.
    """

    stage: str
    models: Mapping[str, ModelMemory]
    phases: Mapping[str, PhaseMemory]
    batch: Mapping[str, Any]
    work: Work = field(default_factory=Work)
    bf16: bool = False

    @property
    def worst_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> float:
        """Peak bytes on each device."""
        return self.phases[self.worst_phase].total


@dataclass(frozen=True)
class Duration:
    """The predicted duration of an update or a training step.

    Attributes:
        seconds: Phase -> seconds.
        basis: A description of the rates behind the prediction: their source and their error.
    """

    seconds: Mapping[str, float]
    basis: str

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Change:
    """A change that makes a stage fit.

    Attributes:
        keys: Key of the stage -> value that makes it fit.
        peak: Peak bytes on each device with these keys.
    """

    keys: Mapping[str, Any]
    peak: float

    def flags(self, stage: str) -> str:
        """Returns the keys as flags, ready to paste after `rlhf-zoo plan RECIPE` or `rlhf-zoo run RECIPE`.

        Args:
            stage: Name of the stage.
        """
        return " ".join(f"--{stage}.{name} {_quote_value(value)}" for name, value in self.keys.items())


@dataclass(frozen=True)
class Plan:
    """The plan of a recipe.

    Attributes:
        recipe: Name of the recipe.
        device: The devices of the run.
        stages: The memory and work of each stage.
        durations: Stage -> duration of an update or step; None if no measured rates apply to the device.
        changes: Stage that does not fit -> the smallest change that makes it fit; None if no change does.
        assumptions: What the plan assumes, as clauses to print after "Assumed: ".
    """

    recipe: str
    device: Device
    stages: Sequence[StagePlan]
    durations: Mapping[str, Duration | None]
    changes: Mapping[str, Change | None]
    assumptions: Sequence[str] = field(default_factory=list)

    @property
    def peak(self) -> float:
        """Peak bytes on each device in the stage that needs the most."""
        return max(stage.peak for stage in self.stages)

    @property
    def line(self) -> str:
        """The plan in one line."""
        parts = [f"{stage.stage} {format_gib(stage.peak)}" for stage in self.stages]
        text = f"Plan for {self.device}: {', '.join(parts)} GiB"
        duration = self.durations.get("ppo")
        if duration is not None:
            text += f", about {format_seconds(duration.total)} s per PPO update{self.total_time('ppo')}"
        if self.changes:
            text += f"; {' and '.join(self.changes)} may not fit: `rlhf-zoo plan {self.recipe}` shows what would"
        return text + "."

    def total_time(self, stage: str) -> str:
        """Formats the duration of all updates of a stage, such as " (40 updates: 2.0 h)".

        Args:
            stage: Name of the stage.

        Returns:
            The text; "" if the number of updates or the duration of an update is unknown.
        """
        updates = next(plan.batch.get("updates") for plan in self.stages if plan.stage == stage)
        duration = self.durations[stage]
        if duration is None or updates is None:
            return ""
        unit = "update" if stage == "ppo" else "step"
        return f" ({updates:,} {unit}{'' if updates == 1 else 's'}: {_format_time(duration.total * updates)})"

    @property
    def total_sentence(self) -> str:
        """The total time of the stages with a known number of steps; "" if there are none or a duration is unknown."""
        seconds_by_stage: dict[str, float] = {}
        for stage in self.stages:
            duration, updates = self.durations[stage.stage], stage.batch.get("updates")
            if duration is None:
                return ""
            if updates is not None:
                seconds_by_stage[stage.stage] = duration.total * updates
        unknown_stages = [stage.stage for stage in self.stages if stage.stage not in seconds_by_stage]
        if not seconds_by_stage:
            return ""
        time = _format_time(sum(seconds_by_stage.values()))
        if not unknown_stages:
            return f"All stages: about {time}, without the evaluation."
        row_flags = " ".join(f"--rows {stage}=NUMBER" for stage in unknown_stages if stage != "ppo")
        hint = f" (add {row_flags})" if row_flags else ""
        exclusion = f"{' and '.join(unknown_stages)}, whose steps depend on the rows of the data{hint}"
        return f"{' and '.join(seconds_by_stage)}: about {time}, without {exclusion}, and without the evaluation."

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, change_peaks: Mapping[str, float]) -> "Plan":
        """Rebuilds a plan from its document, which does not contain the work of the stages.

        Args:
            document: A document that `to_json` returned.
            change_peaks: Stage with a change -> peak bytes with this change.
        """
        stages, durations, changes = [], {}, dict[str, Change | None]()
        for entry in document["stages"]:
            name = entry["stage"]
            models, phases = (_drop_totals(entry[key]) for key in ("models", "phases"))
            stages.append(
                StagePlan(
                    name,
                    {model: ModelMemory(**sizes) for model, sizes in models.items()},
                    {phase: PhaseMemory(**sizes) for phase, sizes in phases.items()},
                    entry["batch"],
                )
            )
            basis = entry["seconds_by"]
            durations[name] = None if basis is None else Duration(entry["seconds"], basis)
            if not entry["fits"]:
                change = entry["change"]
                changes[name] = None if change is None else Change(change, change_peaks[name])
        device = Device(**document["device"])
        return cls(document["recipe"], device, stages, durations, changes, document["assumptions"])

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as docs/json.md describes it."""
        return {
            "recipe": self.recipe,
            "device": asdict(self.device),
            "usable_bytes": self.device.usable_gib * GIB,
            "stages": [
                {
                    "stage": stage.stage,
                    "models": {name: {**vars(model), "total": model.total} for name, model in stage.models.items()},
                    "phases": {name: {**vars(phase), "total": phase.total} for name, phase in stage.phases.items()},
                    "worst_phase": stage.worst_phase,
                    "peak": stage.peak,
                    "batch": stage.batch,
                    "fits": stage.stage not in self.changes,
                    "change": None if (change := self.changes.get(stage.stage)) is None else dict(change.keys),
                    "seconds": None if (duration := self.durations[stage.stage]) is None else dict(duration.seconds),
                    "seconds_by": None if duration is None else duration.basis,
                }
                for stage in self.stages
            ],
            "assumptions": list(self.assumptions),
        }


def format_seconds(value: float) -> str:
    """Formats seconds with three digits, and from 100 as a whole number.

    Args:
        value: Seconds. Values below 0.01 become "under 0.01", because the prediction leaves out the overhead of calls.
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else "under 0.01"


def _format_time(seconds: float) -> str:
    """Formats a duration in hours, in minutes below an hour, or in seconds below a tenth of a minute."""
    if seconds < 6:
        return f"{max(seconds, 1):.0f} s"
    hours = seconds / 3600
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def format_gib(byte_count: float) -> str:
    """Formats a number of bytes in GiB, without the unit.

    Args:
        byte_count: Number of bytes.
    """
    return f"{byte_count / GIB:.2f}" if byte_count < 10 * GIB else f"{byte_count / GIB:.1f}"


def _drop_totals(sizes_by_name: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Drops the totals, which are computed from the other sizes."""
    return {
        name: {part: size for part, size in sizes.items() if part != "total"} for name, sizes in sizes_by_name.items()
    }


def _quote_value(value: Any) -> str:
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))
