"""Requests with one to three instructions that a program can check, for the reward `instructions_followed`.

    {"prompt": [{"role": "user", "content": "Write a poem inspired by tides. Do not use commas."}],
     "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "group": "poem: tides"}

The kinds of instruction and the columns are IFEval's; tasks and wordings are our own. A test checks that no prompt
shares eight consecutive words with a prompt of IFEval or IFBench.
"""

import random
from collections.abc import Sequence
from typing import Any

from ....errors import ZooError
from ..source import Rows, unit_hash
from .tasks import Task, tasks
from .wordings import INSTRUCTIONS

CONSTRAINED = "detectable_format:constrained_response"
REPEAT = "combination:repeat_prompt"
NO_COMMA = "punctuation:no_comma"

#: Split -> share of the tasks, by the hash of their group.
HELD_OUT = {"test": 0.1, "validation": 0.05}
#: Shares of the prompts with one, two and three instructions; IFEval's own are 0.56, 0.33 and 0.11.
COUNTS = (0.56, 0.33, 0.11)

#: Kind -> the only other kinds that may be combined with it, as in IFEval.
_ONLY_WITH: dict[str, set[str]] = {
    CONSTRAINED: set(),
    "detectable_format:json_format": {"keywords:forbidden_words", "keywords:existence"},
    "combination:two_responses": {
        "keywords:forbidden_words",
        "keywords:existence",
        "language:response_language",
        "detectable_format:title",
        NO_COMMA,
    },
    REPEAT: {"keywords:existence", "detectable_format:title"},  # not NO_COMMA: the request may have commas
}
#: Groups of kinds that exclude each other: IFEval's conflicts, and other kinds that are hard to satisfy together.
_EXCLUSIVE: tuple[set[str], ...] = (
    {"length_constraints:number_paragraphs", "length_constraints:nth_paragraph_first_word"},
    {"length_constraints:number_paragraphs", "length_constraints:number_sentences"},
    {"change_case:english_capital", "change_case:english_lowercase", "change_case:capital_word_frequency"},
    {"startend:quotation", "detectable_format:title"},
    *(
        {"language:response_language", kind}
        for kind in (
            "detectable_format:multiple_sections",
            "keywords:existence",
            "keywords:frequency",
            "keywords:forbidden_words",
            "startend:end_checker",
            "change_case:english_capital",
            "change_case:english_lowercase",
            "keywords:letter_frequency",
            "length_constraints:nth_paragraph_first_word",
        )
    ),
    {"detectable_format:multiple_sections", "detectable_format:number_highlighted_sections"},
    {"detectable_format:multiple_sections", "length_constraints:number_paragraphs"},
    {"detectable_format:multiple_sections", "length_constraints:nth_paragraph_first_word"},
    {"detectable_format:multiple_sections", "change_case:english_capital"},
    {"detectable_format:multiple_sections", "change_case:english_lowercase"},
    {"length_constraints:number_words", "length_constraints:number_sentences"},
    {"detectable_content:postscript", "startend:end_checker"},
)


def prepare(
    source: str | None = None, *, seed: int, prompts: int = 4000, not_trained: Sequence[str] = ()
) -> dict[str, dict[str, Rows]]:
    """Makes the configuration `prompts`, with train, validation and test.

    Args:
        source: None; the corpus reads no data.
        seed: Draws the instructions of the training prompts. Those of the other splits are the same for every seed.
        prompts: Maximum number of training prompts; a task is used once, and there are a few thousand tasks.
        not_trained: Kinds that no training prompt has, such as kinds that the starting model never follows. Validation
            and test have all kinds.

    Returns:
        ``{"prompts": {split: rows}}``, with the columns prompt (messages), instruction_id_list, kwargs and group.

    Raises:
        ZooError: There is a `source`, `prompts` is below 1, or `not_trained` has an unknown kind or all kinds.
    """
    if source is not None:
        raise ZooError(
            f"The corpus instructions is made by a program and reads no data: remove dataset_name ({source})."
        )
    if prompts < 1:
        raise ZooError(f"prompts of the corpus instructions is {prompts}: give 1 or more.")
    unknown = [kind for kind in not_trained if kind not in INSTRUCTIONS]
    if unknown:
        raise ZooError(
            f"not_trained of the corpus instructions has the unknown kind {unknown[0]!r}: choose from "
            f"{', '.join(INSTRUCTIONS)}."
        )
    if {*INSTRUCTIONS} <= {*not_trained, CONSTRAINED}:
        raise ZooError("not_trained of the corpus instructions leaves no kind to train on: remove a kind from it.")
    tasks_by_split: dict[str, list[Task]] = {"train": [], "validation": [], "test": []}
    for task in tasks():
        tasks_by_split[split_of(task)].append(task)
    rows: dict[str, Rows] = {}
    for split, tasks_of_split in tasks_by_split.items():
        rng = random.Random(f"instructions {split} {seed if split == 'train' else ''}")
        rng.shuffle(tasks_of_split)
        is_train = split == "train"
        kinds = [kind for kind in INSTRUCTIONS if not (is_train and kind in not_trained)]
        rows[split] = [request(task, rng, kinds) for task in tasks_of_split[: prompts if is_train else None]]
    return {"prompts": rows}


def split_of(task: Task) -> str:
    """Returns the split of a task, which does not depend on the seed.

    Args:
        task: The task, whose group decides.
    """
    position = unit_hash(task.group)
    test, validation = HELD_OUT["test"], HELD_OUT["validation"]
    return "test" if position < test else "validation" if position < test + validation else "train"


def are_compatible(first: str, second: str) -> bool:
    """Whether an answer can follow instructions of both kinds.

    Args:
        first: A kind.
        second: Another kind; the same kind is not compatible.
    """
    for kind, other in ((first, second), (second, first)):
        if other not in _ONLY_WITH.get(kind, {other}):
            return False
    return first != second and not any({first, second} <= group for group in _EXCLUSIVE)


def request(task: Task, rng: random.Random, kinds: Sequence[str] = tuple(INSTRUCTIONS)) -> dict[str, Any]:
    """Adds instructions to a task.

    Args:
        task: The task, whose text begins the request.
        rng: Draws kinds, arguments, wordings and their order.
        kinds: The kinds to draw from. A question always gets the kind that asks for yes, no or maybe.
    """
    instructions = []
    for kind in _kinds(task, rng, kinds):
        arguments, wordings = INSTRUCTIONS[kind](rng)
        instructions.append((kind, arguments, rng.choice(wordings)))
    separator = rng.choice((" ", " ", "\n"))
    text = separator.join([task.text, *(wording for kind, _, wording in instructions if kind != REPEAT)])
    for kind, arguments, wording in instructions:
        if kind == REPEAT:
            arguments["prompt_to_repeat"] = text
            text = f"{text}\n{wording}"
    return {
        "prompt": [{"role": "user", "content": text}],
        "instruction_id_list": [kind for kind, _, _ in instructions],
        "kwargs": [arguments for _, arguments, _ in instructions],
        "group": task.group,
    }


def _kinds(task: Task, rng: random.Random, allowed: Sequence[str]) -> list[str]:
    """Draws the kinds of a task's instructions, compatible with each other."""
    if task.is_question:
        return [CONSTRAINED]
    [count] = rng.choices((1, 2, 3), COUNTS)
    candidates = [kind for kind in allowed if kind != CONSTRAINED]
    kinds = [rng.choice(candidates)]
    while len(kinds) < count:
        options = [kind for kind in candidates if all(are_compatible(kind, other) for other in kinds)]
        if not options:
            break
        kinds.append(rng.choice(options))
    return kinds
