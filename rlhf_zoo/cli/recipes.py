"""`rlhf-zoo recipes list|show|copy|validate|keys`: shows, copies and checks recipes, and lists their keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ZooError
from ..plugins import SYNONYMS
from ..runs.registry import STAGES
from ..runs.status_line import show_activity
from .common import loading, read_flags
from .layout import Group, RecipeCommand
from .options import HUB, RECIPE, SOURCE_HUB, TRUST, UserPath, json_option
from .plan import hub_for_reading
from .tables import print_json, print_table, print_text

if TYPE_CHECKING:
    from ..hub.client.connect import Hub
    from ..runs.recipe import Recipe
    from ..runs.settings.parse import RecipeConfig, StageSettings


@click.group(cls=Group)
def recipes() -> None:
    """List, show, copy and check recipes.

    \b
    Example:
      rlhf-zoo recipes list
    """


@recipes.command("list")
@json_option()
@click.option(
    "--readme", type=UserPath(), help="Write the package's recipes as a table between the markers of this file."
)
def recipes_list(as_json: bool, readme: Path | None) -> None:
    """List the recipes of this package and of other installed packages, by the hardware that they need.

    \b
    Example:
      rlhf-zoo recipes list --json
    """
    from ..runs.recipe_table import HARDWARE, insert_table, recipe_rows, rows_of_other_packages

    if readme is not None:
        readme.write_text(insert_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
        return
    other_rows, warnings = rows_of_other_packages()
    rows = [*recipe_rows(), *other_rows]
    for sentence in warnings:
        click.echo(f"Warning: {sentence}", err=True)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    for hardware in HARDWARE:
        group = [row for row in rows if row.hardware == hardware]
        print_table(hardware[0].upper() + hardware[1:], ["recipe", "stages", "data", "memory", "description"], [
            [row.name, " ".join(row.stages), row.data + (" (simulated)" if row.simulated else ""), row.memory,
             row.description + (f" (package {row.package})" if row.package else "")]
            for row in group
        ])  # fmt: skip


@recipes.command("show")
@RECIPE
def recipes_show(recipe: str) -> None:
    """Print a recipe's files.

    \b
    Example:
      rlhf-zoo recipes show tiny-world
    """
    from ..runs.recipe import load_recipe

    loaded_recipe = load_recipe(recipe)
    for name in ("recipe", *loaded_recipe.stages):
        for path in loaded_recipe.yaml_files(name):
            folder = "" if path.parent == loaded_recipe.folder else f"{path.parent.name}/"
            print_text(f"# {folder}{path.name}\n{path.read_text(encoding='utf-8').rstrip()}\n")


@recipes.command("copy")
@RECIPE
@click.argument("target", type=UserPath())
def recipes_copy(recipe: str, target: Path) -> None:
    """Copy a recipe into a new folder, to edit it.

    \b
    Example:
      rlhf-zoo recipes copy tiny-world my-recipe
    """
    from ..runs.recipe import copy_recipe

    click.echo(f"Copied to {copy_recipe(recipe, target)}: edit it, then `rlhf-zoo run {shlex.quote(str(target))}`.")


@recipes.command("validate", cls=RecipeCommand)
@RECIPE
@HUB
@SOURCE_HUB
@TRUST
@click.pass_context
def recipes_validate(ctx: click.Context, recipe: str, hub: str | None, source_hub: str | None) -> None:
    """Check every key of a recipe, the flags, and the names of reward functions, without training.

    If the data are local, every row is checked, and reward functions and rule judges are tried on the first prompts.
    For data and models on a Hub, the columns, the first row and the context length are checked, if the Hub answers.

    \b
    Example:
      rlhf-zoo recipes validate tiny-world --ppo.kl_coef 0.2
    """
    flags = read_flags(ctx, recipe)
    with loading("loading the checks"):
        from ..runs.checks.models import uses_hub
        from ..runs.parents import check_parents
        from ..runs.recipe import load_recipe
        from ..runs.settings.loading import check_installed
        from ..runs.settings.parse import import_dataclasses, recipe_config, stage_settings

        import_dataclasses()

    loaded_recipe = load_recipe(recipe)
    config, settings_by_stage = recipe_config(loaded_recipe, flags["recipe"]), {}
    for stage in loaded_recipe.stages:
        settings = stage_settings(
            loaded_recipe, stage, flags[stage], shared_flags=flags["recipe"], output_dir=Path("runs")
        )
        settings_by_stage[stage] = settings
        check_installed(settings)
        if stage == "ppo":
            from ..pipeline.stages.ppo import load_reward_functions

            load_reward_functions(settings)
    if "ppo" in settings_by_stage:
        check_parents(loaded_recipe, settings_by_stage["ppo"])
    needs_hub = uses_hub(loaded_recipe, config, settings_by_stage)
    with hub_for_reading(needs_hub, hub, source_hub) as connected_hub, show_activity(f"checking {loaded_recipe.name}"):
        lines = _check_models_and_data(connected_hub, loaded_recipe, config, settings_by_stage)
    click.echo("\n".join(lines))


def _check_models_and_data(
    hub: Hub, recipe: Recipe, config: RecipeConfig, settings_by_stage: dict[str, StageSettings]
) -> list[str]:
    """Runs the checks that read files of the recipe's models and data. Returns the lines of the result."""
    import datasets

    from ..evaluation.judges.named import check_judges_available, explain_missing_labels
    from ..evaluation.lm_eval import check_tasks
    from ..hub.client.refusals import reason
    from ..runs.checks.models import (
        check_named_models,
        check_response_length,
        count_rows_cut_by_sft,
        named_models,
    )
    from ..runs.checks.splits import check_forms, check_judge_data
    from ..runs.dataset import own_pairs_keys
    from ..runs.judge import choose_judge

    datasets.utils.logging.disable_progress_bar()
    # Names stay unchecked because a Hub does not answer, or because the Hub that is asked last does not have them.
    for blamed_hub in filter(None, (hub, hub.source_hub)):
        outage = blamed_hub.outage()
        if outage is not None:
            break
    if outage is not None:  # otherwise the check of each name would wait for the Hub again
        offline_hub = replace(blamed_hub, offline=True)
        hub = offline_hub if blamed_hub is hub else replace(hub, source_hub=offline_hub)
    causes = check_forms(config, settings_by_stage, hub, every_row=True)
    unchecked = {f"the columns of {name}": cause for name, cause in causes.items()}  # what is unchecked -> why
    models = named_models(settings_by_stage, hub, allow_missing=True)
    unchecked |= {
        f"the context of {model.name}": model.problem for model in models.values() if model.problem is not None
    }
    check_named_models(models, settings_by_stage)
    if (ppo := settings_by_stage.get("ppo")) is not None:
        check_response_length(config, ppo, models.get("policy"))
        names = choose_judge(config.evaluation, ppo).judge_names
        check_judges_available(names, config.evaluation.llm_settings, hub=None)
        _try_on_local_prompts(config, ppo, names, hub)
        if "classifier" in names:
            labeled, subject = config.evaluation.labeled_arguments, "the judge classifier"
            with explain_missing_labels():
                causes = check_judge_data(config, labeled, "labeled", hub, subject=subject)
            unchecked |= {f"the labels of {name}": cause for name, cause in causes.items()}
        check_tasks(config.evaluation.lm_eval)
        if (pairs := own_pairs_keys(recipe, config)) is not None:
            causes = check_judge_data(config, pairs, "pairs", hub, subject="evaluation.own_pairs")
            unchecked |= {f"the pairs of {name}": cause for name, cause in causes.items()}
    sft = settings_by_stage.get("sft")
    truncation = None if sft is None else count_rows_cut_by_sft(config, sft, models.get("policy"), hub)
    lines = [f"{recipe.name} is valid: {', '.join(recipe.stages)}."]
    if truncation is not None and truncation.cut:
        lines.append(f"The stage sft: {truncation.sentence}.")
    if unchecked:
        cause = next(iter(unchecked.values())) if outage is None else f"it does not answer: {reason(outage)}"
        lines.append(
            f"Not checked: {', '.join(unchecked)}, which {blamed_hub.name} does not show ({cause}); "
            f"name another Hub with {blamed_hub.flag}."
        )
    return lines


def _try_on_local_prompts(config: RecipeConfig, ppo: StageSettings, judges: Iterable[str], hub: Hub) -> None:
    """Tries reward functions and rule judges on prompts in local files, as `run` does before it trains."""
    from ..evaluation.judges.rule import RuleJudge
    from ..pipeline.stages.ppo import check_answers, load_reward_functions, try_functions
    from ..runs.checks.splits import local_rows
    from ..runs.dataset import evaluation_split
    from ..runs.settings.judge_names import split_judge_name

    prompts = local_rows(config, ppo, hub)
    if prompts is None:
        return
    functions, datasets = load_reward_functions(ppo), {"train_dataset": prompts}
    check_answers(ppo, functions, datasets)
    try_functions(ppo, functions, datasets)
    split, share = evaluation_split(config, ppo.data)
    rules = [RuleJudge(argument) for kind, argument in map(split_judge_name, judges) if kind == "rule"]
    test_prompts = local_rows(config, ppo, hub, split) if rules and share is None else None
    if test_prompts is not None:
        test_prompts = test_prompts.select(range(min(config.evaluation.prompts, len(test_prompts))))
        for rule in rules:
            rule.check_prompts(test_prompts, subject=f"the split {split}")


@recipes.command("keys")
@click.argument("stage", type=click.Choice(["recipe", *STAGES]))
@click.argument("word", required=False)
@json_option()
def recipes_keys(stage: str, word: str | None, as_json: bool) -> None:
    """List the keys that a stage takes, in its YAML or as flags.

    Keys of this package come first, then those of trl and transformers. With WORD, only keys with this word in their
    name or meaning are listed, and the key that other tools call WORD.

    \b
    Example:
      rlhf-zoo recipes keys ppo kl
    """
    from ..runs.settings.declared import DeclaredKey, declared_keys
    from ..runs.settings.parse import recipe_keys
    from ..runs.settings.values import short_repr

    if stage == "recipe":
        keys = {
            name: DeclaredKey(str(getattr(hint, "__name__", hint)), default, text, is_own=True)
            for name, (hint, default, text) in recipe_keys().items()
        }
    else:
        keys = dict(declared_keys(stage))
    synonym = None if word is None else SYNONYMS.get(_key_name(word))
    rows = [  # trl and transformers write help texts for argparse, where %% stands for a percent sign
        [name, key.annotation, str(key.default), " ".join(key.help.replace("%%", "%").split())]
        for name, key in sorted(keys.items(), key=lambda entry: (not entry[1].is_own, entry[0]))
        if _matches(word, name, key.help) or (synonym in keys and str(synonym) in name)
    ]
    if not rows:
        raise ZooError(
            f"No key of {stage} has {short_repr(word)} in its name or meaning: leave the word out to see all keys."
        )
    if as_json:
        print_json([dict(zip(("key", "type", "default", "help"), row, strict=True)) for row in rows])
        return
    # With four columns, or beside transformers' long names, sentences would wrap after 16 letters.
    for title, is_own in ((f"Keys of {stage}", True), (f"Keys of {stage} from trl and transformers", False)):
        if listed := [
            [name, f"{meaning} [{kind}, default {default}]".strip()]
            for name, kind, default, meaning in rows
            if keys[name].is_own == is_own
        ]:
            print_table(title, ["key", "meaning [type, default]"], listed, min_width=0)


def _matches(word: str | None, key: str, meaning: str) -> bool:
    """Whether a key's name contains the word, or its meaning has a word that begins with it. True without a word."""
    if word is None:
        return True
    name = _key_name(word)
    return name in key.lower() or any(candidate.startswith(name) for candidate in re.findall(r"\w+", meaning.lower()))


def _key_name(word: str) -> str:
    """Returns a word as it would be written in the name of a key."""
    return word.strip("-").replace("-", "_").lower()
