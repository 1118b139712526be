"""`rlhf-zoo baseline`: compares PPO with simpler methods that start from the same SFT policy."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import ZooError
from .common import loading, read_flags
from .layout import RecipeCommand
from .open_run import run_context
from .options import RECIPE, json_option, seeds_option, unpublished_run_options
from .tables import interval, print_table

if TYPE_CHECKING:
    from ..pipeline.experiments.baseline import Method

#: Method -> the options that it takes.
METHOD_OPTIONS = {
    "best-of-n": ("pool",),
    "sft": ("seeds", "learning_rate"),
    "rejection": ("seeds", "learning_rate"),
    "dpo": ("beta", "seeds", "learning_rate"),
    "rloo": ("beta", "seeds", "learning_rate"),
}
DEFAULT_SEEDS, DEFAULT_POOL = 3, 64


@click.command(cls=RecipeCommand)
@RECIPE
@click.option("--method", required=True, type=click.Choice([*METHOD_OPTIONS]), help="The method to compare PPO with.")
@click.option(
    "--beta",
    metavar="LIST",
    help="Values of β, for dpo and rloo.  [default: half of PPO's kl_coef, kl_coef, twice kl_coef]",
)
@seeds_option(f"Number of training runs of each setting; not for best-of-n.  [default: {DEFAULT_SEEDS}]", default=None)
@click.option(
    "--learning_rate",
    "--learning-rate",
    "learning_rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Learning rate; not for best-of-n.  [default: PPO's; SFT's for sft]",
)
@click.option(
    "--pool", type=click.IntRange(min=1), help=f"Samples per prompt, for best-of-n.  [default: {DEFAULT_POOL}]"
)
@click.option(
    "--served",
    type=click.IntRange(min=0),
    help="Completions assumed to be served after training; the compute to sample them is added to that of training.  "
    "[default: the number evaluated]",
)
@unpublished_run_options("Run this method again, even if it is finished.")
@json_option("Print frontier.json instead of tables.")
@click.pass_context
def baseline(
    ctx: click.Context,
    recipe: str,
    method: Method,
    served: int | None,
    restart: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare PPO with a simpler method: at equal KL to the SFT policy, and at equal compute.

    The recipe's run must be finished. The method starts from the run's SFT policy, and learns from its pairs, prompts
    and reward. Finished parts are not run again. PPO's card gets a table of the results, which `rlhf-zoo push --resume
    RUN` publishes. Keys of the recipe are flags as for `rlhf-zoo run`; give them the same values as for the run.

    \b
    Example:
      rlhf-zoo baseline tiny-world --method best-of-n
    """
    flags = read_flags(ctx, recipe)
    method_options = {name: options.pop(name) for name in ("beta", "seeds", "learning_rate", "pool")}
    for name, value in method_options.items():
        if value is not None and name not in METHOD_OPTIONS[method]:
            raise ZooError(f"--{name} is not an option of --method {method}: leave it out.")
    with run_context(recipe, flags, never_publish=True, **options) as (context, _):
        with loading("loading the trainer"):
            from ..pipeline.experiments.baseline import open_finished_run
            from ..pipeline.experiments.baseline_methods import run_method
            from ..pipeline.experiments.baseline_report import write_report
            from ..publishing.cards.card import make_card

        betas = None if method_options["beta"] is None else read_betas(method_options["beta"], method)
        finished_run = open_finished_run(context, method)
        run_method(
            finished_run,
            method,
            betas=betas,
            seed_count=method_options["seeds"] or DEFAULT_SEEDS,
            learning_rate=method_options["learning_rate"],
            pool_size=method_options["pool"] or DEFAULT_POOL,
            restart=restart,
        )
        frontier = write_report(finished_run, method, served=served)
        make_card(context.record("ppo").path)
    path = context.directory / "baseline" / "frontier.json"
    if as_json:
        click.echo(path.read_text(encoding="utf-8").rstrip())
        return
    _show(frontier)
    click.echo(f"The figures are in {path}, the plot in {path.with_suffix('.png')}.")
    if context.record("ppo").read().get("publish"):
        click.echo(f"`rlhf-zoo push --resume {shlex.quote(str(context.directory))}` sends PPO's card with the figures.")


def read_betas(text: str, method: Method) -> list[float]:
    """Parses the value of --beta.

    Args:
        text: The value, such as "0.05,0.1".
        method: The method.

    Returns:
        The values, each once.

    Raises:
        ZooError: An item is not a number of at least 0, or is 0 with DPO, whose loss is then constant.
    """
    from ..runs.settings.values import parse_numbers

    values = parse_numbers("--beta", text, example="0.05,0.1,0.2")
    if method == "dpo" and 0.0 in values:
        raise ZooError("--beta lists 0, but DPO learns nothing with it: give numbers above 0.")
    return values


def _show(frontier: Mapping[str, Any]) -> None:
    extra_metrics = list(frontier["sft"]["extra_metrics"])
    rows = [_policy_row("SFT", frontier["sft"], extra_metrics), _policy_row("PPO", frontier["ppo"], extra_metrics)]
    # Ablations show no FLOPs: their training is not counted, so the FLOPs of serving would look like the total.
    rows += [[*_policy_row(point["label"], point, extra_metrics)[:-1], ""] for point in frontier["ppo_ablation"]]
    for policy in (frontier["trivial"] or {}).get("policies", []):
        reward = interval(policy["reward"]) if policy["reward"] else ""
        rows.append(
            [policy["name"], "", reward, interval(policy["judge"]), f"{policy['win_rate']['value']:.3f}"]
            + [""] * (2 + len(extra_metrics))
        )
    for method, points in frontier["methods"].items():
        rows += [_policy_row(f"{method}, {point['label']}", point, extra_metrics) for point in points]
    print_table(
        f"Held-out prompts; judge: {frontier['judge']}; KL in nats, ≤: an upper bound",
        ["", "KL", "reward", "judge", "win rate over SFT", "over PPO", *extra_metrics, "FLOPs"],
        rows,
    )
    comparisons = []
    for budget, title in (("equal_kl", "PPO's KL"), ("equal_compute", "PPO's FLOPs")):
        for method, crossing in frontier[budget].items():
            if crossing["inside"]:
                comparisons.append(_comparison_row(f"{method} at {title}", crossing))
                continue
            comparisons.append([f"{method} at {title}", crossing["reason"], "", ""])
            if crossing.get("farthest"):
                position = f"at KL {crossing['farthest']['kl']:.2f} (PPO: {crossing['farthest']['ppo']})"
                comparisons.append(_comparison_row(f"{method} {position}", crossing["farthest"]))
    print_table(
        f"Results at the same KL, and at the same FLOPs or fewer, if {frontier['served']} completions are served",
        ["", "", "judge", "PPO's judge score minus this one"],
        comparisons,
    )
    _show_curve(frontier)


def _show_curve(frontier: Mapping[str, Any]) -> None:
    """Prints best-of-n's curve, the filter that reaches PPO's reward, and where best-of-n costs as much as PPO."""
    from ..publishing.cards.markdown import estimate

    for score, fit in frontier["fits"].get("best-of-n", {}).items():
        alpha, beta = (str(estimate(fit[name])) for name in ("alpha", "beta"))
        peak = f"a peak at d = {estimate(fit['peak']['d'])}" if fit["peak"] else fit["no_peak"]
        title = "the reward" if score == "proxy" else "the judge"
        click.echo(f"Best-of-n raises {title} over SFT by d·(α − β·d), with d = √KL: α {alpha}, β {beta}; {peak}")
    if filtered := frontier["filter"]:
        click.echo(
            f"Keeping the {filtered['share']:.1%} of SFT's samples with the highest reward reaches PPO's reward at "
            f"{filtered['kl']:.2f} nats, with a judge score of {filtered['judge']:.2f}; PPO takes "
            f"{frontier['ppo']['kl']['value']:.2f} nats, with a judge score of {frontier['ppo']['judge']['value']:.2f}."
        )
    for point in frontier["methods"].get("best-of-n", []):
        if point.get("break_even") is not None:
            click.echo(
                f"Best of {point['label'].rpartition(' ')[2]} costs as much compute as PPO after "
                f"{point['break_even']:.0f} completions."
            )


def _policy_row(label: str, point: Mapping[str, Any], extra_metrics: Sequence[str]) -> list[str]:
    kl = f"{'≤ ' if point['kl']['is_bound'] else ''}{point['kl']['value']:.2f}"
    win_rates = [f"{point['win_rate'][side]['value']:.3f}" for side in ("sft", "ppo")]
    extra_scores = [
        interval(point["extra_metrics"][name]) if name in point["extra_metrics"] else "" for name in extra_metrics
    ]
    flops = f"{point['compute']['flops']:.2e}"
    return [label, kl, interval(point["reward"]), interval(point["judge"]), *win_rates, *extra_scores, flops]


def _comparison_row(title: str, point: Mapping[str, Any]) -> list[str]:
    return [title, point["label"], interval(point["judge"]), interval(point["ppo_minus_this"]["judge"], sign="+")]
