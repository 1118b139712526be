"""Reward models of one run that differ by the trainer's seed alone, and where they disagree.

The first is the run's own. RUN/ensemble/seed-K/reward is the reward stage under the seed K, on the same SFT policy and
the same pairs. RUN/ensemble/overview.json says what came of them: see `evaluation.ensemble`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ZooError
from ...evaluation.calibration import calibration
from ...evaluation.ensemble import agreements, by_kl, disagreement, standardised, unrelated
from ...evaluation.stats import Estimate, accuracy, bootstrap_mean, correlation
from ...fileio import read_json, write_json
from ...modeling.chat import append_completion
from ...modeling.devices import on_device
from ...modeling.loading import load_tokenizer
from ...modeling.models import load_classifier
from ...modeling.prompt_keys import prompt_key
from ...publishing.plots import plot_ensemble
from ...rewards import RewardModel
from ...runs.context import RunContext
from ...runs.dataset import evaluation_rows, stage_source
from ...runs.pairs import named_pairs
from ...runs.parents import member_run
from ...runs.registry import ENSEMBLE
from ..run_recipe import run_stage, said
from ..stages.pair_report import score_pairs
from ..stages.pairs import held_out_pairs, open_pairs
from ..stages.samples import pairs_seed, sft_samples
from ..stages.train import quiet
from .baseline import read_samples

SIDES = ("sft", "ppo")


def check(context: RunContext) -> None:
    """Raises ZooError for a recipe that has no ensemble, and for wrong keys, before anything is trained."""
    if "reward" not in context.recipe.stages:
        raise ZooError(
            f"The recipe {context.recipe.name} has no stage reward, so no model is trained: give it a reward.yaml."
        )
    for stage in context.recipe.stages:
        context.settings(stage)
    data = context.settings("reward").data
    if data.held_out_share is None and data.dataset_test_split is None and named_pairs(context) is None:
        raise ZooError(
            f"The recipe {context.recipe.name} holds no pairs out, on which its reward models could be compared: give "
            "--reward.dataset_test_split or --reward.held_out_share."
        )


def member(context: RunContext, seed: int) -> RunContext:
    """The run of the reward model under another seed. The run's own must have been trained."""
    flags = {stage: dict(keys) for stage, keys in context.flags.items()}
    own = flags.setdefault("reward", {})
    own["seed"] = seed
    settings, pairs = context.settings("reward"), named_pairs(context)
    if pairs is not None and pairs.commit is not None:
        flags["recipe"]["dataset_revision"] = pairs.commit
    if pairs is None and settings.data.simulated_pairs is not None:
        own["pairs_seed"] = pairs_seed(settings)
    return replace(member_run(context, seed), flags=flags)


def train(context: RunContext, count: int, console: Any) -> list[RunContext]:
    """Trains what is missing: the stages up to the reward model, and `count` − 1 more of it under the next seeds.

    context.restart is of the further ones. Returns the run of each model, the recipe's own first.
    """
    quiet()
    check(context)
    run = replace(context, restart=False)
    # A reward model may have started from an SFT policy of the Hub.
    for stage in ["reward"] if run.record("reward").read() else ["sft", "reward"]:
        _run(run, stage, console)
    first = run.settings("reward").trainer.seed
    runs = [run]
    for seed in range(first + 1, first + count):
        one = member(run, seed)
        _run(replace(one, restart=context.restart), "reward", console, f", seed {seed}")
        runs.append(one)
    return runs


def _run(context: RunContext, stage: str, console: Any, note: str = "") -> None:
    console.rule(f"[bold]{stage}{note}")
    if run_stage(context, stage):
        console.print(said(context, stage), highlight=False)
    else:
        console.print(f"{stage}{note} was finished before.", highlight=False)


@dataclass(frozen=True)
class Texts:
    """N completions, prompt before each, and of evaluated ones the judge's scores and Σ log π − log π_SFT, nats."""

    prompts: Sequence[str]
    texts: Sequence[Any]
    ended: Sequence[bool]
    judge: Sequence[float] | None = None
    kl: Sequence[float] | None = None


def overview(runs: Sequence[RunContext]) -> dict[str, Any]:
    """What overview.json says of the reward models of `runs`. Raises ZooError where an evaluation is of another run."""
    run = runs[0]
    texts, judge = _texts(run)
    margins, split, sides, pairs_of = _score(runs, texts)
    over = sides["sft"]
    for one, row in zip(runs, over, strict=True):
        if row.std() == 0:
            path = one.record("reward").path
            raise ZooError(f"The reward model in {path} gives all SFT completions the same score: train it longer.")
    seeds = [one.settings("reward").trainer.seed for one in runs]
    named: dict[str, Any] = {side: standardised(raw, over) for side, raw in sides.items()}
    mean_margin = (margins / over.std(axis=1, keepdims=True)).mean(axis=0)
    models = []
    for place, (one, seed) in enumerate(zip(runs, seeds, strict=True)):
        found = calibration(margins[place], seed=run.shared.seed)
        path = one.record("reward").path.relative_to(run.directory)
        models.append(
            {
                "seed": seed,
                "directory": path.as_posix(),
                "accuracy": accuracy(margins[place] > 0, pairs_of).to_json(),
                "ece": found["ece"],
                "ece_by_chance": found["ece_by_chance"],
                **_on_texts({side: rows[place] for side, rows in named.items()}, texts, run.shared.seed),
            }
        )
    shared = {side: rows.mean(axis=0) for side, rows in named.items()}
    agreed = agreements(margins)
    return {
        "schema": 1,
        "command": run.command,
        "recipe": run.recipe.name,
        "simulated": run.shared.simulated,
        "seeds": seeds,
        "split": split,
        "judge": judge,
        "models": models,
        "ensemble": {
            "accuracy": accuracy(mean_margin > 0, pairs_of).to_json(),
            **_on_texts(shared, texts, run.shared.seed),
        },
        "agreement": {
            "mean": fmean(found.value for found in agreed.values()),
            "pairs": [{"seeds": [seeds[a], seeds[b]], **found.to_json()} for (a, b), found in agreed.items()],
        },
        "disagreement": _disagreement(named, texts, run.shared.seed),
        "own_less_others": _own_less_others(named, texts, run.shared.seed),
    }


def _texts(run: RunContext) -> tuple[dict[str, Texts], str | None]:
    """Completions of SFT, of PPO where the run was evaluated, and the name of the judge, None where it was not."""
    sft, record = run.checkpoint("sft"), run.record("eval")
    document = record.read()
    if document.get("status") != "finished":
        opened, source = open_pairs(run)
        drawn = sft_samples(opened, opened.settings("reward"), source, sft)
        return {"sft": Texts(drawn.prompts, drawn.texts, drawn.ended)}, None
    mend = "make it again with `rlhf-zoo eval --restart`."
    if document["parents"]["sft"]["fingerprint"] != sft.lineage["fingerprint"]:
        raise ZooError(f"{record.path} is of another SFT policy than {run.record('sft').path}: {mend}")
    path = record.path / "samples.jsonl"
    try:
        document = read_json(record.path / "evaluation.json")
        asked, each = evaluation_rows(run, stage_source(run, "ppo"), path=sft.path), document["samples_per_prompt"]
        prompts = asked["prompt"][: document["rows"]]
        rows = read_samples(path, prompts, each)
        prompts = [prompt for prompt in prompts for _ in range(each)]
        return {side: _of(rows, prompts, side) for side in SIDES}, document["judge"]["name"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise ZooError(f"{path} cannot be read ({error!r}): {mend}") from error


def _of(rows: Sequence[Mapping[str, Any]], prompts: Sequence[Any], side: str) -> Texts:
    """prompts: of each row, a text or the conversation, which reward models render by their own template."""
    return Texts(
        [row["prompt"] for row in rows],
        [append_completion(prompt, row[side]["completion"]) for prompt, row in zip(prompts, rows, strict=True)],
        [row[side]["ended"] for row in rows],
        [row[side]["judge"] for row in rows],
        [row[side]["kl"] for row in rows],
    )


def _score(
    runs: Sequence[RunContext], texts: Mapping[str, Texts]
) -> tuple[NDArray[np.float64], str, dict[str, NDArray[np.float64]], list[str]]:
    """Raw scores of M models: margins (M, pairs) on the held-out pairs, their split, each side's texts (M, N), and what
    tells the pairs' prompts apart. A tie counts as wrong, as on a reward model's card.
    """
    opened, source = open_pairs(runs[0])
    held_out = held_out_pairs(opened, source)
    assert held_out is not None  # `check` refuses such a recipe
    pairs, split = held_out
    margins: list[NDArray[np.float64]] = []
    sides: dict[str, list[list[float]]] = {side: [] for side in texts}
    for one in runs:  # a single model is held at once
        path, use_cpu = one.checkpoint("reward").path, one.settings("reward").trainer.use_cpu
        tokenizer = load_tokenizer(path)
        model = on_device(load_classifier(path), use_cpu=use_cpu)
        scorer = RewardModel(model, tokenizer, tokenizer, center=False, scale=False)
        found = score_pairs(scorer, pairs)
        margins.append(np.subtract(found["chosen"], found["rejected"]))
        for side, read in texts.items():
            sides[side].append(scorer.score_texts(read.texts, ended=read.ended).tolist())
    scored = {side: np.array(scores) for side, scores in sides.items()}
    return np.array(margins), split, scored, [prompt_key(prompt) for prompt in pairs["prompt"]]


def _on_texts(scores: Mapping[str, NDArray[np.float64]], texts: Mapping[str, Texts], seed: int) -> dict[str, Any]:
    """Of evaluated completions: PPO's mean score, where SFT's have 0 ± 1, and by side Spearman's ρ with the judge.

    Both are None where nothing was evaluated, and ρ where one of its sides does not vary.
    """
    if "ppo" not in texts:
        return {"ppo_score": None, "judge_correlation": None}
    ranked = {
        side: correlation(scores[side], one.judge, one.prompts, seed=seed, ranks=True)
        for side, one in texts.items()
        if one.judge is not None
    }
    return {
        "ppo_score": bootstrap_mean(scores["ppo"], texts["ppo"].prompts, seed=seed).to_json(),
        "judge_correlation": {side: one.to_json() if one else None for side, one in ranked.items()},
    }


def _disagreement(named: Mapping[str, NDArray[np.float64]], texts: Mapping[str, Texts], seed: int) -> dict[str, Any]:
    apart = {side: disagreement(rows) for side, rows in named.items()}

    def mean(values: NDArray[np.float64]) -> Estimate:
        return bootstrap_mean(values, texts["sft"].prompts, seed=seed)  # rows of both sides have the same prompts

    evaluated = texts.get("ppo")
    found: dict[str, Any] = {
        "over": "completions of the evaluation" if evaluated else "samples of the SFT model on training prompts",
        "unrelated": unrelated(len(named["sft"])),
        "sft": mean(apart["sft"]).to_json(),
        "ppo": None,
        "ppo_less_sft": None,
        "by_kl": [],
    }
    if evaluated is not None and evaluated.kl is not None:
        found["ppo"] = mean(apart["ppo"]).to_json()
        found["ppo_less_sft"] = mean(apart["ppo"] - apart["sft"]).to_json()
        found["by_kl"] = by_kl(apart["ppo"], evaluated.kl, evaluated.prompts, seed=seed)
    return found


def _own_less_others(
    named: Mapping[str, NDArray[np.float64]], texts: Mapping[str, Texts], seed: int
) -> dict[str, Any] | None:
    """What the run's own reward model gives PPO's completions beyond the mean of the others."""
    if "ppo" not in named:
        return None
    beyond = named["ppo"][0] - named["ppo"][1:].mean(axis=0)
    return bootstrap_mean(beyond, texts["ppo"].prompts, seed=seed).to_json()


def write_overview(run: Path, document: Mapping[str, Any]) -> tuple[Path, Path]:
    """Writes overview.json and overview.png beside the models; returns both paths."""
    folder = run / ENSEMBLE
    write_json(folder / "overview.json", document)
    plot_ensemble(document, folder / "overview.png")
    return folder / "overview.json", folder / "overview.png"
