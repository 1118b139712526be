"""`rlhf-zoo smoke`: runs every stage of a recipe in miniature."""

import contextlib
import logging
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import click

from ..errors import ZooError
from .common import loading, quiet_hub
from .layout import Command
from .open_run import locked, open_hub, open_run
from .options import RECIPE, UserPath, json_option
from .tables import print_json

log = logging.getLogger(__name__)


@click.command(cls=Command)
@RECIPE
@click.option("--keep", type=UserPath(), help="Keep the run and its Hub in this folder, which must be new or empty.")
@json_option()
def smoke(recipe: str, keep: Path | None, as_json: bool) -> None:
    """Run every stage of a recipe in miniature, as a test.

    Each stage takes a few steps on miniatures of its models and data. A miniature model has random weights; it keeps
    the model's configuration class, vocabulary size, special tokens and chat template. Miniature data keep the columns
    of the data. The run has its own embedded Hub, and nothing is downloaded. The exit code is 1 if a stage fails.

    \b
    Example:
      rlhf-zoo smoke tiny-world
    """
    from ..runs.recipe import load_recipe

    loaded_recipe = load_recipe(recipe)
    if not loaded_recipe.zoo:
        raise ZooError(
            f"There is no {loaded_recipe.yaml_file('zoo')}, which describes miniatures of the recipe's models and "
            "data: write one as in CONTRIBUTING.md, or run the recipe with fewer steps (--ppo.max_steps)."
        )
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ZooError(f"{keep} is not a new or empty folder: give --keep another one.")
    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhf-zoo-smoke-")))
        stack.enter_context(_zoo_home(folder / "home"))
        hub = stack.enter_context(open_hub("local"))
        from rich.console import Console

        with loading("loading the trainer"):
            from ..pipeline import run_recipe
            from ..pipeline.smoke.miniatures import publish_miniatures, small_flags

        quiet_hub()
        console, start = Console(stderr=as_json, width=200, soft_wrap=True), time.monotonic()
        miniatures = publish_miniatures(loaded_recipe, hub)
        console.print(f"Miniatures: {', '.join(miniatures) or 'none needed'}", highlight=False)
        directory, failure = folder / "run", None
        run = open_run(loaded_recipe, directory, small_flags(loaded_recipe), hub, push_to_hub=True)
        with locked(directory), run as (context, publisher):
            try:
                run_recipe.run(context, console, publisher)
                if "ppo" in loaded_recipe.stages:
                    run_recipe.show_published(context, Console(quiet=True))  # a test too: it reads the Hub
            except ZooError as error:
                failure = str(error)
            except Exception as error:
                log.debug("The smoke test of %s failed.", loaded_recipe.name, exc_info=True)
                frame = traceback.extract_tb(error.__traceback__)[-1]
                failure = f"{type(error).__name__} in {frame.filename}:{frame.lineno}: {error}"
        seconds = time.monotonic() - start
        if as_json:
            print_json({"recipe": loaded_recipe.name, "passed": failure is None, "seconds": seconds, "error": failure})
        else:
            verdict = "passed" if failure is None else f"FAILED: {failure}"
            console.print(f"{loaded_recipe.name}: {verdict} ({seconds:.0f} s)", highlight=False, markup=False)
    if failure is not None:
        raise click.exceptions.Exit(1)


@contextlib.contextmanager
def _zoo_home(folder: Path) -> Iterator[None]:
    """Moves RLHF_ZOO_HOME, with its Hub and caches, to a folder; restores the environment at the end."""
    old_environment = dict(os.environ)
    os.environ["RLHF_ZOO_HOME"] = str(folder.absolute())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(old_environment)
