"""Environment variables that change training are ignored, refused or recorded, never obeyed silently."""

import re
from pathlib import Path

import accelerate
import pytest
import torch
import transformers

from rlhf_zoo.errors import ZooError
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.runs.context import environment_info
from rlhf_zoo.runs.environment import (
    IGNORED_VARIABLES,
    RECORDED_VARIABLES,
    REFUSED_VARIABLES,
    apply_environment,
    recorded_variables,
)
from rlhf_zoo.runs.recipe import Recipe
from rlhf_zoo.runs.settings.parse import stage_settings

#: Where things run, who watches, or details of what `REFUSED_VARIABLES` refuses.
HARMLESS = re.compile(
    "ACCELERATE_(MIN_VERSION|DEBUG_MODE|DEBUG_RDV_FILE|ENABLE_RICH|CPU_AFFINITY|BYPASS_DEVICE_MAP|ALLOW_CP_STANDALONE"
    "|USE_CPU|USE_SAGEMAKER|SAGEMAKER_.*|CONFIG_DS_FIELDS|DEEPSPEED_.*|FP8_.*|DYNAMO_)"
)


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
@pytest.mark.parametrize("half", [False, True])
def test_bf16_key_overrides_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: str, half: bool
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no" if half else "bf16")
    recipe = Recipe("toy", Path(), {"description": "A toy."}, {stage: {"bf16": half, "use_cpu": True}})
    settings = stage_settings(recipe, stage, {}, shared_flags={}, output_dir=Path("runs/toy"))
    assert settings.trainer.mixed_precision == ("bf16" if half else "no")
    assert ("ACCELERATE_MIXED_PRECISION=bf16 in the environment is ignored" in caplog.text) is not half


def test_ppo_config_precision_ignores_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert PPOConfig(output_dir=str(tmp_path), use_cpu=True).mixed_precision == "no"


@pytest.mark.parametrize("name", REFUSED_VARIABLES)
def test_refused_variables_stop_training(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "false")
    apply_environment()
    monkeypatch.setenv(name, "true")
    with pytest.raises(ZooError, match=name):
        apply_environment()


def test_recorded_variables_are_in_environment_info(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RECORDED_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert recorded_variables() == {}
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    assert environment_info()["ONEDNN_DEFAULT_FPMATH_MODE"] == "BF16"


def test_gpu_is_in_environment_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "gpu" not in environment_info()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert environment_info()["gpu"] == "NVIDIA H200"


def test_every_accelerate_variable_is_classified() -> None:
    accelerator, trainer = Path(accelerate.__file__).parent, Path(transformers.__file__).parent
    files = [
        *(accelerator / f"{name}.py" for name in ("accelerator", "state", "data_loader", "optimizer", "scheduler")),
        *(accelerator / "utils").glob("*.py"),
        *(trainer / f"{name}.py" for name in ("trainer", "training_args")),
    ]
    names = {
        name for file in files for name in re.findall(r"\bACCELERATE_[A-Z0-9_]+", file.read_text(encoding="utf-8"))
    }
    assert len(names) > 20
    known = {*IGNORED_VARIABLES, *REFUSED_VARIABLES, *RECORDED_VARIABLES}
    assert sorted(name for name in names - known if not HARMLESS.fullmatch(name)) == []
