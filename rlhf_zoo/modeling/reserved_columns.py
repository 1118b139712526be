"""Reserved column names: this package's own columns, and the arguments of reward functions and rules.

A data set may have columns with these names, but reward functions never get them: arguments with these names hold this
package's values.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

_Values = TypeVar("_Values")

PROMPT_TOKENS = "input_ids"
#: The index of a row's prompt in the data set. It selects the row's random stream.
PROMPT_INDEX = "_rlhf_zoo_prompt_index"
#: The index of a row's completion among the completions of its prompt.
GENERATION_INDEX = "_rlhf_zoo_generation_index"

#: The values of a row that the prompt template in the recipe's `columns` inserts.
QUESTION = "_rlhf_zoo_question"

#: The arguments of reward functions and rules, besides columns of the data set.
FUNCTION_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# Reserved columns that no user expects reward functions to get, so no warning names them.
_SILENTLY_WITHHELD = frozenset({"prompt", PROMPT_TOKENS, "attention_mask", PROMPT_INDEX, GENERATION_INDEX, QUESTION})
#: Columns that functions do not get: `completion` (as in TRL), columns named like an argument, and the package's own.
RESERVED = frozenset({*FUNCTION_ARGUMENTS, "completion", *_SILENTLY_WITHHELD})
#: Columns of the table of completions. If the function NAME logs a column `score`, the table calls it "score (NAME)".
TABLE_COLUMNS = ("prompt", "completion", "score", "kl", "ended")


def columns_for_functions(columns: Mapping[str, _Values]) -> dict[str, _Values]:
    """Returns the columns that reward functions, rules and judges get besides prompts and completions.

    Args:
        columns: {column: values} of the data set.
    """
    return {name: values for name, values in columns.items() if name not in RESERVED}


def withheld_columns(names: Iterable[str]) -> list[str]:
    """Lists the columns that users may expect reward functions to get, but that are withheld.

    Args:
        names: The column names of a data set of prompts.

    Returns:
        The withheld columns, in order.
    """
    return [name for name in names if name in RESERVED - _SILENTLY_WITHHELD]


def how_to_rename(name: str) -> str:
    """Returns the fix for a column with a reserved name, as the end of a sentence."""
    return f"rename the column, in a recipe by `columns: {{given_{name}: {name}}}`"
