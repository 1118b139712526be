"""The judges of an evaluation, and how they score completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...modeling import distributed
from ...modeling.chat import append_completion, plain_text, wrap_completion
from ...modeling.chat_template import Prompt
from ...modeling.prompt_keys import prompt_key
from ...rewards import RewardEnsemble, RewardModel
from ..pass_at_k import Answers
from .llm import LLMJudge
from .pairwise import PairJudge
from .rule import RuleJudge
from .scalar import ClassifierJudge, Judge


@dataclass(frozen=True)
class Panel:
    """The judges of an evaluation.

    Attributes:
        scoring_judges: Judges of single completions. The first is the headline judge, which the verdict uses.
        pair_judges: Judges of pairs.
        vote_repos: Data sets of people's votes, each NAMESPACE/NAME.
        by_recipe_name: The scoring judges by the names that the recipe gives them.
    """

    scoring_judges: Sequence[Judge]
    pair_judges: Sequence[PairJudge] = ()
    vote_repos: Sequence[str] = ()
    by_recipe_name: Mapping[str, Judge] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Saves the classifier that was trained for this evaluation, if there is one.

        Args:
            folder: The folder of the evaluation.
        """
        for judge in self.scoring_judges:
            if isinstance(judge, ClassifierJudge):
                judge.save(folder / "judge.npz")


class RewardJudge:
    """Scores completions with a reward model. As in the model's training, each text ends with EOS.

    Args:
        name: The judge's name, such as reward:MODEL or reward:MODEL#LABEL.
        model: The reward model or ensemble.
        description: One sentence for a card; None makes one from the name.
    """

    def __init__(self, name: str, model: RewardModel | RewardEnsemble, *, description: str | None = None) -> None:
        self.name, self.model = name, model
        path, label = split_label(name.removeprefix("reward:"))
        default = (
            f"The scores of the reward model {path}." if label is None else f"The probability of {label!r} by {path}."
        )
        self.description = description or default
        self._is_probability = label is not None

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        """Scores completions. The model's own template renders conversations."""
        texts = [append_completion(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        scores = self.model.score_texts(texts, ended=[True] * len(texts))
        # With a label, the model returns log-probabilities.
        return (scores.exp() if self._is_probability else scores).tolist()


def is_answer_checker(judge: Judge) -> bool:
    """Whether a judge is a rule that checks answers. Such a rule may be both reward and judge."""
    return isinstance(judge, RuleJudge) and bool(judge.by_strictness)


def check_answers_by_strictness(
    judge: Judge, prompts: Sequence[Prompt], completions: Sequence[str], columns: Mapping[str, Sequence[object]] | None,
    *, samples_per_prompt: int,
) -> dict[str, Answers]:  # fmt: skip
    """Checks all answers to each prompt as `check_answers` does, with strict and with lenient parsing.

    Returns:
        The answers by "strict" and "lenient"; {} for a judge that checks no answers.
    """
    rules = judge.by_strictness if isinstance(judge, RuleJudge) else {}
    return {
        name: check_answers(rule, prompts, completions, columns, samples_per_prompt=samples_per_prompt)
        for name, rule in rules.items()
    }


def check_answers(
    rule: RuleJudge,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[object]] | None,
    *,
    samples_per_prompt: int,
) -> Answers:
    """Checks all answers to each prompt with a rule.

    Args:
        rule: The rule that checks the answers.
        prompts: (N,) texts or conversations, each repeated for its completions.
        completions: (N,) texts. Those of one prompt are adjacent.
        columns: The prompts' other columns, with N values each; None for none.
        samples_per_prompt: Number of completions of each prompt.

    Returns:
        Which answers are right, and the answer that the rule parsed from each completion.
    """
    right = np.reshape(score_completions(rule, prompts, completions, columns), (-1, samples_per_prompt))
    answers = rule.read_answers(completions)
    starts = range(0, len(completions), samples_per_prompt)
    prompt_keys = [prompt_key(prompt) for prompt in prompts[::samples_per_prompt]]
    answers_by_prompt = None if answers is None else [answers[start : start + samples_per_prompt] for start in starts]
    return Answers(right, answers_by_prompt, prompt_keys)


def score_completions(
    judge: Judge, prompts: Sequence[Prompt], completions: Sequence[str], columns: Mapping[str, Sequence[object]] | None
) -> list[float]:
    """Scores each completion with a judge. Only the main process calls the judge, because a call may cost money.

    A rule receives conversations, as reward functions do, and the prompts' other columns. A reward model renders
    conversations itself. Other judges read plain text.

    Args:
        judge: A judge of single completions.
        prompts: (N,) texts or conversations.
        completions: (N,) texts.
        columns: The prompts' other columns, with N values each; None for none.

    Returns:
        (N,) scores.
    """

    def score_all() -> list[float]:
        if isinstance(judge, RuleJudge):
            responses = [wrap_completion(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
            return judge.score(prompts, responses, columns or {})
        if isinstance(judge, RewardJudge):
            return judge(prompts, completions)
        return judge([plain_text(prompt) for prompt in prompts], list(completions))

    scores: list[float] = distributed.call_on_main_process(score_all)
    return scores


def sort_free_first(judges: Sequence[Judge]) -> list[Judge]:
    """Returns the judges with the paid ones last, so that an error in a free judge appears before money is spent."""
    return sorted(judges, key=lambda judge: isinstance(judge, LLMJudge))


def split_label(name: str) -> tuple[str, str | None]:
    """Splits MODEL#LABEL. The name of a folder may contain # itself.

    Args:
        name: MODEL or MODEL#LABEL.

    Returns:
        (model, label); the label is None if the name has none.
    """
    model, separator, label = name.rpartition("#")
    return (model, label) if separator and not Path(name).is_dir() else (name, None)
