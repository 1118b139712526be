"""What a user reads first: a mistake is told before the stack is imported, and a Hub that is silent before it tires."""

import io
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from hub_fixture import base_environment
from rich.console import Console

from rlhf_zoo.cli.tables import table
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import Hub, choose, choose_source
from rlhf_zoo.hub.client.refs import resolve
from rlhf_zoo.runs.data.sources import find_data

NOBODY = "http://127.0.0.1:9"
# Of what takes seconds to import.
HEAVY = ("torch", "transformers", "trl", "datasets", "pandas", "huggingface_hub", "accelerate", "gradio", "matplotlib")
PROBE = f"""
import sys
from rlhf_zoo.cli.main import main
sys.argv[0] = "rlhf-zoo"
try:
    main()
finally:
    print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes") / "wrong"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("description: A toy.\ndataset_name: a/b\n")
    (folder / "sft.yaml").write_text("lerning_rate: 1\n")
    (folder / "ppo.yaml").write_text("total_episodes: many\n")
    return folder


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("recipes list", 0, ""),
        ("recipes show tiny-world", 0, ""),
        ("recipes keys ppo", 0, ""),
        ("sft tiny-world --bad_flag 1", 2, "--bad_flag is not a key of the stage sft"),
        ("run tiny-world --ppo.kl_coef -1", 2, "--ppo.kl_coef is -1"),
        ("sft WRONG", 2, "sft.yaml has lerning_rate, which is not a key of the stage sft, did you mean"),
        ("ppo WRONG", 2, "total_episodes in WRONG/ppo.yaml is 'many', but it takes a whole number"),
        ("recipes validate WRONG", 2, "sft.yaml has lerning_rate"),
        ("doctor WRONG", 2, "total_episodes in WRONG/ppo.yaml"),
        ("eval WRONG", 2, "sft.yaml has lerning_rate"),
    ],
)
def test_mistakes_and_recipes_need_no_stack(words: str, code: int, said: str, wrong: Path) -> None:
    command = [sys.executable, "-c", PROBE, *words.replace("WRONG", str(wrong)).split()]
    done = subprocess.run(command, env=base_environment(), capture_output=True, text=True, check=False)
    *lines, imported = done.stderr.splitlines()
    assert done.returncode == code, done.stderr
    assert said.replace("WRONG", str(wrong)) in "".join(lines)
    assert imported == "", f"{words} imports {imported}"


def test_a_launcher_is_told_the_cause(tmp_path: Path) -> None:
    cause = tmp_path / "error.json"
    launched = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(cause)}
    command = [sys.executable, "-m", "rlhf_zoo.cli", "ppo", "tiny-world", "--kl_coef", "-1"]
    done = subprocess.run(command, env=base_environment() | launched, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("Error: ") == 1
    assert json.loads(cause.read_text())["message"] == done.stderr.strip()


@pytest.mark.parametrize("width", [80, 60, 200])
def test_tables_break_lines_between_words_alone(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = ["model", "stage", "recipe", "base", "reward", "KL", "win rate", "date"]
    rows = [["tiny-world-ppo", "ppo", "tiny-world", "tiny-world-sft", "1.823*", "3.910*", "0.822",
             "2026-11-23"]]  # fmt: skip
    for terminal in (width >= 80, False):
        screen = io.StringIO()
        made = partial(Console, file=screen, force_terminal=terminal, color_system=None)
        monkeypatch.setattr("rich.console.Console", lambda made=made, **given: made(**({"width": width} | given)))
        table("local", columns, rows)
        words = screen.getvalue().split()
        assert set(" ".join([*columns, *rows[0]]).split()) <= set(words), screen.getvalue()


def test_a_silent_source_is_named_within_seconds(tmp_path: Path) -> None:
    source = choose_source(NOBODY, choose("local", push_to_hub=False))
    assert source is not None
    assert source.description == f"{NOBODY} (--source_hub)"
    started = time.monotonic()
    with pytest.raises(ZooError) as data:
        find_data("maker/lines", None, source).load(None, "train", columns=[])
    with pytest.raises(ZooError) as model:
        resolve("maker/model", source)
    assert time.monotonic() - started < 5
    for caught in (data, model):
        assert f"the source {NOBODY}" in str(caught.value)
        assert "--source_hub" in str(caught.value)
    with pytest.raises(ZooError, match=f"and {NOBODY} does not answer .*: check the network and --hub"):
        find_data("maker/lines", None, Hub("other", NOBODY, "--hub", cache=tmp_path)).load(None, "train", columns=[])


def test_what_new_reads_from_was_named_by_its_own_flag() -> None:
    assert choose(NOBODY, push_to_hub=False, option="--source_hub").description == f"{NOBODY} (--source_hub)"
