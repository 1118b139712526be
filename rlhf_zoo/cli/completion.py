"""`rlhf-zoo completion`: prints the script that lets a shell complete command lines."""

import click

from .layout import Command


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets a shell complete commands, options, recipes and their keys.

    Add the line of the example to ~/.bashrc or ~/.zshrc. For fish: rlhf-zoo completion fish | source

    \b
    Example:
      eval "$(rlhf-zoo completion bash)"
    """
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    assert completion_class is not None
    click.echo(completion_class(ctx.find_root().command, {}, "rlhf-zoo", "_RLHF_ZOO_COMPLETE").source())
