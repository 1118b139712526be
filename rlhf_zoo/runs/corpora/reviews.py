"""Film reviews to continue and to judge, and pairs of positive and negative snippets of other reviews.

The reviews are the Sentiment Polarity Dataset v2.0 (Pang & Lee, ACL 2004), the snippets the Sentence Polarity Dataset
v1.0 (Pang & Lee, ACL 2005), both CC BY 4.0. They do not ship with this package: `prepare` reads NLTK's download,
folders of ``SPLIT.jsonl`` files, or the Hub.
"""

import itertools
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...errors import ZooError
from ..data.overlap import find_overlap
from .source import SPLITS, Rows, read_splits, split_by_hash, unit_hash

#: Folders of the reviews and of the snippets.
REVIEWS, SNIPPETS = "movie_reviews", "rt_polarity"
#: Folder -> name of the corpus in NLTK.
NLTK = {REVIEWS: "movie_reviews", SNIPPETS: "sentence_polarity"}
#: Number of pairs that train the reward model, and that test it and the judges.
PAIR_COUNTS = {"train": 1500, "test": 300}

#: Number of a review's first words that are a prompt, as `columns` in recipes/smollm2-reviews/ppo.yaml has it.
PROMPT_WORDS = 8

HELP = (
    'run `python -c \'import nltk; nltk.download("movie_reviews"); nltk.download("sentence_polarity")\'` and give '
    "--dataset_name ~/nltk_data"
)

#: Superfluous spaces before and after marks, which both corpora have.
_SPACE_BEFORE = re.compile(r"\s+([.,;:!?)\]]|'(?:s|m|d|t|re|ve|ll)\b|n't\b)")
_SPACE_AFTER = re.compile(r"([(\[])\s+")


def prepare(source: str | None = None, *, seed: int) -> dict[str, dict[str, Rows]]:
    """Makes three configurations.

    - lines (text): the reviews of train, validation and test. No training text contains the first `PROMPT_WORDS` words
      of a validation or test text, because these words are the prompts of the evaluation.
    - preferences (prompt, chosen, rejected): an empty prompt, a positive snippet and a negative snippet of similar
      length; train and test. Nobody compared the two snippets.
    - judge (text, label): the reviews of the judge split, with the label 1 for positive reviews and 0 for negative
      ones. No other configuration has these reviews, and no pair depends on the label of a review.

    Args:
        source: NLTK's data folder; a folder with the folders movie_reviews and rt_polarity, each with
            ``SPLIT.jsonl[.gz]`` (text, label; splits train, judge, validation, test); or the id of a data set on the
            Hub with these splits, whose column ``corpus`` names one of the two.
        seed: Has no effect, because nothing is drawn at random.

    Returns:
        ``{configuration: {split: rows}}``.

    Raises:
        ZooError: The source cannot be read, or lacks a split or a column.
    """
    if source is None:
        raise ZooError(f"The reviews do not come with this package: {HELP}.")
    reviews, snippets = (_read(source, corpus) for corpus in (REVIEWS, SNIPPETS))
    lines = {split: [{"text": row["text"]} for row in reviews[split]] for split in ("train", "validation", "test")}
    held_out = [{"prompt": _first_words(row["text"])} for row in (*lines["validation"], *lines["test"])]
    overlap = find_overlap(held_out, lines["train"])
    lines["train"] = [row for index, row in enumerate(lines["train"]) if index not in overlap.row_indices]
    return {
        "lines": lines,
        "preferences": {split: _pairs(snippets[split], limit) for split, limit in PAIR_COUNTS.items()},
        "judge": {"train": reviews["judge"]},
    }


#: The judge's labels belong to reviews, and the reward model's labels to snippets by other critics.
prepare.judge_has_other_labels = True  # type: ignore[attr-defined]


def _first_words(text: str) -> str:
    return " ".join(text.split()[:PROMPT_WORDS])


def _pairs(rows: Rows, limit: int) -> Rows:
    """Pairs positive and negative texts of the same rank by length, so that length does not predict the label."""
    hashed_order = sorted(rows, key=lambda row: unit_hash(row["text"]))
    sides = [[row["text"] for row in hashed_order if row["label"] == label][:limit] for label in (1, 0)]
    count = min(map(len, sides))
    sides_by_length = (sorted(side[:count], key=lambda text: len(text.split())) for side in sides)
    pairs = [{"prompt": "", "chosen": pro, "rejected": con} for pro, con in zip(*sides_by_length, strict=True)]
    return sorted(pairs, key=lambda pair: unit_hash(pair["chosen"]))


def _read(source: str, corpus: str) -> dict[str, Rows]:
    """Reads the rows (text, label) of each split of a corpus, with single spaces."""
    folder = Path(source).expanduser()
    texts = _nltk_texts(folder, NLTK[corpus])
    if texts is not None:
        return _split(texts, corpus)
    if (folder / corpus).is_dir():
        rows = read_splits(str(folder / corpus), SPLITS, ("text", "label"), fix=HELP)
    else:
        rows = read_splits(source, SPLITS, ("corpus", "text", "label"), fix=HELP)
        rows = {split: [row for row in split_rows if row["corpus"] == corpus] for split, split_rows in rows.items()}
    return {split: _check_rows(split_rows, f"{source}, {corpus}, split {split},") for split, split_rows in rows.items()}


def _check_rows(rows: Rows, subject: str) -> Rows:
    for number, row in enumerate(rows, 1):
        if not isinstance(row["text"], str) or row["label"] not in (0, 1):
            raise ZooError(
                f"{subject} row {number}: text must be a string and label 0 (negative) or 1 (positive): correct that "
                "row."
            )
    if {row["label"] for row in rows} != {0, 1}:
        raise ZooError(f"{subject} needs texts of both labels, 0 (negative) and 1 (positive): add rows.")
    return [_row(row["text"], row["label"]) for row in rows]


def _row(text: str, label: int) -> dict[str, str | int]:
    return {"text": " ".join(text.split()), "label": int(label)}


def _nltk_texts(folder: Path, corpus: str) -> list[tuple[str, int]] | None:
    """Reads (text, label) of an NLTK corpus from its folder or its zip; None if there is neither."""
    for location in (folder / "corpora" / corpus, folder / corpus):
        try:
            if location.is_dir() and (files := [path for path in location.rglob("*") if path.is_file()]):
                contents = [(path.relative_to(location).as_posix(), path.read_bytes()) for path in sorted(files)]
            elif location.with_name(f"{corpus}.zip").is_file():
                with zipfile.ZipFile(location.with_name(f"{corpus}.zip")) as archive:
                    contents = [(name, archive.read(name)) for name in sorted(archive.namelist())]
            else:
                continue
        except (OSError, zipfile.BadZipFile) as error:
            raise ZooError(f"NLTK's {corpus} at {location} cannot be read ({error}): download it again.") from error
        texts = list(itertools.chain.from_iterable(_labeled_texts(name, content) for name, content in contents))
        if texts:
            return texts
    return None


def _labeled_texts(name: str, content: bytes) -> Iterator[tuple[str, int]]:
    """Yields (text, label) from a file of NLTK: pos/NAME.txt is one review, rt-polarity.pos has a snippet per line."""
    label = {"pos": 1, "neg": 0}
    path = Path(name)
    text = content.decode("iso-8859-1")
    if path.suffix == ".txt" and path.parent.name in label:
        yield text, label[path.parent.name]
    elif path.suffix[1:] in label:
        yield from ((line, label[path.suffix[1:]]) for line in text.splitlines() if line.strip())


def _split(texts: Iterable[tuple[str, int]], corpus: str) -> dict[str, Rows]:
    """Cleans texts, drops repeated ones, and splits them by their hash."""
    by_text = {
        " ".join(_SPACE_AFTER.sub(r"\1", _SPACE_BEFORE.sub(r"\1", text)).split()): label for text, label in texts
    }
    return split_by_hash({text: _row(text, label) for text, label in by_text.items()}, subject=f"NLTK's {corpus}")
