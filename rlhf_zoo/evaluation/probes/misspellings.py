"""Finds copies of one text that differ only in spelling, as where each copy has other typos.

Two texts are such copies if this holds wherever their words differ: the letters are alike, no digit differs, and one of
the words may be misspelled. A word is not misspelled if a prompt, both sides or many texts have it. So "Sunday" in the
place of "Monday", one number in the place of another, and a word of the prompt are content, and make another text. In
most of these places the other word must be one that many texts have: the right spelling, and not just another answer.
"""

from collections import Counter
from collections.abc import Sequence, Set
from difflib import SequenceMatcher
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

#: Number of texts that are all compared with each other. Others are compared with the copies found among these.
SAMPLE = 300
#: The others are compared with at most so many copies of a text.
MAX_MEMBERS = 10
#: Copies share at least this part of their different words, and their lengths in letters differ by less than a tenth.
MIN_SHARED_WORDS = 0.4
_MIN_LENGTH_RATIO = 0.9
#: Where words differ, at least this part of their letters is the same, in order; words of up to two letters may differ.
MIN_SAME_LETTERS = 0.6
_MAX_SHORT_WORD = 2
#: Many texts have a word if it is in this part of them, and in at least three.
MIN_USUAL_SHARE, MIN_USUAL_TEXTS = 0.05, 3


def merge_copies(texts: Sequence[str], tokens: Sequence[Sequence[str]], vocabulary: Set[str]) -> list[str]:
    """Replaces misspelled copies of a text by one of them.

    Args:
        texts: (N,) texts.
        tokens: (N,) their words.
        vocabulary: Words that are not misspelled.

    Returns:
        (N,) texts, equal for copies.
    """
    row_of = {text: row for row, text in enumerate(texts)}
    # In alphabetical order, so that the order of the input has no influence.
    distinct = sorted(row_of)
    words = [tokens[row_of[text]] for text in distinct]
    sampled = np.unique(np.linspace(0, len(distinct) - 1, min(len(distinct), SAMPLE)).astype(int)).tolist()
    counts = Counter(word for place in sampled for word in set(words[place]))
    usual = {word for word, count in counts.items() if count >= max(MIN_USUAL_TEXTS, MIN_USUAL_SHARE * len(sampled))}
    leader = {place: place for place in sampled}
    for a, b in _similar_pairs(words, sampled):
        if leader[a] != leader[b] and _are_copies(words[a], words[b], vocabulary, usual):
            old, new = max(leader[a], leader[b]), min(leader[a], leader[b])
            leader.update({place: new for place, first in leader.items() if first == old})
    members: dict[int, list[int]] = {}
    for place, first in leader.items():
        members.setdefault(first, []).append(place)
    copied = {first: places[:MAX_MEMBERS] for first, places in members.items() if len(places) > 1}
    for place in range(len(distinct)) if copied else ():
        if place not in leader:
            leader[place] = next(
                (
                    first
                    for first, places in copied.items()
                    if any(_are_copies(words[place], words[k], vocabulary, usual) for k in places)
                ),
                place,
            )
    merged = {text: distinct[leader.get(place, place)] for place, text in enumerate(distinct)}
    return [merged[text] for text in texts]


def _similar_pairs(words: Sequence[Sequence[str]], places: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the pairs of places whose texts are about as long and share enough words to be copies."""
    sets = [set(words[place]) for place in places]
    number_of = {word: number for number, word in enumerate(sorted(set().union(*sets)))}
    matrix: NDArray[np.float32] = np.zeros((len(places), len(number_of)), dtype=np.float32)
    for row, word_set in enumerate(sets):
        matrix[row, [number_of[word] for word in word_set]] = 1
    sizes = np.maximum(matrix.sum(1), 1)
    letters = np.array([max(1, sum(map(len, words[place]))) for place in places])
    similar = matrix @ matrix.T >= MIN_SHARED_WORDS * np.minimum.outer(sizes, sizes)
    similar &= np.minimum.outer(letters, letters) >= _MIN_LENGTH_RATIO * np.maximum.outer(letters, letters)
    return [(places[a], places[b]) for a, b in combinations(range(len(places)), 2) if similar[a, b]]


def _are_copies(a: Sequence[str], b: Sequence[str], vocabulary: Set[str], usual: Set[str]) -> bool:
    places = usual_places = 0
    for kind, a_start, a_end, b_start, b_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        different = [*a[a_start:a_end], *b[b_start:b_end]]
        # A lost or doubled space splits or joins words, so their letters are compared together.
        letters = "".join(a[a_start:a_end]), "".join(b[b_start:b_end])
        if any(map(str.isdigit, "".join(letters))) or all(word in vocabulary or word in usual for word in different):
            return False
        is_short = max(map(len, letters)) <= _MAX_SHORT_WORD
        if not is_short and SequenceMatcher(None, *letters, autojunk=False).ratio() < MIN_SAME_LETTERS:
            return False
        places += 1
        usual_places += any(word in usual for word in different)
    return 2 * usual_places >= places
