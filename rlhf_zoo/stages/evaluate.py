"""The eval stage: PPO against SFT on held-out prompts, by a judge that is not the training reward."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ..errors import ZooError
from ..evaluation.judges import ClassifierJudge, FunctionJudge
from ..evaluation.length_control import length_controlled_win_rate
from ..evaluation.stats import Estimate, bootstrap_mean, bootstrap_perplexity, win_rate
from ..evaluation.text import distinct_n_estimate, repetition
from ..hub.publish import checkpoint_files
from ..models import load_causal
from ..ppo.completions import TAKEN
from ..record import checkpoint_step, fingerprint, now, write_json, write_text
from .context import Checkpoint, RunContext, versions
from .data import DataSource, data_source
from .interrupt import Stopped
from .measure import Measured, Yardstick, judge_is_reward, measure, yardstick
from .train import quiet
from .trajectory import Trajectory, follow

__all__ = ["Measured", "Yardstick", "check_prompts", "measure", "run", "same_weights", "yardstick"]

EVAL_STREAM = 5
TIE = 1e-9  # judges' scores that differ by less are equal


def run(context: RunContext) -> bool:
    """Evaluates the finished PPO policy against its SFT policy. Returns False when that was done already.

    Writes eval/evaluation.json and eval/samples.jsonl. The figures are over the test split, which nothing else reads.
    """
    started = time.monotonic()
    quiet()
    shared = context.shared
    source = data_source(context)
    checkpoints = {stage: context.checkpoint(stage) for stage in ("sft", "ppo")}
    record = context.record("eval")
    if context.restart:
        record.clear()
    resolved = {
        "evaluation": asdict(shared.evaluation),
        "seed": shared.seed,
        "data": source.lineage["fingerprint"],
        "parents": {stage: found.lineage["fingerprint"] for stage, found in checkpoints.items()},
    }
    record.check_fingerprint(resolved, recipe=context.recipe.name)
    if record.read().get("status") == "finished":
        return False
    prompts = check_prompts(context, source)
    record.write(
        stage="eval",
        recipe=context.recipe.name,
        status="running",
        seed=shared.seed,
        fingerprint=fingerprint(resolved),
        resolved=resolved,
        versions=versions(),
        parents={stage: dict(found.lineage) for stage, found in checkpoints.items()},
        hub=context.hub.label,
        repo=None,
        command=context.command,
    )
    try:
        tools = yardstick(context, source, checkpoints["sft"].path)
        followed = follow(context, source, tools)
        chosen = _choose(context, followed)
        if chosen is not None:
            checkpoints["ppo"] = context.checkpoint("ppo")
            record.write(parents={stage: dict(found.lineage) for stage, found in checkpoints.items()})
        document, samples = _evaluate(context, tools, checkpoints, prompts)
    except KeyboardInterrupt as error:
        record.write(status="interrupted")
        raise Stopped from error
    seconds = time.monotonic() - started
    write_json(record.path / "evaluation.json", {**document, **_verdict(record.path, followed), "seconds": seconds})
    write_text(record.path / "samples.jsonl", samples)
    if chosen is not None:
        context.record("ppo").write(chosen=chosen)
    record.write(status="finished", seconds=seconds, finished=now())
    return True


def check_prompts(context: RunContext, source: DataSource) -> Dataset:
    """Rows of the held-out prompts that the evaluation asks for. Raises ZooError when the test split has too few."""
    wanted = context.shared.evaluation.prompts
    prompts = source.load("prompts", "test", columns=["prompt"])
    if len(prompts) < wanted:
        raise ZooError(
            f"The test split has {len(prompts)} prompts and evaluation.prompts asks for {wanted}: lower it, or prepare "
            "more data."
        )
    return prompts.select(range(wanted))


def check_judges(context: RunContext) -> None:
    """Raises ZooError for a judge or a lexicon that cannot be had, before anything is trained."""
    config = context.shared.evaluation
    if config.judge != "classifier":
        FunctionJudge(config.judge)
    if config.lexicon is not None:
        from ..corpora.product_remarks import lexicon

        lexicon(config.lexicon)


def _evaluate(
    context: RunContext, tools: Yardstick, checkpoints: Mapping[str, Checkpoint], rows: Dataset
) -> tuple[dict[str, Any], str]:
    """The contents of evaluation.json, less its seconds, and of samples.jsonl."""
    config, seed = context.shared.evaluation, context.shared.seed
    groups = [i for i in range(config.prompts) for _ in range(config.samples)]
    keys = [(EVAL_STREAM, i // config.samples, i % config.samples) for i in range(len(groups))]
    columns = rows.select(groups).to_dict()
    asked = columns["prompt"]
    columns = {name: values for name, values in columns.items() if name not in TAKEN}
    policies = {"sft": tools.reference, "ppo": load_causal(checkpoints["ppo"].path), "control": tools.reference}
    measured = {
        name: measure(
            policy,
            tools,
            asked,
            keys=keys,
            seed=seed + (name == "control"),
            desc=f"evaluating {name}",
            columns=columns,
        )
        for name, policy in policies.items()
    }
    samples = _samples(tools, measured, asked, groups, config.samples)
    return _document(context, tools, measured, groups), samples


def _choose(context: RunContext, followed: Trajectory | str) -> dict[str, Any] | None:
    """The chosen checkpoint, for run.json, where the run's rule leaves it to the verdict; else None.

    Where the verdict recommends none, the last stays the chosen one, and the card says what the verdict is. Until it is
    evaluated, the choice is `open`, and nothing is published as `main`.
    """
    record = context.record("ppo")
    before = record.read().get("chosen") or {}
    if before.get("rule") != "recommended":
        return None
    recommended = None if isinstance(followed, str) else followed.verdict.recommended
    last = record.last_checkpoint()
    assert last is not None  # a finished stage has one
    step = checkpoint_step(last) if recommended is None else recommended
    chosen = {"step": step, "rule": "recommended", "metric": None, "value": None}
    record.write(chosen={**chosen, "open": True})
    return chosen


def _verdict(folder: Path, followed: Trajectory | str) -> dict[str, Any]:
    """What evaluation.json says of the run's checkpoints; their scores by prompt go to a file beside it."""
    scores = folder / "over_training.json"
    if isinstance(followed, str):
        scores.unlink(missing_ok=True)
        return {"verdict": None, "recommended": None, "over_training": {"problem": followed}}
    write_json(scores, followed.arrays())
    found = followed.to_json()
    return {"verdict": found["verdict"], "recommended": found["recommended"], "over_training": found}


def _estimates(found: Measured, judge: str, groups: Sequence[int], seed: int) -> dict[str, Estimate]:
    return {
        "reward": bootstrap_mean(found.reward, groups, seed=seed),
        "judge": bootstrap_mean(found.judges[judge], groups, seed=seed),
        "kl": bootstrap_mean(found.kl, groups, seed=seed),
        "exact_kl": bootstrap_mean(found.exact_kl, groups, seed=seed),
        "length": bootstrap_mean(found.length, groups, seed=seed),
        "eos_rate": bootstrap_mean([float(ended) for ended in found.ended], groups, seed=seed),
        "distinct_1": distinct_n_estimate(found.completions, groups, 1),
        "distinct_2": distinct_n_estimate(found.completions, groups, 2),
        "repetition": bootstrap_mean([repetition(text) for text in found.completions], groups, seed=seed),
        "sft_perplexity": bootstrap_perplexity(found.sft_logprob, found.length, groups, seed=seed),
    }


def _document(
    context: RunContext, tools: Yardstick, measured: Mapping[str, Measured], groups: Sequence[int]
) -> dict[str, Any]:
    seed, config = context.shared.seed, context.shared.evaluation
    headline = tools.judges[0]

    def against_sft(side: str, judge: str) -> dict[str, Any]:
        ours, theirs = measured[side].judges[judge], measured["sft"].judges[judge]
        return win_rate(ours, theirs, groups, seed=seed, tolerance=TIE).to_json()

    judges = {
        judge.name: {
            "description": judge.description,
            **{
                side: bootstrap_mean(measured[side].judges[judge.name], groups, seed=seed).to_json()
                for side in ("sft", "ppo")
            },
            "win_rate": against_sft("ppo", judge.name),
            "control": against_sft("control", judge.name),
        }
        for judge in tools.judges
    }
    about = {"name": headline.name, "description": headline.description, "is_training_reward": judge_is_reward(context)}
    if isinstance(headline, ClassifierJudge):
        about["accuracy"] = headline.accuracy.to_json()
    return {
        "schema": 1,
        "recipe": context.recipe.name,
        "seed": seed,
        "split": "test",
        "prompts": config.prompts,
        "samples_per_prompt": config.samples,
        "n": len(groups),
        "temperature": tools.temperature,
        "max_new_tokens": tools.max_new_tokens,
        "simulated": context.shared.simulated,
        "judge": about,
        "judges": judges,
        "reward_model": context.record("reward").read().get("reward_model"),
        **{
            side: {
                name: estimate.to_json()
                for name, estimate in _estimates(measured[side], headline.name, groups, seed).items()
            }
            for side in ("sft", "ppo")
        },
        "win_rate": against_sft("ppo", headline.name),
        "win_rate_at_equal_length": _at_equal_length(measured, headline.name, groups, seed),
        "control": against_sft("control", headline.name),
    }


def _at_equal_length(measured: Mapping[str, Measured], judge: str, groups: Sequence[int], seed: int) -> dict[str, Any]:
    ours, theirs = measured["ppo"], measured["sft"]
    apart = np.subtract(ours.judges[judge], theirs.judges[judge])
    scores = np.where(np.abs(apart) <= TIE, 0.5, apart > 0)
    return length_controlled_win_rate(scores, ours.length, theirs.length, groups, seed=seed).to_json()


def _samples(
    tools: Yardstick, measured: Mapping[str, Measured], prompts: Sequence[str], groups: Sequence[int], per_prompt: int
) -> str:
    lines = []
    for i, prompt in enumerate(prompts):
        row: dict[str, Any] = {"prompt": prompt, "sample": i % per_prompt}
        for side, found in measured.items():
            row[side] = {
                "completion": found.completions[i],
                "reward": found.reward[i],
                "judge": found.judges[tools.judges[0].name][i],
                "kl": found.kl[i],
                "length": found.length[i],
                "ended": found.ended[i],
            }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return "".join(lines)


def same_weights(a: Path, b: Path) -> bool:
    """Whether two checkpoints hold the same weight files, of those that are published, by sha256."""
    import hashlib

    def digests(folder: Path) -> dict[str, str]:
        return {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in checkpoint_files(folder).items()
            if name.endswith(".safetensors")
        }

    return bool(digests(a)) and digests(a) == digests(b)
