"""The judge `rule:REWARD`: a reward function, or a verifier that reads the right answers from a column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from datasets import Dataset

from ...errors import ZooError
from ...modeling.chat import wrap_completion
from ...modeling.chat_template import Prompt
from ...modeling.reserved_columns import columns_for_functions
from ...plugins import REWARDS, load_object
from ...rewards.functions import Batch, NamedReward, RewardFunction, convert_rewards
from ...rewards.rule import Rule, last_message_text
from ...rewards.verifiable import AnswerRule, Verifiable

TRIAL_PROMPTS = 2  # prompts on which a rule is tried


class RuleJudge:
    """A reward function as a judge. It receives the prompts' other columns, such as the right answer.

    Args:
        target: The reward function's name, as recipes write it.
        function: The function; None to load it by its name.

    Raises:
        ZooError: There is no such function, it counts tokens, or its `read` fails.
    """

    def __init__(self, target: str, function: RewardFunction | None = None) -> None:
        self.target = target
        rule = function or load_object(target, group=REWARDS)
        # A judge has no tokenizer, so it cannot count tokens.
        if getattr(rule, "unit", None) == "tokens":
            name = target.partition("(")[0]
            raise ZooError(
                f"The judge rule:{target} counts tokens, but a judge reads texts: set its unit, as in "
                f"rule:{name}(unit='words')."
            )
        self._reward = NamedReward(target, rule)
        self.name = f"rule:{target}"
        self.read_answers([""])  # so that a failing `read` is reported before training

    def check_prompts(self, rows: Dataset, *, subject: str) -> None:
        """Checks, before training, that the rule can score completions of these prompts.

        If the rule reads right answers from a column, this checks every row. Any other rule is called on the first
        prompts, each of which serves as its own completion.

        Args:
            rows: The prompts, with their other columns.
            subject: The name of the rows in error messages.

        Raises:
            ZooError: The column is missing, a row has no readable answer, or the call fails.
        """
        rule = self._reward.function
        if isinstance(rule, AnswerRule):
            is_answered = rule.answer_flags(rows, subject=subject)
            if not all(is_answered):
                raise ZooError(
                    f"Row {is_answered.index(False)} of {subject} has no answer in the column {rule.column!r}, and the "
                    f"judge {self.name} scores every row: add one, remove the row, or name another judge."
                )
            return
        columns = rows.select(range(min(TRIAL_PROMPTS, len(rows)))).to_dict()
        prompts = columns["prompt"]
        try:
            self.score(
                prompts,
                [wrap_completion(prompt, last_message_text(prompt)) for prompt in prompts],
                columns_for_functions(columns),
            )
        except ZooError as error:
            raise ZooError(f"The judge {self.name} was tried with prompts as their own answers: {error}") from error

    def select_answered(self, rows: Dataset) -> Dataset | None:
        """Selects the rows that have a right answer, if the rule needs one.

        Args:
            rows: The prompts, with their other columns.

        Returns:
            The selected rows; None if no row has an answer.
        """
        rule = self._reward.function
        if not isinstance(rule, AnswerRule):
            return rows
        # Rows without the column cannot check this rule, but can check other judges.
        if rule.column not in columns_for_functions(rows.features):
            return None
        is_answered = rule.answer_flags(rows, subject="the pairs")
        answered_rows = [row for row, has_answer in enumerate(is_answered) if has_answer]
        return rows.select(answered_rows) if answered_rows else None

    @property
    def description(self) -> str:
        """One sentence for a card."""
        return f"The rule {self._reward.name}, {getattr(self._reward.function, 'meaning', Rule.meaning)}."

    @property
    def by_strictness(self) -> dict[str, RuleJudge]:
        """Two judges, "strict" and "lenient" by how they parse answers; {} if the rule checks no answers."""
        rule = self._reward.function
        if not isinstance(rule, Verifiable):
            return {}
        return {"strict": RuleJudge(self.target, rule.strict), "lenient": RuleJudge(self.target, rule.lenient)}

    def read_answers(self, completions: Sequence[str]) -> list[Hashable] | None:
        """Reads the answer in each completion.

        Args:
            completions: (N,) texts.

        Returns:
            (N,) answers; None if the rule has no `read`.

        Raises:
            ZooError: The rule's `read` fails.
        """
        read = getattr(self._reward.function, "read", None)
        if read is None:
            return None
        try:
            answers: list[Hashable] = [read(text) for text in completions]
            Counter(answers)  # raises TypeError for answers that cannot be counted, such as lists
        except Exception as error:
            raise ZooError(
                f"`read` of the rule {self._reward.name} fails ({error}): it must return the answer in a completion as "
                "a text or a number, or None if there is no answer."
            ) from error
        return answers

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Scores texts with a rule that needs no other columns."""
        return self.score(prompts, completions, {})

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[object], columns: Mapping[str, Sequence[object]]
    ) -> list[float]:
        """Scores completions.

        Args:
            prompts: (N,) texts or conversations.
            completions: (N,) texts or conversations.
            columns: The prompts' other columns, one value per prompt.

        Returns:
            (N,) scores.

        Raises:
            ZooError: The rule fails, or returns no score for a row.
        """
        column_lists = {name: list(values) for name, values in columns.items()}
        # Judges have only texts, so the token ids are empty; `__init__` refuses rules that count tokens.
        batch = Batch(list(prompts), list(completions), [[] for _ in prompts], column_lists)
        try:
            values = self._reward(batch)
        except Exception as error:
            self._reward.raise_as_zoo_error(batch, error)
        scores, _ = convert_rewards(self._reward.name, values, batch)
        if scores.isnan().any():
            row = int(scores.isnan().nonzero()[0])
            raise ZooError(
                f"The rule {self._reward.name} returned no score for the prompt {batch.quoted_prompt(row)}: a judge "
                "must score every prompt."
            )
        return scores.tolist()
