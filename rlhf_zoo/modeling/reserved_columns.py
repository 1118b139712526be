"""Reserved column names: our own columns of a prompt, and the arguments of reward functions and rules.

A data set may have columns with these names, but they are never passed on: the value that a function gets under such a
name is ours.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

_Values = TypeVar("_Values")

PROMPT_TOKENS = "input_ids"
#: The index of a row's prompt in the data set, which keys the random stream. No data set has a column of this name.
PROMPT_INDEX = "_rlhf_zoo_prompt_index"
#: The index of a row's completion among those of its prompt.
GENERATION = "_rlhf_zoo_generation_index"

#: The values of a row that `columns` writes into its prompt, a list of texts. No data set has a column of this name.
QUESTION = "_rlhf_zoo_question"

#: The arguments of reward functions and rules, besides columns of the data set.
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
#: As in TRL, `completion` is not passed on; the others come as `prompts` and `completion_ids`, or are ours.
RESERVED = frozenset(
    {*ARGUMENTS, "prompt", "completion", PROMPT_TOKENS, "attention_mask", PROMPT_INDEX, GENERATION, QUESTION}
)
#: Columns of the table of completions. A column that a function logs under such a name gets the function's name too.
TABLE = ("prompt", "completion", "score", "kl", "ended")
#: Columns that every data set of prompts may have, and that nobody expects a reward function to get.
_USUAL = frozenset({"prompt", PROMPT_TOKENS, "attention_mask", PROMPT_INDEX, GENERATION, QUESTION})


def columns_for_functions(columns: Mapping[str, _Values]) -> dict[str, _Values]:
    """Selects the columns that reward functions, rules and judges get besides prompts and completions.

    Args:
        columns: All columns of the prompts.
    """
    return {name: values for name, values in columns.items() if name not in RESERVED}


def withheld_columns(names: Iterable[str]) -> list[str]:
    """Lists columns that users may expect reward functions to get, but that these never get.

    Args:
        names: Column names of a data set of prompts.

    Returns:
        Those that have a reserved name, in order.
    """
    return [name for name in names if name in RESERVED - _USUAL]


def how_to_rename(name: str) -> str:
    """Returns the fix for a column with a reserved name, as the end of a sentence.

    Args:
        name: The column.
    """
    return f"rename the column, in a recipe by `columns: {{given_{name}: {name}}}`"
