"""The judge `rule:REWARD`: a reward function, or a verifier that reads answers in a column of the prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from ...errors import ZooError
from ...modeling.chat import wrap_completion
from ...modeling.reserved_columns import passed_on
from ...plugins import REWARDS, load_object
from ...rewards.functions import Batch, FunctionCall, RewardFunction, numbers
from ...rewards.verifiable import Answered, Verifiable, text_of

TRIED = 2  # prompts that a rule is tried on


class RuleJudge:
    """A reward function as a judge: it is told the prompts' other columns, such as a known answer."""

    def __init__(self, target: str, function: RewardFunction | None = None) -> None:
        """function: None is what the target names."""
        self.target = target
        rule = function or load_object(target, group=REWARDS)
        if getattr(rule, "unit", None) == "tokens":
            name = target.partition("(")[0]
            raise ZooError(
                f"The judge rule:{target} counts tokens, and a judge reads texts: set its unit, as in "
                f"rule:{name}(unit='words')."
            )
        self._call = FunctionCall(target, rule)
        self.name = f"rule:{target}"
        self.said([""])  # so that one that fails is known before anything trains

    def check_prompts(self, rows: Dataset, *, of: str) -> None:
        """Checks, before anything trains, that the rule can score answers to these prompts.

        One that reads answers in a column is asked of every row. Any other is called on the first prompts, whose own
        texts stand for answers.

        Args:
            rows: The prompts, with their other columns.
            of: What to call them.

        Raises:
            ZooError: The column is missing, or a row has no answer in it that the rule can read; or the call fails.
        """
        rule = self._call.function
        if isinstance(rule, Answered):
            answered = rule.answered(rows, of=of)
            if not all(answered):
                raise ZooError(
                    f"Row {answered.index(False)} of {of} has no answer in the column {rule.column!r}, and the judge "
                    f"{self.name} scores every row: write one, take the row out, or name another judge."
                )
            return
        columns = rows.select(range(min(TRIED, len(rows)))).to_dict()
        prompts = columns["prompt"]
        try:
            self.score(prompts, [wrap_completion(prompt, text_of(prompt)) for prompt in prompts], passed_on(columns))
        except ZooError as error:
            raise ZooError(f"The judge {self.name} was tried on prompts as their own answers: {error}") from error

    def with_answers(self, rows: Dataset) -> Dataset | None:
        """The rows whose answers the rule can read, None where there are none."""
        rule = self._call.function
        if not isinstance(rule, Answered):
            return rows
        if rule.column not in passed_on(rows.features):
            return None
        kept = [place for place, has in enumerate(rule.answered(rows, of="the pairs")) if has]
        return rows.select(kept) if kept else None

    @property
    def description(self) -> str:
        return f"The rule {self._call.name}, which a program checks."

    @property
    def readings(self) -> dict[str, RuleJudge]:
        """Of a rule that says whether an answer is right: it with the answer read strictly, and leniently."""
        rule = self._call.function
        if not isinstance(rule, Verifiable):
            return {}
        return {"strict": RuleJudge(self.target, rule.strict), "lenient": RuleJudge(self.target, rule.lenient)}

    def said(self, completions: Sequence[str]) -> list[Hashable] | None:
        """What each is read as, of a rule that says; None of another. Raises ZooError where its `read` fails."""
        read = getattr(self._call.function, "read", None)
        if read is None:
            return None
        try:
            found: list[Hashable] = [read(text) for text in completions]
            Counter(found)  # a list is no answer that could be counted
        except Exception as error:
            raise ZooError(
                f"`read` of the rule {self._call.name} fails ({error}): let it return, of any text, what it answers as "
                "a text or number, or None."
            ) from error
        return found

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        return self.score(prompts, completions, {})

    def score(
        self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> list[float]:
        """prompts, completions: texts or conversations.

        columns: the prompts' other columns, one value a prompt. Raises ZooError for a row without a number.
        """
        given = {name: list(values) for name, values in columns.items()}
        batch = Batch(list(prompts), list(completions), [[] for _ in prompts], given)
        try:
            returned = self._call.now(batch)
        except Exception as error:
            self._call.refuse(batch, error)
        found, _ = numbers(self._call.name, returned, batch)
        if found.isnan().any():
            row = int(found.isnan().nonzero()[0])
            raise ZooError(
                f"The rule {self._call.name} applies to some prompts only, not to {batch.prompt(row)}: a judge must "
                "score each."
            )
        return found.tolist()
