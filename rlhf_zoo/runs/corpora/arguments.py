"""Pairs of arguments for the same side of a debate; crowd workers chose the more convincing argument of each pair.

The corpus is UKPConvArg1Strict (Habernal & Gurevych, ACL 2016, CC BY 4.0). It does not ship with this package:
`prepare` reads its CSV files (one for each side of a debate), a folder of ``SPLIT.jsonl`` files, or the Hub.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import ZooError
from .source import SPLITS, Rows, read_splits, unit_hash

#: Split -> prefixes of the names of its debates' CSV files; all other debates are in train.
DEBATES: Mapping[str, tuple[str, ...]] = {
    "test": ("evolution-vs-creation", "is-the-school-uniform"),
    "validation": ("ban-plastic-water-bottles",),
    "judge": ("firefox-vs-internet-explorer", "human-growth-and-development", "if-your-spouse", "tv-is-better"),
}
#: Number of an argument's first words that a prompt contains after the side.
OPENING_WORDS = 3

HELP = (
    "clone github.com/UKPLab/acl2016-convincing-arguments and give --dataset_name its folder data/UKPConvArg1Strict-CSV"
)


def prepare(source: str | None = None, *, seed: int) -> dict[str, dict[str, Rows]]:
    """Makes the four configurations of the recipe's data set. No debate is in two splits.

    - lines (text): a side and an argument for it, each argument once; train, validation and test.
    - prompts (prompt): a side and the first three words of an argument for it; train, validation and test.
    - preferences (prompt, chosen, rejected): a side, a more convincing argument for it and a less convincing one; train
      and test.
    - judge (text, label): the arguments of the judge split, with the label 1 if chosen more often than rejected and 0
      if rejected more often. No other configuration has these debates.

    Args:
        source: The folder of the corpus's CSV files, a folder of ``SPLIT.jsonl[.gz]`` (topic, chosen, rejected; splits
            train, judge, validation, test), or the id of a data set on the Hub.
        seed: Determines the order of the training prompts, and nothing else.

    Returns:
        ``{configuration: {split: rows}}``.

    Raises:
        ZooError: The source cannot be read, or lacks a split or a column.
    """
    if source is None:
        raise ZooError(f"The arguments do not come with this package: {HELP}.")
    pairs = {split: _pairs(rows) for split, rows in _read(source).items()}
    arguments = {split: _arguments(pairs[split]) for split in ("train", "validation", "test")}
    unique_prompts = {split: dict.fromkeys(_prompt(*item) for item in items) for split, items in arguments.items()}
    prompts = {split: [{"prompt": prompt} for prompt in items] for split, items in unique_prompts.items()}
    random.Random(f"arguments train prompts {seed}").shuffle(prompts["train"])
    return {
        "lines": {split: [{"text": side + text} for side, text in items] for split, items in arguments.items()},
        "prompts": prompts,
        "preferences": {split: pairs[split] for split in ("train", "test")},
        "judge": {"train": _label_arguments(pairs["judge"])},
    }


def _read(source: str) -> dict[str, Rows]:
    folder = Path(source).expanduser()
    files = sorted(folder.glob("*.csv"))
    if not files:
        return read_splits(source, SPLITS, ("topic", "chosen", "rejected"), fix=HELP)
    rows: dict[str, Rows] = {split: [] for split in SPLITS}
    for path in files:
        split = next((split for split, prefixes in DEBATES.items() if path.name.startswith(prefixes)), "train")
        rows[split] += _read_csv(path)
    for split, split_rows in rows.items():
        if not split_rows:
            raise ZooError(f"{source} has no debate of the split {split}: {HELP}.")
    return rows


def _read_csv(path: Path) -> Iterable[dict[str, str]]:
    """Yields the rows of a CSV file: id, label (a1 or a2), and both arguments, in which <br/> ends a line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ZooError(f"{path} cannot be read ({error}): fetch it again.") from error
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        fields = line.replace("<br/>", " ").split("\t")
        if len(fields) != 4 or fields[1] not in ("a1", "a2"):
            raise ZooError(
                f"{path}, line {number}, must hold id, a1 or a2, and two arguments, separated by tabs: fetch it again."
            )
        first, second = fields[2:]
        chosen, rejected = (first, second) if fields[1] == "a1" else (second, first)
        yield {"topic": path.stem, "chosen": chosen, "rejected": rejected}


def _pairs(rows: Rows) -> Rows:
    """Returns the pairs in an order that mixes the debates, so that the first pairs come from all of them."""
    return sorted(map(_pair, rows), key=lambda pair: unit_hash(pair["chosen"] + pair["rejected"]))


def _pair(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns a pair whose prompt is the side. Arguments begin with a space and have single spaces between words."""
    debate, _, side = str(row["topic"]).partition("_")
    prompt = f"{debate.replace('-', ' ').strip()}: {side.replace('-', ' ').strip()}."
    return {"prompt": prompt, **{name: " " + " ".join(str(row[name]).split()) for name in ("chosen", "rejected")}}


def _arguments(pairs: Rows) -> list[tuple[str, str]]:
    """Returns each (side, argument) once, in an order that does not depend on the labels."""
    arguments = {(pair["prompt"], pair[name]) for pair in pairs for name in ("chosen", "rejected")}
    return sorted(arguments, key=lambda item: (unit_hash(item[1]), item))


def _prompt(side: str, text: str) -> str:
    return f"{side} {' '.join(text.split()[:OPENING_WORDS])}"


def _label_arguments(pairs: Rows) -> Rows:
    net_choices: Counter[tuple[str, str]] = Counter()
    for pair in pairs:
        net_choices[pair["prompt"], pair["chosen"]] += 1
        net_choices[pair["prompt"], pair["rejected"]] -= 1
    return [
        {"text": side + text, "label": int(net_choices[side, text] > 0)}
        for side, text in _arguments(pairs)
        if net_choices[side, text] != 0
    ]
