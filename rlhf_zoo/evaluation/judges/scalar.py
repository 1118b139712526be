"""Judges of single completions. A higher score is better; scores of different judges are not comparable.

The classifier and the lexicon read prompt + completion as one text.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...errors import ZooError
from ...fileio import write_bytes
from ...plugins import call_list_judge
from ..stats import Estimate, proportion
from .pairwise import check_lengths, first_paragraph, load_function

_HELD_OUT_SHARE = 0.2  # share of the texts held out to measure a classifier's accuracy


@runtime_checkable
class Judge(Protocol):
    """Scores completions. It takes N prompts and N completions, and returns N scores."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """One sentence for a card: what the judge is, what it was trained on, and how good it is."""
        ...

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]: ...


class ClassifierJudge:
    """P(positive) by logistic regression over TF-IDF of single words and word pairs (scikit-learn).

    It is saved as one npz file of arrays, so reading it needs no pickle.

    Args:
        terms: (K,) words and word pairs.
        idf: (K,) their inverse document frequencies.
        weights: (K,) the coefficients.
        bias: The intercept.
        accuracy: The judge's accuracy on held-out texts, with Wilson's interval.
        training_text_count: Number of training texts.
    """

    name = "classifier"
    _SCHEMA = 1
    # The pattern keeps one-letter words. With sublinear term frequency, "great" ten times is not ten times as good.
    _VECTORIZER_OPTIONS: Mapping[str, object] = {
        "ngram_range": (1, 2), "sublinear_tf": True, "token_pattern": r"(?u)\b\w+\b",
    }  # fmt: skip

    def __init__(
        self,
        *,
        terms: Sequence[str],
        idf: NDArray[np.float64],
        weights: NDArray[np.float64],
        bias: float,
        accuracy: Estimate,
        training_text_count: int,
    ) -> None:
        if not len(terms) == len(idf) == len(weights):
            raise ValueError(
                f"{len(terms)} terms, {len(idf)} idf values, {len(weights)} weights: their numbers must be equal."
            )
        self._terms, self._idf, self._weights, self._bias = list(terms), idf, weights, bias
        self.accuracy, self.training_text_count = accuracy, training_text_count

    @classmethod
    def train(cls, rows: Iterable[Mapping[str, object]], *, seed: int) -> ClassifierJudge:
        """Trains a judge. Texts that differ only in case and outer spaces fall on the same side of the split.

        Args:
            rows: Rows with `text` and `label` (1 for positive, 0 for negative).
            seed: Seed of the split.

        Raises:
            ZooError: A column is missing, a label is neither 1 nor 0, or there are too few texts of either label.
        """
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression

        texts, labels, is_held_out = _split(rows, seed=seed)
        training_texts = [text for text, held_out in zip(texts, is_held_out, strict=True) if not held_out]
        vectorizer = TfidfVectorizer(**cls._VECTORIZER_OPTIONS)
        # C = 4 had the best 5-fold accuracy among 1, 4, 16 on the judge split of pros_cons.
        model = LogisticRegression(C=4.0, max_iter=1000).fit(
            vectorizer.fit_transform(training_texts), labels[~is_held_out]
        )
        judge = cls(
            terms=vectorizer.get_feature_names_out().tolist(),
            idf=vectorizer.idf_,
            weights=model.coef_[0],
            bias=float(model.intercept_[0]),
            accuracy=Estimate(0.0, (0.0, 1.0), 0),
            training_text_count=len(training_texts),
        )
        # Measure the accuracy with the code that will score completions.
        scores = judge._scores([text for text, held_out in zip(texts, is_held_out, strict=True) if held_out])
        judge.accuracy = proportion(int(((scores > 0.5) == labels[is_held_out]).sum()), int(is_held_out.sum()))
        return judge

    @staticmethod
    def check(rows: Iterable[Mapping[str, object]], *, seed: int) -> None:
        """Checks rows as `train` does, whose arguments and errors it has."""
        _split(rows, seed=seed)

    @property
    def description(self) -> str:
        """One sentence for a card: the method, the number of texts and the held-out accuracy."""
        low, high = self.accuracy.ci95
        return (
            f"TF-IDF and logistic regression, trained on {self.training_text_count} labeled texts; "
            f"accuracy {self.accuracy.value:.3f} [{low:.3f}, {high:.3f}] on {self.accuracy.n} held-out texts."
        )

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Returns P(positive) of each prompt + completion."""
        return self._scores(_join_texts(prompts, completions)).tolist()

    def save(self, path: Path | str) -> None:
        """Writes the judge into one npz file. Equal judges give equal bytes.

        Args:
            path: The file.
        """
        header = {
            "schema": self._SCHEMA,
            "bias": self._bias,
            "accuracy": self.accuracy.to_json(),
            "trained_on": self.training_text_count,
        }
        # Text is stored as bytes, because npz without pickle has only fixed-width strings.
        arrays: dict[str, NDArray[Any]] = {
            "header": _as_bytes(json.dumps(header)),
            "terms": _as_bytes("\n".join(self._terms)),  # no term contains a newline: a term is words joined by spaces
            "idf": np.asarray(self._idf, dtype=np.float64),
            "weights": np.asarray(self._weights, dtype=np.float64),
        }
        # Written in memory first, so that the file appears complete or not at all.
        buffer = BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        write_bytes(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path | str) -> ClassifierJudge:
        """Reads a saved judge. Nothing in the file is executed.

        Args:
            path: The file.

        Raises:
            ZooError: The file is missing or not a judge.
        """
        try:
            with np.load(Path(path), allow_pickle=False) as arrays:
                header = json.loads(arrays["header"].tobytes())
                if header["schema"] != cls._SCHEMA:
                    raise ValueError(f"its schema is {header['schema']}")
                accuracy = header["accuracy"]
                return cls(
                    terms=arrays["terms"].tobytes().decode().split("\n"),
                    idf=arrays["idf"],
                    weights=arrays["weights"],
                    bias=header["bias"],
                    accuracy=Estimate(accuracy["value"], tuple(accuracy["ci95"]), accuracy["n"]),
                    training_text_count=header["trained_on"],
                )
        except FileNotFoundError as error:
            raise ZooError(f"There is no judge at {path}: run the evaluation, which trains and saves it.") from error
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise ZooError(
                f"{path} is not a saved judge ({error}): delete it, and the next evaluation trains a new one."
            ) from error

    @cached_property
    def _vectorizer(self) -> Any:
        from sklearn.feature_extraction.text import TfidfVectorizer

        vectorizer = TfidfVectorizer(**self._VECTORIZER_OPTIONS, vocabulary=self._terms)
        # Setting idf_ has the effect of fitting the vectorizer, so that it need not be pickled.
        vectorizer.idf_ = self._idf
        return vectorizer

    def _scores(self, texts: Sequence[str]) -> NDArray[np.float64]:
        if not texts:
            return np.zeros(0)
        logits = self._vectorizer.transform(texts) @ self._weights + self._bias
        return 1 / (1 + np.exp(-logits))


class LexiconJudge:
    """(positive − negative) / (positive + negative) over a text's opinion words, −1 to 1; 0 without opinion words.

    A negation among the three words before an opinion word, with no punctuation in between, flips the opinion's sign. A
    word on both lists does not count. A hyphenated word that is on no list is split into its parts.

    Args:
        positive: The positive words.
        negative: The negative words.
    """

    name = "lexicon"
    _TOKEN = re.compile(r"\w+(?:[-'’]\w+)*\+?|[^\w\s]")  # "+" may end a word on a list, such as "a+"
    _NEGATIONS = frozenset(
        {"no", "not", "never", "none", "nothing", "neither", "nor", "without", "lacks", "lacking", "hardly", "barely"}
        | {"scarcely", "cannot", "cant", "dont", "doesnt", "didnt", "isnt", "wasnt", "wont"}
    )
    _REACH = 3  # a negation flips the signs of this many words after it

    def __init__(self, positive: Iterable[str], negative: Iterable[str]) -> None:
        good, bad = ({word.strip().lower() for word in words} - {""} for words in (positive, negative))
        if not good - bad or not bad - good:
            raise ZooError(
                "A lexicon judge needs words that are only positive, and words that are only negative: add the missing "
                "words."
            )
        self._polarity = dict.fromkeys(good - bad, 1) | dict.fromkeys(bad - good, -1)
        self._sizes = len(good - bad), len(bad - good)

    @property
    def description(self) -> str:
        """One sentence for a card: the formula and the sizes of the lists."""
        positive, negative = self._sizes
        return (
            f"Balance of opinion words, (positive − negative) / (positive + negative), by a lexicon of {positive} "
            f"positive and {negative} negative words; a negation before a word flips its sign."
        )

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Returns the balance of each prompt + completion, −1 to 1."""
        return [self._score(text) for text in _join_texts(prompts, completions)]

    def _score(self, text: str) -> float:
        opinions = []
        since_negation = self._REACH + 1  # number of words since the last negation
        for token in self._tokens(text):
            since_negation += 1
            # Punctuation ends the reach of a negation.
            if not token[0].isalnum():
                since_negation = self._REACH + 1
            elif token in self._NEGATIONS or token.endswith(("n't", "n’t")):
                since_negation = 0
            elif token in self._polarity:
                opinions.append(self._polarity[token] * (-1 if since_negation <= self._REACH else 1))
        return sum(opinions) / len(opinions) if opinions else 0.0

    def _tokens(self, text: str) -> Iterable[str]:
        for token in self._TOKEN.findall(text.lower()):
            if token not in self._polarity:
                yield from token.rstrip("+").split("-") if token[0].isalnum() else (token,)
            else:
                yield token


class FunctionJudge:
    """A function (prompts, completions) -> numbers.

    Args:
        target: "module:attribute" or an entry point's name.
        name: The judge's name; None for the function's name, or that of the entry point.
        description: A sentence for cards; None for the first paragraph of the function's docstring.
    """

    def __init__(self, target: str, *, name: str | None = None, description: str | None = None) -> None:
        self._function: Callable[[list[str], list[str]], Sequence[float]] = load_function(target)
        self.target = target
        self.name = name or target.rpartition(":")[2]
        self.description = description or first_paragraph(self._function) or f"The function {target}."

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Returns the function's scores. Raises ZooError unless there is one finite number per completion."""
        check_lengths(prompts, completions)
        scores = call_list_judge(self.target, self._function, list(prompts), list(completions))
        if len(scores) != len(completions):
            raise ZooError(
                f"The judge {self.target!r} gave {len(scores)} scores for {len(completions)} completions: "
                "it must give one for each completion."
            )
        for index, score in enumerate(scores):
            try:
                is_number = math.isfinite(score)  # raises TypeError for texts, which float() would read
            except (TypeError, ValueError, OverflowError):
                is_number = False
            if not is_number:
                raise ZooError(f"The judge {self.target!r} gave {score!r} for completion {index}: it must be a number.")
        return [float(score) for score in scores]


def _join_texts(prompts: Sequence[str], completions: Sequence[str]) -> list[str]:
    check_lengths(prompts, completions)
    return [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]


def _parse_rows(rows: Iterable[Mapping[str, object]]) -> tuple[list[str], NDArray[np.bool_]]:
    texts, labels = [], []
    for index, row in enumerate(rows):
        for key in ("text", "label"):
            if key not in row:
                raise ZooError(f"Row {index} for the judge has no column {key!r}, only {', '.join(map(str, row))}.")
        if not isinstance(row["text"], str):
            raise ZooError(f"Row {index} for the judge has {row['text']!r} as its text: it must be a text.")
        if row["label"] not in (0, 1):
            raise ZooError(f"Row {index} for the judge has the label {row['label']!r}: it must be 1 or 0.")
        texts.append(row["text"])
        labels.append(bool(row["label"]))
    return texts, np.array(labels, dtype=bool)


def _split(
    rows: Iterable[Mapping[str, object]], *, seed: int
) -> tuple[list[str], NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns the texts, their labels, and which texts are held out. Each part has both labels."""
    texts, labels = _parse_rows(rows)
    # Splitting distinct texts rather than rows keeps copies of training texts out of the held-out part.
    keys = [text.strip().lower() for text in texts]
    distinct_keys = sorted(set(keys))
    order = np.random.default_rng(seed).permutation(len(distinct_keys))
    held_out_keys = {distinct_keys[index] for index in order[: round(_HELD_OUT_SHARE * len(distinct_keys))]}
    is_held_out = np.array([key in held_out_keys for key in keys], dtype=bool)
    for part, name in ((~is_held_out, "training"), (is_held_out, "held-out")):
        if len(set(labels[part].tolist())) < 2:
            raise ZooError(
                f"The judge's {name} part has {int(part.sum())} texts and not both labels: add rows of the label 0 and "
                "of the label 1 to the judge's texts."
            )
    return texts, labels, is_held_out


def _as_bytes(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), dtype=np.uint8)
