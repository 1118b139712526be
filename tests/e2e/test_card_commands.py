"""Extracts every command from the cards of a published run and runs it, as a reader would."""

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
    """The code in a card: shell commands, and Python blocks that run after them."""

    shell: list[str]
    python: list[str]

    @classmethod
    def of(cls, readme: Path) -> Printed:
        text = readme.read_text(encoding="utf-8")
        fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        assert {language for language, _ in fences} <= {"sh", "python"}, "this test runs no other language"
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        inline = [span for span in re.findall(r"`([^`\n]+)`", prose) if span.startswith("rlhf-zoo ")]
        lines = [line for language, block in fences if language == "sh" for line in block.splitlines()]
        return cls(
            list(dict.fromkeys([*inline, *lines])), [block for language, block in fences if language == "python"]
        )


@pytest.fixture(scope="module")
def reader(base: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A copy of the run and its Hub, with a folder for $PATH that has `rlhf-zoo`."""
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
        assert made == [shlex.join(["rlhf-zoo", "run", "recipes/tiny-world", *FLAGS, "--json"])], "the run's command"
        assert all(f"`step-{step:06d}`" in (reader.path / stage / "README.md").read_text() for step in steps)
        assert len(printed.python) == (2 if stage == "ppo" else 1), "one generates, one loads the critic"


def test_every_card_command_runs(reader: Run) -> None:
    done = run_shell(reader, "rlhf-zoo pull local/tiny-world-ppo@step-000002 --hub local --output_dir first")
    assert done.returncode == 0, done.stderr
    cards = [read_card(reader, stage) for stage in STAGES] + [Printed.of(reader.folder / "first" / "README.md")]
    commands = list(dict.fromkeys(command for card in cards for command in card.shell))
    assert len(commands) >= 17
    # Commands that train are skipped: `run` made this run, and tests/e2e/test_reproduce.py tests `reproduce`.
    failed = {
        command: done.stderr[-2000:]
        for command in commands
        if not command.startswith(("rlhf-zoo run ", "rlhf-zoo reproduce "))
        and (done := run_shell(reader, command)).returncode != 0
    }
    assert not failed
    # Before its Python, run each card's own pull command again: two cards may pull into the same folder.
    for number, card in enumerate(cards):
        (reader.folder / f"snippet_{number}.py").write_text("\n".join(card.python))
        fetch = [command for command in card.shell if "--output_dir tiny-world" in command]
        done = run_shell(reader, "\n".join([*fetch, f"{shlex.join(PYTHON)} snippet_{number}.py"]))
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip(), "it prints a completion or a score"
    defaults = json.loads((reader.folder / "tiny-world-ppo" / "generation_config.json").read_text())
    assert (defaults["do_sample"], defaults["top_k"], defaults["temperature"]) == (True, 0, 1.0), "as evaluated"
