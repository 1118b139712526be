"""The reward `instructions_followed`: the share of a prompt's instructions that an answer verifiably follows.

As in google/IFEval, a prompt's instructions are in two columns: `instruction_id_list`, such as
["punctuation:no_comma", "length_constraints:number_words"], and `kwargs`, the arguments of each instruction, such as
[{}, {"relation": "at least", "num_words": 60}]. Arguments that are null count as missing.

An answer can follow its instructions and still say nothing, so this reward does not show whether an answer is right.
It is therefore not `Verifiable`: as the judge of a policy that it rewarded, it cannot rule out reward hacking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ZooError
from ..fileio import is_finite
from ..modeling.chat_template import Prompt
from .instructions_kinds import KINDS, answer_forms
from .rule import Rule, last_message_text

COLUMNS = ("instruction_id_list", "kwargs")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a prompt.

    Attributes:
        kind: The id of the instruction's kind in IFEval, such as "punctuation:no_comma".
        arguments: The instruction's arguments by name.
    """

    kind: str
    arguments: Mapping[str, Any]

    def is_followed(self, answer: str, *, loose: bool = False) -> bool:
        """Whether an answer follows the instruction. An empty answer follows none.

        Args:
            answer: The answer.
            loose: As for `answer_forms`.
        """
        follows = KINDS[self.kind].follows
        return any(follows(form, self.arguments) for form in answer_forms(answer, loose=loose))


def read_instructions(ids: Any, kwargs: Any, *, where: str) -> list[Instruction]:
    """Reads the instructions of one row.

    Args:
        ids: The row's `instruction_id_list`.
        kwargs: The row's `kwargs`.
        where: The row's name in errors, such as "row 3".

    Returns:
        The instructions; [] if both columns are None.

    Raises:
        ZooError: The columns are not two lists of the same length, a kind is unknown, or an argument is missing or
            invalid.
    """
    if ids is None and kwargs is None:
        return []
    if not isinstance(ids, (list, tuple)) or not isinstance(kwargs, (list, tuple)) or len(ids) != len(kwargs):
        raise ZooError(
            f"instruction_id_list and kwargs of {where} are {ids!r} and {kwargs!r}: give two lists of the same length, "
            "with a mapping of arguments for each instruction."
        )
    instructions = []
    for kind, values in zip(ids, kwargs, strict=True):
        if not isinstance(kind, str) or kind not in KINDS:
            raise ZooError(f"{where} has the instruction {kind!r}: give one of {', '.join(sorted(KINDS))}.")
        if values is not None and not isinstance(values, Mapping):
            raise ZooError(f"The instruction {kind} of {where} has the kwargs {values!r}: give a mapping of arguments.")
        arguments = {name: _as_integer(value) for name, value in (values or {}).items() if value is not None}
        if problem := KINDS[kind].find_problem(arguments):
            raise ZooError(f"The instruction {kind} of {where} {problem}.")
        instructions.append(Instruction(kind, arguments))
    return instructions


def _as_integer(value: Any) -> Any:
    """Converts an integral float to an integer. A table stores integers as floats if some rows lack the argument."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True, kw_only=True)
class InstructionsFollowed(Rule):
    """share · (followed / all instructions) + complete · 1[all followed]; None for a row without instructions.

    Logs the extra column NAME/missed, the kinds of instructions that an answer does not follow, and two metrics:
    NAME/share, the mean share of instructions followed, and NAME/all, the share of answers that follow all.

    Attributes:
        share: The weight of the share of a prompt's instructions that its answer follows.
        complete: The bonus for an answer that follows all instructions.
        loose: Whether an answer also counts if it follows an instruction only without its first or last line or without
            asterisks, as in IFEval's loose accuracy.
        name: The name in metrics.

    Raises:
        ZooError: When called: the prompts lack a column, a row cannot be read, or langdetect is needed but not
            installed.
    """

    share: float = 1.0
    complete: float = 1.0
    loose: bool = False
    name: str = "instructions_followed"

    def __post_init__(self) -> None:
        for field in ("share", "complete"):
            if not is_finite(getattr(self, field)):
                raise self._field_error(field, "a number")
        if not isinstance(self.loose, bool):
            raise self._field_error("loose", "True or False")

    def check_columns(self, names: Iterable[str]) -> None:
        """Checks that the prompts have both `COLUMNS`.

        Args:
            names: The names of the prompts' columns.

        Raises:
            ZooError: A column is missing.
        """
        names = list(names)
        for column in COLUMNS:
            if column not in names:
                raise ZooError(
                    f"The reward {self.name} reads the column {column!r}, but the prompts have "
                    f"{', '.join(map(repr, names)) or 'no columns but the prompt'}: add it, in the form of "
                    "google/IFEval."
                )

    def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Any],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        self.check_columns(columns)
        rewards: list[float | None] = []
        missed: list[str] = []
        shares: list[float] = []
        rows = zip(completions, columns["instruction_id_list"], columns["kwargs"], strict=True)
        for row, (completion, ids, kwargs) in enumerate(rows):
            instructions, answer = read_instructions(ids, kwargs, where=f"row {row}"), last_message_text(completion)
            not_followed = [
                instruction.kind
                for instruction in instructions
                if not instruction.is_followed(answer, loose=self.loose)
            ]
            missed.append(", ".join(not_followed))
            if not instructions:
                rewards.append(None)
                continue
            shares.append(1 - len(not_followed) / len(instructions))
            rewards.append(self.share * shares[-1] + self.complete * (not not_followed))
        if log_extra is not None:
            log_extra(f"{self.name}/missed", missed)
        if log_metric is not None and shares:
            log_metric(f"{self.name}/share", sum(shares) / len(shares))
            log_metric(f"{self.name}/all", sum(share == 1 for share in shares) / len(shares))
        return rewards


instructions_followed = InstructionsFollowed()
