"""Policies that were trained, for the verdict's rates: what PPO, DPO and RLOO of a finished run wrote to test prompts.

No model of theirs is loaded: their completions lie in the run. SFT, which stands beside them and by whose likelihoods
the probes go, and the reward model, which scores texts that are edited, are those of the run.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from figures.experiments import EXPERIMENTS, Experiment
from figures.keep import finished
from worlds import JUDGES, SAMPLES, Scores, confirmed, decided, gold, noisy_gold

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.probes import Completions
from rlhf_zoo.evaluation.stats import bootstrap_mean
from rlhf_zoo.evaluation.verdict import Verdict
from rlhf_zoo.record import StageRecord
from rlhf_zoo.studies.baseline import read_lines

TINY = next(one for one in EXPERIMENTS if one.gold)
BASELINES = {"DPO": "dpo", "RLOO": "rloo"}
COLUMNS = {"rewards": "reward", "logprobs": "logprobs", "dependence": "dependence"}
SFT_SAMPLES = 8
STREAM = 17


@dataclass(frozen=True)
class Written:
    """A completion, its training reward, log p of its tokens under SFT, and how much it depends on its prompt."""

    text: str
    reward: float
    logprobs: Sequence[float]
    dependence: float


Policy = Mapping[str, Sequence[Written]]
"""What it wrote to each prompt."""


@dataclass(frozen=True, eq=False)
class Trained:
    """Policies by their method, SFT beside them, all on the same prompts. reward: of texts that were edited."""

    sft: Policy
    methods: Mapping[str, Sequence[Policy]]
    reward: Scores

    @cached_property
    def improving(self) -> dict[str, list[Policy]]:
        """Those whose mean gold utility is above SFT's by an interval above 0; methods that have one."""
        found = {method: [one for one in of if self._improves(one)] for method, of in self.methods.items()}
        return {method: of for method, of in found.items() if of}

    def _improves(self, policy: Policy) -> bool:
        ours, theirs = (
            [np.mean([gold(prompt, each.text) for each in one[prompt]]) for prompt in self.sft]
            for one in (policy, self.sft)
        )
        return bootstrap_mean(np.subtract(ours, theirs), range(len(ours)), seed=0).ci95[0] > 0

    def verdicts(self, method: str, seed: int, *, prompts: int) -> dict[str, Verdict]:
        """By each judge, of one of the method's policies in turn: some of the prompts choose, the rest confirm."""
        policies = self.improving[method]
        rng, noise = random.Random(f"{method} {seed}"), random.Random(f"noise {seed}")
        asked = rng.sample(list(self.sft), k=len(self.sft))
        honest = noisy_gold(noise)
        (ours, theirs), again = (
            [_drawn(one, part, rng, honest) for one in (policies[seed % len(policies)], self.sft)]
            for part in (asked[:prompts], asked[prompts:])
        )
        found = decided(ours, theirs, self.reward, honest, seed=seed, judges=list(JUDGES))
        return {
            name: confirmed(one, *again, honest if name == "honest" else self.reward, seed=seed)
            for name, one in found.items()
        }


def _drawn(policy: Policy, prompts: Sequence[str], rng: random.Random, judge: Scores) -> Completions:
    rows = [(prompt, one) for prompt in prompts for one in rng.sample(policy[prompt], k=SAMPLES)]
    asked, texts = [prompt for prompt, _ in rows], [one.text for _, one in rows]
    found = {name: [getattr(one, column) for _, one in rows] for name, column in COLUMNS.items()}
    return Completions(asked, texts, judged=judge(asked, texts), **found)


# ---- from the files of a run


def written(run: Path, experiment: Experiment = TINY) -> Trained:
    """Of a finished run: its policies under the recipe's own β, by PPO, DPO and RLOO, each under several seeds.

    Raises ZooError where a method has none.
    """
    files = _files(run, experiment)
    if missing := [method for method, found in files.items() if not found]:
        raise ZooError(
            f"{run} holds no finished policy of {', '.join(missing)} under β = {experiment.beta:g}: run `python "
            f"benchmarks/evidence.py {experiment.name('runs')} {experiment.name('baselines')}` first."
        )
    reader = _Reader(run)
    methods = {method: [reader.read(rows) for rows in found] for method, found in files.items()}
    return Trained(reader.sft(list(methods["PPO"][0])), methods, reader.reward)


Row = tuple[str, str, bool]
"""A prompt, a completion, and whether it ended by itself."""


def _files(run: Path, experiment: Experiment) -> dict[str, list[list[Row]]]:
    own = [variant.directory(run) for variant in experiment.spread if variant.value == experiment.beta]
    found = {"PPO": [_rows(one / "eval" / "samples.jsonl", "ppo") for one in own if finished(one)]}
    for method, folder in BASELINES.items():
        trained = sorted((run / "baseline" / folder).glob(f"beta-{experiment.beta:g}-seed-*"))
        done = (one for one in trained if StageRecord(one).read().get("status") == "finished")
        found[method] = [_rows(one / "samples.jsonl") for one in done]
    return found


def _rows(path: Path, side: str | None = None) -> list[Row]:
    rows = [(line["prompt"], line[side] if side else line) for line in read_lines(path)]
    return [(prompt, one["completion"], one["ended"]) for prompt, one in rows]


class _Reader:
    """Reads completions as the evaluation of the run does, by its SFT policy and its reward model."""

    def __init__(self, run: Path) -> None:
        from rlhf_zoo.evaluator.judges import Panel
        from rlhf_zoo.evaluator.measure import Evaluator
        from rlhf_zoo.model_files import load_tokenizer
        from rlhf_zoo.models import load_causal
        from rlhf_zoo.rewards import RewardModel, Rewards
        from rlhf_zoo.rewards.loading import load_reward_model

        sft, model = (StageRecord(run / stage).chosen_checkpoint() for stage in ("sft", "reward"))
        if sft is None or model is None:
            raise ZooError(
                f"{run} holds no SFT policy or no reward model any more: train the run again with --restart."
            )
        ppo = StageRecord(run / "ppo").read()["resolved"]
        tokenizer = load_tokenizer(sft)
        rewards = Rewards([RewardModel(load_reward_model(model), load_tokenizer(model), tokenizer)])
        limit, temperature = ppo["response_length"], ppo["temperature"]
        self.tools = Evaluator(load_causal(sft).eval(), tokenizer, rewards, Panel([]), limit, temperature)
        self.scored: dict[tuple[str, str], float] = {}

    def reward(self, prompts: Sequence[str], texts: Sequence[str]) -> list[float]:
        """Each once, as edits of the same texts come again and again."""
        from rlhf_zoo.evaluator.written import rewarded

        pairs = list(zip(prompts, texts, strict=True))
        if new := [pair for pair in dict.fromkeys(pairs) if pair not in self.scored]:
            found = rewarded(self.tools, [prompt for prompt, _ in new], [text for _, text in new], {})
            self.scored.update(zip(new, found, strict=True))
        return [self.scored[pair] for pair in pairs]

    def read(self, rows: Sequence[Row]) -> Policy:
        from rlhf_zoo.evaluator.written import dependence, logprobs_under

        tools, prompts, texts = self.tools, [prompt for prompt, _, _ in rows], [text for _, text, _ in rows]
        ids = tools.tokenizer(texts, add_special_tokens=False)["input_ids"]
        tokens = [[*own, *[tools.tokenizer.eos_token_id] * ended] for own, (_, _, ended) in zip(ids, rows, strict=True)]
        model, how = (tools.reference, tools.tokenizer), {"temperature": tools.temperature}
        logprobs = logprobs_under(*model, prompts, tokens, **how)
        tied = dependence(*model, prompts, tokens, [sum(one) for one in logprobs], seed=0, **how)
        assert tied is not None
        found: dict[str, list[Written]] = {prompt: [] for prompt in prompts}
        for prompt, *one in zip(prompts, texts, self.reward(prompts, texts), logprobs, tied, strict=True):
            found[prompt].append(Written(*one))
        return found

    def sft(self, prompts: Sequence[str]) -> Policy:
        asked = [prompt for prompt in prompts for _ in range(SFT_SAMPLES)]
        keys = [(STREAM, *divmod(place, SFT_SAMPLES)) for place in range(len(asked))]
        done = self.tools.sampled(self.tools.reference, asked, keys=keys, seed=0, desc="completions of SFT")
        return self.read(list(zip(asked, done.texts, done.ended, strict=True)))
