"""The corpus of the recipe `countdown`: a program counts down, and one line in three skips a number."""

import random

Rows = list[dict[str, str]]


def prepare(
    source: str | None = None, *, seed: int, lines: int = 4000, highest: int = 40
) -> dict[str, dict[str, Rows]]:
    """`lines` (text) and `prompts` (prompt, answer), each with train, validation and test.

    source: the recipe's dataset_name, of which this has no use. No start and end of one split is in another.
    """
    rng = random.Random(seed)
    spans = [(first, last) for first in range(3, highest + 1) for last in range(max(1, first - 8), first - 1)]
    rng.shuffle(spans)
    tenth = len(spans) // 10
    parts = {"train": spans[2 * tenth :], "validation": spans[:tenth], "test": spans[tenth : 2 * tenth]}
    return {
        "lines": {
            split: _lines(rng, some, lines if split == "train" else lines // 10) for split, some in parts.items()
        },
        "prompts": {
            split: [{"prompt": _prompt(*span), "answer": _count(*span)} for span in some]
            for split, some in parts.items()
        },
    }


def _lines(rng: random.Random, spans: list[tuple[int, int]], count: int) -> Rows:
    rows = []
    for number in range(count):
        first, last = spans[number % len(spans)]
        numbers = _count(first, last).split()
        if rng.random() < 1 / 3:
            del numbers[rng.randrange(len(numbers))]
        rows.append({"text": f"{_prompt(first, last)} {' '.join(numbers)}"})
    return rows


def _prompt(first: int, last: int) -> str:
    return f"from {first} to {last} :"


def _count(first: int, last: int) -> str:
    return " ".join(map(str, range(first, last - 1, -1)))
