"""Trains a recipe in rounds. Each labels samples of the previous PPO policy, and trains a reward model and PPO."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...evaluation.head_to_head import read_json_lines
from ...evaluation.judges.named import check_endpoints, check_judges_available
from ...evaluation.prompt_groups import group_other_prompts
from ...evaluation.stats import Estimate, bootstrap_mean
from ...fileio import read_json, write_json
from ...plugins import PREFERENCES, load_object
from ...runs.context import Publisher, RunContext
from ...runs.dataset import PAIRS_RECORD_FILE, labeled_rows
from ...runs.judge import evaluation_settings
from ...runs.rounds import GOLD, JUDGE, round_run, write_round_file
from ...runs.settings.judge_names import SAME_LABELS, split_judge_name
from .. import run_recipe
from ..stages.round_pairs import make_pairs
from .runner import Variant, read_outcome

if TYPE_CHECKING:
    from rich.console import Console

#: Number of pairs to label in a round if neither an option nor the recipe sets it.
DEFAULT_PAIRS = 1000
ROUNDS_FILE = "rounds.json"
_METRICS = ("reward", "judge", "kl", "length", "distinct_2")
OpenPublisher = Callable[[RunContext], AbstractContextManager[Publisher | None]]


def check_labeler(context: RunContext, labeler: str | None) -> str:
    """Checks, before training, that the new pairs can be labeled.

    Args:
        context: The run.
        labeler: The option --labels: 'gold', 'judge' or a judge's name; None for 'gold' if the recipe sets
            `preference`, otherwise 'judge'.

    Returns:
        'gold', or a judge's name.

    Raises:
        ZooError: The labeler cannot be used, or the recipe has no reward model that can be trained again.
    """
    _check_rounds(context)
    data, config = context.settings("reward").data, evaluation_settings(context)
    has_gold = data.preference is not None
    if labeler is None:
        labeler = GOLD if has_gold else JUDGE
    if labeler == GOLD:
        if not has_gold:
            raise ZooError(
                "--labels gold uses `preference` of the stage reward, but the recipe does not set it: choose --labels "
                "judge, or name a judge, such as votes:NAMESPACE/NAME."
            )
        load_object(data.preference, group=PREFERENCES)
        return labeler
    name = config.judge_names[0] if labeler == JUDGE else labeler
    if split_judge_name(name)[0] == SAME_LABELS:
        option = f"--labels {labeler}" + ("" if labeler == name else f", which is {name} here,")
        raise ZooError(
            f"{option} would repeat the existing labels: name another judge, such as reward:NAME, rule:NAME or "
            "votes:NAMESPACE/NAME."
        )
    # The data set of votes need not exist yet, because the page that collects them shows this run.
    hub = None if split_judge_name(name)[0] == "votes" else context.hub
    check_judges_available(
        [name],
        config.llm_settings,
        load_labeled=lambda: labeled_rows(context),
        seed=context.shared.seed,
        hub=hub,
        has_headline=False,
    )
    check_endpoints([name], config.llm_settings)
    return name


def _check_rounds(context: RunContext) -> None:
    """Checks that the recipe trains a reward model, which PPO uses, so that a round can train it again."""
    stages = context.recipe.stages
    missing_stage = next((stage for stage in ("sft", "reward", "ppo") if stage not in stages), None)
    if missing_stage is not None:
        raise ZooError(
            f"--rounds needs the stages sft, reward and ppo, but the recipe {context.recipe.name} has no stage "
            f"{missing_stage}: add {missing_stage}.yaml, or omit --rounds."
        )
    path = context.settings("ppo").data.reward_model_path
    if path != "reward":
        raise ZooError(
            f"--rounds trains the recipe's reward model again, but its PPO uses {path}: set reward_model_path of the "
            "stage ppo to reward."
        )


def run_rounds(
    context: RunContext,
    console: "Console",
    open_publisher: OpenPublisher,
    *,
    round_count: int,
    labeler: str,
    pair_count: int | None,
) -> list[RunContext]:
    """Runs rounds 2, 3, … one after the other.

    Args:
        context: The first round, which is finished.
        console: A rich console.
        open_publisher: Opens the publisher of a run.
        round_count: The total number of rounds.
        labeler: The labeler that `check_labeler` returned.
        pair_count: Number of pairs to label per round; None for the recipe's simulated_pairs, or else DEFAULT_PAIRS.

    Returns:
        The runs of all rounds.
    """
    runs = [context]
    for number in range(2, round_count + 1):
        console.rule(f"[bold]round {number}")
        run = round_run(context, number, labeler, runs[-1].checkpoint("ppo"))
        count = pair_count or context.settings("reward").data.simulated_pairs or DEFAULT_PAIRS
        pair_counts = make_pairs(run, runs[-1], count=count)
        console.print(
            f"{pair_counts['new']} new pairs of samples of round {number - 1}, labeled by {labeler}, and "
            f"{pair_counts['old']} older pairs.",
            highlight=False,
        )
        write_round_file(run)
        with open_publisher(run) as publisher:
            run_recipe.run(run, console, publisher)
        runs.append(run)
    return runs


# Results


def write_rounds(runs: Sequence[RunContext]) -> tuple[Path, list[dict[str, Any]]]:
    """Writes rounds.json into the first round's directory.

    Args:
        runs: The runs of all rounds.

    Returns:
        The path of rounds.json, and a row for each round.
    """
    rounds = [_round_row(run, runs[index - 1] if index else None) for index, run in enumerate(runs)]
    path = runs[0].directory / ROUNDS_FILE
    write_json(path, {"schema": 1, "recipe": runs[0].recipe.name, "rounds": rounds})
    return path, rounds


def _round_row(run: RunContext, previous: RunContext | None) -> dict[str, Any]:
    outcome = read_outcome(Variant(), run.directory)
    reward_figures = run.record("reward").read().get("reward_model") or {}
    pair_counts = {} if run.round is None else read_json(run.round.folder / PAIRS_RECORD_FILE)
    return {
        "round": 1 if run.round is None else run.round.number,
        "directory": str(run.directory),
        "repo": outcome.repo,
        "labels": None if run.round is None else run.round.labeler,
        "pairs": None if run.round is None else {key: pair_counts[key] for key in ("new", "old")},
        "reward_model": {key: reward_figures[key] for key in ("accuracy", "ci95", "n") if key in reward_figures},
        "figures": {key: outcome.estimates[key] for key in _METRICS},
        "win_rate": outcome.win_rate,
        **outcome.judgment,
        "judge_minus_previous": None if previous is None else _judge_gain(run, previous).to_json(),
    }


def _judge_gain(run: RunContext, previous: RunContext) -> Estimate:
    """Estimates the headline judge's mean score of this round's PPO policy minus that of the previous round's.

    Both rounds sample the same test prompts with the same random streams, so samples are paired. The interval is a
    bootstrap over groups of prompts.
    """

    def read_scores(context: RunContext) -> dict[tuple[str, int], float]:
        samples = read_json_lines(context.record("eval").path / "samples.jsonl")
        return {(str(sample["prompt"]), sample["sample"]): sample["ppo"]["judge"] for sample in samples}

    scores, previous_scores = read_scores(run), read_scores(previous)
    shared_keys = [key for key in scores if key in previous_scores]
    groups = group_other_prompts([prompt for prompt, _ in shared_keys], run.shared.evaluation.group)
    return bootstrap_mean([scores[key] - previous_scores[key] for key in shared_keys], groups, seed=run.shared.seed)
