"""The program `rlhf-zoo`: finds the command, runs it, and turns exceptions into error messages and exit codes."""

import contextlib
import importlib
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from .. import __version__
from ..errors import PrintableFormatter, ZooError, printable
from ..modeling import distributed
from ..runs.registry import STAGES
from .layout import Group

#: Commands other than the stages: name -> module:attribute.
COMMANDS = {
    "ablate": "cli.sweep:ablate",
    "baseline": "cli.baseline:baseline",
    "card": "cli.publish:card",
    "compare": "cli.compare:compare",
    "completion": "cli.completion:completion",
    "doctor": "cli.train:doctor",
    "ensemble": "cli.ensemble:ensemble",
    "eval": "cli.evaluate:evaluate",
    "hub": "cli.hub:hub",
    "lineage": "cli.lineage:lineage",
    "new": "cli.new:new",
    "plan": "cli.plan:plan",
    "probe": "cli.probe:probe",
    "pull": "cli.pull:pull",
    "push": "cli.publish:push",
    "recipes": "cli.recipes:recipes",
    "reproduce": "cli.lineage:reproduce",
    "run": "cli.train:run",
    "smoke": "cli.smoke:smoke",
    "space": "cli.space:space",
    "sweep": "cli.sweep:sweep",
    "trace": "cli.compare:trace",
    "zoo": "cli.zoo:zoo",
}
#: Errors of gloo and NCCL after another process of the command has ended.
PEER_LOST = re.compile(r"(?i)connection (closed|reset) by peer|broken pipe|remote process exited|gloo|nccl")
#: Seconds that a failed process other than the main one waits for the launcher to end it.
LAUNCHER_SECONDS = 15


class LazyGroup(Group):
    """A group that imports the module of a command only when the command is used."""

    def headings(self, ctx: click.Context) -> Mapping[str, Sequence[str]]:
        """Returns the names of the commands by heading: what a user wants to do.

        Args:
            ctx: The context of the group.
        """
        return {
            "Start": ["new", "recipes", "plan", "doctor", "smoke", "completion"],
            "Train": ["run", *STAGES, "ablate", "sweep", "ensemble"],
            "Evaluate": ["eval", "compare", "baseline", "probe"],
            "Publish": ["push", "pull", "zoo", "space", "hub"],
            "Inspect": ["card", "trace", "lineage", "reproduce"],
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in self.headings(ctx).values() for name in names]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in STAGES:
            from .train import stage_command

            return stage_command(STAGES[name])
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        return getattr(importlib.import_module(f"rlhf_zoo.{module}"), attribute)

    def resolve_command(self, ctx: click.Context, args: list[str]):
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise ZooError(f"There is no command {args[0]!r}{self._suggestion(ctx, args[0])}")
        return super().resolve_command(ctx, args)

    def _suggestion(self, ctx: click.Context, name: str) -> str:
        """Returns the end of an error: the command that the user probably meant, or else how to list the commands."""
        from ..plugins import did_you_mean

        names = self.list_commands(ctx)
        for group in names:
            command = self.get_command(ctx, group)
            if isinstance(command, click.Group) and name in command.commands:
                return f", did you mean '{group} {name}'?"
        return did_you_mean(name, names) or "; `rlhf-zoo --help` lists the commands."


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="rlhf-zoo")
def cli() -> None:
    """Train RLHF recipes stage by stage, and publish every checkpoint with its reward and KL.

    \b
    Example:
      rlhf-zoo run tiny-world
      rlhf-zoo pull local/tiny-world-ppo@best
    """


def _click_error(error: click.ClickException) -> str:
    """Rewrites click's message, which may have two sentences, as one sentence that also says where to find help."""
    own_message = _choice_error(error) or _unknown_word_error(error)
    if own_message is not None:
        return own_message
    message = error.format_message().replace("a valid float range", "a number")
    first, _, second = message.replace("a valid integer range", "a whole number").partition(". ")
    sentence = first + (f", {second[0].lower()}{second[1:]}" if second else "")
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "rlhf-zoo COMMAND"
    return f"{sentence.rstrip('.')}: see `{command} --help`."


def _choice_error(error: click.ClickException) -> str | None:
    """Returns the message for a value that is missing or not one of a parameter's choices; None for other errors."""
    from ..plugins import did_you_mean

    parameter = error.param if isinstance(error, click.BadParameter) else None
    if parameter is None or not isinstance(parameter.type, click.Choice):
        return None
    choices = [str(choice) for choice in parameter.type.choices]
    name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
    if isinstance(error, click.MissingParameter):
        return f"{name} is missing: give one of {', '.join(choices)}."
    match = re.match(r"'(.*)' is not one of ", error.message, re.DOTALL)
    if match is None:
        return None
    hint = did_you_mean(match[1], choices) or "."
    return f"{name} is {match[1]!r}, but it takes one of {', '.join(choices)}{hint}"


def _unknown_word_error(error: click.ClickException) -> str | None:
    """Returns the message for an unknown option or subcommand, or for a word after a command with options only."""
    from ..plugins import did_you_mean

    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return None
    command, path = context.command, f"`{context.command_path}`"
    options = [param.opts[0] for param in command.get_params(context) if isinstance(param, click.Option)]
    if isinstance(error, click.NoSuchOption):  # without hyphens, which make any two options similar
        hint = did_you_mean(error.option_name.strip("-"), [option.strip("-") for option in options])
        return f"{path} has no option {error.option_name}" + (hint or f": it has {', '.join(options)}.")
    pattern = r"(?:No such command|Got unexpected extra arguments?) ['(](.*)('\.|\))"
    match = re.fullmatch(pattern, error.message, re.DOTALL)
    if match is None or any(isinstance(param, click.Argument) for param in command.params):
        return None
    if isinstance(command, click.Group):
        names = command.list_commands(context)
        hint = did_you_mean(match[1], names) or f": it has {', '.join(names)}."
        return f"{path} has no command {match[1]!r}{hint}"
    return f"{path} takes options only, but got {match[1]!r}: use {', '.join(options)}."


def _user_error(error: BaseException) -> str | None:
    """Returns the message for an error that the user can fix, such as a full disk; None for a bug."""
    from ..hub.client.refusals import is_disk_full

    path = getattr(error, "filename", None)
    if is_disk_full(error):
        return f"The disk is full ({path or 'while writing'}): free some space and run the command again."
    if isinstance(error, OSError) and path is not None:
        return f"{str(path)[:200]} cannot be used ({error.strerror or error}): check the path and its permissions."
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # pathlib's message
        return "There is no home directory to expand ~ to: set HOME and RLHF_ZOO_HOME, or write the path in full."
    if distributed.process_count() > 1 and isinstance(error, RuntimeError) and PEER_LOST.search(str(error)):
        return "Another process of this command ended: run the same command again to resume from the last checkpoint."
    return None


def _stdout_is_closed() -> bool:
    """Returns whether the program that reads stdout has closed the pipe, as `| head` does."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's flush at exit would fail
        return True
    return False


def _treat_as_ctrl_c(main_pid: int, signal_number: int, frame: FrameType | None) -> None:
    """Treats SIGTERM, which schedulers send to preempt a job, as Ctrl-C. A child process simply ends."""
    if os.getpid() != main_pid:
        signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)
    raise KeyboardInterrupt


def _fail(sentence: str) -> NoReturn:
    """Prints an error and exits with code 2.

    The launcher of several processes always prints its own summary, so the message also goes into the file from which
    the launcher reads the cause.
    """
    _wait_for_launcher()
    sentence = printable(sentence)  # parts of it may come from the system, click or a library
    click.echo(f"Error: {sentence}", err=True)
    if distributed.launched_count() > 1 and (error_file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": f"Error: {sentence}", "timestamp": int(time.time())}))
    sys.exit(2)


def _wait_for_launcher() -> None:
    """Waits, in a process other than the main one, for the launcher to end it: only the main one prints the error."""
    if distributed.rank() > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(LAUNCHER_SECONDS)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats a warning as one sentence, without the line of code that raised it."""
    return f"Warning: {printable(str(message))}\n"


def main() -> None:
    """Runs the command line.

    Exit codes: 0, or the command's own; 2 for an error that the user can fix; 1 for a bug, with its traceback, or for a
    closed stdout; 130 after Ctrl-C. SIGTERM is treated as Ctrl-C: the run saves its state and closes its files.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, partial(_treat_as_ctrl_c, os.getpid()))
    if distributed.launched_count() > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides DDP's advice to developers
    if not sys.warnoptions:
        # Users cannot act on warnings for developers. pin_memory without an accelerator is harmless. The warning about
        # FSDP2-wrapped modules forbids changing their output in place, which this package never does.
        ignored = (
            (DeprecationWarning, ""),
            (FutureWarning, ""),
            (UserWarning, ".*pin_memory"),
            (UserWarning, "FSDP2-wrapped"),
        )
        for category, message in ignored:
            warnings.filterwarnings("ignore", message, category)
    warnings.formatwarning = _format_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the C locale cannot encode β
    try:
        for argument in sys.argv[1:]:  # Python decodes bytes that are not UTF-8 as lone surrogates
            if any("\ud800" <= character <= "\udfff" for character in argument):
                raise ZooError(
                    f"The argument {os.fsencode(argument)!r} is not UTF-8: rename the file, or correct the argument."
                )
        code = cli.main(prog_name="rlhf-zoo", standalone_mode=False)
        if _stdout_is_closed():
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)
    except ZooError as error:
        _fail(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(_click_error(error))
    except (KeyboardInterrupt, click.Abort):
        if distributed.rank() == 0:
            click.echo("Interrupted; run the same command again: it resumes if it has saved anything.", err=True)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            sys.exit(1)
        sentence = _user_error(error)
        if sentence is None:
            _wait_for_launcher()
            raise
        _fail(sentence)


def hf_main() -> None:
    """Runs `hf rlhf-zoo`: like `main`, but with time to save after Ctrl-C, because `hf` would kill an extension."""
    from ..hub.client.extension import foreground

    with foreground():
        main()


if __name__ == "__main__":
    main()
