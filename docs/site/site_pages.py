"""The pages of the site that are generated from the code: commands, keys of recipes, the Python API, error messages."""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from rlhf_zoo import errors
from rlhf_zoo.cli.layout import RUN_HEADING, RunOption
from rlhf_zoo.cli.main import cli
from rlhf_zoo.runs.registry import STAGES
from rlhf_zoo.runs.settings.declared import DeclaredKey, declared_keys
from rlhf_zoo.runs.settings.parse import recipe_keys

PACKAGE = Path(errors.__file__).parent
#: The names on the API page, by heading. The trainer comes first, as most readers look for it.
API = {
    "The trainer": ("PPOTrainer", "PPOConfig", "RewardModel"),
    "Probes of any trainer's rollouts": ("probe", "RolloutFindings", "watch", "ProbeCallback"),
    "Sampling": ("sample", "Samples", "visible_text"),
    "Two policies side by side": ("Comparison", "CompletionPair", "Limits", "Snapshot", "Timeline", "TimelineRun"),
    "Cards and lineage": ("make_card", "find_lineage", "Lineage"),
    "Errors": ("ZooError",),
}
#: Package -> heading of its error messages, in the order of the page.
AREAS = {
    "cli": "Commands and options",
    "runs": "Recipes, keys, data and run directories",
    "pipeline": "Stages, plans and experiments",
    "ppo": "The trainer",
    "rewards": "Rewards",
    "modeling": "Models and tokenizers",
    "evaluation": "Evaluation and judges",
    "publishing": "Cards, publishing and lineage",
    "hub": "The Hub",
    "app": "The comparison page and Spaces",
}


def pages() -> dict[str, str]:
    """Returns the generated pages: path in the site -> Markdown."""
    return {
        "reference/cli.md": commands_page(),
        "reference/keys.md": keys_page(),
        "reference/api.md": api_page(),
        "reference/errors.md": errors_page(),
    }


def cell(text: object) -> str:
    """Returns text for a table cell: on one line, with Markdown escaped."""
    line = " ".join(str(text).split())
    return re.sub(r"([\\|<>*_\[\]])", r"\\\1", line)


def code(text: object) -> str:
    """Returns text as inline code for a table cell. Bars are escaped, as they would end the cell."""
    line = " ".join(str(text).split()).replace("|", "&#124;").replace("<", "&lt;")
    return f"<code>{line}</code>"


def commands_page() -> str:
    """Returns the page of every command, with its options."""
    context = click.Context(cli, info_name="rlhf-zoo")
    shared = {}
    parts = [
        "# Every command\n\nGenerated from the program's own help. `-h` after any command shows the same. "
        "A command on a recipe takes [any key of its stages](keys.md) as a flag too.\n"
    ]
    for heading, names in cli.headings(context).items():
        parts.append(f"## {heading}\n")
        for name in names:
            command = cli.get_command(context, name)
            parts += describe_command(command, click.Context(command, info_name=name, parent=context), shared)
    rows = "\n".join(f"| {code(name)} | {cell(meaning)} |" for name, meaning in shared.items())
    parts.append(
        f"## {RUN_HEADING}\n\nMost commands on a recipe or a run take these.\n\n"
        f"| option | meaning |\n|---|---|\n{rows}\n"
    )
    return "\n".join(parts)


def describe_command(command: click.Command, context: click.Context, shared: dict[str, str]) -> Iterator[str]:
    """Yields the heading, usage, help and options of a command and of its subcommands.

    Args:
        command: The command.
        context: The command's context, which has the words before its name.
        shared: Collects the options that most commands share: name -> meaning.
    """
    usage = " ".join(command.collect_usage_pieces(context))
    text, _, example = (command.help or "").partition("\b\n")
    yield f"### {context.command_path}\n\n`{context.command_path} {usage}`\n"
    yield "\n\n".join(cell(paragraph) for paragraph in text.split("\n\n") if paragraph.strip()) + "\n"
    if example := textwrap.dedent(re.sub(r"(?m)^ *Example:\s*$", "", example.replace("\b\n", ""))).strip():
        yield f"```sh\n{example}\n```\n"
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is None or "--help" in parameter.opts:
            continue
        if isinstance(parameter, RunOption):
            shared.setdefault(*record)
        else:
            rows.append(f"| {code(record[0])} | {cell(record[1])} |")
    if rows:
        yield "| option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            yield from describe_command(child, click.Context(child, info_name=name, parent=context), shared)


def keys_page() -> str:
    """Returns the page of every key that a recipe may set."""
    keys = {
        "recipe": {
            name: DeclaredKey(str(getattr(hint, "__name__", hint)), default, text, is_own=True)
            for name, (hint, default, text) in recipe_keys().items()
        },
        **{stage: declared_keys(stage) for stage in STAGES},
    }
    parts = [
        "# Every key of a recipe\n\nGenerated from the code. `rlhf-zoo recipes keys ppo kl` finds a key by a word. "
        "A key stands in the stage's file, such as `ppo.yaml`, or follows a command as a flag: `--kl_coef 0.1`, and "
        "in `rlhf-zoo run` as `--ppo.kl_coef 0.1`. Keys of this package come first, then those of trl and "
        "transformers, with the help of those libraries.\n"
    ]
    for file, declared in keys.items():
        for own in (True, False):
            rows = [
                f"| {code(name)}<br>{code(key.annotation)} | {code(key.default)} | "
                f"{cell(key.help.replace('%%', '%'))} |"
                for name, key in sorted(declared.items())
                if key.is_own is own
            ]
            if rows:
                title = f"{file}.yaml" if own else f"{file}.yaml: keys of trl and transformers"
                parts.append(
                    f"## {title}\n\n| key, type | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
                )
    return "\n".join(parts)


def api_page() -> str:
    """Returns the page of the Python API, which mkdocstrings fills from the docstrings."""
    parts = [
        "# The Python API\n\nWhat `rlhf_zoo` exports. [The trainer in your own script](../trainer.md) shows its use.\n"
    ]
    for heading, names in API.items():
        parts.append(f"## {heading}\n")
        parts += [f"::: rlhf_zoo.{name}\n    options: {{ heading_level: 3 }}\n" for name in names]
    return "\n".join(parts)


def errors_page() -> str:
    """Returns the page of every error message for users."""
    sentences: dict[str, set[str]] = {area: set() for area in AREAS}
    for path in sorted(PACKAGE.rglob("*.py")):
        area = path.relative_to(PACKAGE).parts[0]
        if area in sentences:
            sentences[area] |= set(messages(ast.parse(path.read_text(encoding="utf-8"))))
    parts = [
        "# Every error message\n\nGenerated from the code: each sentence with which a command stops, exit code 2. "
        "… stands for what the program fills in. Search for some words of your message; the sentence itself says "
        "what to change. [Your own model and data](../your-model.md#error-messages) and "
        "[rewards](../rewards.md#error-messages) explain the most common ones.\n"
    ]
    for area, heading in AREAS.items():
        rows = "\n".join(f"- {cell(sentence)}" for sentence in sorted(sentences[area], key=str.lower))
        parts.append(f"## {heading}\n\n{rows}\n")
    return "\n".join(parts)


def messages(tree: ast.Module) -> Iterator[str]:
    """Yields the messages of the errors that a module raises, if they are written at the call."""
    names = {"ZooError"} | {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.ZooError)
    }
    names |= {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id in names for base in node.bases)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names and node.args:
            sentence = " ".join(text_of(node.args[0]).split())
            # A message without fixed words was built elsewhere.
            if re.search(r"[a-z]{3}.*[a-z]{3}", sentence.replace("…", "")):
                yield re.sub(r"…(?:\s*…)+", "…", sentence)


def text_of(node: ast.expr) -> str:
    """Returns the text of an expression, with … for the variable parts."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"
