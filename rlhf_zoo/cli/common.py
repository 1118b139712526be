"""Helpers that several commands share."""

from __future__ import annotations

import contextlib
import gc
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import click

from ..errors import ZooError
from ..runs.registry import STAGES
from ..runs.status_line import show_activity
from .options import LM_EVAL_TASKS


@contextlib.contextmanager
def loading(activity: str) -> Iterator[None]:
    """Shows an activity while the command imports packages, and pauses garbage collection.

    Imports create a million objects and almost no garbage, so collection would take a fifth of the import time.

    Args:
        activity: The activity, such as "loading the trainer".
    """
    module_count, was_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        with show_activity(activity):
            yield
    finally:
        if len(sys.modules) > module_count:
            gc.freeze()  # imported objects stay alive, so later collections can skip them
        if was_enabled:
            gc.enable()


def command_line() -> str:
    """Returns the command line that the user typed, for run records and for the message about a locked run."""
    return shlex.join(["rlhf-zoo", *sys.argv[1:]])


def check_namespace(namespace: str | None) -> None:
    """Checks the value of --namespace.

    Args:
        namespace: The value; None without the option.

    Raises:
        ZooError: No Hub could have a user or an organization of this name.
    """
    from ..runs.recipe import is_repository_name

    if namespace is not None and not is_repository_name(namespace):
        raise ZooError(f"--namespace is {namespace!r}, which no Hub accepts: give the name of a user or organization.")


def check_repo(repo: str, form: str, *, subject: str = "--repo") -> None:
    """Checks the name of a repository.

    Args:
        repo: The name.
        form: The expected form, for the error message.
        subject: What the error message calls the name, such as the option that gave it.

    Raises:
        ZooError: No Hub could have a repository of this name.
    """
    from ..runs.recipe import is_repository_name

    if repo.count("/") != 1 or not all(map(is_repository_name, repo.split("/"))):
        raise ZooError(f"{subject} is {repo!r}, which no Hub accepts: write {form}.")


def quiet_hub(*, keep_progress_bars: bool = False) -> None:
    """Turns off huggingface_hub's progress bars, and its warnings, such as those about commits that change nothing.

    Args:
        keep_progress_bars: Whether to leave the progress bars on.
    """
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.set_verbosity_error()
    if not keep_progress_bars:
        disable_progress_bars()


def parse_columns(text: Any, *, example: str) -> dict[str, str]:
    """Parses the value of --columns.

    Args:
        text: The value of the option.
        example: An example value, for the error message.

    Raises:
        ZooError: The value is not a mapping of names.
    """
    from ..runs.settings.values import coerce

    try:
        mapping: dict[str, str] = coerce(text, dict[str, str])
    except ValueError as error:
        raise ZooError(f"--columns is {text!r}, but it takes {error}: write '{example}'.") from error
    return mapping


def read_flags(
    ctx: click.Context, recipe: str, *, stage: str | None = None, check_names: bool = True
) -> dict[str, dict[str, Any]]:
    """Reads a command's flags for a recipe, and checks them and the recipe's files without importing training code.

    Args:
        ctx: The context of the command.
        recipe: A name or a folder.
        stage: The only stage that the command runs, or "eval"; None if it runs several. A flag without a prefix is a
            key of recipe.yaml, or else of the stage.
        check_names: Whether to check that the judges, the rewards and lm-evaluation-harness exist.

    Returns:
        Stage -> its flags. The flags of recipe.yaml are under 'recipe'.

    Raises:
        ZooError: A flag or a file of the recipe is wrong.
    """
    from ..plugins import REWARDS, check_registered
    from ..runs.recipe import load_recipe
    from ..runs.settings.declared import declared_keys, refused_keys
    from ..runs.settings.evaluation import check_harness
    from ..runs.settings.judge_names import check_judge_name
    from ..runs.settings.parse import parse_flags, recipe_config, recipe_keys
    from ..runs.settings.values import coerce, convert_keys

    if recipe.startswith("-"):
        raise ZooError(f"Put {recipe} after the recipe: `{ctx.command_path} RECIPE {recipe} ...`.")
    lm_eval_tasks = ctx.meta.get(LM_EVAL_TASKS)
    flags = parse_flags([*ctx.args, *(["--evaluation.lm_eval", lm_eval_tasks] if lm_eval_tasks is not None else [])])
    only_stage = None if stage == "eval" else stage  # the evaluation reads the keys of every stage
    unprefixed_flags, shared_keys = flags.pop(""), recipe_keys()
    flags["recipe"] = {key: value for key, value in unprefixed_flags.items() if not only_stage or key in shared_keys}
    if only_stage is not None:
        flags[only_stage] |= {key: value for key, value in unprefixed_flags.items() if key not in shared_keys}
    loaded_recipe = load_recipe(recipe)
    evaluation = recipe_config(loaded_recipe, flags["recipe"]).evaluation
    for name in STAGES:
        hints = {key: declared.type_hint for key, declared in declared_keys(name).items()}
        subject, refused = f"the stage {name}", refused_keys(name)
        flag = "--" if name == stage else f"--{name}."
        convert_keys(flags[name], hints, "the command's flags", subject=subject, refused_names=refused, flag=flag)
        if name in loaded_recipe.stages and only_stage in (None, name):
            source = str(loaded_recipe.yaml_file(name))
            convert_keys(loaded_recipe.stages[name], hints, source, subject=subject, refused_names=refused)
    if check_names and "ppo" in loaded_recipe.stages and only_stage in (None, "ppo"):
        for judge in filter(None, [evaluation.judge, *evaluation.judges]):
            check_judge_name(judge)
        if evaluation.lm_eval:
            check_harness()
        rewards = {**loaded_recipe.stages["ppo"], **flags["ppo"]}.get("reward_funcs")
        with contextlib.suppress(ValueError):  # `stage_settings` reports a value that is not a list
            for reward in coerce(rewards, list[str] | None) or ():
                check_registered(reward, group=REWARDS)
    return flags
