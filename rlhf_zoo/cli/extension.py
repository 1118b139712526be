"""`rlhf-zoo install-hf-extension|uninstall-hf-extension`."""

import click


@click.command("install-hf-extension")
def install() -> None:
    """Make `hf rlhf-zoo ...` run this command.

    \b
    Example:
      rlhf-zoo install-hf-extension
      hf rlhf-zoo recipes list
    """
    from ..hub.client.extension import executable, folder
    from ..hub.client.extension import install as install_extension

    script = str(executable())
    previous_script = install_extension()
    if previous_script == script:
        click.echo(f"`hf rlhf-zoo` runs {script} already.")
        return
    instead = f" instead of {previous_script}" if previous_script else ""
    click.echo(f"`hf rlhf-zoo` runs {script}{instead}: `hf` reads this from {folder()}.")
    click.echo("`rlhf-zoo uninstall-hf-extension` removes it.")


@click.command("uninstall-hf-extension")
def uninstall() -> None:
    """Remove what `rlhf-zoo install-hf-extension` wrote.

    \b
    Example:
      rlhf-zoo uninstall-hf-extension
    """
    from ..hub.client.extension import uninstall as uninstall_extension

    click.echo("`hf rlhf-zoo` is removed." if uninstall_extension() else "`hf rlhf-zoo` was not installed.")
