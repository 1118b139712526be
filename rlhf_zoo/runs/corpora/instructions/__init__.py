"""Requests with one to three instructions that a program can check, for the reward `instructions_followed`.

    {"prompt": [{"role": "user", "content": "Write a poem inspired by tides. Do not use commas."}],
     "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "group": "poem: tides"}

The kinds of instruction and the columns are IFEval's; tasks and wordings are our own. A test checks that no prompt
shares eight consecutive words with a prompt of IFEval or IFBench. From answers to the tasks, the corpus also makes
demonstrations for SFT.
"""

import random
from collections.abc import Sequence
from typing import Any

from ....errors import ZooError
from ....rewards.rule import last_message_text
from ..source import Rows, read_splits, unit_hash
from .demonstrations import demonstrate
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
    source: str | None = None,
    *,
    seed: int,
    prompts: int = 4000,
    not_trained: Sequence[str] = (),
    requests: int = 1,
) -> dict[str, dict[str, Rows]]:
    """Makes the configuration `prompts`, and with a source `demonstrations`.

    - prompts (prompt, instruction_id_list, kwargs, group): requests; train, validation and test.
    - demonstrations (prompt, completion): requests of training tasks, with answers that a program edited until they
      follow all instructions; train. Requests for which that fails are left out.

    Args:
        source: A folder with ``train.jsonl[.gz]`` or the id of a data set on the Hub, with the columns prompt (one of
            `tasks`, as text or messages) and answer. `python -m rlhf_zoo.runs.corpora.instructions` writes a model's
            answers in this form. Answers to tasks of validation and test are left out.
        seed: Draws the instructions of training prompts and demonstrations. Those of the other splits are the same for
            every seed.
        prompts: Maximum number of training prompts; a task is used once, and there are a few thousand tasks.
        not_trained: Kinds that no training prompt has, such as kinds that the starting model never follows. Validation
            and test have all kinds.
        requests: How many requests are drawn for each answer of the source.

    Returns:
        ``{configuration: {split: rows}}``.

    Raises:
        ZooError: `prompts` or `requests` is below 1; `not_trained` has an unknown kind or leaves none; or the source
            cannot be read or has a prompt that is no task.
    """
    for name, number in (("prompts", prompts), ("requests", requests)):
        if number < 1:
            raise ZooError(f"{name} of the corpus instructions is {number}: give 1 or more.")
    if unknown := [kind for kind in not_trained if kind not in INSTRUCTIONS]:
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
    if source is None:
        return {"prompts": rows}
    return {"prompts": rows, "demonstrations": {"train": _demonstrations(source, seed, requests)}}


def _demonstrations(source: str, seed: int, requests: int) -> Rows:
    """Draws requests for each answer of the source, and edits the answer until it follows them."""
    tasks_by_text = {task.text: task for task in tasks()}
    answered = read_splits(
        source, ["train"], ["prompt", "answer"], fix="write it with python -m rlhf_zoo.runs.corpora.instructions"
    )
    rows = []
    for number, row in enumerate(answered["train"], 1):
        text = last_message_text(row["prompt"])
        if (task := tasks_by_text.get(text)) is None:
            raise ZooError(
                f"Row {number} of {source} has the prompt {text!r}, which is no task of the corpus instructions: write "
                "the file with python -m rlhf_zoo.runs.corpora.instructions."
            )
        if split_of(task) != "train":
            continue
        rng = random.Random(f"demonstrations {seed} {text}")
        for _ in range(requests):
            made = request(task, rng)
            if (answer := demonstrate(made, row["answer"], task.topic, rng)) is not None:
                rows.append({"prompt": made["prompt"], "completion": [{"role": "assistant", "content": answer}]})
    return rows


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
