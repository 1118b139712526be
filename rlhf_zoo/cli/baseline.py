"""`rlhf-zoo baseline`: what simpler methods than PPO make of the SFT policy of a finished run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ZooError
from .common import FLAGS, TRUST, TRUST_RUN, UserPath, run_flags
from .open_run import run_context
from .tables import interval, table

if TYPE_CHECKING:
    from ..pipeline.experiments.baseline import Method

METHODS = ("best-of-n", "sft", "rejection", "dpo", "rloo")
#: The options that a method takes.
TAKES = {
    "best-of-n": ("pool",),
    "sft": ("seeds", "learning_rate"),
    "rejection": ("seeds", "learning_rate"),
    "dpo": ("beta", "seeds", "learning_rate"),
    "rloo": ("beta", "seeds", "learning_rate"),
}
SEEDS = 3


@click.command(context_settings=FLAGS)
@click.argument("recipe")
@click.option("--method", required=True, type=click.Choice(METHODS), help="What to compare PPO with.")
@click.option(
    "--beta", metavar="LIST", help="Of dpo and rloo: values of β.  [default: PPO's kl_coef, its half, twice it]"
)
@click.option("--seeds", type=click.IntRange(min=1), help=f"Of all but best-of-n: runs, of each β.  [default: {SEEDS}]")
@click.option(
    "--learning_rate",
    "--learning-rate",
    "learning_rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Of all but best-of-n.  [default: PPO's; of sft its own]",
)
@click.option("--pool", type=click.IntRange(min=1), help="Of best-of-n: samples of each prompt.  [default: 64]")
@click.option(
    "--served",
    type=click.IntRange(min=0),
    help="Completions that compute counts beside training.  [default: as many as are evaluated]",
)
@click.option("--output_dir", "--output-dir", type=UserPath(), help="The run.  [default: runs/RECIPE]")
@click.option("--hub", help="'local' (the embedded Hub) or an address.")
@TRUST
@TRUST_RUN
@click.option("--restart", is_flag=True, help="Do again what is asked for, also where it is finished.")
@click.option("--json", "as_json", is_flag=True, help="Print frontier.json instead of tables.")
@click.pass_context
def baseline(
    ctx: click.Context,
    recipe: str,
    method: Method,
    output_dir: Path | None,
    hub: str | None,
    restart: bool,
    as_json: bool,
    served: int | None,
    **asked: Any,
) -> None:
    """Compare PPO with a simpler method: at equal KL to the SFT policy, and at equal compute.

    It needs a finished run of the recipe, starts from its SFT policy, and learns from its pairs, prompts and reward.
    What is finished is not done again. PPO's card has a table of it, and `rlhf-zoo push --resume RUN` sends it. Keys of
    the recipe are flags as for `rlhf-zoo run`, and must be those of the run.

    \b
    Example:
      rlhf-zoo baseline tiny-world --method best-of-n
    """
    flags = run_flags(ctx, recipe)
    if refused := [name for name, value in asked.items() if value is not None and name not in TAKES[method]]:
        raise ZooError(f"--{refused[0]} is no option of --method {method}: leave it out.")
    with run_context(recipe, flags, output_dir=output_dir, hub=hub, read_only=True) as (context, _):
        from ..pipeline.experiments.baseline import (
            HELD,
            betas,
            default_betas,
            open_baseline,
            run_best_of_n,
            run_trained,
        )
        from ..pipeline.experiments.baseline_report import write_report
        from ..publishing.cards.card import make_card

        listed = None if asked["beta"] is None else betas(asked["beta"], method)
        opened = open_baseline(replace(context, restart=False), method)
        if method == "best-of-n":
            run_best_of_n(opened, pool=asked["pool"] or 64, restart=restart)
        else:
            first, rate = context.shared.seed, asked["learning_rate"]
            for value in (default_betas(context) if listed is None else listed) if method in HELD else [None]:
                for seed in range(first, first + (asked["seeds"] or SEEDS)):
                    run_trained(opened, method, seed, beta=value, learning_rate=rate, restart=restart)
        frontier = write_report(opened, method, served=served)
        make_card(context.record("ppo").path)
    path = context.directory / "baseline" / "frontier.json"
    if as_json:
        click.echo(path.read_text(encoding="utf-8").rstrip())
        return
    _show(frontier)
    click.echo(f"The figures are in {path}, the plot in {path.with_suffix('.png')}.")
    if context.record("ppo").read().get("publish"):
        click.echo(f"`rlhf-zoo push --resume {shlex.quote(str(context.directory))}` sends PPO's card with them.")


def _show(frontier: Mapping[str, Any]) -> None:
    from ..publishing.cards.markdown import estimate

    beside = list(frontier["sft"]["beside"])
    rows = [_row("SFT", frontier["sft"], beside), _row("PPO", frontier["ppo"], beside)]
    # What the ablation computed is not counted, and its serving alone would look like all.
    rows += [[*_row(point["label"], point, beside)[:-1], ""] for point in frontier["ppo_ablation"]]
    for policy in (frontier["trivial"] or {}).get("policies", []):
        reward = interval(policy["reward"]) if policy["reward"] else ""
        rows.append(
            [policy["name"], "", reward, interval(policy["judge"]), f"{policy['win_rate']['value']:.3f}"]
            + [""] * (2 + len(beside))
        )
    for method, points in frontier["methods"].items():
        rows += [_row(f"{method}, {point['label']}", point, beside) for point in points]
    table(
        f"Held-out prompts; judge: {frontier['judge']}; KL in nats, ≤: an upper bound",
        ["", "KL", "reward", "judge", "win rate over SFT", "over PPO", *beside, "FLOPs"],
        rows,
    )
    against = []
    for kind, title in (("equal_kl", "PPO's KL"), ("equal_compute", "PPO's FLOPs")):
        for method, crossing in frontier[kind].items():
            if crossing["inside"]:
                against.append(_against(f"{method} at {title}", crossing))
                continue
            against.append([f"{method} at {title}", crossing["said"], "", ""])
            if crossing.get("farthest"):
                there = f"at KL {crossing['farthest']['kl']:.2f} (PPO: {crossing['farthest']['ppo']})"
                against.append(_against(f"{method} {there}", crossing["farthest"]))
    table(
        f"The same KL, and at most the same FLOPs ({frontier['served']} completions served)",
        ["", "", "judge", "PPO's judge less this"],
        against,
    )
    for of, fit in frontier["fits"].get("best-of-n", {}).items():
        alpha, beta = (str(estimate(fit[name])) for name in ("alpha", "beta"))
        peak = f"a peak at d = {estimate(fit['peak']['d'])}" if fit["peak"] else fit["no_peak"]
        title = "the reward" if of == "proxy" else "the judge"
        click.echo(f"Best-of-n's gain of {title} over SFT is d·(α − β·d), d = √KL: α {alpha}, β {beta}; {peak}")
    if price := frontier["filter"]:
        click.echo(
            f"A filter that keeps the {price['share']:.1%} of SFT's samples with the highest reward has PPO's reward "
            f"at {price['kl']:.2f} nats, and a judge of {price['judge']:.2f}; PPO takes "
            f"{frontier['ppo']['kl']['value']:.2f} nats, and its judge is {frontier['ppo']['judge']['value']:.2f}."
        )
    for point in frontier["methods"].get("best-of-n", []):
        if point.get("break_even") is not None:
            click.echo(
                f"Best of {point['label'].rpartition(' ')[2]} has computed as much as PPO after "
                f"{point['break_even']:.0f} completions served."
            )


def _row(label: str, point: Mapping[str, Any], beside: Sequence[str]) -> list[str]:
    kl = f"{'≤ ' if point['kl']['is_bound'] else ''}{point['kl']['value']:.2f}"
    won = [f"{point['win_rate'][side]['value']:.3f}" for side in ("sft", "ppo")]
    others = [interval(point["beside"][name]) if name in point["beside"] else "" for name in beside]
    flops = f"{point['compute']['flops']:.2e}"
    return [label, kl, interval(point["reward"]), interval(point["judge"]), *won, *others, flops]


def _against(title: str, found: Mapping[str, Any]) -> list[str]:
    return [title, found["label"], interval(found["judge"]), interval(found["ppo_less_this"]["judge"], sign="+")]
