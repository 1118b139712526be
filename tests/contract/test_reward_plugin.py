"""examples/reward_plugin works as its README says: after `pip install`, its rewards are found by name."""

import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_fixture import base_environment
from zoo_process import zoo

from rlhf_zoo.errors import ZooError
from rlhf_zoo.plugins import REWARDS, load_object
from rlhf_zoo.rewards import Rewards

PLUGIN = Path(__file__).parents[2] / "examples" / "reward_plugin"
README = (PLUGIN / "README.md").read_text()


def block(language: str) -> str:
    return "".join(re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M))


def pip_install(package: Path, folder: Path) -> Path:
    """Installs a copy, so that the build leaves no file in the checkout; returns the folder for PYTHONPATH."""
    source, target = folder / package.name, folder / "installed"
    shutil.copytree(package, source, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    # With an installed build backend, pip needs no network.
    offline = ["--no-build-isolation", "--no-index"] if importlib.util.find_spec("hatchling") else []
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", *offline]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, capture_output=True, text=True)
    return target


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pip_install(PLUGIN, tmp_path_factory.mktemp("plugin"))


def test_wheel_registers_rewards_named_in_readme(installed: Path) -> None:
    [distribution] = importlib.metadata.distributions(path=[str(installed)])
    assert distribution.name == "zoo-reward-example"
    names = {entry.name for entry in distribution.entry_points if entry.group == REWARDS}
    assert names == {"finished", "mentions"} and all(f"`{name}`" in README for name in names)
    assert not (installed / "test_zoo_reward_example.py").exists()


def test_tests_of_plugin_pass_after_installation(installed: Path, tmp_path: Path) -> None:
    shutil.copy(PLUGIN / "test_zoo_reward_example.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "."]
    process = subprocess.run(
        command, cwd=tmp_path, env=base_environment() | {"PYTHONPATH": str(installed)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert process.returncode == 0 and "4 passed" in process.stdout, process.stdout + process.stderr


def test_reward_is_found_by_name_only_when_installed(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ZooError, match="No installed package registers 'finished'"):
        load_object("finished", group=REWARDS)
    recipe = yaml.safe_load(block("yaml"))
    monkeypatch.syspath_prepend(installed)
    rewards = Rewards([load_object(name, group=REWARDS) for name in recipe["reward_funcs"]])
    assert rewards.names == ["finished", "mentions"]
    assert len(recipe["reward_weights"]) == 1 + len(rewards.rewards), "the reward model has the first weight"
    assert rewards.rewards[1](prompts=[""], completions=["a good battery"]) == [0.5]
    sys.modules.pop("zoo_reward_example")


def test_validate_command_of_readme_works(installed: Path, tmp_path: Path) -> None:
    [line] = [line for line in block("sh").splitlines() if line.startswith("rlhf-zoo recipes validate ")]
    result = zoo(*shlex.split(line)[1:], home=tmp_path, cwd=tmp_path, PYTHONPATH=str(installed))
    assert result.returncode == 0 and "tiny-world is valid" in result.stdout, result.stderr
