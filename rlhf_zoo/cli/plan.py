"""`rlhf-zoo plan`: shows the memory that a recipe needs, what makes it fit, and how long training takes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from ..errors import ZooError
from ..runs.registry import STAGES
from ..runs.status_line import show_activity
from .common import loading, quiet_hub, read_flags
from .layout import RecipeCommand
from .open_run import open_hub
from .options import HUB, RECIPE, SOURCE_HUB, TRUST, json_option
from .tables import print_json, print_table, stdout_console

if TYPE_CHECKING:
    from ..hub.client.connect import Hub
    from ..pipeline.plan.devices import Device
    from ..pipeline.plan.result import Plan, StagePlan
    from ..runs.recipe import Recipe

#: Maximum width of a line in characters if stdout is not a terminal; no sentence is that long.
UNWRAPPED = 1000
COLUMNS = ("weights", "gradients", "optimizer", "activations", "cache", "logits", "process")


@contextlib.contextmanager
def hub_for_reading(is_needed: bool, hub: str | None, source_hub: str | None) -> Iterator[Hub]:
    """Connects a command that publishes nothing to the Hubs from which `rlhf-zoo run` would read.

    Args:
        is_needed: Whether the recipe names anything on a Hub. If not, the command connects to no Hub.
        hub: The value of --hub.
        source_hub: The value of --source_hub.
    """
    from ..hub.client.connect import DEFAULT_HUB

    connection = open_hub(hub, source=source_hub)
    with connection if is_needed else contextlib.nullcontext(DEFAULT_HUB) as connected_hub:
        quiet_hub()
        yield connected_hub


@click.command(cls=RecipeCommand)
@RECIPE
@click.option(
    "--gpu",
    help="The device: h100:8, rtx4090, 24gb:2, cpu, …  [default: this machine's GPU, else the recipe's, else cpu]",
)
@click.option("--lora", is_flag=True, help="Assume LoRA adapters on weights in bfloat16, in every stage.")
@click.option("--load_in_4bit", "--load-in-4bit", is_flag=True, help="Assume LoRA adapters on weights in 4 bits.")
@click.option(
    "--prompt_length",
    "--prompt-length",
    type=click.IntRange(min=1),
    help="Number of tokens of the longest prompt.  [default: PPO's max_prompt_length, else the length in zoo.yaml]",
)
@click.option(
    "--rows",
    multiple=True,
    metavar="STAGE=NUMBER",
    help="Number of rows that sft or reward trains on, to plan its steps and total time; may be repeated.",
)
@click.option("--detail", is_flag=True, help="Also show the memory of each phase and of each model.")
@HUB
@SOURCE_HUB
@TRUST
@json_option()
@click.pass_context
def plan(
    ctx: click.Context,
    recipe: str,
    gpu: str | None,
    lora: bool,
    load_in_4bit: bool,
    prompt_length: int | None,
    rows: tuple[str, ...],
    detail: bool,
    hub: str | None,
    source_hub: str | None,
    as_json: bool,
) -> None:
    """Say whether a recipe fits on a device, which change would make it fit, and how long training takes.

    Nothing is trained and no weights are loaded. Keys of the recipe are flags, as for `rlhf-zoo run`.

    \b
    Example:
      rlhf-zoo plan tldr-pythia-6.9b --gpu h100:8 \\
        --sft.fsdp2 true --reward.fsdp2 true --ppo.fsdp2 true
    """
    from ..pipeline.plan.devices import local_device, parse_device
    from ..pipeline.plan.result import LORA
    from ..pipeline.plan.rows import add_steps
    from ..runs.recipe import load_recipe
    from ..runs.settings.key_classes import effective_keys

    flags = read_flags(ctx, recipe, check_names=False)
    device = None if gpu is None else parse_device(gpu)
    loaded_recipe = load_recipe(recipe)
    row_counts = _parse_rows(rows, [stage for stage in loaded_recipe.stages if stage != "ppo"])
    for stage in loaded_recipe.stages:
        if lora or load_in_4bit:
            flags[stage] = {**LORA, **flags[stage]}
        if load_in_4bit and "load_in_4bit" in STAGES[stage].model_keys:
            flags[stage]["load_in_4bit"] = True
    assumptions: list[str] = []
    if device is None:
        device = local_device()
        if device.cpu and loaded_recipe.zoo.get("gpu"):
            device = parse_device(loaded_recipe.zoo["gpu"])
    if device == parse_device(loaded_recipe.zoo.get("gpu", "cpu")) and not (lora or load_in_4bit):
        for stage, gpu_flags in (loaded_recipe.zoo.get("gpu_flags") or {}).items():
            keys = effective_keys(loaded_recipe, stage, gpu_flags)
            assumptions += [f"{stage}.{key} {json.dumps(keys[key])}, as the recipe's zoo.yaml sets for {device}"
                        for key in keys if key not in flags[stage]]  # fmt: skip
            flags[stage] = {**keys, **flags[stage]}
    result = _cached_plan(loaded_recipe, device, flags, prompt_length, hub, source_hub)
    result = replace(result, assumptions=[*result.assumptions, *assumptions])
    result = add_steps(result, loaded_recipe, flags, row_counts)
    if as_json:
        print_json(result.to_json())
        return
    print_plan(result, detail=detail)


def _parse_rows(texts: Sequence[str], stages: Sequence[str]) -> dict[str, int]:
    """Parses the values of --rows."""
    rows = {}
    for text in texts:
        stage, _, number = text.partition("=")
        example = f"as in --rows {stages[0] if stages else 'sft'}=10000."
        if stage not in stages:
            raise ZooError(f"--rows is {text!r}: name one of {', '.join(stages) or 'sft, reward'}, {example}")
        if not number.isdecimal() or int(number) < 1:
            raise ZooError(f"--rows is {text!r}: give a number from 1, {example}")
        rows[stage] = int(number)
    return rows


def _cached_plan(
    recipe: Recipe,
    device: Device,
    flags: Mapping[str, Mapping[str, Any]],
    prompt_length: int | None,
    hub: str | None,
    source_hub: str | None,
) -> Plan:
    """Returns the plan from the cache, or makes it. A cached plan needs no slow imports."""
    from ..pipeline.plan import cache
    from ..pipeline.plan.result import Plan
    from ..pipeline.plan.shipped_shapes import model_names, shape_digests

    entry_name = None
    if recipe.download_mark is None and (digests := shape_digests(model_names(recipe, flags))) is not None:
        inputs = [recipe.name, recipe.shared, recipe.stages, recipe.zoo, flags, prompt_length, digests]
        entry_name = cache.digest([cache.code_digest(), cache.versions(), asdict(device), *inputs])
        if isinstance(entry := cache.read_cached("plans", entry_name), dict):
            return Plan.from_json(entry["plan"], change_peaks=entry["change_peaks"])
    with loading("loading the planner"):
        from ..pipeline.plan.plan import make_plan
        from ..pipeline.plan.shapes import has_local_shape
    needs_hub = not all(map(has_local_shape, model_names(recipe, flags)))
    with hub_for_reading(needs_hub, hub, source_hub) as connected_hub, show_activity(f"planning {recipe.name}"):
        result = make_plan(recipe, device, flags, prompt_length=prompt_length, hub=connected_hub)
    if entry_name is not None:
        peaks = {stage: change.peak for stage, change in result.changes.items() if change is not None}
        cache.write_cached("plans", entry_name, {"plan": result.to_json(), "change_peaks": peaks})
    return result


def print_plan(result: Plan, *, detail: bool) -> None:
    """Prints a plan: for each stage, whether it fits and how long it takes.

    Args:
        result: The plan.
        detail: Whether to print tables of each stage's phases and models too.
    """
    from ..pipeline.plan.result import format_seconds

    console = stdout_console(UNWRAPPED)

    def print_sentence(sentence: str) -> None:
        console.print(sentence, highlight=False, markup=False, emoji=False)

    click.echo(f"{result.recipe} on {result.device}")
    for stage in result.stages:
        click.echo(_verdict(result, stage))  # on one line, because users copy flags from it
    untimed_stages: list[str] = []
    for stage in result.stages:
        duration, unit = result.durations[stage.stage], "update" if stage.stage == "ppo" else "step"
        if duration is None:
            untimed_stages.append(stage.stage)
            continue
        phases = [f"{name} {format_seconds(value)}" for name, value in duration.seconds.items() if value]
        parts = f": {', '.join(phases)}" if len(phases) > 1 else ""
        time = f"{stage.stage} takes about {format_seconds(duration.total)} s per {unit}"
        print_sentence(f"{time}{result.total_time(stage.stage)}{parts}.")
    if untimed_stages:
        is_unknown_gpu = not result.device.cpu and not result.device.teraflops  # such as --gpu 24gb
        hint = ": name the GPU to get a time, such as --gpu rtx4090" if is_unknown_gpu else ""
        stages = " and ".join(untimed_stages)
        print_sentence(f"The time of {stages} is unknown, because nothing was measured on such a device{hint}.")
    if total := result.total_sentence:
        print_sentence(total)
    for basis in dict.fromkeys(duration.basis for duration in result.durations.values() if duration is not None):
        print_sentence(f"The times hold if every text has the maximum length; {basis}.")
    for assumption in result.assumptions:
        print_sentence(f"Assumed: {assumption}.")
    if not detail:
        click.echo("--detail shows the memory of each phase and model.")
        return
    click.echo("\nGiB on each device:\n")
    for stage in result.stages:
        _print_tables(stage)


def _verdict(result: Plan, stage: StagePlan) -> str:
    from ..pipeline.plan.result import format_gib

    memory = f"{format_gib(stage.peak)} of {result.device.usable_gib:.1f} GiB usable"
    if stage.stage not in result.changes:
        return f"{stage.stage} fits: {memory}."
    change = result.changes[stage.stage]
    remedy = (
        "no key makes it fit: use more or larger devices"
        if change is None
        else f"the smallest change that makes it fit is {change.flags(stage.stage)} ({format_gib(change.peak)} GiB)"
    )
    return f"{stage.stage} DOES NOT FIT: {memory}; {remedy}."


def _print_tables(stage: StagePlan) -> None:
    from ..pipeline.plan.result import format_gib

    rows = [
        [
            f"{name}{' ←' if name == stage.worst_phase else ''}",
            *(format_gib(getattr(need, column)) for column in COLUMNS),
            format_gib(need.total),
        ]
        for name, need in stage.phases.items()
    ]
    batch_sizes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in stage.batch.items())
    print_table(f"{stage.stage}: {batch_sizes}", ["phase", *COLUMNS, "total"], rows)
    print_table(f"{stage.stage}: models", ["model", "weights", "gradients", "optimizer", "total"], [
        [name, *(format_gib(getattr(need, column)) for column in ("weights", "gradients", "optimizer", "total"))]
        for name, need in stage.models.items()
    ])  # fmt: skip


def print_plan_line(
    recipe: Recipe, flags: Mapping[str, Mapping[str, Any]], *, hub: Hub, stage: str | None = None
) -> None:
    """Prints the plan of a command that is about to train, in one line on stderr. A ZooError is printed, not raised.

    Args:
        recipe: The recipe.
        flags: The flags by stage.
        hub: The Hub of the models.
        stage: The only stage that will run; None for all.
    """
    from ..modeling import distributed

    with loading("loading the planner"):
        from ..pipeline.plan.devices import local_device
        from ..pipeline.plan.plan import make_plan
        from ..runs.settings.key_classes import effective_keys
    stages = list(recipe.stages) if stage is None else [stage]
    stage_keys = [{**effective_keys(recipe, name, recipe.stages[name]), **flags.get(name, {})} for name in stages]
    on_cpu = any(keys.get("use_cpu") for keys in stage_keys)
    try:
        device = replace(local_device(use_cpu=on_cpu), count=distributed.process_count())
        with show_activity(f"planning {recipe.name}"):
            line = make_plan(recipe, device, flags, stages=stages, suggest_changes=False, hub=hub).line
        click.echo(line, err=True)
    except ZooError as error:
        click.echo(f"No plan: {error}", err=True)
