"""Product remarks: pros and cons that buyers wrote, for completion, preferences and judging.

The corpus is "Pros and Cons" by Bing Liu (CC BY 4.0; Ganapathibhotla & Liu, COLING 2008). It does not ship with this
package: `prepare` reads it from NLTK's download, from a folder of ``SPLIT.jsonl`` files, or from the Hub.
"""

import itertools
import random
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ZooError
from .source import SPLITS, Rows, read_jsonl, read_splits, split_by_hash, unit_hash

#: An opening is neutral if the share of pros among the remarks that begin with it is within these bounds.
NEUTRAL = (0.2, 0.8)
MIN_CONTINUATIONS = 5
#: The share of the neutral openings that become test prompts; the others are validation prompts.
TEST_SHARE = 0.75
MAX_OPENING_WORDS = 3

HELP = "run `python -c 'import nltk; nltk.download(\"pros_cons\")'` and give --dataset_name ~/nltk_data"

_TAG = re.compile(r"</?\w+>")


@dataclass(frozen=True)
class Remark:
    """A remark by a buyer.

    Attributes:
        text: The remark, with single spaces between words.
        label: 1 for a pro, 0 for a con.
    """

    text: str
    label: int

    @property
    def words(self) -> list[str]:
        """The words of the remark."""
        return self.text.split(" ")


def prepare(source: str | None = None, *, seed: int, train_pairs: int = 5_000) -> dict[str, dict[str, Rows]]:
    """Makes the four configurations of the recipe's data set.

    - lines (text): lower-cased remarks of train, validation and test.
    - prompts (prompt): openings of 1 to 3 words; see `_prompts`.
    - preferences (prompt, chosen, rejected): pairs built from labels, a pro chosen over a con; see `_pairs`.
    - judge (text, label): the judge split, which no other configuration uses.

    The data of the evaluation (test prompts, test pairs) do not depend on the seed.

    Args:
        source: A folder of ``SPLIT.jsonl[.gz]`` (text, label; splits train, judge, validation, test), NLTK's corpus
            (``nltk_data``, ``corpora/pros_cons``, or its zip), or the id of a data set on the Hub.
        seed: Draws the training prompts and pairs.
        train_pairs: Maximum number of training pairs.

    Returns:
        ``{configuration: {split: rows}}``.

    Raises:
        ZooError: The source cannot be read, or lacks a split or a column.
    """
    remarks = read_lower_case_remarks(source)
    other_remarks = {split: remarks[split] for split in ("train", "validation", "test")}
    return {
        "lines": {split: [{"text": remark.text} for remark in other_remarks[split]] for split in other_remarks},
        "prompts": _prompts(other_remarks, seed=seed),
        "preferences": {
            "train": _pairs(other_remarks["train"], f"train pairs {seed}", limit=train_pairs, matched_only=False),
            "test": _pairs(other_remarks["test"], "test pairs", limit=None, matched_only=True),
        },
        "judge": {"train": [{"text": remark.text, "label": remark.label} for remark in remarks["judge"]]},
    }


def read_lower_case_remarks(source: str | None) -> dict[str, list[Remark]]:
    """Reads remarks, lower-cases them, and drops remarks of one word, which leave nothing to complete.

    Args:
        source: As in `prepare`.

    Returns:
        Split -> remarks.

    Raises:
        ZooError: The source cannot be read, or lacks a split or a column.
    """
    if source is None:
        raise ZooError(f"Product remarks do not come with this package: {HELP}, or name a folder or a Hub id.")
    remarks_by_split = {
        split: [Remark(" ".join(remark.text.lower().split()), remark.label) for remark in remarks]
        for split, remarks in read_remarks(source).items()
    }
    return {
        split: [remark for remark in remarks if len(remark.words) > 1] for split, remarks in remarks_by_split.items()
    }


def _openings(remark: Remark) -> Iterator[str]:
    """Yields the first word, two words and three words of a remark, if at least one word remains to complete."""
    words = remark.words
    for count in range(1, min(MAX_OPENING_WORDS, len(words) - 1) + 1):
        yield " ".join(words[:count])


def _prompts(remarks: dict[str, list[Remark]], *, seed: int) -> dict[str, Rows]:
    """Returns neutral openings for the evaluation, and other openings for PPO.

    An opening is neutral if it has at least `MIN_CONTINUATIONS` continuations in train, validation and test, of which
    20 to 80% are pros. The sha1 of a neutral opening decides between test and validation, whatever the seed. The labels
    only choose openings: no model learns from them, and PPO never sees a neutral opening. (SFT does see remarks that
    begin with neutral openings, because it must learn to continue them.) Each training remark gives one opening as a
    training prompt, so that frequent openings stay frequent.
    """
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for remark in itertools.chain.from_iterable(remarks.values()):
        for opening in _openings(remark):
            counts[opening][remark.label] += 1
    low, high = NEUTRAL
    neutral_openings = {
        opening
        for opening, (cons, pros) in counts.items()
        if cons + pros >= MIN_CONTINUATIONS and low <= pros / (cons + pros) <= high
    }
    rng = random.Random(f"product-remarks train prompts {seed}")
    train_openings = [rng.choice(list(_openings(remark))) for remark in remarks["train"]]
    held_out: dict[str, Rows] = {"validation": [], "test": []}
    for opening in sorted(neutral_openings, key=unit_hash):
        held_out["test" if unit_hash(opening) < TEST_SHARE else "validation"].append({"prompt": opening})
    train = [{"prompt": opening} for opening in train_openings if opening not in neutral_openings]
    return {"train": train, **held_out}


def _pairs(remarks: Sequence[Remark], stream: str, *, limit: int | None, matched_only: bool) -> Rows:
    """Returns pairs of a pro (chosen) and a con (rejected), each remark in at most one pair.

    The two remarks of a matched pair begin with the same words. Up to 3 of these words are the prompt, and the two
    completions begin with a space. Unless ``matched_only``, unmatched pairs with empty prompts follow, up to ``limit``.
    """
    rng = random.Random(f"product-remarks {stream}")
    by_first_word: dict[str, tuple[list[Remark], list[Remark]]] = defaultdict(lambda: ([], []))
    for remark in remarks:
        by_first_word[remark.words[0]][remark.label].append(remark)
    pairs: list[tuple[Remark, Remark]] = []
    unmatched_cons: list[Remark] = []
    unmatched_pros: list[Remark] = []
    for cons, pros in by_first_word.values():
        rng.shuffle(cons)
        rng.shuffle(pros)
        match_count = min(len(cons), len(pros))
        pairs += zip(pros[:match_count], cons[:match_count], strict=True)
        unmatched_cons += cons[match_count:]
        unmatched_pros += pros[match_count:]
    rng.shuffle(pairs)
    if not matched_only:
        rng.shuffle(unmatched_cons)
        rng.shuffle(unmatched_pros)
        pairs += zip(unmatched_pros, unmatched_cons, strict=False)
    rows = [_row(pro, con) for pro, con in pairs[:limit]]
    rng.shuffle(rows)
    return rows


def _row(pro: Remark, con: Remark) -> dict[str, Any]:
    max_count = min(MAX_OPENING_WORDS, len(pro.words) - 1, len(con.words) - 1)
    shared_count = 0
    while shared_count < max_count and pro.words[shared_count] == con.words[shared_count]:
        shared_count += 1
    prompt = " ".join(pro.words[:shared_count])
    return {"prompt": prompt, "chosen": pro.text[len(prompt) :], "rejected": con.text[len(prompt) :]}


def read_remarks(source: str) -> dict[str, list[Remark]]:
    """Reads the remarks of each of `SPLITS`, as written.

    Args:
        source: As in `prepare`.

    Returns:
        Split -> remarks.

    Raises:
        ZooError: The source cannot be read, or lacks a split or a column.
    """
    path = Path(source).expanduser()
    if path.exists():
        texts = _nltk_texts(path, "pros_cons", ("IntegratedPros.txt", "IntegratedCons.txt"))
        if texts is not None:
            remarks = _clean_lines(texts["IntegratedPros.txt"], texts["IntegratedCons.txt"])
            return split_by_hash(remarks, subject="The corpus")
        if not path.is_dir():
            raise ZooError(f"{source} is neither a folder nor NLTK's pros_cons zip: {HELP}.")
    rows = read_splits(source, SPLITS, ("text", "label"), fix=HELP)
    return {split: _parse_remarks(rows[split], f"{source}, split {split},") for split in SPLITS}


def _parse_remarks(rows: Rows, subject: str) -> list[Remark]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row["text"], str) or row["label"] not in (0, 1):
            raise ZooError(
                f"{subject} row {number}: text must be a string and label 0 (con) or 1 (pro): correct that row."
            )
    return [Remark(row["text"], int(row["label"])) for row in rows]


def _nltk_texts(path: Path, corpus: str, names: Sequence[str]) -> dict[str, str] | None:
    """Reads files of an NLTK corpus from its folder, a folder above it, or its zip; None if there are no such files."""
    folders = [path, path / corpus, path / "corpora" / corpus]
    zips = [path, *(folder.with_name(f"{corpus}.zip") for folder in folders[1:])]
    candidates = [
        *(folder for folder in folders if any((folder / name).is_file() for name in names)),
        *(archive for archive in zips if archive.suffix == ".zip" and archive.is_file()),
    ]
    if not candidates:
        return None
    location = candidates[0]
    try:
        if location.is_dir():
            data = {name: (location / name).read_bytes() for name in names if (location / name).is_file()}
        else:
            with zipfile.ZipFile(location) as archive:
                members = {Path(member).name: member for member in archive.namelist()}
                data = {name: archive.read(members[name]) for name in names if name in members}
    except (OSError, zipfile.BadZipFile) as error:
        raise ZooError(
            f"{location} cannot be read ({error}): correct its permissions or download NLTK's {corpus} again."
        ) from error
    missing_names = [name for name in names if name not in data]
    if missing_names:
        raise ZooError(f"{location} lacks {', '.join(missing_names)}: download NLTK's {corpus} again.")
    return {name: content.decode("iso-8859-2") for name, content in data.items()}  # the encoding of NLTK's own readers


def _clean_lines(pros: str, cons: str) -> dict[str, Remark]:
    """Returns lower-cased text -> remark without tags. Drops one-word lines and lines that have both labels."""
    by_text: dict[str, Remark] = {}
    contradictory_texts: set[str] = set()
    for label, lines in ((1, pros), (0, cons)):
        for line in lines.splitlines():
            text = " ".join(_TAG.sub(" ", line).split())
            if len(text.split(" ")) < 2:
                continue
            first_remark = by_text.setdefault(text.lower(), Remark(text, label))
            if first_remark.label != label:
                contradictory_texts.add(text.lower())
    return {key: remark for key, remark in by_text.items() if key not in contradictory_texts}


def lexicon(source: str) -> dict[str, int]:
    """Reads Bing Liu's opinion lexicon, for a judge without training data. Words with both signs are dropped.

    Args:
        source: A folder with ``train.jsonl[.gz]`` (word, label 1 or 0), or NLTK's corpus (``nltk_data``,
            ``corpora/opinion_lexicon``, or its zip).

    Returns:
        Word → +1 or -1.

    Raises:
        ZooError: The lexicon cannot be read.
    """
    path = Path(source).expanduser()
    fix = "run `python -c 'import nltk; nltk.download(\"opinion_lexicon\")'` and use ~/nltk_data"
    if not path.exists():
        raise ZooError(f"There is no opinion lexicon at {source}: {fix}.")
    signs: dict[str, set[int]] = defaultdict(set)
    texts = _nltk_texts(path, "opinion_lexicon", ("positive-words.txt", "negative-words.txt"))
    if texts is not None:
        for name, sign in (("positive-words.txt", +1), ("negative-words.txt", -1)):
            for line in texts[name].splitlines():
                if (word := line.strip()) and not word.startswith(";"):
                    signs[word].add(sign)
    elif path.is_dir():
        for number, row in enumerate(read_jsonl(path, "train"), 1):
            if not isinstance(row.get("word"), str) or row.get("label") not in (0, 1):
                raise ZooError(
                    f"{source}, train, row {number}: it needs word (text) and label (0 or 1): correct that row."
                )
            signs[row["word"]].add(1 if row["label"] else -1)
    else:
        raise ZooError(f"{source} is neither a folder nor NLTK's opinion_lexicon zip: {fix}.")
    if not signs:
        raise ZooError(f"The opinion lexicon at {source} is empty: {fix}.")
    return {word: word_signs.pop() for word, word_signs in signs.items() if len(word_signs) == 1}


prepare.lexicon = lexicon  # type: ignore[attr-defined]  # read by the judge `evaluation.lexicon`
