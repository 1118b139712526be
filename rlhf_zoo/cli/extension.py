"""`rlhf-zoo hub extension install|uninstall`: adds the commands of rlhf-zoo to `hf`, or removes them."""

import click

from .layout import Group


@click.group(cls=Group)
def extension() -> None:
    """Add the commands of rlhf-zoo to `hf` as `hf rlhf-zoo ...`, or remove them.

    \b
    Example:
      rlhf-zoo hub extension install
      hf rlhf-zoo recipes list
    """


@extension.command()
def install() -> None:
    """Make `hf rlhf-zoo ...` run this rlhf-zoo.

    \b
    Example:
      rlhf-zoo hub extension install
    """
    from ..hub.client.extension import executable, folder
    from ..hub.client.extension import install as install_extension

    script = str(executable())
    previous_script = install_extension()
    if previous_script == script:
        click.echo(f"`hf rlhf-zoo` already runs {script}.")
        return
    instead = f" instead of {previous_script}" if previous_script else ""
    click.echo(f"`hf rlhf-zoo` now runs {script}{instead}: `hf` finds the command in {folder()}.")
    click.echo("`rlhf-zoo hub extension uninstall` removes it.")


@extension.command()
def uninstall() -> None:
    """Remove what `rlhf-zoo hub extension install` wrote.

    \b
    Example:
      rlhf-zoo hub extension uninstall
    """
    from ..hub.client.extension import uninstall as uninstall_extension

    click.echo("`hf rlhf-zoo` is removed." if uninstall_extension() else "`hf rlhf-zoo` was not installed.")
