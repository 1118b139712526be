"""The command line: help, completion, JSON for tables, errors in one sentence, and exit codes."""

import dataclasses
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from warm import PYTHON
from zoo_process import COMMAND, environment, errors, free_port, wait_until, zoo

from rlhf_zoo.cli import main as cli
from rlhf_zoo.cli.layout import RecipeCommand, RunOption
from rlhf_zoo.errors import ZooError
from rlhf_zoo.runs.recipe import copy_recipe
from rlhf_zoo.runs.recipe_table import Row
from rlhf_zoo.runs.record import StageRecord, fingerprint

COMMANDS = {
    "ablate", "baseline", "card", "compare", "doctor", "ensemble", "eval", "hub", "hub env", "hub serve", "hub status",
    "hub token", "hub token list", "hub token revoke", "hub extension", "hub extension install",
    "hub extension uninstall", "completion", "lineage", "new", "plan", "ppo", "probe",
    "pull", "push", "recipes", "recipes copy", "recipes keys", "recipes list", "recipes show", "recipes validate",
    "reproduce", "reward", "run", "sft", "smoke", "sweep", "trace",
    "hub add", "hub export", "space", "space deploy", "zoo",
}  # fmt: skip


def walk(command: click.Command, path: tuple[str, ...] = ()) -> dict[str, click.Command]:
    commands = {" ".join(path): command} if path else {}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            commands |= walk(child, (*path, name))
    return commands


def test_commands_are_listed_and_have_examples():
    commands = walk(cli.cli)
    assert set(commands) == COMMANDS
    for name, command in commands.items():
        text = command.get_help(click.Context(command, info_name=name))
        example = text.partition("Example:\n")[2].partition("\n\n")[0]
        assert name.split()[0] in example and "rlhf-zoo " in example, name


def _help(*words: str) -> str:
    """Returns the help that a terminal of 80 columns shows."""
    result = CliRunner().invoke(cli.cli, [*words, "--help"], terminal_width=80, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_help_groups_commands_and_truncates_nothing():
    text = _help()
    headings = [line for line in text.splitlines() if re.fullmatch(r"[A-Z]\w+:", line)]
    assert headings == ["Options:", "Start:", "Train:", "Evaluate:", "Publish:", "Inspect:"]
    for name, command in {"": cli.cli, **walk(cli.cli)}.items():
        text = _help(*name.split())
        # Examples count too. A single word, such as a long path, cannot be broken.
        assert not [line for line in text.splitlines() if len(line) > 80 and len(line.split()) > 1], name
        if isinstance(command, click.Group):
            context = click.Context(command)
            for child in command.list_commands(context):
                summary = command.get_command(context, child).get_short_help_str(1000)
                assert summary.endswith(".") and summary in " ".join(text.split()), (name, summary)


def test_help_puts_shared_options_under_their_own_heading():
    for name, command in walk(cli.cli).items():
        own, _, shared = _help(*name.split()).partition("Run and Hub options:")
        expected = [option.opts[0] for option in command.params if isinstance(option, RunOption)]
        assert re.findall(r"^  (--\w+)", shared, re.MULTILINE) == expected, name
        assert "--help" in own, name
        options = re.findall(r"^  (--\w+)", own, re.MULTILINE)
        assert not {"--hub", "--source_hub", "--trust_run"} & {*options}, name


def test_every_command_on_recipe_takes_options_that_messages_name():
    commands = {name: command for name, command in walk(cli.cli).items() if isinstance(command, RecipeCommand)}
    assert commands.keys() >= {"run", "plan", "recipes validate", "baseline"}
    for name, command in commands.items():
        options = {spelling for option in command.params for spelling in option.opts}
        assert {"--hub", "--source_hub", "--trust_remote_code"} <= options, name


def test_options_of_several_words_take_underscores_and_hyphens():
    for name, command in walk(cli.cli).items():
        spellings = {spelling for option in command.params for spelling in option.opts if spelling.startswith("--")}
        for spelling in spellings:
            words = re.split("[-_]", spelling[2:])
            assert {f"--{'_'.join(words)}", f"--{'-'.join(words)}"} <= spellings, (name, spelling)


def test_help_breaks_lines_at_spaces_only():
    for name, command in {"": cli.cli, **walk(cli.cli)}.items():
        texts = [command.help, *(option.help for option in command.params if isinstance(option, click.Option))]
        words = {word for text in texts for word in (text or "").split()}
        shown = {*re.sub(r"\n +", " ", _help(*name.split())).split()}
        assert not {word for word in words if "-" in word} - shown, name


def test_completion_offers_commands_options_and_recipes():
    def completions(words: list[str], incomplete: str) -> set[str]:
        complete = BashComplete(cli.cli, {}, "rlhf-zoo", "_RLHF_ZOO_COMPLETE")
        return {item.value for item in complete.get_completions(words, incomplete)}

    assert completions([], "ru") == {"run"}
    assert completions(["run"], "tiny-w") == {"tiny-world"}
    assert "--push_to_hub" in completions(["ppo", "tiny-world"], "--push")
    kl_keys = {"kl_coef", "kl_estimator", "kl_horizon", "kl_in", "kl_target"}
    for words, prefix in ((["run", "tiny-world"], "ppo."), (["ablate", "tiny-world"], "ppo."), (["ppo", "x"], "")):
        values = completions(words, f"--{prefix}kl")
        assert {f"--{prefix}{key}" for key in kl_keys} <= values
        assert all(option.startswith((f"--{prefix}kl", "--kl_coef")) for option in values)
    assert "--ppo.learning_rate" in completions(["run", "tiny-world"], "--ppo.learning-r")
    assert completions(["run", "x"], "--evaluation.prom") == {"--evaluation.prompts"}
    assert completions(["run", "x"], "--rew") >= {"--reward.simulated_pairs"}
    assert "--ppo.kl_coef" not in completions(["run", "x"], "--") | completions(["pull"], "--ppo.kl")
    script = CliRunner().invoke(cli.cli, ["completion", "zsh"], catch_exceptions=False).output
    assert script.startswith("#compdef rlhf-zoo") and "_RLHF_ZOO_COMPLETE=zsh_complete" in script


def test_completion_offers_every_key_without_heavy_imports():
    from rlhf_zoo.runs.settings.declared import declared_recipe_keys
    from rlhf_zoo.runs.settings.parse import recipe_keys

    assert declared_recipe_keys().keys() == recipe_keys().keys()
    words = {
        "_RLHF_ZOO_COMPLETE": "bash_complete",
        "COMP_CWORD": "3",
        "COMP_WORDS": "rlhf-zoo run tiny-world --ppo.kl_c",
    }
    script = (
        "import sys\nfrom rlhf_zoo.cli.main import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'trl'} & {*sys.modules}, 'completion must be quick'"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["plain,--ppo.kl_coef"]


def test_recipes_keys_searches_by_word_and_lists_own_keys_first():
    def keys(*words: str) -> list[str]:
        result = CliRunner().invoke(cli.cli, ["recipes", "keys", *words, "--json"], catch_exceptions=False)
        return [row["key"] for row in json.loads(result.output)]

    all_keys, kl_keys = keys("ppo"), keys("ppo", "kl")
    assert {"kl_coef", "kl_target"} <= set(kl_keys) and len(kl_keys) < len(all_keys) / 3
    assert all_keys.index("vf_coef") < all_keys.index("adam_beta1")
    text = CliRunner().invoke(cli.cli, ["recipes", "keys", "ppo"], catch_exceptions=False).output
    assert "%%" not in text


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("100", 100)])
def test_recipes_keys_through_pipe_is_as_wide_as_columns(columns: str | None, width: int) -> None:
    result = CliRunner().invoke(cli.cli, ["recipes", "keys", "ppo"], env={"COLUMNS": columns}, catch_exceptions=False)
    assert max(map(len, result.output.splitlines())) == width


@pytest.mark.parametrize(
    ("stage", "word", "key"),
    [
        ("ppo", "beta", "kl_coef"), ("ppo", "--init-kl-coef", "kl_coef"), ("ppo", "LR", "learning_rate"),
        ("ppo", "max_new_tokens", "response_length"), ("sft", "epochs", "num_train_epochs"),
        ("reward", "batch_size", "per_device_train_batch_size"),
    ],
)  # fmt: skip
def test_recipes_keys_finds_keys_by_other_tools_names(stage: str, word: str, key: str):
    result = CliRunner().invoke(cli.cli, ["recipes", "keys", "--json", stage, "--", word], catch_exceptions=False)
    assert key in [row["key"] for row in json.loads(result.output)]


def test_help_examples_use_valid_keys():
    from rlhf_zoo.runs.recipe import load_recipe
    from rlhf_zoo.runs.settings.parse import parse_flags, recipe_config, recipe_keys, stage_keys

    for name in ("run", "sft", "reward", "ppo", "eval", "recipes validate"):
        text = walk(cli.cli)[name].get_help(click.Context(cli.cli))
        words = text.partition("Example:\n")[2].split("\n")[0].split()
        recipe, *flags = words[1 + len(name.split()) :]
        parsed = parse_flags(flags)
        recipe_config(load_recipe(recipe))
        keys = recipe_keys() | (stage_keys(name) if name in ("sft", "reward", "ppo") else {})
        assert parsed[""].keys() <= keys.keys() and parsed["ppo"].keys() <= stage_keys("ppo").keys()


def test_version_is_printed_and_bare_command_shows_usage(tmp_path):
    assert zoo("--version", home=tmp_path).stdout.startswith("rlhf-zoo, version ")
    bare = zoo(home=tmp_path)
    assert bare.returncode == 2 and "Usage: rlhf-zoo" in bare.stdout + bare.stderr


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (["recipes", "list"], {entry.name for entry in dataclasses.fields(Row)}),
        (["recipes", "keys", "recipe"], {"key", "type", "default", "help"}),
        (["recipes", "keys", "ppo"], {"key", "type", "default", "help"}),
        (["hub", "status"], {"running", "url", "pid", "root", "repositories", "bytes", "damaged"}),
    ],
)
def test_tables_print_json_with_flag(tmp_path, command, keys):
    """`run --json` is tested with the pipeline."""
    result = zoo(*command, "--json", home=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    rows = document if isinstance(document, list) else [document]
    assert rows and all(set(row) == keys for row in rows)
    plain = zoo(*command, home=tmp_path)
    assert plain.returncode == 0 and not plain.stdout.startswith(("[", "{"))


def test_recipes_show_copy_and_validate_succeed(tmp_path):
    shown = zoo("recipes", "show", "tiny-world", home=tmp_path).stdout
    assert all(f"# {name}.yaml\n" in shown for name in ("recipe", "sft", "reward", "ppo"))
    result = zoo("recipes", "copy", "tiny-world", "mine", home=tmp_path, cwd=tmp_path)
    assert result.stdout == "Copied to mine: edit it, then `rlhf-zoo run mine`.\n"
    result = zoo("recipes", "validate", "mine", "--ppo.kl_coef", "0.2", "--seed=2", home=tmp_path, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "mine is valid: sft, reward, ppo.\n", "")


# Mistakes


def error_sentence(tmp_path: Path, *arguments: str, **env: str) -> str:
    """Runs a command that must fail: it prints one sentence, which is returned, and changes no file."""
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    before = sorted(work.rglob("*"))
    result = zoo(*arguments, home=tmp_path / "home", cwd=work, **env)
    assert result.returncode == 2, (result.returncode, result.stderr)
    messages = errors(result.stderr)
    assert len(messages) == 1 and messages[0].startswith("Error: ") and "Traceback" not in result.stderr, result.stderr
    assert messages[0].endswith((".", "?")) and ". " not in messages[0].removesuffix("."), messages[0]
    assert result.stdout == "" and sorted(work.rglob("*")) == before
    return messages[0].removeprefix("Error: ")


def test_pull_rejects_missing_repository(tmp_path):
    assert "There is no repository 'local/none'" in error_sentence(tmp_path, "pull", "local/none@best")
    hub_line = zoo("pull", "local/none", home=tmp_path / "home").stderr.splitlines()[0]
    assert hub_line == "Hub: the embedded Hub (pass --hub to use another)", "pull has no --push_to_hub"


@pytest.fixture
def error_message(no_hub, monkeypatch, tmp_path):
    """Runs a failing command in this process, which imports the trainers only once; returns its error message."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)

    def error_message(*arguments: str) -> str:
        with pytest.raises(ZooError) as caught:
            cli.cli.main(list(arguments), standalone_mode=False)
        return str(caught.value)

    return error_message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run tiny-world --evaluation.promts 2", "did you mean 'evaluation.prompts'?"),
        ("ppo tiny-world --sft.max_step 3", "--sft.max_step is not a key of the stage sft, did you mean 'max_steps'?"),
        (
            'sft tiny-world --corpus_args {"linez":5}',
            "corpus_args does not fit rlhf_zoo.runs.corpora.tiny_world_2:prepare",
        ),
    ],
)
def test_command_rejects_invalid_keys_and_writes_nothing(error_message, tmp_path, arguments, message):
    assert message in error_message(*arguments.split(), "--output_dir", "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ablate without-ppo --kl_coef 0", "has no stage ppo, so there is nothing to ablate"),
        ("ablate tiny-world --kl_coef 0,x", "--kl_coef lists 'x'"),
        ("ensemble without-reward", "has no stage reward"),
        ("sweep tiny-world --grid kl_cof=0.1", "--grid kl_cof is not a key of the stage ppo, did you mean 'kl_coef'?"),
        ("sweep tiny-world --grid per_device_train_batch_size=32,100000", "has 352 rows, but an update needs 200000"),
        ("sweep tiny-world --grid num_mini_batches=2,7", "num_mini_batches"),
    ],
)
def test_experiment_with_invalid_variants_trains_nothing(error_message, tmp_path, words, message):
    for stage in ("ppo", "reward"):
        (copy_recipe("tiny-world", tmp_path / f"without-{stage}") / f"{stage}.yaml").unlink()
    command, recipe, *options = words.split()
    lines = ["--corpus_args", '{"lines": 600}'] if command == "sweep" else []
    assert message in error_message(command, recipe, *lines, *options)
    assert not list((tmp_path / "runs").glob("*/sft")) and (command == "sweep" or not (tmp_path / "runs").exists())


def test_command_reports_unreachable_hub(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    token = {"RLHF_ZOO_HUB_TOKEN": "hub_x"}
    message = f"The Hub {url} cannot be reached ("
    assert error_sentence(tmp_path, "run", "tiny-world", "--hub", url, "--push_to_hub", **token).startswith(message)
    assert error_sentence(tmp_path, "pull", "a/b", "--hub", url, **token).startswith(message)
    # Without publishing, PPO still needs its SFT model, which is neither in the run directory nor reachable.
    result = zoo("ppo", "tiny-world", "--hub", url, "--output_dir", "run", home=tmp_path, cwd=tmp_path, **token)
    assert result.returncode == 2 and len(errors(result.stderr)) == 1
    assert message in result.stderr and "), and local/tiny-world-sft@best is not in the cache: check" in result.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["data"]


def test_compare_rejects_taken_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        message = error_sentence(tmp_path, "compare", "local/x-ppo", "--hub", "local", "--port", port)
        assert message == f"Port {port} of 127.0.0.1 is taken: choose another with --port, or --port 0 for a free one."


def test_sft_reports_data_errors_with_their_data_set(error_message, tmp_path):
    recipe, data = tmp_path / "mine", tmp_path / "data" / "lines"
    data.mkdir(parents=True)
    recipe.mkdir()
    (data / "train.jsonl").write_text('{"txt": "a line"}\n' * 4)
    (tmp_path / "data" / "README.md").write_text(
        "---\nconfigs:\n- config_name: lines\n  data_files:\n  - split: train\n    path: lines/train.jsonl\n---\n"
    )
    (recipe / "recipe.yaml").write_text(f"description: A toy.\ndataset_name: {tmp_path / 'data'}\n")
    (recipe / "sft.yaml").write_text("bf16: false\n")
    message = error_sentence(tmp_path, "sft", str(recipe), "--hub", "local", "--output_dir", str(tmp_path / "run"))
    assert "configuration lines, split train, has no column 'text', only 'txt': the stage reads messages, " in message
    assert "messages, conversations, prompt and completion, or text; rename the column" in message
    message = error_message("sft", "mine", "--output_dir", "run", "--dataset_train_split", "trian")
    assert "has no split 'trian', only 'train': set dataset_train_split or dataset_test_split." in message
    assert "The data set data/none, configuration lines" in error_message("sft", "mine", "--dataset_name", "data/none")
    (data / "train.jsonl").write_text('{"txt": "a line"}\n{"txt": "a line",}\n')
    message = error_message("sft", "mine", "--output_dir", "run")
    assert message.endswith("line 2 of train.jsonl is not JSON (Expecting property name enclosed in "
                         "double quotes, column 18); correct that line.")  # fmt: skip
    assert not list((tmp_path / "run").rglob("*.json"))


def test_eval_without_run_writes_nothing(error_message, tmp_path):
    assert "local/tiny-world-sft@best" in error_message("eval", "tiny-world", "--output_dir", "run")
    assert not (tmp_path / "run").exists()


def write_record(path: Path, *, recipe: str, resolved: dict) -> None:
    StageRecord(path).write(
        stage=path.name, recipe=recipe, status="finished", fingerprint=fingerprint(resolved), resolved=resolved
    )


def test_stage_rejects_directory_of_other_recipe_or_settings(error_message, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home" / "zoo"))  # its key signs the records
    write_record(tmp_path / "work" / "one" / "data", recipe="product-remarks", resolved={})
    message = error_sentence(tmp_path, "sft", "tiny-world", "--output_dir", "one")
    assert message.startswith("one/data has a run of the recipe 'product-remarks', not of 'tiny-world': choose another")
    assert "--restart" in message
    # The command refuses with --restart too, because the sft stage belongs to another recipe.
    for stage in ("sft", "reward"):
        write_record(tmp_path / "work" / "both" / stage, recipe="product-remarks", resolved={})
    for options in ([], ["--restart"]):
        message = error_sentence(tmp_path, "ppo", "tiny-world", "--output_dir", "both", *options)
        assert message.startswith("both/sft has a run of the recipe 'product-remarks', not of 'tiny-world'"), message
    resolved = {
        "corpus": "rlhf_zoo.runs.corpora.tiny_world_2:prepare",
        "corpus_args": {},
        "dataset_name": None,
        "seed": 3,
    }
    write_record(tmp_path / "two" / "data", recipe="tiny-world", resolved=resolved)
    message = error_message("sft", "tiny-world", "--output_dir", "two")
    assert message.startswith("two/data has a run with seed = 3, and this one has 1: choose another --output_dir")
    assert "--restart" in message


def test_stage_leaves_foreign_directories_unchanged(error_message, tmp_path):
    """--output_dir may be a folder of the user's own, with a `data` or a `sft/checkpoint-500` of another trainer."""
    csv = tmp_path / "one" / "data" / "mine.csv"
    csv.parent.mkdir(parents=True)
    csv.write_text("a,b\n")
    checkpoint = tmp_path / "two" / "sft" / "checkpoint-500"
    checkpoint.mkdir(parents=True)
    for options in ([], ["--restart"]):
        message = error_message("sft", "tiny-world", "--output_dir", "one", *options)
        assert message == "one/data has files that do not belong to a run: choose another --output_dir."
        message = error_message("sft", "tiny-world", "--corpus_args", '{"lines": 50}', "--output_dir", "two", *options)
        assert message == "two/sft has checkpoints without a run.json: choose another --output_dir."
    assert csv.read_text() == "a,b\n" and checkpoint.is_dir()


def test_run_rejects_too_few_prompts_before_training(error_message, tmp_path):
    options = ("--corpus_args", '{"lines": 50}', "--evaluation.prompts", "5000", "--output_dir", "run")
    message = error_message("run", "tiny-world", *options)
    assert "prompts, but evaluation.prompts is 5000: lower it, or prepare more data." in message
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["data"]


# Exit codes


@pytest.fixture
def main_result(monkeypatch, capsys):
    """Runs main() with a command that raises `error`; returns its exit code and stderr."""

    def main_result(error: BaseException | None) -> tuple[int, str]:
        @click.command()
        def command() -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(cli, "cli", command)
        monkeypatch.setattr(sys, "argv", ["rlhf-zoo"])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, capsys.readouterr().err

    return main_result


def test_main_maps_errors_to_exit_codes(main_result):
    from rlhf_zoo.pipeline.stages.interrupt import Stopped

    assert main_result(None) == (0, "")
    assert main_result(ZooError("A thing is wrong: mend it.")) == (2, "Error: A thing is wrong: mend it.\n")
    interrupted = "\nInterrupted; run the same command again: it resumes if it has saved anything.\n"
    assert main_result(KeyboardInterrupt()) == main_result(Stopped()) == (130, interrupted)


def test_main_reports_full_disk_from_any_library(main_result):
    full = OSError(errno.ENOSPC, "No space left on device", "/data/file")
    remedy = "free some space and run the command again."
    assert main_result(full) == (2, f"Error: The disk is full (/data/file): {remedy}\n")
    wrapped = ValueError("loading failed")
    wrapped.__cause__ = full
    rust = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    for error in (wrapped, rust, OSError(errno.EDQUOT, "Disk quota exceeded")):
        assert main_result(error) == (2, f"Error: The disk is full (while writing): {remedy}\n")


def test_sft_reports_full_disk_in_one_sentence(tmp_path):
    """A file-size limit stands in for a full disk: writing above 64 KiB fails with EFBIG."""
    code = """
import resource, signal
from rlhf_zoo.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
main()
"""
    command = [*PYTHON, "-c", code, "sft", "tiny-world", "--output_dir", str(tmp_path / "run")]
    result = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert len(errors(result.stderr)) == 1 and "free space" in result.stderr
    assert json.loads((tmp_path / "run" / "data" / "run.json").read_text())["status"] == "running"
    assert not list(tmp_path.rglob("run/**/*.tmp")) and not (tmp_path / "run" / "sft").exists()


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_sft_exits_130_when_interrupted_before_training(tmp_path, stop_signal):
    """It prints no traceback, and leaves no Hub running. Schedulers send SIGTERM."""
    command = [*COMMAND, "sft", "tiny-world", "--output_dir", str(tmp_path / "run")]
    process = subprocess.Popen(
        command, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: (tmp_path / "zoo" / "hub" / "client-token").exists(), process)
    os.kill(process.pid, stop_signal)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert errors(stderr) == ["Interrupted; run the same command again: it resumes if it has saved anything."]
