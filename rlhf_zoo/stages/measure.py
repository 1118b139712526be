"""What completions are measured with: sampling, reward, KL and the judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation.judges import ClassifierJudge, FunctionJudge, Judge, LexiconJudge
from ..functional import exact_kl, selected_logprobs
from ..models import load_causal, load_classifier
from ..plugins import load_object
from ..rewards import RewardModel, Rewards
from ..sampling import Samples, response_logits
from .context import RunContext
from .data import DataSource
from .generate import complete

__all__ = ["Measured", "Yardstick", "judge_is_reward", "measure", "yardstick"]

CHUNK = 64  # completions whose logits of both policies are held at once


@dataclass(frozen=True)
class Yardstick:
    """What completions are measured with: one reference, one reward, the judges (the first is the headline's)."""

    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards
    judges: Sequence[Judge]
    max_new_tokens: int
    temperature: float


@dataclass(frozen=True)
class Measured:
    """One policy's completions, one entry a (prompt, sample).

    Against the SFT policy, in nats a completion: kl, Σ_t k1 of the tokens drawn; exact_kl, Σ_t KL(π‖π_SFT) of the
    distributions that they were drawn from, which has the same mean and less noise. sft_logprob: Σ_t log π_SFT.
    """

    completions: list[str]
    reward: list[float]
    kl: list[float]
    length: list[int]
    ended: list[bool]
    judges: dict[str, list[float]]
    exact_kl: list[float]
    sft_logprob: list[float]
    tokens: list[list[int]]


def measure(
    policy: PreTrainedModel,
    yardstick: Yardstick,
    prompts: Sequence[str],
    *,
    keys: Sequence[tuple[int, ...]],
    seed: int,
    desc: str,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> Measured:
    """Samples one completion a prompt and measures each. Two policies under equal keys and seed draw alike.

    columns: the prompts' other columns, one value a prompt, which reward functions may read.
    """
    done = complete(
        policy,
        yardstick.tokenizer,
        prompts,
        keys=keys,
        seed=seed,
        max_new_tokens=yardstick.max_new_tokens,
        temperature=yardstick.temperature,
        desc=desc,
    )
    reward: list[float] = []
    kl: list[float] = []
    exact: list[float] = []
    sft: list[float] = []
    for batch in done.batches:
        chosen = slice(len(reward), len(reward) + len(batch))
        texts = [prompt + text for prompt, text in zip(prompts[chosen], done.texts[chosen], strict=True)]
        others = {name: list(values[chosen]) for name, values in (columns or {}).items()}
        reward += yardstick.rewards(batch, prompts[chosen], done.texts[chosen], texts, others).total.tolist()
        for part in batch.chunks(CHUNK):
            drawn, along, rated = _against(policy, yardstick, part)
            kl += drawn
            exact += along
            sft += rated
    judged = {judge.name: judge(list(prompts), done.texts) for judge in yardstick.judges}
    tokens = [list(row) for batch in done.batches for row in batch.token_lists()]
    return Measured(done.texts, reward, kl, done.lengths, done.ended, judged, exact, sft, tokens)


@torch.no_grad()
def _against(
    policy: PreTrainedModel, yardstick: Yardstick, batch: Samples
) -> tuple[list[float], list[float], list[float]]:
    """Of each completion, summed over its tokens, nats: k1, the exact KL to the reference, and log π_ref."""
    logits = response_logits(yardstick.reference, batch, temperature=yardstick.temperature)
    reference = selected_logprobs(logits, batch.completion_ids)
    if policy is yardstick.reference:
        exact = torch.zeros_like(reference)
    else:
        exact = exact_kl(response_logits(policy, batch, temperature=yardstick.temperature), logits)
    found = (batch.logprobs - reference, exact, reference)
    drawn, along, rated = (one.masked_fill(~batch.mask, 0).sum(1).tolist() for one in found)
    return drawn, along, rated


def yardstick(context: RunContext, source: DataSource, reference_path: Path) -> Yardstick:
    """The SFT policy at `reference_path` as reference, PPO's reward, and the recipe's judges."""
    ppo = context.settings("ppo")
    tokenizer = AutoTokenizer.from_pretrained(reference_path)
    rewards: list[Any] = [load_object(name, group="rlhf_zoo.rewards") for name in ppo.data.reward_funcs or []]
    if ppo.data.reward_model_path is not None:
        path = (
            context.checkpoint("reward").path if ppo.data.reward_model_path == "reward" else ppo.data.reward_model_path
        )
        rewards.insert(0, RewardModel(load_classifier(path), AutoTokenizer.from_pretrained(path), tokenizer))
    return Yardstick(
        reference=load_causal(reference_path).eval(),
        tokenizer=tokenizer,
        rewards=Rewards(rewards, weights=ppo.trainer.reward_weights),
        judges=_judges(context, source),
        max_new_tokens=ppo.trainer.response_length,
        temperature=ppo.trainer.temperature,
    )


def judge_is_reward(context: RunContext) -> bool:
    """Whether the headline's judge is a reward function that PPO is paid by: then it judges nothing."""
    ppo = context.settings("ppo")
    functions = list(ppo.data.reward_funcs or [])
    models = 0 if ppo.data.reward_model_path is None else 1
    weights = ppo.trainer.reward_weights or [1.0] * (models + len(functions))
    paid = {name for name, weight in zip(functions, weights[models:], strict=True) if weight}
    return context.shared.evaluation.judge in paid


def _judges(context: RunContext, source: DataSource) -> list[Judge]:
    config = context.shared.evaluation
    judges: list[Judge] = []
    if config.judge == "classifier":
        saved = context.record("eval").path / "judge.npz"
        trained = ClassifierJudge.train(
            source.load("judge", "train", columns=["text", "label"]), seed=context.shared.seed
        )
        trained.save(saved)
        judges.append(trained)
    else:
        judges.append(FunctionJudge(config.judge, name=config.judge_name, description=config.judge_description or None))
    if config.lexicon is not None:
        from ..corpora.product_remarks import lexicon

        signs = lexicon(config.lexicon)
        positive, negative = ([word for word, sign in signs.items() if sign == wanted] for wanted in (1, -1))
        judges.append(LexiconJudge(positive, negative))
    return judges
