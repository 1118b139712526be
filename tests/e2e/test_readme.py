"""Every command of README.md but the two make targets, and of the pages that go on from it, as it stands there, in its
order, on a shrunken tiny-world.

A folder named tiny-world in the working directory goes before the recipe of that name in the package: so the commands
run word for word, and only the recipe is small.
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
from zoo_process import answers, program, wait_until

from rlhf_zoo.runs.recipe import copy_recipe

ROOT = Path(__file__).parents[2]
GUIDES = ("quickstart", "is-ppo-right", "reward-up-text-worse", "choose-a-reward", "choose-a-judge", "publish", "kl")
#: The Hub that embedded-hub.md serves stays for trainer.md.
PAGES = (
    *("README.md", "docs/commands.md"),
    *(f"docs/{name}.md" for name in GUIDES),
    *("docs/embedded-hub.md", "docs/trainer.md"),
)
README = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
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
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)


def readme_commands() -> list[str]:
    lines = [line.partition("  #")[0].strip() for block in code_blocks("sh") for line in block.splitlines()]
    # A guide repeats commands of README.md, which have run by then.
    return [line for line in dict.fromkeys(lines) if line and not line.startswith("make ")]


def user_environment(folder: Path) -> dict[str, str]:
    """The environment of a user without any Hub, who has a (warm) `rlhf-zoo`."""
    path = [program(folder), Path(sys.executable).parent, os.environ["PATH"]]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "RLHF_ZOO_"))}
    own = {"RLHF_ZOO_HOME": str(folder / "home"), "PATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    return kept | own


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory with the small recipe, and the environment of a user without any Hub."""
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
    made = {line.split()[1] for block in code_blocks("sh") for line in block.splitlines() if line.startswith("make ")}
    assert made == {"demo", "real"}
    assert len(readme_commands()) >= 14
    assert all(command.startswith(("rlhf-zoo ", "hf ", 'eval "$(rlhf-zoo hub env)"')) for command in readme_commands())


def test_every_documented_command_runs(place):
    served = None
    serving: dict[str, str] = {}
    try:
        for command in readme_commands():
            if command == "rlhf-zoo zoo --hub local --namespace demo":
                # From here on they read what `make demo` published.
                run_command("rlhf-zoo push runs/tiny-world --hub local --namespace demo", place)
            if command == "rlhf-zoo hub serve &":
                served = start_command(command.removesuffix(" &"), place)
                wait_until((Path(place[1]["RLHF_ZOO_HOME"]) / "hub" / "server.json").is_file, served, 60)
            elif command.startswith("eval "):
                said = run_command("rlhf-zoo hub env", place).stdout
                words = [shlex.split(line)[1] for line in said.splitlines() if line.startswith("export ")]
                serving = dict(word.split("=", 1) for word in words)
                assert serving["HF_ENDPOINT"].startswith("http://127.0.0.1:")
                run_command(f"{command} && env | grep -q HF_ENDPOINT=", place)
            elif command.startswith("rlhf-zoo compare "):
                check_compare(command, place)
            else:
                run_command(command, place, **serving)
        check_python_block(place, serving)
    finally:
        if served is not None:
            served.send_signal(signal.SIGTERM)
            assert served.wait(30) == 0
    tags = json.loads((place[0] / "runs/tiny-world/ppo/run.json").read_text())["repo"]["tags"]
    assert {"step-000040", "best"} == set(tags)
    assert json.loads((place[0] / "runs/tiny-world/ppo/run.json").read_text())["publish"]["namespace"] == "local"


def check_python_block(place, serving):
    """The trainer alone, as docs/trainer.md shows it, against the Hub that is served."""
    trained, stepped = code_blocks("python")
    script = place[0] / "alone.py"
    script.write_text(f"{trained}\n{stepped}")
    done = run_command(f"{shlex.join(PYTHON)} {script}", place, **serving)
    assert "objective/kl" in done.stdout
    # The loop prints score and KL of its two updates; the first is measured before any step.
    *_, first, second = done.stdout.strip().splitlines()
    assert abs(float(first.split()[1])) < 1e-5 < abs(float(second.split()[1]))


def start_command(command: str, place) -> subprocess.Popen:
    folder, environment = place
    return subprocess.Popen(shlex.split(command), cwd=folder, env=environment, start_new_session=True)


def check_compare(command: str, place) -> None:
    """`compare` serves until it is stopped: its page answers, and Ctrl-C ends it."""
    process = start_command(command, place)
    try:
        wait_until(lambda: answers(7860), process)
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    # Had the port been another program's, the page would be too, and this process would have ended with 2.
    assert code == 130
