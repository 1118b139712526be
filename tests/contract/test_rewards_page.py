"""The recipes of docs/rewards.md are valid, and its code and commands run."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from trainer_fixture import make_policy, make_tokenizer, make_trainer, updates_of
from zoo_process import zoo

from rlhf_zoo.pipeline.stages.ppo import load_reward_functions
from rlhf_zoo.plugins import registered_names
from rlhf_zoo.rewards.loading import load_reward_model
from rlhf_zoo.runs.recipe import load_recipe
from rlhf_zoo.runs.settings.parse import stage_keys, stage_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.S | re.M)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the page's modules."""
    for code in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", code)
        assert name is not None
        (tmp_path / name[1]).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_rewards", "scalar"):
        sys.modules.pop(name, None)


def test_page_recipes_are_valid(modules: Path) -> None:
    assert len(blocks("yaml")) == 8
    for block in blocks("yaml"):
        keys = {"missing_eos_penalty": None, **yaml.safe_load(block)}  # tiny-world has one
        settings = stage_settings(load_recipe("tiny-world"), "ppo", keys, shared_flags={}, output_dir=modules)
        load_reward_functions(settings)


def test_page_names_existing_keys_and_all_rewards() -> None:
    names = set(re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (.*?) \|", PAGE, flags=re.M))))
    functions = set(re.findall(r"^\| .*?`([a-z_]+)\([^`]*…[^`]*\)`", PAGE, flags=re.M))
    assert names <= {*stage_keys("ppo"), *registered_names("rlhf_zoo.rewards")}
    assert set(registered_names("rlhf_zoo.rewards")) <= names | functions


def test_page_functions_score_completions_in_run(modules: Path) -> None:
    [weights] = [yaml.safe_load(block) for block in blocks("yaml") if "my_rewards:brief" in block]
    settings = stage_settings(
        load_recipe("tiny-world"), "ppo", {**weights, "reward_model_path": None, "reward_weights": [1.0, 0.5, 1.0]},
        shared_flags={}, output_dir=modules,
    )  # fmt: skip
    trainer = make_trainer(modules, reward_funcs=load_reward_functions(settings), max_steps=1)
    trainer.train()
    assert {"rewards/brief", "rewards/no_echo", "rewards/sentences"} <= updates_of(trainer)[0].keys()
    import my_rewards  # type: ignore[import-not-found]

    [spans] = my_rewards.sentences([""], ["the cup. a tap. the end."])
    assert spans == [(0, 8, 0.2), (15, 24, 0.2)]
    assert my_rewards.no_echo([""], [""], [[5, 5, 6, 6, 6]]) == [[0, -0.1, 0, -0.1, -0.1]]


def test_page_reward_model_loads_and_trains(modules: Path) -> None:
    import scalar  # type: ignore[import-not-found]

    torch.manual_seed(0)
    scalar.ScalarModel(make_policy().config).save_pretrained("my-reward-model")
    make_tokenizer().save_pretrained("my-reward-model")
    [keys] = [yaml.safe_load(block) for block in blocks("yaml") if "reward_model_loader" in block]
    model = load_reward_model(keys["reward_model_path"], loader=keys["reward_model_loader"])
    trainer = make_trainer(modules, reward_model=model, max_steps=1)
    trainer.train()
    assert "rewards/reward_model" in updates_of(trainer)[0]


def test_page_commands_run(modules: Path) -> None:
    [commands] = blocks("sh")
    for line in commands.splitlines():
        _, *arguments = shlex.split(line)
        result = zoo(*arguments, home=modules / "home", cwd=modules)
        assert result.returncode == 0, result.stderr
