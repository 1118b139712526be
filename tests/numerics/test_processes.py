"""Two processes compute what one does: the same completions, metrics and weights, up to the order of a sum."""

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
from zoo_process import together as in_two

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.fsdp import gather_optimizer

pytestmark = pytest.mark.timeout(3 * SECONDS)

COMPARED = ("together", "uneven", "one_trunk", "by_prompt", "by_hand", "left_over")
# A few units in the last place of weights of size 1 after up to 12 steps of SGD.
WEIGHTS = 1e-6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where PROCESSES processes made the runs, over the loopback interface and a port that is free."""
    root = tmp_path_factory.mktemp("processes")
    alone = processes_run.train(root / "alone", "sharded", 1)
    torch.save(alone, root / "alone" / "process-0.pt")
    shutil.copytree(root / "alone" / "sharded", root / "start")
    runs = ["together", "resumed", *COMPARED[1:], "voting", "sharded", "sharded_resumed"]
    # The processes end themselves after SECONDS, with their stacks on stderr.
    codes, said = in_two(
        [*PYTHON, processes_run.__file__, str(root), str(PROCESSES), *runs], root, dict(os.environ), seconds=2 * SECONDS
    )
    assert codes == [0, 0], said
    return root


def found(directory: Path, name: str) -> list[dict[str, Any]]:
    """What each process computed in a run."""
    return [torch.load(directory / name / f"process-{rank}.pt", weights_only=True) for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", COMPARED)
def test_two_processes_compute_what_one_does(directory: Path, tmp_path: Path, name: str) -> None:
    one, two = processes_run.train(tmp_path, name, 1), found(directory, name)[0]
    assert distance(one["weights"], two["weights"]) < WEIGHTS
    assert distance(one["weights"], one["began"]) > 1000 * WEIGHTS
    assert one["kl_coef"] == pytest.approx(two["kl_coef"], rel=1e-6)
    assert [row.keys() for row in one["log"]] == [row.keys() for row in two["log"]]
    for mine, theirs in zip(one["log"], two["log"], strict=True):
        # Single precision; what is near 0 is a difference of numbers near 1, such as an explained variance.
        assert theirs == pytest.approx(mine, rel=2e-5, abs=1e-5)


@pytest.mark.parametrize("name", [*COMPARED, "resumed"])
def test_processes_hold_the_same_weights_and_metrics(directory: Path, name: str) -> None:
    one, other = found(directory, name)
    assert digests(one["weights"]) == digests(other["weights"])
    assert one["log"] == other["log"] and len(one["log"]) > 1
    assert one["kl_coef"] == other["kl_coef"]


def test_the_runs_meet_what_they_are_made_for(directory: Path) -> None:
    together, uneven, by_hand = (found(directory, name) for name in ("together", "uneven", "by_hand"))
    log = together[0]["log"]
    assert {row["policy/epochs"] for row in log if "policy/epochs" in row} == {2.0}  # of 3: an early stop
    assert len({row["kl_coef"] for row in log if "kl_coef" in row}) == 4  # β moved
    assert [row["episodes"] for row in log if "episodes" in row] == [8, 16, 24, 32]
    for seen in uneven:
        assert seen["sizes"] == [8, 5, 8, 5]  # of both, without the row that fills the last batch up
    logged = found(directory, "left_over")[0]["log"]
    assert sum("letters" in row for row in logged) == 4 and sum("eval_objective/score" in row for row in logged) == 1
    # No random stream of one process is another's.
    assert by_hand[0]["generated"] != by_hand[1]["generated"]
    assert [row["objective/score"] for row in by_hand[0]["log"]] == pytest.approx([0.875, -0.125])


@pytest.mark.attack
def test_a_step_that_one_process_cannot_make_is_left_out_by_both(directory: Path) -> None:
    one, other = found(directory, "voting")
    assert digests(one["weights"]) == digests(other["weights"])
    for seen in (one, other):
        rows = [row for row in seen["log"] if "skipped_steps" in row]
        assert [row["skipped_steps"] for row in rows] == [0, 2, 2]
        assert [row["loss"] != row["loss"] for row in rows] == [False, True, False]
        assert all(weight.isfinite().all() for weight in seen["weights"].values())


def test_processes_that_would_wait_for_each_other_are_refused(directory: Path, tmp_path: Path) -> None:
    assert all("even_batches False" in seen["refusal"] for seen in found(directory, "by_hand"))
    assert processes_run.refusal(tmp_path, accelerator_config={"even_batches": False}) == ""


def test_a_checkpoint_is_written_once_and_resumed_exactly(directory: Path) -> None:
    whole, resumed = found(directory, "together"), found(directory, "resumed")
    assert [seen["saves"] for seen in whole] == [2, 0]
    checkpoint = directory / "together" / "checkpoint-2"
    assert {path.name for path in checkpoint.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    for mine, theirs in zip(whole, resumed, strict=True):
        assert len(theirs["sizes"]) == 2
        assert digests(mine["weights"]) == digests(theirs["weights"])
        assert mine["log"] == theirs["log"] and mine["kl_coef"] == theirs["kl_coef"]


def test_weights_in_shards_compute_what_one_process_does(directory: Path, tmp_path: Path) -> None:
    """FSDP2: where the weights lay, not what was asked for; and what is saved is what one process saves and resumes."""
    one = torch.load(directory / "alone" / "process-0.pt", weights_only=True)
    for name in ("sharded", "sharded_resumed"):  # the latter goes on from one process's checkpoint
        for two in found(directory, name):
            assert two["placements"].keys() == {
                "policy", "critic", "reference", "reward 0", "reward 1", "supervised"
            }  # fmt: skip
            for where, held in two["placements"].values():
                assert where == "(Shard(dim=0),)" and 0.4 < held < 0.6
            # Adam divides by the root of what may be near 0, so rounding is larger than SGD's.
            assert (
                distance(one["weights"], two["weights"]) < 20 * WEIGHTS < distance(one["weights"], one["began"]) / 100
            )
            assert two["kl_coef"] == one["kl_coef"]
        for mine, theirs in zip(one["log"], found(directory, name)[0]["log"], strict=True):
            assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-4)
    saved, whole = directory / "sharded" / "checkpoint-2", directory / "start" / "checkpoint-2"
    names = {path.relative_to(whole) for path in whole.rglob("*") if not path.name.startswith("rng_state")}
    assert names == {path.relative_to(saved) for path in saved.rglob("*") if not path.name.startswith("rng_state")}
    ours, theirs = (torch.load(path / "optimizer.pt", weights_only=True) for path in (whole, saved))
    assert ours["param_groups"] == theirs["param_groups"]
    for place, state in ours["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(theirs["state"][place][key], value, rtol=1e-4, atol=1e-6)
    shutil.copytree(saved, tmp_path / "start" / "checkpoint-2")
    resumed = processes_run.train(tmp_path, "sharded_resumed", 1)
    assert distance(one["weights"], resumed["weights"]) < 20 * WEIGHTS


def test_one_process_keeps_what_is_saved_of_an_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    kept = gather_optimizer(optimizer, keep=True)
    assert kept is not None and kept["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert gather_optimizer(optimizer, keep=False) is None


FREED = """
import sys, torch
from pathlib import Path
from rlhf_zoo.modeling.fsdp import return_memory

def resident():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) // 1024

torch.ones(2**22) + 1  # 16 MiB: freed, it has glibc keep blocks up to its size in the heap
if sys.argv[1] == "back":
    return_memory()
before, kept, freed = resident(), [], []
for _ in range(64):  # 128 MiB in blocks of 2, with small ones between them that stay
    freed.append(torch.ones(2**19))
    kept.append(torch.ones(2**13))
del freed
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_what_shards_gathered_is_given_back_when_it_is_freed() -> None:
    held = {
        how: int(subprocess.run([*PYTHON, "-c", FREED, how], capture_output=True, text=True, check=True).stdout)
        for how in ("left", "back")
    }
    assert held["left"] > 100 and held["back"] < 20


def test_what_cannot_be_sharded_is_refused_in_a_sentence(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="fsdp2 shards weights over several processes, but there is only one"):
        make_trainer(tmp_path, fsdp2=True)
    assert all("critic on the policy's trunk" in seen["sharding"] for seen in found(directory, "by_hand"))
