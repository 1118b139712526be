"""`rlhf-zoo compare|trace`: shows a checkpoint's completions, side by side or token by token."""

from pathlib import Path
from typing import Any

import click

from ..errors import ZooError
from ..runs.settings.values import json_object
from ..runs.status_line import show_activity
from .common import loading
from .layout import Command
from .open_run import open_hub
from .options import ABLATION, HUB, SOURCE_HUB, TRUST, TRUST_RUN, json_option, lineage_options
from .tables import print_json, stdout_console


@click.command(cls=Command)
@click.argument("ppo")
@lineage_options
@click.option(
    "--votes",
    help="The data set NAMESPACE/NAME for votes of the blind test; '' keeps no votes.  "
    "[default: local/NAME-votes on the embedded Hub, elsewhere none]",
)
@click.option(
    "--votes_per_hour",
    "--votes-per-hour",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="Maximum number of votes from one address per hour. A minute allows a sixth of them, but at least 10, and a "
    "day allows four times as many.",
)
@ABLATION
@HUB
@SOURCE_HUB
@TRUST
@TRUST_RUN
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=7860,
    show_default=True,
    help="Port to listen on; 0 picks a free one.",
)
@click.option("--open", "open_browser", is_flag=True, help="Open the page in a browser, if this machine has a screen.")
def compare(
    ppo: str, votes: str | None, runs: tuple[str, ...], hub: str | None, source_hub: str | None, **options: Any
) -> None:
    """Open the comparison page: SFT and PPO side by side.

    PPO is NAMESPACE/NAME[@TAG], a run directory or a folder. The page also shows training step by step, a blind test,
    and PPO's card.

    \b
    Example:
      rlhf-zoo compare local/tiny-world-ppo --hub local
    """
    with open_hub(hub, source=source_hub) as connected_hub:
        with loading("loading the page"):
            from ..app.serve import launch
            from ..evaluation.votes.data import HubVotes

        if votes is None:
            votes = _default_votes_dataset(ppo) if connected_hub.kind == "local" else None
        elif votes:
            from ..hub.client.publish import resolve_namespace

            votes = HubVotes(votes).name
            resolve_namespace(votes.partition("/")[0], hub=connected_hub)
        try:
            launch(ppo, votes=votes or None, runs=runs or None, hub=connected_hub, **options)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None  # the normal way to stop the page, so there is nothing to resume


def _default_votes_dataset(ppo: str) -> str | None:
    """Returns the default data set for votes on the embedded Hub; None for a folder, as votes name repositories."""
    if Path(ppo).is_dir():
        return None
    name = ppo.partition("@")[0].rpartition("/")[2].removesuffix("-ppo")
    return f"local/{name}-votes"


@click.command(cls=Command)
@click.argument("run", metavar="RUN|REPO")
@click.option(
    "--prompt",
    required=True,
    help='The text to complete, or a conversation as JSON: \'[{"role": "user", "content": "hi"}]\'.',
)
@click.option(
    "--stage", type=click.Choice(["ppo", "sft"]), default="ppo", help="The policy to show; sft means --step 0."
)
@click.option(
    "--step", type=click.IntRange(min=0), help="Step of the checkpoint; 0: the policy before PPO.  [default: the last]"
)
@click.option("--revision", help="The tag or commit of a repository, as in REPO@TAG.")
@click.option(
    "--old",
    help="The policy in the ratios' denominator: a step, folder or repository.  [default: the previous checkpoint]",
)
@click.option("--sft", help="The reference policy.  [default: the run's SFT model]")
@click.option("--reward", help="The reward model.  [default: the run's reward model]")
@click.option(
    "--reward_funcs",
    "--reward-funcs",
    multiple=True,
    help="A reward function that REPO names and may import; may be repeated.",
)
@click.option("--columns", help='The prompt\'s other columns for reward functions, as JSON: \'{"answer": "4"}\'.')
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of the sample.")
@click.option("--temperature", type=float, help="Sampling temperature.  [default: the temperature of training]")
@click.option(
    "--max_new_tokens",
    "--max-new-tokens",
    type=click.IntRange(min=1),
    help="Maximum number of new tokens.  [default: as in training]",
)
@HUB
@SOURCE_HUB
@TRUST
@TRUST_RUN
@json_option("Print the tokens and the totals as JSON.")
def trace(
    run: str,
    prompt: str,
    stage: str,
    step: int | None,
    columns: str | None,
    hub: str | None,
    source_hub: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Sample one completion of a PPO checkpoint, and show PPO's quantities for each token.

    RUN is a run directory, its folder ppo, or a checkpoint in it; REPO is NAMESPACE/NAME[@TAG]. The quantities are
    log π, log π_ref, KL, reward, value, δ, advantage (before whitening), and the ratio to the previous checkpoint.

    \b
    Example:
      rlhf-zoo trace runs/demo --prompt "the battery" --step 20
    """
    if stage == "sft":
        if step:
            raise ZooError(f"--stage sft is step 0, so it does not go with --step {step}: pass only one.")
        step = 0
    prompt_columns = {} if columns is None else json_object(columns, option="--columns", example="'{\"name\": value}'")
    policy_options = {name: options.pop(name) for name in ("revision", "old", "sft", "reward")}
    with open_hub(hub, source=source_hub) as connected_hub:
        with loading("loading the trainer"):
            from ..pipeline.inspect.trace import find_traced_policy, trace_checkpoint
            from ..pipeline.inspect.trace_view import show, to_document
            from ..runs.data.turns import parse_prompt
        with show_activity(f"tracing {run}"):
            parsed_prompt = parse_prompt(prompt)
            policy = find_traced_policy(run, step=step, hub=connected_hub, **policy_options)
            trace_result = trace_checkpoint(policy, parsed_prompt, columns=prompt_columns, **options)
        if as_json:
            print_json(to_document(trace_result, policy))
            return
        show(trace_result, policy, stdout_console(120))
