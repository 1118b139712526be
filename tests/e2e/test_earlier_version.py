"""What an earlier version left (a run of commit 48a5258, with its Hub) goes on working: earlier_version.tar.xz."""

import json
import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from finished_run import STAGES, Run, in_its_place
from safetensors.torch import load_file
from torch.testing import assert_close


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(Path(__file__).with_name("earlier_version.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return Run(folder / "finished")


def copied(kept: Run, folder: Path) -> Run:
    shutil.copytree(kept.folder, folder / "finished", symlinks=True)
    run = Run(folder / "finished")
    in_its_place(run.path)
    return run


def test_it_goes_on(kept, tmp_path):
    """What is finished stays, and PPO goes on from its checkpoint, optimizer and random states to what it had made."""
    run = copied(kept, tmp_path)
    shutil.rmtree(run.record("ppo").checkpoint_path(6))
    run.record("ppo").write(status="interrupted")
    # An older sampler rounded otherwise, and a published step never takes other weights: it was not published yet.
    published = run.root / "repos" / "models" / "local" / "tiny-world-ppo.git"
    subprocess.run(["git", "-C", str(published), "tag", "-d", "step-000006"], check=True, capture_output=True)
    done = run.zoo(*shlex.split(run.json("eval", "run.json")["command"])[1:])
    assert done.returncode == 0, done.stderr
    ours, theirs = (load_file(one.record("ppo").checkpoint_path(6) / "model.safetensors") for one in (run, kept))
    assert_close(ours, theirs)
    for stage in ("sft", "reward", "eval"):
        assert run.json(stage, "run.json") == kept.json(stage, "run.json"), "it was done again"
    now, then = json.loads(done.stdout), kept.json("summary.json")
    assert (now["win_rate"], now["ppo"], now["verdict"]) == (then["win_rate"], then["ppo"], then["verdict"])


def test_its_hub_and_its_cards(kept, tmp_path):
    run = copied(kept, tmp_path)

    def zoo(*arguments: str) -> str:
        done = run.zoo(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    pulled = Path(zoo("pull", "local/tiny-world-ppo@best").strip())
    ours, theirs = (load_file(path / "model.safetensors") for path in (pulled, kept.record("ppo").checkpoint_path(6)))
    assert_close(ours, theirs)
    assert "local/tiny-world-reward @ step-000004" in zoo("lineage", "local/tiny-world-ppo")
    listed = {entry["repo"] for entry in json.loads(zoo("zoo", "--namespace", "local", "--json"))}
    assert listed == {f"local/tiny-world-{stage}" for stage in STAGES}
    for stage in STAGES:
        zoo("card", f"run/{stage}")
        now, then = ((one.path / stage / "README.md").read_text().splitlines() for one in (run, kept))
        then = [line.replace("labelled", "labeled") for line in then]
        now = [line.replace(" (version 1), at", ", at") for line in now]  # of the verdict's rule, said since version 2
        then, now = ([line for line in one if not line.startswith("- One seed (1)")] for one in (then, now))
        less, more = ([line for line in one if line not in other] for one, other in ((then, now), (now, then)))
        # Since then, and no more.
        said = (" split", "- Not measured:", "| **best of 4** | not measured", "| **ties**", "(plots/training.png)")
        assert all(any(word in line for word in said) for line in [*less, *more]), (less, more)
        figures = [re.findall(r"\d[\d.]*", " ".join(one).replace("best of 4", "")) for one in (less, more)]
        assert figures[0] == figures[1] != []
