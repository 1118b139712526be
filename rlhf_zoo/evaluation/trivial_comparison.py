"""Chooses trivial policies on validation prompts, and compares them with SFT and PPO on test prompts."""

from collections.abc import Mapping, Sequence

import numpy as np
from datasets import Dataset

from ..modeling.chat_template import Prompt
from .head_to_head import HeadToHead
from .judges.llm import LLMJudge
from .judges.panel import score_completions
from .measure import Evaluator, PolicyMeasurements, repeat_prompts
from .stats import TIE_TOLERANCE, bootstrap_mean, win_rate
from .text_logprobs import score_by_reward
from .trivial_policies import (
    TrivialPolicy,
    TrivialScore,
    TrivialScores,
    append_ending,
    choose_policies,
    select_candidates,
    shift_by_prompt,
)


def choose_trivial_policies(
    evaluator: Evaluator,
    prompts: Sequence[Prompt],
    columns: Mapping[str, Sequence[object]],
    sft: PolicyMeasurements,
    ppo: PolicyMeasurements,
    *,
    samples_per_prompt: int,
) -> list[TrivialPolicy]:
    """Chooses trivial policies from SFT's and PPO's completions to validation prompts, without the judges.

    Args:
        evaluator: The evaluator, of which only the training reward is used.
        prompts: (N,) prompts, each repeated for its samples.
        columns: Name -> (N,) values of the prompts' other columns.
        sft: The SFT policy's completions.
        ppo: The PPO policy's completions.
        samples_per_prompt: Completions per prompt.

    Returns:
        The policies.
    """
    first_samples = slice(None, None, samples_per_prompt)
    distinct_prompts = prompts[first_samples]
    columns = {name: values[first_samples] for name, values in columns.items()}
    favorite = None
    if sft.reward and ppo.reward:
        candidates = select_candidates([*sft.completions, *ppo.completions], [*sft.reward, *ppo.reward])
        # A constant is written after every prompt, so each candidate is scored after all prompts.
        means = [
            np.mean(
                score_by_reward(
                    evaluator,
                    distinct_prompts,
                    [text] * len(distinct_prompts),
                    columns,
                    desc=f"one text for every prompt, {number} of {len(candidates)}",
                )
            )
            for number, text in enumerate(candidates, 1)
        ]
        favorite = candidates[int(np.argmax(means))]
    return choose_policies(sft.completions, ppo.completions, favorite=favorite)


def score_trivial_policies(comparison: HeadToHead, policies: Sequence[TrivialPolicy], rows: Dataset) -> TrivialScores:
    """Scores trivial policies by the headline judge, on the prompts and samples of a comparison.

    A language model costs money for each text, so it judges only the constants.

    Args:
        comparison: The measured policies.
        policies: The trivial policies that `choose_trivial_policies` returned.
        rows: The rows that were passed to `head_to_head`.

    Returns:
        The scores.
    """
    _, prompts, columns = repeat_prompts(rows, comparison.samples_per_prompt)
    is_paid = isinstance(comparison.evaluator.judge, LLMJudge)
    judged_policies = [policy for policy in policies if policy.kind == "constant" or not is_paid]
    return TrivialScores([_score_policy(comparison, policy, prompts, columns) for policy in judged_policies])


def _score_policy(
    comparison: HeadToHead, policy: TrivialPolicy, prompts: Sequence[Prompt], columns: Mapping[str, Sequence[object]]
) -> TrivialScore:
    sft, ppo = (comparison.measurements[side].completions for side in ("sft", "ppo"))
    repeats = 1
    if policy.kind == "constant":
        # All samples of a prompt are the same text. It is scored once, and the score is repeated below.
        repeats, texts = comparison.samples_per_prompt, [policy.text] * len(prompts)
    elif policy.kind == "ending":
        texts = [append_ending(text, policy.text) for text in sft]
    else:
        texts = shift_by_prompt(ppo, comparison.samples_per_prompt)
    scored_prompts, scored_texts = prompts[::repeats], texts[::repeats]
    scored_columns = {name: values[::repeats] for name, values in columns.items()}
    judge_scores = np.repeat(
        score_completions(comparison.evaluator.judge, scored_prompts, scored_texts, scored_columns), repeats
    )
    rewards = score_by_reward(comparison.evaluator, scored_prompts, scored_texts, scored_columns, desc=policy.name)
    rewards = np.repeat(rewards, repeats).tolist()
    groups, seed = comparison.groups, comparison.seed
    sft_scores = comparison.measurements["sft"].judge_scores[comparison.judge_name]
    return TrivialScore(
        policy,
        judge=bootstrap_mean(judge_scores, groups, seed=seed),
        win_rate=win_rate(judge_scores, sft_scores, groups, tolerance=TIE_TOLERANCE),
        reward=bootstrap_mean(rewards, groups, seed=seed) if rewards else None,
    )
