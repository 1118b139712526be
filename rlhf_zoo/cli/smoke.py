"""`rlhf-zoo smoke`: a recipe through every stage, in miniature."""

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
from .common import quiet_hub
from .open_run import open_run, settle_hub, writing
from .options import UserPath, json_option
from .tables import print_json

log = logging.getLogger(__name__)


@click.command()
@click.argument("recipe")
@click.option("--keep", type=UserPath(), help="Keep the run and its Hub in this folder, which is new or empty.")
@json_option()
def smoke(recipe: str, keep: Path | None, as_json: bool) -> None:
    """Train a recipe for a few steps on miniatures of its models and data, through every stage and a Hub of its own.

    A miniature has the model's configuration class, vocabulary size, special tokens and chat template, and the data's
    columns; its weights are random. Nothing is downloaded. Exit code 1 where a stage fails.

    \b
    Example:
      rlhf-zoo smoke tiny-world
    """
    from ..runs.recipe import load_recipe

    loaded = load_recipe(recipe)
    if not loaded.zoo:
        raise ZooError(
            f"There is no {loaded.source('zoo')}, which describes miniatures of its models and data: write one as in "
            "CONTRIBUTING.md, or run the recipe with fewer steps, by --ppo.max_steps and the like."
        )
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ZooError(f"{keep} is there already and is not empty: give --keep another folder.")
    with contextlib.ExitStack() as opened:
        folder = keep or Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="rlhf-zoo-smoke-")))
        opened.enter_context(_home(folder / "home"))
        hub = opened.enter_context(settle_hub("local", push_to_hub=False))
        from rich.console import Console

        from ..pipeline import run_recipe as pipeline
        from ..pipeline.smoke.run import publish_miniatures, small_flags

        quiet_hub()
        console, started = Console(stderr=as_json, width=200, soft_wrap=True), time.monotonic()
        made = publish_miniatures(loaded, hub)
        console.print(f"Miniatures: {', '.join(made) or 'none needed'}", highlight=False)
        directory, failed = folder / "run", None
        run = open_run(loaded, directory, small_flags(loaded), hub, push_to_hub=True)
        with writing(directory), run as (context, publisher):
            try:
                pipeline.run(context, console, publisher)
                if "ppo" in loaded.stages:
                    pipeline.show(context, Console(quiet=True))
            except ZooError as error:
                failed = str(error)
            except Exception as error:
                log.debug("The smoke of %s failed.", loaded.name, exc_info=True)
                where = traceback.extract_tb(error.__traceback__)[-1]
                failed = f"{type(error).__name__} in {where.filename}:{where.lineno}: {error}"
        seconds = time.monotonic() - started
        if as_json:
            print_json({"recipe": loaded.name, "passed": failed is None, "seconds": seconds, "error": failed})
        else:
            verdict = "passed" if failed is None else f"FAILED: {failed}"
            console.print(f"{loaded.name}: {verdict} ({seconds:.0f} s)", highlight=False, markup=False)
    if failed is not None:
        raise click.exceptions.Exit(1)


@contextlib.contextmanager
def _home(folder: Path) -> Iterator[None]:
    """Sets RLHF_ZOO_HOME, with its Hub and caches, to a folder; restores the environment at the end."""
    before = dict(os.environ)
    os.environ["RLHF_ZOO_HOME"] = str(folder.absolute())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
