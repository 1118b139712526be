"""How much of the gold utility that a run could have had its recommended checkpoint has.

The recommended checkpoint is chosen on validation prompts; here every checkpoint answers the test prompts, with the
keys and the seed that the eval stage gives them. So SFT's figure is that of evaluation.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_zoo.errors import ZooError
from rlhf_zoo.record import StageRecord, checkpoint_step, read_json, write_json

FILE = "gain.json"


@dataclass(frozen=True)
class Gain:
    """Gold utility of SFT, of the best and the last checkpoint, and of the recommended one.

    recommended_step, recommended: None where none is recommended. Shares are of best − SFT; None where no checkpoint is
    above SFT, so that there is no gain to have.
    """

    sft: float
    best_step: int
    best: float
    last: float
    recommended_step: int | None
    recommended: float | None

    @property
    def share(self) -> float | None:
        """What the recommended checkpoint has; 0 where none is recommended: then one stays with SFT."""
        return self._share(self.sft if self.recommended is None else self.recommended)

    @property
    def last_share(self) -> float | None:
        """What the last checkpoint has, which is the policy without a verdict."""
        return self._share(self.last)

    def _share(self, gold: float) -> float | None:
        possible = self.best - self.sft
        return (gold - self.sft) / possible if possible > 0 else None


def share_of_gain(sft: float, gold: Mapping[int, float], recommended: int | None) -> Gain:
    """gold: step -> mean gold utility. Raises ZooError where `recommended` is none of the steps, or there are none."""
    if not gold:
        raise ZooError("No checkpoint was measured, so no gain can be said: measure the run's checkpoints first.")
    if recommended is not None and recommended not in gold:
        raise ZooError(
            f"Step {recommended} is recommended and was not measured; the steps are {sorted(gold)}: evaluate again."
        )
    best = max(sorted(gold), key=gold.__getitem__)
    chosen = None if recommended is None else gold[recommended]
    return Gain(sft, best, gold[best], gold[max(gold)], recommended, chosen)


def stored(run: Path) -> dict[str, Any] | None:
    """What `measured` left in this run: {sft, checkpoints: [{step, gold}], prompts, samples}.

    None where it did not finish, or was of other checkpoints or another evaluation than the run holds now.
    """
    if not (run / FILE).is_file():
        return None
    document = read_json(run / FILE)
    if document["of"] != _of(run) or {row["step"] for row in document["checkpoints"]} != set(_steps(run)):
        return None
    return {key: document[key] for key in ("sft", "checkpoints", "prompts", "samples")}


def measured(run: Path, base: Path) -> dict[str, Any]:
    """Measures what is not measured yet, one checkpoint after the other, and returns `stored`.

    base: the run directory in which data and SFT lie; `run` itself but for a run of an ablation. Raises ZooError where
    a checkpoint that the verdict followed is not on the disk any more.
    """
    if (found := stored(run)) is not None:
        return found
    document = read_json(run / FILE) if (run / FILE).is_file() else {}
    evaluation = _resolved(run)["evaluation"]
    if document.get("of") != _of(run):
        document = {
            "schema": 1,
            "of": _of(run),
            "prompts": evaluation["prompts"],
            "samples": evaluation["samples"],
            "sft": None,
            "checkpoints": [],
        }
    lying = {checkpoint_step(path): path for path in StageRecord(run / "ppo").checkpoints()}
    gold = _Gold(run, base)
    if document["sft"] is None:
        document["sft"] = gold(base / "sft" / read_json(run / "eval" / "run.json")["parents"]["sft"]["path"])
        write_json(run / FILE, document)
    done = {row["step"] for row in document["checkpoints"]}
    for step in _steps(run):
        if step in done:
            continue
        if step not in lying:
            raise ZooError(f"{run / 'ppo'} holds no checkpoint-{step} any more: train the run again with --restart.")
        document["checkpoints"].append({"step": step, "gold": gold(lying[step])})
        write_json(run / FILE, document)
    found = stored(run)
    assert found is not None
    return found


class _Gold:
    """The mean gold utility of a checkpoint on the test prompts of a run."""

    def __init__(self, run: Path, base: Path) -> None:
        from transformers import AutoTokenizer

        from rlhf_zoo.evaluation.judges import FunctionJudge
        from rlhf_zoo.stages.train import quiet

        quiet()
        resolved = _resolved(run)
        ppo = StageRecord(run / "ppo").read()["resolved"]
        evaluation = resolved["evaluation"]
        lines = (base / "data" / "prompts" / "test.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines[: evaluation["prompts"]]]
        self.per_prompt = evaluation["samples"]
        self.prompts = [prompt for prompt in prompts for _ in range(self.per_prompt)]
        self.seed = resolved["seed"]
        self.max_new_tokens, self.temperature = ppo["response_length"], ppo["temperature"]
        self.load_tokenizer = AutoTokenizer.from_pretrained
        self.name = run.name
        self.judge = FunctionJudge(evaluation["judge"])

    def __call__(self, checkpoint: Path) -> float:
        from rlhf_zoo.evaluator.head_to_head import STREAM
        from rlhf_zoo.models import load_causal
        from rlhf_zoo.runs.generate import complete

        done = complete(
            load_causal(checkpoint),
            self.load_tokenizer(checkpoint),
            self.prompts,
            keys=[(STREAM, *divmod(place, self.per_prompt)) for place in range(len(self.prompts))],
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            desc=f"gold utility of {self.name}, {checkpoint.name}",
        )
        return fmean(self.judge(self.prompts, done.texts))


def _resolved(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = StageRecord(run / "eval").read()["resolved"]
    return found


def _of(run: Path) -> dict[str, Any]:
    """What the figures belong to: policies, prompts and random numbers. (Which is recommended is not among it.)"""
    resolved = _resolved(run)
    asked = {key: resolved["evaluation"][key] for key in ("prompts", "samples")}
    return {"parents": resolved["parents"], "data": resolved["data"], "seed": resolved["seed"], **asked}


def _steps(run: Path) -> list[int]:
    """Those that the verdict followed."""
    over = read_json(run / "eval" / "evaluation.json").get("over_training") or {}
    return [one["step"] for one in over.get("checkpoints", [])]
