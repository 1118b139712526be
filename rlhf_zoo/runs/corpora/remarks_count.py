"""Remarks that state how many items they list, such as "3 cons: straps, slow zoom, no case", and a reward for it.

The texts are those of `product_remarks`. The items follow the first colon and are separated by commas. A prompt asks
for a number of pros or cons and begins the first item. The reward checks the number of items, but neither what they say
nor whether they are pros.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .product_remarks import Remark, read_lower_case_remarks
from .source import Rows, unit_hash

COUNTS = (1, 2, 3, 4, 5)
#: Split -> share of the openings, by their hash, that only prompts of this split use.
HELD_OUT = {"test": 0.3, "validation": 0.2}
MAX_OPENING_WORDS = 2

_COMMA = re.compile(r"(?<!\d),|,(?!\d)")  # but not the comma in 1,000
_ANY_SEPARATOR = re.compile(rf"{_COMMA.pattern}|[;/&+\n]|[.!?:](?=\s|$)|\s-+\s|\band\b")
_OTHER_SEPARATOR = re.compile(r"[;/\n]|[.!?:]\s|\s-+\s")
_REQUEST = re.compile(r"\s*(\d+) (?:pro|con)s?:")


def items(text: str) -> list[str]:
    """Splits a text at its commas into items.

    Args:
        text: A list of items, without the request before it.

    Returns:
        The words of each item, lower-cased and without marks; "" for an empty item.
    """
    return _normalize_items(_COMMA.split(text))


def _count_range(text: str) -> tuple[int, int]:
    """Returns the range of item counts that a reader may accept, without empty and repeated items.

    The lower count splits only at commas; the upper count also splits at other marks and at "and".
    """
    fewest, most = (len({*_normalize_items(separator.split(text))} - {""}) for separator in (_COMMA, _ANY_SEPARATOR))
    return fewest, max(fewest, most)


def _normalize_items(pieces: Sequence[str]) -> list[str]:
    return [" ".join(re.findall(r"\w+", piece.lower())) for piece in pieces]


@dataclass(frozen=True, kw_only=True)
class ItemCount:
    """1 if prompt and completion list as many items as the prompt asks for, otherwise 0.

    Each item must contain a letter or digit and occur only once, so neither three commas nor one item written three
    times are three items. The reward is None if the prompt does not begin with a number of pros or cons.

    Attributes:
        name: The reward's name.
    """

    name: str = "item_count"

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def strict(self) -> "ItemCount":
        """Counts only items between commas, none of them empty or repeated."""
        return ItemCount(name=self.name)

    @property
    def lenient(self) -> "ItemCount":
        """Accepts any number that `_count_range` includes."""
        return _Lenient(name=self.name)

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        """Scores completions.

        Args:
            prompts: The prompts.
            completions: The completion of each prompt.
            **columns: Further columns, which are ignored.

        Returns:
            1, 0 or None for each.
        """
        return [self._score(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]

    def _score(self, prompt: str, completion: str) -> float | None:
        request = _REQUEST.match(prompt)
        if request is None:
            return None
        return float(self._has_count(prompt[request.end() :] + completion, int(request[1])))

    def _has_count(self, text: str, count: int) -> bool:
        item_list = items(text)
        return len(item_list) == len({*item_list} - {""}) == count


class _Lenient(ItemCount):
    def _has_count(self, text: str, count: int) -> bool:
        fewest, most = _count_range(text)
        return fewest <= count <= most


item_count = ItemCount()


def prepare(source: str | None = None, *, seed: int) -> dict[str, dict[str, Rows]]:
    """Makes two configurations, each with train, validation and test.

    - lines (text): remarks of 1 to 5 items separated only by commas, with their number and kind in front.
    - prompts (prompt): a number from 1 to 5, the kind of a remark, and the first one or two words of its first item;
      the number is unrelated to that remark. Openings of validation and test are not openings of training prompts.

    Args:
        source: As in `product_remarks.prepare`.
        seed: Draws only the training prompts.

    Returns:
        ``{configuration: {split: rows}}``.

    Raises:
        ZooError: The source cannot be read, or lacks a split or a column.
    """
    remarks = read_lower_case_remarks(source)
    lists = {
        split: [remark for remark in remarks[split] if is_list(remark)] for split in ("train", "validation", "test")
    }
    rng = random.Random(f"remarks-count train prompts {seed}")
    train_prompts = [
        _prompt(remark, rng.choice(COUNTS), rng.randint(1, MAX_OPENING_WORDS)) for remark in lists["train"]
    ]
    prompts = {"train": train_prompts}
    for split in HELD_OUT:
        candidates = set()
        for remark in lists[split]:
            position = unit_hash(remark.text)  # it decides the number and the length of the opening
            candidates.add(_prompt(remark, COUNTS[int(position * 1e6) % len(COUNTS)], 1 + int(position * 2)))
        prompts[split] = sorted(candidates, key=unit_hash)
    return {
        "lines": {split: [{"text": _line(remark)} for remark in lists[split]] for split in lists},
        "prompts": {
            split: [{"prompt": prompt} for prompt in candidates if _split_of(prompt) == split]
            for split, candidates in prompts.items()
        },
    }


def is_list(remark: Remark) -> bool:
    """Whether a remark is a list of 1 to 5 different items, separated only by commas.

    Args:
        remark: A remark as buyers wrote it, in lower case.
    """
    text = _strip_marks(remark)
    item_list = items(text)
    return len(item_list) in COUNTS and len(item_list) == len({*item_list} - {""}) and not _OTHER_SEPARATOR.search(text)


def _strip_marks(remark: Remark) -> str:
    """Returns the text of a remark without punctuation at its end."""
    return remark.text.rstrip(" ,.;:!")


def _request_text(count: int, remark: Remark) -> str:
    return f"{count} {'pro' if remark.label else 'con'}{'' if count == 1 else 's'}:"


def _line(remark: Remark) -> str:
    pieces = [piece.strip() for piece in _COMMA.split(_strip_marks(remark))]
    return f"{_request_text(len(pieces), remark)} {', '.join(pieces)}"


def _prompt(remark: Remark, count: int, word_count: int) -> str:
    words = _COMMA.split(_strip_marks(remark))[0].split()
    return f"{_request_text(count, remark)} {' '.join(words[:word_count])}"


def _split_of(prompt: str) -> str:
    """Returns the split of a prompt by its opening alone, whatever number and kind precede the opening."""
    position = unit_hash(prompt.partition(": ")[2])
    test, validation = HELD_OUT["test"], HELD_OUT["validation"]
    return "test" if position < test else "validation" if position < test + validation else "train"
