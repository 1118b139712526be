"""Start-up: mistakes are reported before heavy imports, and a silent Hub within seconds."""

import contextlib
import gc
import io
import json
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import miniatures
import pytest
from hub_fixture import base_environment
from rich.console import Console

from rlhf_zoo.cli.common import loading
from rlhf_zoo.cli.tables import print_table
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import Hub, choose_hub, choose_source
from rlhf_zoo.hub.client.refs import resolve
from rlhf_zoo.runs.data.sources import find_data

UNREACHABLE_HUB = "http://127.0.0.1:9"
# Packages that take seconds to import.
HEAVY = ("torch", "transformers", "trl", "datasets", "pandas", "huggingface_hub", "accelerate", "gradio", "matplotlib")
# Packages that help must not import either.
LIGHT = ("sklearn", "numpy", "rich", "dulwich", "yaml", "http.server")
# Runs each command in a fork of one process, which has imported the packages `imports` and the command line.
FORKS = """
import importlib, io, json, os, sys
imports, commands = json.loads(sys.argv[1])
list(map(importlib.import_module, imports))
from rlhf_zoo.cli.main import main
for words, unneeded in commands:
    if os.fork() == 0:
        sys.argv, sys.stderr = ["rlhf-zoo", *words.split()], io.StringIO()
        try:
            main()
        except BaseException as end:
            code = getattr(end, "code", repr(end))
        imported = [name for name in unneeded if name in sys.modules]
        print("\\n" + json.dumps([code, sys.stderr.getvalue(), imported]), flush=True)
        os._exit(0)
    os.wait()
"""
# Plans and traces load the models' code and the stages' dataclasses, but no data, trainer, plot or page.
PAGES = ("matplotlib", "gradio", "sklearn", "torch.utils.tensorboard")
TRAINING = ("datasets", "pandas", "pyarrow", "transformers.trainer", *PAGES)


@pytest.fixture(scope="module")
def wrong_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes") / "wrong"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("description: A toy.\ndataset_name: a/b\n")
    (folder / "sft.yaml").write_text("lerning_rate: 1\n")
    (folder / "ppo.yaml").write_text("total_episodes: many\n")
    return folder


def run_in_forks(
    commands: list[tuple[str, tuple[str, ...]]], folder: Path, imports: tuple[str, ...] = ()
) -> list[tuple[int, str, list[str]]]:
    """Runs (command, packages) pairs; returns for each its exit code, its stderr, and the packages that it imported."""
    command = [sys.executable, "-c", FORKS, json.dumps([imports, commands])]
    environment = base_environment() | {"RLHF_ZOO_HOME": str(folder)}
    process = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    results = [tuple(json.loads(line)) for line in process.stdout.splitlines() if line.startswith("[")]
    assert len(results) == len(commands)
    return results


def test_help_mistakes_and_recipe_commands_import_no_heavy_package(wrong_recipe: Path, tmp_path: Path) -> None:
    expected = {
        "--help": (0, ""),
        "run --help": (0, ""),
        "ppo --help": (0, ""),
        "hub --help": (0, ""),
        "recipes list": (0, ""),
        "recipes show tiny-world": (0, ""),
        "recipes keys ppo": (0, ""),
        "sft tiny-world --bad_flag 1": (2, "--bad_flag is not a key of the stage sft"),
        "run tiny-world --ppo.kl_coef -1": (2, "--ppo.kl_coef is -1"),
        "sft WRONG": (2, "sft.yaml has lerning_rate, which is not a key of the stage sft, did you mean"),
        "ppo WRONG": (2, "total_episodes in WRONG/ppo.yaml is 'many', but it takes a whole number"),
        "recipes validate WRONG": (2, "sft.yaml has lerning_rate"),
        "doctor WRONG": (2, "total_episodes in WRONG/ppo.yaml"),
        "eval WRONG": (2, "sft.yaml has lerning_rate"),
    }
    commands = [
        (words.replace("WRONG", str(wrong_recipe)), (*HEAVY, *LIGHT) if "--help" in words else HEAVY)
        for words in expected
    ]
    results = run_in_forks(commands, tmp_path)
    for (words, (code, message)), (exit_code, stderr, imported) in zip(expected.items(), results, strict=True):
        assert (exit_code, imported) == (code, []), (words, stderr)
        assert message.replace("WRONG", str(wrong_recipe)) in stderr.replace("\n", "")


def test_commands_import_no_package_that_they_do_not_need(tmp_path: Path) -> None:
    """The forks are of a process that has imported torch, which all these commands need."""
    miniatures.save("GPT-2", tmp_path / "base")
    rows = [json.dumps({"prompt": f"what is {row}", "completion": f"{row}"}) for row in range(240)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    expected = {
        "plan tiny-world --gpu rtx4090": (0, ("trl", "peft", *TRAINING)),
        "plan tiny-world --gpu rtx4090 --lora": (0, TRAINING),
        "trace nowhere --prompt hello": (2, ("trl", *TRAINING)),
        "recipes validate tiny-world": (0, PAGES),
        "new mine --model nowhere --prompts nowhere --reward numeric_match": (2, ("trl", "peft", *PAGES)),
        "new other --model base --prompts pairs.jsonl --reward length": (0, ("trl", "peft", *PAGES)),
    }
    commands = [(words, unneeded) for words, (_, unneeded) in expected.items()]
    results = run_in_forks(commands, tmp_path, imports=("torch",))
    for (words, (code, _)), (exit_code, stderr, imported) in zip(expected.items(), results, strict=True):
        assert (exit_code, imported) == (code, []), (words, stderr)


def test_imports_run_without_garbage_collection() -> None:
    for error in (None, ZooError("x")):
        with contextlib.suppress(ZooError), loading("loading nothing"):
            assert not gc.isenabled()
            if error is not None:
                raise error
        assert gc.isenabled()


def test_error_is_written_to_file_of_launcher(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    launcher_env = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(error_file)}
    command = [sys.executable, "-m", "rlhf_zoo.cli", "ppo", "tiny-world", "--kl_coef", "-1"]
    process = subprocess.run(
        command, env=base_environment() | launcher_env, capture_output=True, text=True, check=False
    )
    assert process.returncode == 2 and process.stderr.count("Error: ") == 1
    assert json.loads(error_file.read_text())["message"] == process.stderr.strip()


@pytest.mark.parametrize("width", [80, 60, 200])
def test_table_wraps_lines_only_between_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = ["model", "stage", "recipe", "base", "reward", "KL", "win rate", "date"]
    rows = [["tiny-world-ppo", "ppo", "tiny-world", "tiny-world-sft", "1.823*", "3.910*", "0.822",
             "2026-11-23"]]  # fmt: skip
    for terminal in (width >= 80, False):
        screen = io.StringIO()
        make_console = partial(Console, file=screen, force_terminal=terminal, color_system=None)
        monkeypatch.setattr(
            "rich.console.Console",
            lambda make_console=make_console, **options: make_console(**({"width": width} | options)),
        )
        print_table("local", columns, rows)
        words = screen.getvalue().split()
        assert set(" ".join([*columns, *rows[0]]).split()) <= set(words), screen.getvalue()


def test_table_of_long_keys_fits_80_columns_and_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`recipes keys ppo` has a key of 39 letters, which users copy, and types and defaults of more than 16."""
    screen = io.StringIO()
    make_console = partial(Console, file=screen, force_terminal=True, color_system=None)
    monkeypatch.setattr("rich.console.Console", lambda **options: make_console(**({"width": 80} | options)))
    row = ["restore_callback_states_from_checkpoint", "ParallelismConfig", "adamw_torch_fused", 40 * "sentence "]
    title, columns = "Keys [of] ppo", ["key", "type", "default", "meaning [type, default]"]
    print_table(title, columns, [row])
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and row[0] in screen.getvalue()
    letters = Counter("".join([title, *columns, *row]).replace(" ", ""))
    assert Counter(screen.getvalue().translate({ord(char): None for char in " \n─━"})) == letters
    assert screen.getvalue().count("sentence") == 40, "sentences break between words"


def test_silent_source_hub_is_reported_within_seconds(tmp_path: Path) -> None:
    source = choose_source(UNREACHABLE_HUB, choose_hub("local", push_to_hub=False))
    assert source is not None
    assert source.description == f"{UNREACHABLE_HUB} (--source_hub)"
    started = time.monotonic()
    with pytest.raises(ZooError) as data:
        find_data("maker/lines", None, source).load(None, "train", columns=[])
    with pytest.raises(ZooError) as model:
        resolve("maker/model", source)
    assert time.monotonic() - started < 5
    for caught in (data, model):
        assert UNREACHABLE_HUB in str(caught.value)
        assert "--source_hub" in str(caught.value)
    with pytest.raises(ZooError, match=f"and {UNREACHABLE_HUB} does not answer .*: check the network and --hub"):
        find_data("maker/lines", None, Hub("other", UNREACHABLE_HUB, "--hub", cache=tmp_path)).load(
            None, "train", columns=[]
        )


def test_choose_describes_hub_by_given_option() -> None:
    assert (
        choose_hub(UNREACHABLE_HUB, push_to_hub=False, flag="--source_hub").description
        == f"{UNREACHABLE_HUB} (--source_hub)"
    )
