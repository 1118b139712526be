"""Lays out help texts: commands and options under headings, and summaries that are not shortened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import click
from click.shell_completion import CompletionItem

#: A limit that no summary reaches. Click shortens summaries that are longer than its limit.
UNLIMITED = 1000
RUN_HEADING = "Run and Hub options"
#: Stands for "-" while lines are broken, because click also breaks lines after a hyphen.
UNBREAKABLE_HYPHEN = "\N{NON-BREAKING HYPHEN}"


class HelpFormatter(click.HelpFormatter):
    """Breaks lines at spaces only, so that names with hyphens can be copied."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, _keep_hyphens(args), prefix)

    def write_text(self, text: str) -> None:
        super().write_text(_keep_hyphens(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(term, _keep_hyphens(text)) for term, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(UNBREAKABLE_HYPHEN, "-")


def _keep_hyphens(text: str) -> str:
    return text.replace("-", UNBREAKABLE_HYPHEN)


class Context(click.Context):
    """A context whose help `HelpFormatter` formats."""

    formatter_class = HelpFormatter


class RunOption(click.Option):
    """An option that many commands share. `Command` lists such options under their own heading."""


class Command(click.Command):
    """A command whose help has the options that many commands share under their own heading."""

    context_class = Context

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the command's own options, then those that many commands share.

        Args:
            ctx: The context of the command.
            formatter: Collects the help.
        """
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], RUN_HEADING: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections[RUN_HEADING if isinstance(param, RunOption) else "Options"].append(record)
        for heading, rows in sections.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class RecipeCommand(Command):
    """A command that takes any key of a recipe as a flag."""

    allow_extra_args = True
    ignore_unknown_options = True

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes the command's options, and keys of the recipe as flags. "--" alone completes to options only.

        Args:
            ctx: The context of the command.
            incomplete: The word to complete.
        """
        items = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("--") or len(incomplete) == 2:
            return items
        options = {item.value for item in items}
        return [*items, *(item for item in _complete_keys(ctx, incomplete[2:]) if item.value not in options)]


def _complete_keys(ctx: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    """Yields flags for the keys that begin with the incomplete word: this package's keys first, then libraries'."""
    from ..runs.registry import STAGES
    from ..runs.settings.declared import declared_keys, declared_recipe_keys

    word = incomplete.replace("-", "_")
    named_stage = word.partition(".")[0] if "." in word else None
    keys = dict(declared_recipe_keys())
    if ctx.info_name in STAGES:  # the command of a stage takes its keys without a prefix
        keys |= declared_keys(ctx.info_name)
    for stage in STAGES:
        if stage == named_stage or (named_stage is None and stage.startswith(word)):
            keys |= {f"{stage}.{name}": key for name, key in declared_keys(stage).items()}
    for name, key in sorted(keys.items(), key=lambda entry: (not entry[1].is_own, entry[0])):
        if name.startswith(word):
            yield CompletionItem(f"--{name}", help=" ".join(key.help.split()) or None)


class Group(click.Group):
    """A group whose help shows the whole first sentence of each command."""

    command_class = Command
    context_class = Context

    def headings(self, ctx: click.Context) -> Mapping[str, Sequence[str]]:
        """Returns the names of the commands, by heading.

        Args:
            ctx: The context of the group.
        """
        return {"Commands": self.list_commands(ctx)}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands under their headings, in columns of one width.

        Args:
            ctx: The context of the group.
            formatter: Collects the help.
        """
        headings = self.headings(ctx)
        width = max(len(name) for names in headings.values() for name in names)
        for heading, names in headings.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(UNLIMITED))
                        for name, command in commands
                        if command is not None
                    ]
                )
