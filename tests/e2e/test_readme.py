"""Runs every command of README.md, except `make`, and of the guides after it, unchanged and in order.

A folder named tiny-world in the working directory takes precedence over the package's recipe of that name, so the
commands run a small recipe.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from finished_run import ARCHITECTURE
from warm import PYTHON
from zoo_process import program, serves_page, wait_until

from rlhf_zoo.runs.recipe import copy_recipe

ROOT = Path(__file__).parents[2]
GUIDES = ("quickstart", "is-ppo-right", "reward-up-text-worse", "choose-a-reward", "choose-a-judge", "publish", "kl")
#: embedded-hub.md comes before trainer.md, whose Python blocks use the Hub that it starts.
PAGES = (
    *("README.md", "docs/commands.md"),
    *(f"docs/{name}.md" for name in GUIDES),
    *("docs/embedded-hub.md", "docs/trainer.md"),
)
TEXT = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
SMALL = {
    "recipe": {
        "corpus_args": {"lines": 600},
        "architecture": ARCHITECTURE,
        "evaluation.prompts": 8,
        "evaluation.samples": 2,
        "evaluation.checkpoint_prompts": 8,
    },
    "sft": {
        "max_steps": 20,
        "learning_rate": 0.02,
        "save_strategy": "steps",
        "save_steps": 20,
        "eval_strategy": "no",
    },
    "reward": {"simulated_pairs": 64, "simulated_test_pairs": 24, "score_samples": 32},
    "ppo": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "total_episodes": 160,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "response_length": 8,
        "save_steps": 40,
        "release": "last",
        "eval_strategy": "no",
    },
}


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.S | re.M)


def readme_commands() -> list[str]:
    lines = [line.partition("  #")[0].strip() for block in code_blocks("sh") for line in block.splitlines()]
    # Without repetitions: a guide repeats commands of README.md.
    return [line for line in dict.fromkeys(lines) if line and not line.startswith("make ")]


def user_environment(folder: Path) -> dict[str, str]:
    """The environment of a user without settings of a Hub, with a (warm) `rlhf-zoo` on $PATH."""
    path = [program(folder), Path(sys.executable).parent, os.environ["PATH"]]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "RLHF_ZOO_"))}
    own = {"RLHF_ZOO_HOME": str(folder / "home"), "PATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    return kept | own


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory with the small recipe, and the environment of a user."""
    folder = tmp_path_factory.mktemp("readme")
    environment = user_environment(folder) | {"WARM_QUICK": "1"}
    copy_recipe("tiny-world", folder / "tiny-world")
    for name, small in SMALL.items():
        path = folder / "tiny-world" / f"{name}.yaml"
        content = yaml.safe_load(path.read_text())
        for key, value in small.items():
            outer, dot, inner = key.partition(".")
            if dot:
                content[outer][inner] = value
            else:
                content[key] = value
        path.write_text(yaml.safe_dump(content))
    return folder, environment


def run_command(command: str, place, **more) -> subprocess.CompletedProcess:
    folder, environment = place
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**environment, **more}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def test_readme_contains_expected_commands():
    lines = [line for block in code_blocks("sh") for line in block.splitlines()]
    targets = {line.split()[1] for line in lines if line.startswith("make ")}
    assert targets == {"demo", "real"}
    assert len(readme_commands()) >= 14
    assert all(command.startswith(("rlhf-zoo ", "hf ", 'eval "$(rlhf-zoo hub env)"')) for command in readme_commands())


def test_every_documented_command_runs(place):
    server = None
    hub_env: dict[str, str] = {}
    try:
        for command in readme_commands():
            if command == "rlhf-zoo zoo --hub local --namespace demo":
                # The commands after it read what `make demo` publishes.
                run_command("rlhf-zoo push runs/tiny-world --hub local --namespace demo", place)
            if command == "rlhf-zoo hub serve &":
                server = start_command(command.removesuffix(" &"), place)
                wait_until((Path(place[1]["RLHF_ZOO_HOME"]) / "hub" / "server.json").is_file, server, 60)
            elif command.startswith("eval "):
                stdout = run_command("rlhf-zoo hub env", place).stdout
                words = [shlex.split(line)[1] for line in stdout.splitlines() if line.startswith("export ")]
                hub_env = dict(word.split("=", 1) for word in words)
                assert hub_env["HF_ENDPOINT"].startswith("http://127.0.0.1:")
                run_command(f"{command} && env | grep -q HF_ENDPOINT=", place)
            elif command.startswith("rlhf-zoo compare "):
                check_compare(command, place)
            else:
                run_command(command, place, **hub_env)
        check_python_blocks(place, hub_env)
    finally:
        if server is not None:
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
    tags = json.loads((place[0] / "runs/tiny-world/ppo/run.json").read_text())["repo"]["tags"]
    assert {"step-000040", "best"} == set(tags)
    assert json.loads((place[0] / "runs/tiny-world/ppo/run.json").read_text())["publish"]["namespace"] == "local"


def check_python_blocks(place, hub_env):
    """Runs the Python blocks: the filter and the reward function of the guides, and docs/trainer.md's with the Hub."""
    filter_block, reward_block, train_block, loop_block = code_blocks("python")
    script = place[0] / "filter.py"
    checks = (
        "free = [text for text in texts if not left_out & set(words(text))]\n"
        "assert len(texts) == 16 and len(set(texts)) > 1 and kept == (free or texts)\n"
    )
    script.write_text(filter_block + checks)
    run_command(f"{shlex.join(PYTHON)} {script}", place)
    (place[0] / "my_rewards.py").write_text(reward_block)
    assert "my_rewards:brief" in run_command("rlhf-zoo doctor tiny-world --reward_funcs my_rewards:brief", place).stdout
    script = place[0] / "trainer.py"
    script.write_text(f"{train_block}\n{loop_block}")
    done = run_command(f"{shlex.join(PYTHON)} {script}", place, **hub_env)
    assert "objective/kl" in done.stdout
    # The loop prints score and KL of its two updates; the first is measured before any optimizer step.
    *_, first, second = done.stdout.strip().splitlines()
    assert abs(float(first.split()[1])) < 1e-5 < abs(float(second.split()[1]))


def start_command(command: str, place) -> subprocess.Popen:
    folder, environment = place
    return subprocess.Popen(shlex.split(command), cwd=folder, env=environment, start_new_session=True)


def check_compare(command: str, place) -> None:
    """Starts `compare`, waits until its page answers, and stops it with Ctrl-C."""
    process = start_command(command, place)
    try:
        wait_until(lambda: serves_page(7860), process)
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    # With 2, another program would have had the port, and its page would have answered.
    assert code == 130
