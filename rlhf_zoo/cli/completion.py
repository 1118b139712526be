"""`rlhf-zoo completion`: the script that lets a shell complete the command line."""

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, recipes and their keys in a shell.

    Add the line of the example to ~/.bashrc or ~/.zshrc. For fish: rlhf-zoo completion fish | source

    \b
    Example:
      eval "$(rlhf-zoo completion bash)"
    """
    from click.shell_completion import get_completion_class

    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(ctx.find_root().command, {}, "rlhf-zoo", "_RLHF_ZOO_COMPLETE").source())
