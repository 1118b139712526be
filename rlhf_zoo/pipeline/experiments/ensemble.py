"""Trains reward models for a run that differ only in the trainer's seed, and finds where they disagree.

The first model is the run's own. RUN/ensemble/seed-K/reward is the reward stage with seed K, from the same SFT policy
and on the same pairs. RUN/ensemble/overview.json compares the models, by `evaluation.ensemble_report`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ZooError
from ...evaluation.ensemble_report import EnsembleScores, PolicyTexts
from ...evaluation.head_to_head import read_samples
from ...evaluation.prompt_groups import group_other_prompts, group_rows
from ...fileio import read_json, write_json
from ...modeling.chat import append_completion
from ...modeling.chat_template import Prompt
from ...modeling.devices import move_to_best_device
from ...modeling.loading import load_tokenizer
from ...modeling.models import load_classifier
from ...publishing.plots import plot_ensemble
from ...rewards import RewardModel
from ...runs.context import RunContext
from ...runs.dataset import evaluation_rows, stage_source
from ...runs.pairs import find_named_pairs
from ...runs.parents import member_run
from ...runs.registry import ENSEMBLE
from .. import run_recipe
from ..stages.pair_report import score_pairs
from ..stages.pairs import held_out_pairs, open_pairs
from ..stages.samples import pairs_seed, sft_samples
from ..stages.train import silence_libraries
from .runner import with_keys

if TYPE_CHECKING:
    from rich.console import Console


def check(context: RunContext) -> None:
    """Checks, before training, that the recipe trains reward models and holds out pairs on which to compare them.

    Args:
        context: The run.

    Raises:
        ZooError: The recipe has no reward stage, holds out no pairs, or has an invalid key.
    """
    if "reward" not in context.recipe.stages:
        raise ZooError(
            f"The recipe {context.recipe.name} has no stage reward, so no reward model is trained: add a reward.yaml."
        )
    for stage in context.recipe.stages:
        context.settings(stage)
    data = context.settings("reward").data
    if data.held_out_share is None and data.dataset_test_split is None and find_named_pairs(context) is None:
        raise ZooError(
            f"The recipe {context.recipe.name} holds out no pairs on which to compare its reward models: pass "
            "--reward.dataset_test_split or --reward.held_out_share."
        )


def run_with_seed(context: RunContext, seed: int) -> RunContext:
    """Returns the run that trains the reward model with another seed.

    Args:
        context: The run, whose own reward model is finished.
        seed: The seed of the new reward model.
    """
    keys: dict[str, Any] = {"seed": seed}
    # All models must learn from the same pairs.
    flags, settings, pairs = context.flags, context.settings("reward"), find_named_pairs(context)
    if pairs is not None and pairs.commit is not None:
        flags = with_keys(flags, "recipe", {"dataset_revision": pairs.commit})
    if pairs is None and settings.data.simulated_pairs is not None:
        keys["pairs_seed"] = pairs_seed(settings)
    return replace(member_run(context, seed), flags=with_keys(flags, "reward", keys))


def train(context: RunContext, count: int, console: "Console") -> list[RunContext]:
    """Trains the reward models that are not finished, after the stages on which they depend.

    Args:
        context: The run. `restart` applies only to the additional models.
        count: The total number of reward models, with consecutive seeds.
        console: A rich console.

    Returns:
        The run of each model, the recipe's own model first.
    """
    silence_libraries()
    check(context)
    run = replace(context, restart=False)
    # A reward stage that has begun needs no SFT stage here, because its SFT policy may be on the Hub.
    run_recipe.run_stages(run, ["reward"] if run.record("reward").read() else ["sft", "reward"], console)
    first_seed = run.settings("reward").trainer.seed
    runs = [run]
    for seed in range(first_seed + 1, first_seed + count):
        seed_run = run_with_seed(run, seed)
        run_recipe.run_stages(replace(seed_run, restart=context.restart), ["reward"], console, note=f", seed {seed}")
        runs.append(seed_run)
    return runs


def overview(runs: Sequence[RunContext]) -> dict[str, Any]:
    """Compares reward models on held-out pairs and on completions of SFT and PPO.

    Args:
        runs: The run of each model, the recipe's own model first.

    Returns:
        The content of overview.json.

    Raises:
        ZooError: The evaluation has another SFT policy or cannot be read, or a model gives all completions one score.
    """
    first_run = runs[0]
    texts_by_side, judge_name = _read_texts(first_run)
    ensemble_scores, split = _score_pairs_and_texts(runs, texts_by_side)
    records = [run.record("reward") for run in runs]
    for record, scores in zip(records, ensemble_scores.raw_scores["sft"], strict=True):
        if scores.std() == 0:
            raise ZooError(
                f"The reward model in {record.path} gives all SFT completions the same score: train it longer."
            )
    return {
        "schema": 1,
        "command": first_run.command,
        "recipe": first_run.recipe.name,
        "simulated": first_run.shared.simulated,
        "split": split,
        "judge": judge_name,
        **ensemble_scores.report(
            [run.settings("reward").trainer.seed for run in runs],
            [record.path.relative_to(first_run.directory).as_posix() for record in records],
        ),
    }


def _read_texts(run: RunContext) -> tuple[dict[str, PolicyTexts], str | None]:
    """Returns completions of SFT and, if the run was evaluated, of PPO; and the judge's name, or None."""
    sft, record = run.checkpoint("sft"), run.record("eval")
    document = record.read()
    if document.get("status") != "finished":
        owner, source = open_pairs(run)
        samples = sft_samples(owner, owner.settings("reward"), source, sft)
        groups = group_other_prompts(samples.prompts, run.shared.evaluation.group)
        return {"sft": PolicyTexts(groups, samples.texts, samples.ended)}, None
    fix = "evaluate again with `rlhf-zoo eval --restart`."
    if document["parents"]["sft"]["fingerprint"] != sft.lineage["fingerprint"]:
        raise ZooError(f"{record.path} evaluates a different SFT policy than {run.record('sft').path}: {fix}")
    path = record.path / "samples.jsonl"
    try:
        evaluation = read_json(record.path / "evaluation.json")
        held_out = evaluation_rows(run, stage_source(run, "ppo"), policy_folder=sft.path)
        per_prompt = evaluation["samples_per_prompt"]
        held_out = held_out.select(range(evaluation["rows"]))
        rows = read_samples(path, held_out["prompt"], per_prompt)
        row_groups = group_rows(held_out, run.shared.evaluation.group)
        prompts = [prompt for prompt in held_out["prompt"] for _ in range(per_prompt)]
        groups = [group for group in row_groups for _ in range(per_prompt)]
        texts_by_side = {side: _texts_of_side(rows, prompts, groups, side) for side in ("sft", "ppo")}
        return texts_by_side, evaluation["judge"]["name"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise ZooError(f"{path} cannot be read ({error!r}): {fix}") from error


def _texts_of_side(
    rows: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt], groups: Sequence[int], side: str
) -> PolicyTexts:
    """Returns the texts of SFT or PPO, with their prompts. `prompts` has a text or a conversation for each row."""
    return PolicyTexts(
        groups=groups,
        texts=[append_completion(prompt, row[side]["completion"]) for prompt, row in zip(prompts, rows, strict=True)],
        ended=[row[side]["ended"] for row in rows],
        judge_scores=[row[side]["judge"] for row in rows],
        kl=[row[side]["kl"] for row in rows],
    )


def _score_pairs_and_texts(
    runs: Sequence[RunContext], texts_by_side: Mapping[str, PolicyTexts]
) -> tuple[EnsembleScores, str]:
    """Returns each model's scores of the held-out pairs and of the texts, and the name of the pairs' split."""
    owner, source = open_pairs(runs[0])
    held_out = held_out_pairs(owner, source)
    assert held_out is not None  # `check` refuses such a recipe
    pairs, split = held_out
    margins = []
    scores_by_side: dict[str, list[list[float]]] = {side: [] for side in texts_by_side}
    for run in runs:  # run by run, so that only one model is in memory at a time
        path, use_cpu = run.checkpoint("reward").path, run.settings("reward").trainer.use_cpu
        tokenizer = load_tokenizer(path)
        model = move_to_best_device(load_classifier(path), use_cpu=use_cpu)
        reward_model = RewardModel(model, tokenizer, tokenizer, center=False, scale=False)
        pair_scores = score_pairs(reward_model, pairs)
        margins.append(np.subtract(pair_scores["chosen"], pair_scores["rejected"]))
        for side, policy_texts in texts_by_side.items():
            scores = reward_model.score_texts(policy_texts.texts, ended=policy_texts.ended)
            scores_by_side[side].append(scores.tolist())
    pair_groups = group_other_prompts(pairs["prompt"], owner.shared.evaluation.group)
    raw_scores = {side: np.array(scores) for side, scores in scores_by_side.items()}
    return EnsembleScores(np.array(margins), pair_groups, raw_scores, texts_by_side, runs[0].shared.seed), split


def write_overview(run: Path, document: Mapping[str, Any]) -> Path:
    """Writes overview.json and overview.png next to the models. Returns the path of overview.json.

    Args:
        run: The run directory.
        document: The document that `overview` returned.
    """
    path = run / ENSEMBLE / "overview.json"
    write_json(path, document)
    plot_ensemble(document, path.with_suffix(".png"))
    return path
