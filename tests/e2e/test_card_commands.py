"""Every command that the cards of a published run print is extracted from them and run, as a reader would."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from finished_run import FLAGS, STAGES, STEPS, Run
from warm import PYTHON
from zoo_process import environment, hubs_over, program


@dataclass(frozen=True)
class Printed:
    """What a card tells its reader to run: shell commands, and Python after them."""

    shell: list[str]
    python: list[str]

    @classmethod
    def of(cls, readme: Path) -> Printed:
        text = readme.read_text(encoding="utf-8")
        fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        assert {language for language, _ in fences} <= {"sh", "python"}, "a block of another language is not run here"
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        inline = [span for span in re.findall(r"`([^`\n]+)`", prose) if span.startswith("rlhf-zoo ")]
        lines = [line for language, block in fences if language == "sh" for line in block.splitlines()]
        return cls(
            list(dict.fromkeys([*inline, *lines])), [block for language, block in fences if language == "python"]
        )


@pytest.fixture(scope="module")
def reader(base: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run's directory and Hub, beside a folder with a `rlhf-zoo` for the path."""
    reader = base.copy(tmp_path_factory.mktemp("reader") / "copy")
    program(reader.folder)
    yield reader
    assert hubs_over(reader.home) == []


def read_card(reader: Run, stage: str) -> Printed:
    return Printed.of(reader.path / stage / "README.md")


def run_shell(reader: Run, command: str) -> subprocess.CompletedProcess[str]:
    env = environment(reader.home, PATH=f"{reader.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    shell = ["bash", "-euo", "pipefail", "-c", command]
    return subprocess.run(shell, cwd=reader.folder, env=env, capture_output=True, text=True, check=False)


def test_cards_print_expected_commands(reader: Run) -> None:
    for stage, steps in STEPS.items():
        printed, repo, last = read_card(reader, stage), f"local/tiny-world-{stage}", f"step-{steps[-1]:06d}"
        for revision in (last, "best"):
            assert f"rlhf-zoo pull {repo}@{revision} --hub local" in printed.shell
        assert f"rlhf-zoo lineage {repo}@{last} --hub local" in printed.shell
        assert f"rlhf-zoo reproduce {repo}@{last} --hub local" in printed.shell
        made = [line for line in printed.shell if line.startswith("rlhf-zoo run ")]
        assert made == [shlex.join(["rlhf-zoo", "run", "recipes/tiny-world", *FLAGS, "--json"])], "what made it"
        assert all(f"`step-{step:06d}`" in (reader.path / stage / "README.md").read_text() for step in steps)
        assert len(printed.python) == (2 if stage == "ppo" else 1), "one that generates, and one that loads the critic"


def test_every_card_command_runs(reader: Run) -> None:
    done = run_shell(reader, "rlhf-zoo pull local/tiny-world-ppo@step-000002 --hub local --output_dir first")
    assert done.returncode == 0, done.stderr
    cards = [read_card(reader, stage) for stage in STAGES] + [Printed.of(reader.folder / "first" / "README.md")]
    commands = list(dict.fromkeys(command for one in cards for command in one.shell))
    assert len(commands) >= 17
    # What trains is not run again: `run` is what made this run, and tests/e2e/test_reproduce.py makes all anew.
    failed = {
        command: done.stderr[-2000:]
        for command in commands
        if not command.startswith(("rlhf-zoo run ", "rlhf-zoo reproduce "))
        and (done := run_shell(reader, command)).returncode != 0
    }
    assert not failed
    # Each snippet after what its own card says to fetch: two cards may fill the same folder.
    for number, one in enumerate(cards):
        (reader.folder / f"snippet_{number}.py").write_text("\n".join(one.python))
        fetch = [command for command in one.shell if "--output_dir tiny-world" in command]
        done = run_shell(reader, "\n".join([*fetch, f"{shlex.join(PYTHON)} snippet_{number}.py"]))
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip(), "it prints what it generates, or its score"
    defaults = json.loads((reader.folder / "tiny-world-ppo" / "generation_config.json").read_text())
    assert (defaults["do_sample"], defaults["top_k"], defaults["temperature"]) == (True, 0, 1.0), "as evaluated"
