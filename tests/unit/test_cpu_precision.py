"""benchmarks/cpu_precision.py: a CPU that multiplies faster in bfloat16 trains in it."""

import shlex
from pathlib import Path

import cpu_precision
import pytest
import torch

from rlhf_zoo.runs.recipe import load_recipe
from rlhf_zoo.runs.settings.parse import stage_settings


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *, float32: float, gpu: bool) -> list[str]:
    """Returns the options for PPO if a product takes one second in bfloat16."""
    monkeypatch.setattr(cpu_precision, "seconds_per_product", {torch.float32: float32, torch.bfloat16: 1.0}.get)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
    monkeypatch.setattr("sys.argv", ["cpu_precision.py", "ppo"])
    cpu_precision.main()
    return shlex.split(capsys.readouterr().out)


def test_stage_takes_options_of_cpu_that_is_faster_in_bfloat16(monkeypatch, capsys):
    options = printed(monkeypatch, capsys, float32=3.8, gpu=False)
    flags = {key.removeprefix("--ppo."): value for key, value in zip(options[::2], options[1::2], strict=True)}
    stage = stage_settings(load_recipe("smollm2-ifeval"), "ppo", flags, shared_flags={}, output_dir=Path("runs/toy"))
    assert (stage.trainer.bf16, stage.trainer.use_cpu, stage.model.attn_implementation) == (True, True, "eager")


@pytest.mark.parametrize(("float32", "gpu"), [(1.4, False), (0.5, False), (3.8, True)])
def test_other_machines_keep_the_recipe(float32, gpu, monkeypatch, capsys):
    assert printed(monkeypatch, capsys, float32=float32, gpu=gpu) == []


def test_product_takes_time():
    assert 0 < cpu_precision.seconds_per_product(torch.float32) < 1
