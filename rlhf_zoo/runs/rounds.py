"""Rounds of a run. Each later round adds pairs sampled from the last PPO policy, and repeats reward model and PPO.

Round 1 is the run itself. runs/RECIPE/round-N/ holds a later round: the folder `pairs` with old and new pairs for the
reward model, the stages reward, ppo and eval, and round.json with the path of the run. All rounds use the run's SFT
stage. As in Bai et al. 2022, arXiv:2204.05862 §4.5, old and new pairs are mixed, and PPO starts from the SFT policy in
each round.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..fileio import read_json, write_json
from .context import Round, RunContext
from .models import ParentCheckpoint
from .pairs import HELD_OUT_SHARE
from .recipe import Recipe

ROUND_FILE = "round.json"
GOLD, JUDGE = "gold", "judge"
ROUND_STAGES = ("reward", "ppo", "eval")
PAIRS_CONFIGURATION = "preferences"
#: Keys of the reward stage that determine where the first round's pairs come from. Later rounds drop these keys.
FIRST_ROUND_KEYS = (
    "dataset_name", "dataset_revision", "dataset_config", "dataset_train_split", "dataset_test_split", "columns",
    "keep_above", "simulated_pairs", "simulated_test_pairs", "pairs_seed",
)  # fmt: skip


def round_run(context: RunContext, number: int, labeler: str, previous_policy: ParentCheckpoint) -> RunContext:
    """Returns the run of a later round.

    Args:
        context: The first round.
        number: Number of the round, at least 2.
        labeler: The labeler of the new pairs: 'gold' or a judge's name.
        previous_policy: The PPO policy of the previous round.
    """
    name = f"round-{number}"
    folder = context.directory / name
    return replace(
        context,
        recipe=_recipe_on_round_pairs(context),
        flags={**context.flags, "reward": _without_first_round_keys(context.flags.get("reward", {}))},
        directory=folder,
        base=context.directory,
        own_stages=ROUND_STAGES,
        variant=name,
        round=Round(number, labeler, folder / "pairs", previous_policy),
    )


def _recipe_on_round_pairs(context: RunContext) -> Recipe:
    """Returns the recipe with a reward stage that reads the round's pairs."""
    first_round = context.settings("reward").data
    keys = _without_first_round_keys(context.recipe.stages["reward"])
    keys |= {"dataset_config": PAIRS_CONFIGURATION, "dataset_train_split": "train"}
    has_test_split = first_round.simulated_pairs is not None or first_round.dataset_test_split is not None
    if first_round.held_out_share is None and not has_test_split:
        keys["held_out_share"] = HELD_OUT_SHARE
    keys["dataset_test_split"] = "test" if has_test_split and first_round.held_out_share is None else None
    if first_round.dataset_validation_split is not None:
        keys["dataset_validation_split"] = "validation"
    return replace(context.recipe, stages={**context.recipe.stages, "reward": keys})


def _without_first_round_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in FIRST_ROUND_KEYS}


def write_round_file(context: RunContext) -> None:
    """Writes round.json, which names the run to which the round belongs.

    Args:
        context: The round.
    """
    assert context.round is not None
    document = {"schema": 1, "round": context.round.number, "labels": context.round.labeler, "base": ".."}
    write_json(context.directory / ROUND_FILE, document)


def round_fields(directory: Path) -> dict[str, Any]:
    """Returns the fields {base, variant, own_stages} of `RunContext` for the directory of a later round.

    Args:
        directory: A run directory.

    Returns:
        The fields; {} if the directory does not belong to a later round.
    """
    path = directory / ROUND_FILE
    if not path.is_file():
        return {}
    # The base is always the parent folder, because the round.json of a downloaded folder might name another run.
    return {"base": directory / "..", "variant": f"round-{read_json(path)['round']}", "own_stages": ROUND_STAGES}
