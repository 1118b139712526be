"""Checks a judge on pairs of known order. Its scores are in the file of pairs or in the rollouts."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import ZooError
from .judges.check import JudgeCheck, PairCheck, PairLabels, check_pairs, count_labels
from .probes import Completions
from .prompt_groups import NEAR_DUPLICATES, group_other_prompts
from .rollout_files import Rollouts, check_number, iterate_rows, message_text

#: The text columns of a pair. The score columns are `judge_chosen`, `judge_rejected`, and the same for `reward`.
TEXT_COLUMNS = ("prompt", "chosen", "rejected")
SIDES = ("chosen", "rejected")
OWN_PAIRS = "the own pairs"


@dataclass(frozen=True)
class _Scores:
    """The scores of each (prompt, text) in the rollouts, and which (prompt, text) only one side wrote."""

    judge: Mapping[tuple[str, str], Sequence[float]]
    reward: Mapping[tuple[str, str], Sequence[float]]
    texts: Set[tuple[str, str]]
    only_policy: Set[tuple[str, str]]
    only_sft: Set[tuple[str, str]]
    group_of: Mapping[str, Hashable] | None  # the group of each prompt, if the rollouts have groups

    @classmethod
    def of(cls, sides: Sequence[Completions]) -> "_Scores":
        judge: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        reward: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for side in sides:
            for table, scores in zip((judge, reward), (side.judge_scores, side.rewards), strict=True):
                for prompt, text, score in zip(side.prompts, side.texts, scores or (), strict=False):
                    table[prompt.strip(), text.strip()].append(score)
        policy, sft = (
            {(prompt.strip(), text.strip()) for prompt, text in zip(side.prompts, side.texts, strict=True)}
            for side in sides
        )
        group_of = None
        if all(side.groups is not None for side in sides):
            group_of = {prompt.strip(): group for side in sides for prompt, group in side.group_by_prompt.items()}
        return cls(judge, reward, policy | sft, policy - sft, sft - policy, group_of)

    def group_own_prompts(self, prompts: Sequence[str]) -> list[Hashable]:
        """Returns the group of each prompt of the own pairs: the rollouts' group, or that of its near-duplicates."""
        if self.group_of is None:
            return [*group_other_prompts(prompts, NEAR_DUPLICATES)]
        return [self.group_of[prompt] for prompt in prompts]

    def check_own_texts(self, texts: Mapping[str, str], where: str) -> None:
        """Checks that both texts of a pair are in the rollouts."""
        if any((texts["prompt"], texts[side]) not in self.texts for side in SIDES):
            raise ZooError(
                f"{where} has a text that is not among the completions for its prompt: give pairs of other texts with "
                "--labeled."
            )

    def policy_chosen(self, texts: Mapping[str, str]) -> bool | None:
        """Whether the policy wrote the chosen text and SFT the other one, or the reverse; None for other pairs."""
        chosen, rejected = ((texts["prompt"], texts[side]) for side in SIDES)
        if chosen in self.only_policy and rejected in self.only_sft:
            return True
        return False if chosen in self.only_sft and rejected in self.only_policy else None


def check_judge(
    sides: Sequence[Completions], *, labeled: Rollouts | None, own: Rollouts | None, seed: int
) -> JudgeCheck | None:
    """Checks the judge of rollouts on ordered pairs, as an evaluation checks a recipe's judge, and counts their labels.

    Args:
        sides: The policy's completions and SFT's.
        labeled: Labeled pairs, in a file or as rows: `prompt`, `chosen`, `rejected`, and `judge_chosen` and
            `judge_rejected`, the judge's scores. Scores may be missing for texts in the rollouts. `reward_chosen` and
            `reward_rejected` show whether judge and reward make the same errors.
        own: Pairs of the policies' own outputs, in the same form; they need no judge. Their texts must be in the
            rollouts. Only pairs of policy and SFT show whether what the policy learned fools the judge, so only their
            prompts count as checked.
        seed: Seed of the resamples.

    Returns:
        The results; None without pairs.

    Raises:
        ZooError: There are labeled pairs but no column judge, a row is wrong, a score of the judge is neither in the
            pair nor in the rollouts, or a text of the own pairs is not in the rollouts.
    """
    if labeled is None and own is None:
        return None
    has_judge = all(side.judge_scores is not None for side in sides)
    if labeled is not None and not has_judge:
        raise ZooError("Pairs check the column judge, which the completions do not have: score both sides, or remove "
                       "--labeled.")  # fmt: skip
    scores = _Scores.of(sides)
    labeled_check = None if labeled is None else _check_on_pairs(labeled, "the labeled pairs", scores, seed)[0]
    if own is None:
        return JudgeCheck(labeled_check)
    if not has_judge:
        return JudgeCheck(labels=_count_own_labels(own, scores))
    own_check, labels = _check_on_pairs(own, OWN_PAIRS, scores, seed, are_own=True)
    return JudgeCheck(labeled_check, own_check, labels=labels)


def _count_own_labels(source: Rollouts, scores: _Scores) -> PairLabels | None:
    """Counts the labels of own pairs when there is no judge to check."""
    rows = [(where, _pair_texts(row, where)) for where, row in iterate_rows(source, OWN_PAIRS)]
    if not rows:
        raise ZooError(f"{OWN_PAIRS} are empty: give prompt, chosen and rejected.")
    for where, texts in rows:
        scores.check_own_texts(texts, where)
    groups = scores.group_own_prompts([texts["prompt"] for _, texts in rows])
    return count_labels([scores.policy_chosen(texts) for _, texts in rows], groups)


def _check_on_pairs(
    source: Rollouts, name: str, scores: _Scores, seed: int, *, are_own: bool = False
) -> tuple[PairCheck, PairLabels | None]:
    prompts: list[str] = []
    judge_scores_by_pair: list[tuple[float, float]] = []
    rewards_by_pair: list[tuple[float, float]] = []
    rows_without_reward: list[str] = []
    policy_chosen: list[bool | None] = []
    has_rewards = False
    for where, row in iterate_rows(source, name):
        texts = _pair_texts(row, where)
        if are_own:
            scores.check_own_texts(texts, where)
        judge_scores = _pair_of_scores(row, "judge", texts, scores.judge, where)
        if judge_scores is None:
            raise ZooError(
                f"{where}: the judge's scores of this pair are unknown, because its texts are not among the "
                "completions for its prompt: add judge_chosen and judge_rejected."
            )
        reward_scores = _pair_of_scores(row, "reward", texts, scores.reward, where)
        if reward_scores is None:
            rows_without_reward.append(where)
        else:
            rewards_by_pair.append(reward_scores)
        has_rewards = has_rewards or row.get("reward_chosen") is not None
        prompts.append(texts["prompt"])
        policy_chosen.append(scores.policy_chosen(texts))
        judge_scores_by_pair.append(judge_scores)
    if not prompts:
        raise ZooError(f"{name} are empty: give prompt, chosen and rejected.")
    if has_rewards and rows_without_reward:
        raise ZooError(
            f"{rows_without_reward[0]} has no reward_chosen and reward_rejected: give them in all pairs or none."
        )
    margins = None if rows_without_reward else np.subtract(*np.array(rewards_by_pair).T)
    chosen, rejected = np.array(judge_scores_by_pair).T
    groups = scores.group_own_prompts(prompts) if are_own else group_other_prompts(prompts, NEAR_DUPLICATES)
    result = check_pairs(
        chosen,
        rejected,
        groups,
        are_probabilities=False,
        seed=seed,
        reward_margins=margins,
        policy_chosen=policy_chosen,
    )
    if not are_own:
        return result, None
    labels = count_labels(policy_chosen, groups)
    return replace(result, prompt_count=labels.prompt_count if labels else 0), labels


def _pair_texts(row: Mapping[str, Any], where: str) -> dict[str, str]:
    texts = {}
    for name in TEXT_COLUMNS:
        text = message_text(row.get(name))
        if text is None:
            raise ZooError(f"{where} has no {name}, or it is neither a text nor a list of messages: give all three.")
        texts[name] = text.strip()
    if texts["chosen"] == texts["rejected"]:
        raise ZooError(f"{where}: chosen and rejected are equal, so neither is better: remove the pair.")
    return texts


def _pair_of_scores(
    row: Mapping[str, Any], column: str, texts: Mapping[str, str],
    rollout_scores: Mapping[tuple[str, str], Sequence[float]], where: str,
) -> tuple[float, float] | None:  # fmt: skip
    """Returns both sides' scores: from the row, else the mean in the rollouts. None if either score is in neither."""
    scores = []
    for side in SIDES:
        name = f"{column}_{side}"
        text_scores = rollout_scores.get((texts["prompt"], texts[side]))
        if row.get(name) is not None:
            scores.append(check_number(name, row[name], where))
        elif text_scores:
            scores.append(float(np.mean(text_scores)))
        else:
            return None
    return scores[0], scores[1]
