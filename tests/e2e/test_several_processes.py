"""Commands of a recipe in two processes: the files, metrics, weights and tags of one, each written once."""

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
#: Batches of 4 over 19 texts and 15 prompts, so that passes end with rows that cannot be dealt out evenly.
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


def run_in_two_processes(*arguments: str | Path, home: Path) -> tuple[list[int], list[str]]:
    """`rlhf-zoo ARGUMENTS` in two processes: their exit codes and stderr."""
    ended = run_two_processes([*COMMAND, *map(str, arguments)], home.parent, environment(home, PYTHONPATH=TESTS))
    assert hubs_over(home) == []
    return ended


def list_files(folder: Path) -> set[str]:
    """What a stage left, but for the states of random numbers, of which each process has one."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.name.startswith("rng_state")}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [*map(without_times, StageRecord(folder).metrics())]


def assert_close(found: Any, wanted: Any, where: str = "") -> None:
    """Asserts that two JSON values are equal, except for float32 rounding and times."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted.keys() - {"seconds"}:
            assert_close(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_close(one, other, f"{where}[{place}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-3, abs=2e-5), where
    elif isinstance(wanted, str):  # sentences have rounded figures in them
        assert re.sub(r"[\d.]+", "0", found) == re.sub(r"[\d.]+", "0", wanted), where
    else:
        assert found == wanted, where


def assert_same_weights(one: Path, two: Path) -> None:
    names = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert names
    for name in names:
        ours, theirs = load_file(one / name), load_file(two / name)
        assert ours.keys() == theirs.keys()
        assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < 2e-5, name


@pytest.fixture(scope="module")
def runs(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recipe's run in one process, and in two."""
    root = tmp_path_factory.mktemp("runs")
    done = zoo("run", recipe, "--output_dir", root / "one", "--hub", "local", home=root / "home-one", PYTHONPATH=TESTS)
    assert done.returncode == 0, done.stderr
    codes, said = run_in_two_processes(
        "run", recipe, "--output_dir", root / "two", "--hub", "local", home=root / "home-two"
    )
    assert codes == [0, 0], said
    # torch's own warning is switched off in a process of its own, but not where torch is imported already.
    assert [line for line in errors(said[1]) if "reducer.cpp" not in line] == [], "the first process speaks for all"
    assert "Everything is in" in (root / "stdout-0").read_text() and (root / "stdout-1").read_text() == ""
    return root / "one", root / "two"


@pytest.mark.timeout(600)
def test_two_processes_match_one(runs: tuple[Path, Path]) -> None:
    one, two = runs
    for stage in ("sft", "reward", "ppo"):
        assert list_files(two / stage) == list_files(one / stage)
        assert_close(read_metrics(two / stage), read_metrics(one / stage), stage)
        ours, theirs = (StageRecord(run / stage).read() for run in (one, two))
        assert ours["fingerprint"] == theirs["fingerprint"] and ours["chosen"]["step"] == theirs["chosen"]["step"]
        assert ours["repo"]["tags"].keys() == theirs["repo"]["tags"].keys() > {"best"}
        for checkpoint in StageRecord(one / stage).checkpoints():
            check_integrity(two / stage / checkpoint.name)
            assert_same_weights(checkpoint, two / stage / checkpoint.name)
    assert_close(
        *(json.loads((run / "eval" / "evaluation.json").read_text()) for run in (two, one)), where="evaluation"
    )
    assert (two / "eval" / "samples.jsonl").read_text().count("\n") == 2
    assert not (two / LOCK).exists()
    assert (two / "summary.json").is_file()


def copy_until(run: Path, stage: str, step: int, to: Path) -> Path:
    """A copy of a run whose stage was killed after the checkpoint of a step."""
    shutil.copytree(run, to)
    record = StageRecord(to / stage)
    for checkpoint in record.checkpoints():
        if int(checkpoint.name.partition("-")[2]) > step:
            record.remove_checkpoint(checkpoint)
    record.write(status="running", repo=None, publish=None, chosen=None)
    return to


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stage", "how"),
    [
        pytest.param("sft", [], marks=pytest.mark.full),
        pytest.param("reward", ["--fsdp2"], marks=pytest.mark.full),
        ("ppo", ["--fsdp2"]),
    ],
)
def test_run_resumes_with_other_process_count(
    recipe: Path, runs: tuple[Path, Path], tmp_path: Path, stage: str, how: list[str]
) -> None:
    one, _ = runs
    *_, before, then, _ = [0, *(int(each.name.partition("-")[2]) for each in StageRecord(one / stage).checkpoints())]
    more = copy_until(one, stage, before, tmp_path / "more")
    codes, said = run_in_two_processes(
        stage, recipe, "--output_dir", more, "--hub", NOWHERE, *how, home=tmp_path / "home"
    )
    assert codes == [0, 0], said
    fewer = copy_until(more, stage, then, tmp_path / "fewer")
    done = zoo(stage, recipe, "--output_dir", fewer, "--hub", NOWHERE, home=tmp_path / "home", PYTHONPATH=TESTS)
    assert done.returncode == 0, done.stderr
    for run in (more, fewer):
        assert_close(read_metrics(run / stage), read_metrics(one / stage), f"{run.name} {stage}")
        last = StageRecord(one / stage).last_checkpoint()
        assert last is not None
        assert_same_weights(last, run / stage / last.name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--per_device_train_batch_size", "3"),
            "per_device_train_batch_size of the stage sft is 3, for all 2 processes together",
        ),
        (("--dataset_train_split", "nope"), "has no split 'nope', only 'train'"),
    ],
)
def test_error_is_printed_once_for_all_processes(
    recipe: Path, tmp_path: Path, flags: tuple[str, str], said: str
) -> None:
    found = ("sft", recipe, "--output_dir", tmp_path / "run", "--hub", NOWHERE, *flags)
    codes, stderr = run_in_two_processes(*found, home=tmp_path / "home")
    assert codes[0] == 2 and codes[1] != 0
    assert sum(one.count("Error: ") for one in stderr) == 1 and said in stderr[0]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_restart_with_another_base_reaches_all_processes(recipe: Path, tmp_path: Path) -> None:
    base = miniatures.save("Qwen3", tmp_path / "base")
    asked = ("sft", recipe, "--output_dir", tmp_path / "run", "--hub", NOWHERE, "--model_name_or_path", base)
    for more in ((), ("--restart",)):
        codes, said = run_in_two_processes(*asked, "--max_steps", "1", *more, home=tmp_path / "home")
        assert codes == [0, 0], said
        weights = base / "model.safetensors"
        save_file({name: value * 2 for name, value in load_file(weights).items()}, weights, metadata={"format": "pt"})


@pytest.mark.full
@pytest.mark.timeout(900)
def test_killed_worker_ends_run_with_intact_checkpoint(recipe: Path, runs: tuple[Path, Path], tmp_path: Path) -> None:
    """By `accelerate launch`, as a user starts it."""
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
        """Comes back once there is a checkpoint of a step after `past`."""
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
    launched.send_signal(signal.SIGINT)  # Ctrl-C: both stop after the step under way, which is saved
    assert launched.wait(120) != 0
    assert record.read()["status"] == "interrupted"
    steps = [row["step"] for row in record.metrics()]
    assert steps == sorted(steps)


def find_worker(launcher: int, *, rank: int) -> int:
    """The process id of the launcher's process of this rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise LookupError(rank)
