"""A finished run of a small recipe, made once for all workers, and copies of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hub_fixture import RunningHub, start_hub
from zoo_process import COMMAND, environment, zoo

from rlhf_zoo.runs.recipe import copy_recipe
from rlhf_zoo.runs.record import StageRecord

ARCHITECTURE = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "initializer_range": 0.05,
}  # fmt: skip
#: Flags of a run that takes seconds, half of them for the plots of its cards.
FLAGS = [
    "--corpus_args", '{"lines": 600}', "--architecture", json.dumps(ARCHITECTURE),
    "--sft.max_steps", "30", "--sft.learning_rate", "2e-2", "--sft.save_strategy", "steps", "--sft.save_steps", "15",
    "--sft.logging_steps", "5", "--sft.eval_strategy", "steps", "--sft.eval_steps", "15",
    "--reward.simulated_pairs", "64", "--reward.simulated_test_pairs", "24", "--reward.score_samples", "32",
    "--reward.per_device_train_batch_size", "16", "--reward.max_steps", "4", "--reward.save_strategy", "steps",
    "--reward.save_steps", "2", "--reward.logging_steps", "1",
    "--ppo.total_episodes", "96", "--ppo.per_device_train_batch_size", "8", "--ppo.gradient_accumulation_steps", "2",
    "--ppo.num_mini_batches", "2", "--ppo.response_length", "20", "--ppo.per_device_eval_batch_size", "32",
    "--ppo.save_steps", "2", "--ppo.eval_steps", "4", "--ppo.release", "last",
    "--evaluation.prompts", "8", "--evaluation.samples", "2", "--evaluation.checkpoint_prompts", "8",
]  # fmt: skip
STAGES = ("sft", "reward", "ppo")
STEPS = {"sft": [15, 30], "reward": [2, 4], "ppo": [2, 4, 6]}


@dataclass(frozen=True)
class Run:
    """A folder with a run, its recipe and the home of its embedded Hub. env: Environment of its commands."""

    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / "run"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def root(self) -> Path:
        return self.home / "zoo" / "hub"

    def command(self, verb: str = "run", *more: str) -> list[str]:
        return [verb, "recipes/tiny-world", "--output_dir", "run", *FLAGS, *more]

    def zoo(self, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        return zoo(*arguments, home=self.home, cwd=self.folder, **{**self.env, **env})

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *arguments], cwd=self.folder, env=environment(self.home, **{**self.env, **env}), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def json(self, *parts: str) -> Any:
        return json.loads(self.path.joinpath(*parts).read_text())

    def record(self, stage: str) -> StageRecord:
        return StageRecord(self.path / stage)

    def copy(self, folder: Path, *without: str) -> Run:
        """Copies this run and its Hub to `folder`, without the stages `without`."""
        shutil.copytree(self.folder, folder, symlinks=True)
        keep_run_id(folder / "run")
        for stage in without:
            shutil.rmtree(folder / "run" / stage)
        (folder / "run" / "summary.json").unlink()
        return Run(folder)

    def before_ppo(self, folder: Path) -> Run:
        """Copies this run and its Hub as they were before the PPO stage."""
        run = self.copy(folder, "ppo", "eval")
        shutil.rmtree(run.root / "repos" / "models" / "local" / "tiny-world-ppo.git")
        return run

    def hub(self, folder: Path) -> RunningHub:
        """Serves a copy of this run's Hub."""
        shutil.copytree(self.root, folder / "root")
        return start_hub(folder, root=folder / "root")


def keep_run_id(run: Path) -> None:
    """Lets a copy keep the original's id: otherwise a copy counts as another run, since its inode differs."""
    path = run / "run_id"
    path.write_text(f"{path.read_text().split()[0]} {path.stat().st_ino}\n")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Run:
    """An uninterrupted run with its Hub. Tests may not change it."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared if worker_id == "master" else shared.parent) / "finished"
    run = Run(folder)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            unfinished = Run(folder.with_name("finishing"))
            copy_recipe("tiny-world", unfinished.folder / "recipes" / "tiny-world")
            done = unfinished.zoo(*unfinished.command("run", "--json"), WARM_QUICK="figures")
            assert done.returncode == 0, done.stderr
            (unfinished.folder / "stdout").write_text(done.stdout)
            (unfinished.folder / "stderr").write_text(done.stderr)
            unfinished.folder.rename(folder)
    return run
