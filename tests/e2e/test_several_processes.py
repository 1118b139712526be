"""A recipe's commands in two processes write the same files, metrics, weights and tags as in one, each once."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import miniatures
import pytest
import schemas
from safetensors.torch import load_file, save_file
from zoo_process import COMMAND, environment, errors, free_port, hubs_over, loopback, run_two_processes, zoo

from rlhf_zoo.modeling.integrity import check_integrity
from rlhf_zoo.runs.lock import LOCK
from rlhf_zoo.runs.metrics_file import without_times
from rlhf_zoo.runs.record import StageRecord

NOWHERE = "http://127.0.0.1:9"
TESTS = str(Path(schemas.__file__).parent)
TWO = Path(__file__).parents[2] / "recipes" / "accelerate" / "two-cpus.yaml"
#: 19 texts and 15 prompts in batches of 4: the last batch of a pass cannot be split evenly.
KEYS: dict[str, dict[str, Any]] = {
    "sft": {"num_train_epochs": 2, "max_steps": -1, "per_device_eval_batch_size": 4, "eval_strategy": "epoch",
            "save_strategy": "steps", "save_steps": 4, "learning_rate": 1e-3, "bf16": False},
    "reward": {"num_train_epochs": 2, "max_steps": -1, "per_device_eval_batch_size": 4, "save_strategy": "epoch",
               "logging_steps": 2, "learning_rate": 1e-3, "bf16": False, "train_sampling_strategy": "group_by_length"},
    "ppo": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6, "save_steps": 2,
            "num_mini_batches": 2, "num_ppo_epochs": 2, "eval_strategy": "steps", "eval_steps": 3,
            "per_device_eval_batch_size": 4, "learning_rate": 1e-3, "whiten_rewards": True, "release": "last"},
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return schemas.make_recipe(tmp_path_factory.mktemp("recipe"), "Anthropic/hh-rlhf", "plain", **KEYS)


def zoo_twice(*arguments: str | Path, home: Path) -> tuple[list[int], list[str]]:
    """Runs `rlhf-zoo ARGUMENTS` in two processes; returns their exit codes and stderr."""
    results = run_two_processes([*COMMAND, *map(str, arguments)], home.parent, environment(home, PYTHONPATH=TESTS))
    assert hubs_over(home) == []
    return results


def list_files(folder: Path) -> set[str]:
    """Lists a stage's files, without the random states, of which each process writes one."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.name.startswith("rng_state")}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [*map(without_times, StageRecord(folder).metrics())]


def assert_close(actual: Any, expected: Any, where: str = "") -> None:
    """Asserts that two JSON values are equal, except for float32 rounding and times."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected.keys() - {"seconds"}:
            assert_close(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for index, (item, other) in enumerate(zip(actual, expected, strict=True)):
            assert_close(item, other, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-3, abs=2e-5), where
    elif isinstance(expected, str):  # sentences contain rounded figures
        assert re.sub(r"[\d.]+", "0", actual) == re.sub(r"[\d.]+", "0", expected), where
    else:
        assert actual == expected, where


def assert_same_weights(folder: Path, other: Path) -> None:
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors"))
    assert names
    for name in names:
        ours, theirs = load_file(folder / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < 2e-5, name


@pytest.fixture(scope="module")
def runs(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recipe's run in one process, and its run in two."""
    root = tmp_path_factory.mktemp("runs")
    done = zoo("run", recipe, "--output_dir", root / "one", "--hub", "local", home=root / "home-one", PYTHONPATH=TESTS)
    assert done.returncode == 0, done.stderr
    codes, stderr = zoo_twice("run", recipe, "--output_dir", root / "two", "--hub", "local", home=root / "home-two")
    assert codes == [0, 0], stderr
    # The command cannot turn off torch's warning in a warm process, which has imported torch already.
    assert [line for line in errors(stderr[1]) if "reducer.cpp" not in line] == [], "only the first process prints"
    assert "Everything is in" in (root / "stdout-0").read_text() and (root / "stdout-1").read_text() == ""
    return root / "one", root / "two"


@pytest.mark.timeout(600)
def test_two_processes_match_one(runs: tuple[Path, Path]) -> None:
    single, two = runs
    for stage in ("sft", "reward", "ppo"):
        assert list_files(two / stage) == list_files(single / stage)
        assert_close(read_metrics(two / stage), read_metrics(single / stage), stage)
        ours, theirs = (StageRecord(run / stage).read() for run in (single, two))
        assert ours["fingerprint"] == theirs["fingerprint"] and ours["chosen"]["step"] == theirs["chosen"]["step"]
        assert ours["repo"]["tags"].keys() == theirs["repo"]["tags"].keys() > {"best"}
        for checkpoint in StageRecord(single / stage).checkpoints():
            check_integrity(two / stage / checkpoint.name)
            assert_same_weights(checkpoint, two / stage / checkpoint.name)
    assert_close(
        *(json.loads((run / "eval" / "evaluation.json").read_text()) for run in (two, single)), where="evaluation"
    )
    assert (two / "eval" / "samples.jsonl").read_text().count("\n") == 2
    assert not (two / LOCK).exists()
    assert (two / "summary.json").is_file()


def copy_until(run: Path, stage: str, step: int, target: Path) -> Path:
    """Copies a run as if its stage had been killed after the checkpoint of `step`."""
    shutil.copytree(run, target)
    record = StageRecord(target / stage)
    for checkpoint in record.checkpoints():
        if int(checkpoint.name.partition("-")[2]) > step:
            record.remove_checkpoint(checkpoint)
    record.write(status="running", repo=None, publish=None, chosen=None)
    return target


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        pytest.param("sft", [], marks=pytest.mark.full),
        pytest.param("reward", ["--fsdp2"], marks=pytest.mark.full),
        ("ppo", ["--fsdp2"]),
    ],
)
def test_run_resumes_with_other_process_count(
    recipe: Path, runs: tuple[Path, Path], tmp_path: Path, stage: str, flags: list[str]
) -> None:
    single, _ = runs
    *_, before, then, _ = [0, *(int(each.name.partition("-")[2]) for each in StageRecord(single / stage).checkpoints())]
    two_processes = copy_until(single, stage, before, tmp_path / "more")
    codes, stderr = zoo_twice(
        stage, recipe, "--output_dir", two_processes, "--hub", NOWHERE, *flags, home=tmp_path / "home"
    )
    assert codes == [0, 0], stderr
    one_process = copy_until(two_processes, stage, then, tmp_path / "fewer")
    done = zoo(stage, recipe, "--output_dir", one_process, "--hub", NOWHERE, home=tmp_path / "home", PYTHONPATH=TESTS)
    assert done.returncode == 0, done.stderr
    for run in (two_processes, one_process):
        assert_close(read_metrics(run / stage), read_metrics(single / stage), f"{run.name} {stage}")
        last = StageRecord(single / stage).last_checkpoint()
        assert last is not None
        assert_same_weights(last, run / stage / last.name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--per_device_train_batch_size", "3"),
            "per_device_train_batch_size of the stage sft is 3, for all 2 processes together",
        ),
        (("--dataset_train_split", "nope"), "has no split 'nope', only 'train'"),
    ],
)
def test_error_is_printed_once_for_all_processes(
    recipe: Path, tmp_path: Path, flags: tuple[str, str], message: str
) -> None:
    arguments = ("sft", recipe, "--output_dir", tmp_path / "run", "--hub", NOWHERE, *flags)
    codes, stderr = zoo_twice(*arguments, home=tmp_path / "home")
    assert codes[0] == 2 and codes[1] != 0
    assert sum(log.count("Error: ") for log in stderr) == 1 and message in stderr[0]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_restart_with_changed_base_works_in_all_processes(recipe: Path, tmp_path: Path) -> None:
    base = miniatures.save("Qwen3", tmp_path / "base")
    arguments = ("sft", recipe, "--output_dir", tmp_path / "run", "--hub", NOWHERE, "--model_name_or_path", base)
    for restart in ((), ("--restart",)):
        codes, stderr = zoo_twice(*arguments, "--max_steps", "1", *restart, home=tmp_path / "home")
        assert codes == [0, 0], stderr
        weights = base / "model.safetensors"
        save_file({name: value * 2 for name, value in load_file(weights).items()}, weights, metadata={"format": "pt"})


@pytest.mark.full
@pytest.mark.timeout(900)
def test_killed_worker_ends_run_with_intact_checkpoint(recipe: Path, runs: tuple[Path, Path], tmp_path: Path) -> None:
    """With `accelerate launch`, as a user starts it."""
    shutil.copytree(runs[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "ppo")
    shutil.rmtree(tmp_path / "run" / "eval")
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(TWO), "--main_process_port",
        str(free_port()), "-m", "rlhf_zoo.cli", "ppo", str(recipe), "--output_dir", str(tmp_path / "run"), "--hub",
        NOWHERE, "--max_steps", "4000",
    ]  # fmt: skip
    env = environment(tmp_path / "home", **loopback(), PYTHONPATH=TESTS)
    record = StageRecord(tmp_path / "run" / "ppo")

    def launch(log: Path, *, past: int) -> subprocess.Popen[bytes]:
        """Starts the command, and returns once there is a checkpoint after step `past`."""
        with log.open("w") as file:
            launched = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        deadline = time.monotonic() + 400
        while (now := record.last_checkpoint()) is None or int(now.name.partition("-")[2]) <= past:
            assert launched.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return launched

    launched = launch(tmp_path / "log", past=0)
    os.kill(find_worker(launched.pid, rank=1), signal.SIGKILL)
    assert launched.wait(120) != 0
    checkpoint = record.last_checkpoint()
    assert checkpoint is not None
    check_integrity(checkpoint)
    assert hubs_over(tmp_path / "home") == []
    launched = launch(tmp_path / "log-2", past=int(checkpoint.name.partition("-")[2]))
    launched.send_signal(signal.SIGINT)  # Ctrl-C: both processes stop after the current step and save it
    assert launched.wait(120) != 0
    assert record.read()["status"] == "interrupted"
    steps = [row["step"] for row in record.metrics()]
    assert steps == sorted(steps)


def find_worker(launcher: int, *, rank: int) -> int:
    """Returns the process id of the launcher's child with this rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise LookupError(rank)
