"""Two processes give the same completions, metrics and weights as one, up to the order of a sum."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes_run
import pytest
import torch
from processes_run import PROCESSES, SECONDS
from trainer_fixture import digests, distance, make_trainer
from warm import PYTHON
from zoo_process import run_two_processes

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.fsdp import gather_optimizer

pytestmark = pytest.mark.timeout(3 * SECONDS)

COMPARED = ("all_reductions", "uneven_batches", "shared_trunk", "prompt_groups", "step_loop", "partial_batch")
# A few units in the last place of weights of size 1 after up to 12 steps of SGD.
WEIGHTS = 1e-6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of PROCESSES processes, and of one process as their reference."""
    root = tmp_path_factory.mktemp("processes")
    alone = processes_run.train(root / "alone", "sharded", 1)
    torch.save(alone, root / "alone" / "process-0.pt")
    shutil.copytree(root / "alone" / "sharded", root / "start")
    runs = ["all_reductions", "resumed", *COMPARED[1:], "skipped_step", "sharded", "sharded_resumed"]
    # The processes end themselves after SECONDS, with their stacks on stderr.
    codes, output = run_two_processes(
        [*PYTHON, processes_run.__file__, str(root), str(PROCESSES), *runs], root, dict(os.environ), seconds=2 * SECONDS
    )
    assert codes == [0, 0], output
    return root


def results_of(directory: Path, name: str) -> list[dict[str, Any]]:
    """Returns the results of each process in a run."""
    return [torch.load(directory / name / f"process-{rank}.pt", weights_only=True) for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", COMPARED)
def test_two_processes_equal_one(directory: Path, tmp_path: Path, name: str) -> None:
    single, distributed = processes_run.train(tmp_path, name, 1), results_of(directory, name)[0]
    assert distance(single["weights"], distributed["weights"]) < WEIGHTS
    assert distance(single["weights"], single["began"]) > 1000 * WEIGHTS
    assert single["kl_coef"] == pytest.approx(distributed["kl_coef"], rel=1e-6)
    assert [row.keys() for row in single["log"]] == [row.keys() for row in distributed["log"]]
    for expected, actual in zip(single["log"], distributed["log"], strict=True):
        # Single precision; values near 0, such as an explained variance, are differences of numbers near 1.
        assert actual == pytest.approx(expected, rel=2e-5, abs=1e-5)


@pytest.mark.parametrize("name", [*COMPARED, "resumed"])
def test_processes_agree_on_weights_and_metrics(directory: Path, name: str) -> None:
    first, second = results_of(directory, name)
    assert digests(first["weights"]) == digests(second["weights"])
    assert first["log"] == second["log"] and len(first["log"]) > 1
    assert first["kl_coef"] == second["kl_coef"]


def test_runs_exercise_their_special_cases(directory: Path) -> None:
    all_reductions, uneven_batches, step_loop = (
        results_of(directory, name) for name in ("all_reductions", "uneven_batches", "step_loop")
    )
    log = all_reductions[0]["log"]
    assert {row["policy/epochs"] for row in log if "policy/epochs" in row} == {2.0}  # of 3: an early stop
    assert len({row["kl_coef"] for row in log if "kl_coef" in row}) == 4  # β changes
    assert [row["episodes"] for row in log if "episodes" in row] == [8, 16, 24, 32]
    for result in uneven_batches:
        assert result["sizes"] == [8, 5, 8, 5]  # in both processes, without the row that fills up the last batch
    logged = results_of(directory, "partial_batch")[0]["log"]
    assert sum("letters" in row for row in logged) == 4 and sum("eval_objective/score" in row for row in logged) == 1
    # The processes have different random streams.
    assert step_loop[0]["generated"] != step_loop[1]["generated"]
    assert [row["objective/score"] for row in step_loop[0]["log"]] == pytest.approx([0.875, -0.125])


@pytest.mark.attack
def test_both_processes_skip_step_when_one_has_nan_loss(directory: Path) -> None:
    first, second = results_of(directory, "skipped_step")
    assert digests(first["weights"]) == digests(second["weights"])
    for result in (first, second):
        rows = [row for row in result["log"] if "skipped_steps" in row]
        assert [row["skipped_steps"] for row in rows] == [0, 2, 2]
        assert [row["loss"] != row["loss"] for row in rows] == [False, True, False]
        assert all(weight.isfinite().all() for weight in result["weights"].values())


def test_even_batches_false_is_rejected_for_several_processes(directory: Path, tmp_path: Path) -> None:
    assert all("even_batches False" in result["refusal"] for result in results_of(directory, "step_loop"))
    assert processes_run.refusal(tmp_path, accelerator_config={"even_batches": False}) == ""


def test_checkpoint_is_written_once_and_resumes_exactly(directory: Path) -> None:
    uninterrupted, resumed = results_of(directory, "all_reductions"), results_of(directory, "resumed")
    assert [result["saves"] for result in uninterrupted] == [2, 0]
    checkpoint = directory / "all_reductions" / "checkpoint-2"
    assert {path.name for path in checkpoint.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    for expected, actual in zip(uninterrupted, resumed, strict=True):
        assert len(actual["sizes"]) == 2
        assert digests(expected["weights"]) == digests(actual["weights"])
        assert expected["log"] == actual["log"] and expected["kl_coef"] == actual["kl_coef"]


def test_sharded_run_equals_run_of_one_process(directory: Path, tmp_path: Path) -> None:
    """With FSDP2: weights are sharded; the checkpoint equals that of one process, which can resume it."""
    single = torch.load(directory / "alone" / "process-0.pt", weights_only=True)
    for name in ("sharded", "sharded_resumed"):  # the second resumes one process's checkpoint
        for sharded in results_of(directory, name):
            assert sharded["placements"].keys() == {
                "policy", "critic", "reference", "reward 0", "reward 1", "supervised"
            }  # fmt: skip
            for placement, share in sharded["placements"].values():
                assert placement == "(Shard(dim=0),)" and 0.4 < share < 0.6
            # Adam divides by a root that may be near 0, so rounding has a larger effect than in SGD.
            assert (
                distance(single["weights"], sharded["weights"])
                < 20 * WEIGHTS
                < distance(single["weights"], single["began"]) / 100
            )
            assert sharded["kl_coef"] == single["kl_coef"]
        for expected_row, actual in zip(single["log"], results_of(directory, name)[0]["log"], strict=True):
            assert actual == pytest.approx(expected_row, rel=1e-4, abs=1e-4)
    sharded_checkpoint, single_checkpoint = directory / "sharded" / "checkpoint-2", directory / "start" / "checkpoint-2"
    names = {
        path.relative_to(single_checkpoint)
        for path in single_checkpoint.rglob("*")
        if not path.name.startswith("rng_state")
    }
    assert names == {
        path.relative_to(sharded_checkpoint)
        for path in sharded_checkpoint.rglob("*")
        if not path.name.startswith("rng_state")
    }
    expected, actual = (
        torch.load(path / "optimizer.pt", weights_only=True) for path in (single_checkpoint, sharded_checkpoint)
    )
    assert expected["param_groups"] == actual["param_groups"]
    for index, state in expected["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(actual["state"][index][key], value, rtol=1e-4, atol=1e-6)
    shutil.copytree(sharded_checkpoint, tmp_path / "start" / "checkpoint-2")
    resumed = processes_run.train(tmp_path, "sharded_resumed", 1)
    assert distance(single["weights"], resumed["weights"]) < 20 * WEIGHTS


def test_gather_optimizer_returns_state_only_to_keep() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    optimizer_state = gather_optimizer(optimizer, keep=True)
    assert optimizer_state is not None and optimizer_state["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert gather_optimizer(optimizer, keep=False) is None


HEAP_SCRIPT = """
import sys, torch
from pathlib import Path
from rlhf_zoo.modeling.fsdp import return_freed_blocks

def resident():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) // 1024

torch.ones(2**22) + 1  # 16 MiB: once freed, glibc keeps blocks up to that size in the heap
if sys.argv[1] == "returned":
    return_freed_blocks()
before, kept, freed = resident(), [], []
for _ in range(64):  # 128 MiB in blocks of 2 MiB, between small blocks that stay allocated
    freed.append(torch.ones(2**19))
    kept.append(torch.ones(2**13))
del freed
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_return_freed_blocks_lowers_resident_memory() -> None:
    growth = {
        mode: int(subprocess.run([*PYTHON, "-c", HEAP_SCRIPT, mode], capture_output=True, text=True, check=True).stdout)
        for mode in ("kept", "returned")
    }
    assert growth["kept"] > 100 and growth["returned"] < 20


def test_fsdp2_rejects_one_process_and_shared_critic(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="fsdp2 shards weights over several processes, but there is only one"):
        make_trainer(tmp_path, fsdp2=True)
    assert all("critic on the policy's trunk" in result["sharding"] for result in results_of(directory, "step_loop"))
