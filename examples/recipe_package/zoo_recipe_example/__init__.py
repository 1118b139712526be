"""The corpus of the recipe `countdown`: lines that count down, of which a third skip a number."""

import random

Rows = list[dict[str, str]]


def prepare(
    source: str | None = None, *, seed: int, lines: int = 4000, highest: int = 40
) -> dict[str, dict[str, Rows]]:
    """Makes the data sets `lines` (text) and `prompts` (prompt, answer), each with train, validation and test.

    No pair of start and end occurs in two splits.

    Args:
        source: The recipe's dataset_name, which this corpus does not use.
        seed: Seed of the random numbers.
        lines: Number of training lines.
        highest: The highest number to count down from.
    """
    rng = random.Random(seed)
    spans = [(first, last) for first in range(3, highest + 1) for last in range(max(1, first - 8), first - 1)]
    rng.shuffle(spans)
    tenth = len(spans) // 10
    parts = {"train": spans[2 * tenth :], "validation": spans[:tenth], "test": spans[tenth : 2 * tenth]}
    return {
        "lines": {split: _lines(rng, own, lines if split == "train" else lines // 10) for split, own in parts.items()},
        "prompts": {
            split: [{"prompt": _prompt(*span), "answer": _count(*span)} for span in own] for split, own in parts.items()
        },
    }


def _lines(rng: random.Random, spans: list[tuple[int, int]], count: int) -> Rows:
    rows = []
    for index in range(count):
        first, last = spans[index % len(spans)]
        numbers = _count(first, last).split()
        if rng.random() < 1 / 3:
            del numbers[rng.randrange(len(numbers))]
        rows.append({"text": f"{_prompt(first, last)} {' '.join(numbers)}"})
    return rows


def _prompt(first: int, last: int) -> str:
    return f"from {first} to {last} :"


def _count(first: int, last: int) -> str:
    return " ".join(map(str, range(first, last - 1, -1)))
