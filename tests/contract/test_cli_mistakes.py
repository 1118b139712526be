"""Every command with clumsy or hostile input: exit code 2 and one sentence, never a traceback.

The tests call `main` in this process. No Hub runs: connections are refused.
"""

import contextlib
import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from test_cli import walk
from zoo_process import COMMAND, environment

from rlhf_zoo.cli import main as cli
from rlhf_zoo.hub.client import connect
from rlhf_zoo.hub.client.connect import Hub

pytestmark = pytest.mark.attack

LONG = "a" * 5000
DEEP = '{"a":' * 50_000
#: Values for arguments that name a recipe, run, repository or path.
SUBJECTS = (
    "", "file", "latin", "loop", "empty", "file/x", LONG, "nowhere", "~nobody-here/x", "a/b@", "\n",
    "list", "strange", "folder", "deep", "bytes", "recipe-of-folders", "recipe-of-bytes",
)  # fmt: skip
#: Values for options that take a number, a name or JSON.
VALUES = ("", "-1", "nan", "9" * 5000, "\n", "[", DEEP, '{"a": "\\ud800"}', "loop/x")
#: A wrong seed stops commands that would train if their other arguments were valid.
STOP = {
    name: f"--{'' if name in ('sft', 'reward', 'ppo', 'doctor', 'eval') else 'ppo.'}seed=x".split()
    for name in ("ablate", "baseline", "doctor", "ensemble", "eval", "ppo", "reward", "run", "sft", "sweep")
}
REQUIRED = {
    "method": "dpo", "model": "user/name", "kl_coef": "0", "repo": "user/name", "prompt": "the",
    "against": "reference.jsonl", "grid": "kl_coef=0",
}  # fmt: skip
# Commands that serve until Ctrl-C, or write into the home directory.
SKIPPED = {"hub serve", "compare", "hub extension install", "hub extension uninstall"}


LEAVES = {
    name: command
    for name, command in walk(cli.cli).items()
    if name not in SKIPPED and not isinstance(command, click.Group)
}
# Commands that take the options of `run` and `eval`.
LIKE_RUN = ("ablate", "baseline", "doctor", "ensemble", "ppo", "reward", "sft", "sweep")
SHARED = {param.opts[0] for name in ("run", "eval") for param in LEAVES[name].params}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs main() in a folder of odd files; returns exit code, stdout and stderr."""
    from huggingface_hub import constants

    @contextlib.contextmanager
    def unreachable(hub: Hub, source: Hub | None) -> Iterator[Hub]:
        yield Hub("other", "http://127.0.0.1:9", "a test")

    monkeypatch.setattr(connect, "connect", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "file").write_text("x")
    (work / "latin").write_bytes(b"\xff\n")
    (work / "loop").symlink_to(work / "loop")
    (work / "empty").mkdir()
    for name, content in {"list": b"[]", "strange": b'{"stage": 5}', "deep": b"[" * 100_000, "bytes": b"\xff"}.items():
        (work / name / "sft").mkdir(parents=True)
        (work / name / "sft" / "run.json").write_bytes(content)
    (work / "folder" / "sft" / "run.json").mkdir(parents=True)
    for name in ("recipe-of-folders", "recipe-of-bytes"):
        (work / name).mkdir()
        (work / name / "recipe.yaml").write_text("description: A toy.\n")
    (work / "recipe-of-folders" / "sft.yaml").mkdir()
    (work / "recipe-of-bytes" / "sft.yaml").write_bytes(b"\xff")

    def run(*words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["rlhf-zoo", *words])
        with pytest.raises(SystemExit) as caught, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out.getvalue(), err.getvalue()

    return run


def odd_command_lines(command: click.Command, name: str) -> Iterator[list[str]]:
    """Yields the command's arguments, with one odd value at a time."""
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    options = [param for param in command.params if isinstance(param, click.Option) and not param.is_flag]
    required_options = [option.opts[0] for option in options if option.required]
    required = [word for option in required_options for word in (option, REQUIRED[option.removeprefix("--")])]
    if name in LIKE_RUN:  # options shared with `run` and `eval` are tested there
        options = [param for param in options if param.opts[0] not in SHARED]
    valid = ["tiny-world"] * len(arguments)
    for position in range(len(arguments)):
        for odd in SUBJECTS:
            yield [*valid[:position], odd, *valid[position + 1 :], *required, *STOP.get(name, [])]
    for option in options:
        for odd in VALUES:
            yield [*valid, *required, option.opts[0], odd, *STOP.get(name, [])]


@pytest.mark.parametrize("name", LEAVES)
def test_command_reports_mistake_in_one_sentence(run: Callable[..., tuple[int, str, str]], name: str) -> None:
    for words in odd_command_lines(LEAVES[name], name):
        code, _, err = run(*name.split(), *words)
        messages = [line for line in err.splitlines() if line.startswith("Error: ")]
        # Some values are valid; doctor reports problems in its table.
        assert code in (0, 2), (words, code, err)
        assert len(messages) == (code == 2 and not (name == "doctor" and not messages)), (words, code, err)
        assert "Traceback" not in err, (words, err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("runn tiny-world", "There is no command 'runn', did you mean 'run'?"),
        ("train tiny-world", "There is no command 'train', did you mean 'run'?"),
        ("validate tiny-world", "There is no command 'validate', did you mean 'recipes validate'?"),
        ("new mine --model x --memory much", "Invalid value for '--memory': 'much' is not a number"),
        ("plan --prompt_length long x", "'long' is not a whole number"),
        ("evaluate tiny-world", "There is no command 'evaluate', did you mean 'eval'?"),
        ("ppo tiny-world --beta 0.1", "--beta is not a key of the stage ppo, did you mean 'kl_coef'?"),
        ("run tiny-world --beta 0.1", "--beta is not a key of recipe.yaml: write --ppo.kl_coef."),
        ("sft tiny-world --lr 1", "--lr is not a key of the stage sft, did you mean 'learning_rate'?"),
        ("recipes keys ppo nonsense", "No key of ppo has 'nonsense' in its name or meaning"),
        ("recipes lst", "`rlhf-zoo recipes` has no command 'lst', did you mean 'list'?"),
        ("hub export a/b --rep c/d", "`rlhf-zoo hub export` has no option --rep, did you mean 'repo'?"),
        ("hub export a/b --output_dir x", "`rlhf-zoo hub export` has no option --output_dir: it has --repo, --to, "),
        ("run tiny-wrld", "There is no recipe 'tiny-wrld', did you mean 'tiny-world'?"),
        ("run --seed 2 tiny-world", "Put --seed after the recipe: `rlhf-zoo run RECIPE --seed ...`."),
        ("run tiny-world --hub embedded", "--hub is 'embedded': use 'local' or an address"),
        ("run tiny-world --namespace a/b", "--namespace is 'a/b', which no Hub accepts"),
        ("compare x --port seven", "Invalid value for '--port': 'seven' is not a whole number"),
        ("card nowhere", "There is no run in nowhere: pass a run directory, such as runs/tiny-world."),
    ],
)
def test_command_names_mistake_in_arguments(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, arguments: str, message: str
) -> None:
    before = sorted((tmp_path / "work").rglob("*"))
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "") and err.startswith("Error: ") and err.count("\n") == 1 and message in err
    assert ". " not in err and sorted((tmp_path / "work").rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("recipes keys pppo", "STAGE is 'pppo', but it takes one of recipe, sft, reward, ppo, did you mean 'ppo'?"),
        ("recipes keys", "STAGE is missing: give one of recipe, sft, reward, ppo."),
        ("completion tcsh", "SHELL is 'tcsh', but it takes one of bash, fish, zsh."),
        (
            "zoo --sort kll",
            "--sort is 'kll', but it takes one of reward, kl, win_rate, date, stage, name, did you mean",
        ),
        ("zoo nope", "`rlhf-zoo zoo` takes options only, but got 'nope': use --namespace, --stage, "),
        ("zoo nope other", "`rlhf-zoo zoo` takes options only, but got 'nope other': use --namespace, "),
        ("space nope", "`rlhf-zoo space` has no command 'nope': it has "),
        ("hub nope", "`rlhf-zoo hub` has no command 'nope': it has "),
    ],
)
def test_error_for_unknown_word_lists_valid_words(
    run: Callable[..., tuple[int, str, str]], words: str, message: str
) -> None:
    code, out, err = run(*words.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith(f"Error: {message}"), err


def test_command_rejects_arguments_that_are_not_utf_8(run: Callable[..., tuple[int, str, str]]) -> None:
    word = os.fsdecode(b"runs/\xff")
    code, _, err = run("sft", "tiny-world", "--output_dir", word)
    assert code == 2
    assert err == "Error: The argument b'runs/\\xff' is not UTF-8: rename the file, or correct the argument.\n"


def test_command_rejects_empty_path(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    for words in (["run", "tiny-world", "--output_dir", ""], ["card", ""], ["recipes", "copy", "tiny-world", ""]):
        code, _, err = run(*words)
        assert code == 2 and "the path is empty" in err
    assert not (tmp_path / "work" / "data").exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/a/b"),
            "/a/b cannot be used (Permission denied): check the",
        ),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/a/b"), "/a/b cannot be used (Is a directory)"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "/a"), "/a cannot be used (Too many levels"),
        (OSError(errno.ENAMETOOLONG, "File name too long", LONG), f"{LONG[:200]} cannot be used (File name too long)"),
        (RuntimeError("Could not determine home directory."), "There is no home directory to expand ~ to: set HOME"),
    ],
)
def test_system_error_names_path(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("rlhf_zoo.runs.recipe_table.list_recipes", fail)
    code, out, err = run("recipes", "list")
    assert (code, out) == (2, "") and err.startswith(f"Error: {message}") and err.endswith(".\n")


def test_main_does_not_catch_defects(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (
        RuntimeError("a defect"),
        PermissionError(errno.EACCES, "denied"),
        BrokenPipeError(errno.EPIPE, "a socket's"),
    ):
        monkeypatch.setattr(cli.cli, "main", lambda error=error, **_: (_ for _ in ()).throw(error))
        monkeypatch.setattr(sys, "argv", ["rlhf-zoo"])
        with pytest.raises(type(error)):
            cli.main()


def test_command_bounds_json_options(run: Callable[..., tuple[int, str, str]]) -> None:
    for words in (["eval", "tiny-world", "--llm"], ["trace", "runs/x", "--prompt", "the", "--columns"]):
        for text in (DEEP, "9" * 5000, '{"a": "\\ud800"}', '{"a": "\\u0000"}', "[1]", "nan", ""):
            code, _, err = run(*words, text)
            assert code == 2 and err.startswith(f"Error: {words[-1]} is ") and len(err) < 600, err


def test_closed_stdout_prints_no_traceback(tmp_path: Path) -> None:
    """`rlhf-zoo recipes keys ppo | head -1`: no traceback, and no message of the interpreter."""
    process = subprocess.Popen(
        [*COMMAND, "recipes", "keys", "recipe", "--json"],
        env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(120) == 1


def test_command_accepts_odd_terminal_widths(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in ("1", "0", "-3", "many"):
        monkeypatch.setenv("COLUMNS", width)
        assert run("recipes", "list")[0] == run("ablate", "--help")[0] == 0


def test_help_works_without_utf_8_and_home(tmp_path: Path) -> None:
    """The help has a β, which this locale lacks: click still writes UTF-8, and rich writes "?"."""
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    env = {name: value for name, value in environment(tmp_path, **settings).items() if name != "HOME"}
    result = subprocess.run([*COMMAND, "ablate", "--help"], env=env, capture_output=True, check=False, close_fds=True)
    assert (result.returncode, result.stderr) == (0, b"") and b"values of" in result.stdout.lower()
