"""Arguments for one side of a debate, and which of two of them people found more convincing.

The corpus is UKPConvArg1Strict (Habernal & Gurevych, ACL 2016, CC BY 4.0): pairs of arguments for the same side, as
crowd workers ordered them. None of it ships with this package: `prepare` reads its CSV files, one for each side of a
debate, a folder of ``SPLIT.jsonl`` files, or the Hub.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import ZooError
from .source import Rows, read_splits, unit

SPLITS = ("train", "judge", "validation", "test")
#: Of the corpus's CSV files: the debates of each split, whole, by how their names begin; the rest is train.
DEBATES: Mapping[str, tuple[str, ...]] = {
    "test": ("evolution-vs-creation", "is-the-school-uniform"),
    "validation": ("ban-plastic-water-bottles",),
    "judge": ("firefox-vs-internet-explorer", "human-growth-and-development", "if-your-spouse", "tv-is-better"),
}
OPENING = 3  # words of an argument that a prompt ends with

HELP = (
    "clone github.com/UKPLab/acl2016-convincing-arguments and give --dataset_name its folder data/UKPConvArg1Strict-CSV"
)


def prepare(source: str | None = None, *, seed: int) -> dict[str, dict[str, Rows]]:
    """The four configurations of the recipe's data set, as ``{configuration: {split: rows}}``.

    lines (text): the arguments of train, validation and test, each once, behind their side. prompts (prompt): a side
    and the first three words of an argument for it. preferences (prompt, chosen, rejected): a side and two arguments
    for it, the more convincing one chosen; train and test. judge (text, label): the arguments of the judge split, 1 for
    those that were chosen more often than not and 0 for those that were rejected more often; no other configuration has
    seen its debates. No debate is in two splits.

    ``source`` is the folder of the corpus's CSV files, a folder of ``SPLIT.jsonl[.gz]`` (topic, chosen, rejected;
    splits train, judge, validation, test), or the id of a data set on the Hub. ``seed`` orders the training prompts and
    nothing else. Raises ZooError when the source cannot be read or lacks a split or a column.
    """
    if source is None:
        raise ZooError(f"The arguments do not come with this package: {HELP}.")
    pairs = {split: _pairs(rows) for split, rows in _read(source).items()}
    written = {split: _arguments(pairs[split]) for split in ("train", "validation", "test")}
    openings = {split: dict.fromkeys(_prompt(*each) for each in found) for split, found in written.items()}
    prompts = {split: [{"prompt": opening} for opening in found] for split, found in openings.items()}
    random.Random(f"arguments train prompts {seed}").shuffle(prompts["train"])
    return {
        "lines": {split: [{"text": side + text} for side, text in found] for split, found in written.items()},
        "prompts": prompts,
        "preferences": {split: pairs[split] for split in ("train", "test")},
        "judge": {"train": _labeled(pairs["judge"])},
    }


def _read(source: str) -> dict[str, Rows]:
    folder = Path(source).expanduser()
    files = sorted(folder.glob("*.csv"))
    if not files:
        return read_splits(source, SPLITS, ("topic", "chosen", "rejected"), mend=HELP)
    rows: dict[str, Rows] = {split: [] for split in SPLITS}
    for path in files:
        split = next((split for split, names in DEBATES.items() if path.name.startswith(names)), "train")
        rows[split] += _csv(path)
    for split, found in rows.items():
        if not found:
            raise ZooError(f"{source} has no debate of the split {split}: {HELP}.")
    return rows


def _csv(path: Path) -> Iterable[dict[str, str]]:
    """Its rows: id, label (a1 or a2), and both arguments, in which a line ends with <br/>."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ZooError(f"{path} cannot be read ({error}): fetch it again.") from error
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        fields = line.replace("<br/>", " ").split("\t")
        if len(fields) != 4 or fields[1] not in ("a1", "a2"):
            raise ZooError(f"{path}, line {number}, is not id, a1 or a2, and two arguments, with tabs: fetch it again.")
        first, second = fields[2:]
        chosen, rejected = (first, second) if fields[1] == "a1" else (second, first)
        yield {"topic": path.stem, "chosen": chosen, "rejected": rejected}


def _pairs(rows: Rows) -> Rows:
    """In an order that mixes the debates, so that the first of them are of all."""
    return sorted(map(_pair, rows), key=lambda pair: unit(pair["chosen"] + pair["rejected"]))


def _pair(row: Mapping[str, Any]) -> dict[str, str]:
    """Texts single-spaced; the side is the prompt, and the arguments begin with a space."""
    debate, _, side = str(row["topic"]).partition("_")
    prompt = f"{debate.replace('-', ' ').strip()}: {side.replace('-', ' ').strip()}."
    return {"prompt": prompt, **{name: " " + " ".join(str(row[name]).split()) for name in ("chosen", "rejected")}}


def _arguments(pairs: Rows) -> list[tuple[str, str]]:
    """(side, argument), each once, in an order that has nothing to do with the labels."""
    found = {(pair["prompt"], pair[name]) for pair in pairs for name in ("chosen", "rejected")}
    return sorted(found, key=lambda each: (unit(each[1]), each))


def _prompt(side: str, text: str) -> str:
    return f"{side} {' '.join(text.split()[:OPENING])}"


def _labeled(pairs: Rows) -> Rows:
    won: Counter[tuple[str, str]] = Counter()
    for pair in pairs:
        won[pair["prompt"], pair["chosen"]] += 1
        won[pair["prompt"], pair["rejected"]] -= 1
    return [
        {"text": side + text, "label": int(won[side, text] > 0)}
        for side, text in _arguments(pairs)
        if won[side, text] != 0
    ]
