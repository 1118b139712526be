"""The grammar of the tiny world: reads any text as phrases of the world, and finds the words that fit no phrase.

A remark is one sentence. This grammar is simplified; `_ALLOWED` and the lexicon accept more::

    remark    = subject opinion {link} "."
    subject   = "the phone's battery" | "the battery of my phone" | …
    opinion   = [, filler,] (detail | is/are [intensifier] vague)
    link      = because it detail                      only after a vague opinion
              | , so consequence
              | , and|but (it|they|the aspect|its aspect) opinion
              | , and|but verdict
              | , filler

The reader goes from left to right, takes the longest phrase that the grammar allows at each position, and skips a word
that starts no phrase. After such a stray word, a new link or the full stop is also allowed, so that a mistake does not
affect the words after it. Reading terminates on any text, in time linear in its length.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field, replace

from . import lexicon as lex

_SLOT = re.compile(r"\[([^\]]*)\]")
_TOKEN = re.compile(r"\w+(?:'\w+)?|[^\w\s]")
_MAX_REPEAT_TOKENS = 12
"""Longest span, in tokens, whose immediate repetition is dropped; longer spans count as repeated phrases."""


@dataclass(frozen=True)
class Phrase:
    """A phrase of the world, as read in a text.

    Attributes:
        kind: subject, detail, vague, consequence, verdict, filler, aside, stop, and, but, because, so, or pronoun. In a
            trie, bare subject, vague is, vague are, because it, because they, it and they stand for some of these.
        key: An identifier that all spellings of the phrase share.
        text: The words as written.
        polarity: +1 for praise, -1 for a complaint, 0 for neither.
        aspect: In a `Reading`, the aspect that the text describes here, or "product" for a verdict; in a trie, the
            aspect to which the phrase belongs.
        product: The product that the phrase names; in a `Reading`, if it names none, the first product that the text
            named.
        intensified: Whether the phrase contains an intensifier.
        fits: Whether the phrase makes sense at its position, for this product and aspect.
    """

    kind: str
    key: str
    text: str
    polarity: int = 0
    aspect: str | None = None
    product: str | None = None
    intensified: bool = False
    fits: bool = True


@dataclass(frozen=True)
class Reading:
    """A text as phrases of the world.

    Attributes:
        phrases: The phrases in order.
        stray_tokens: Words and marks that the grammar does not allow at their position.
        repeated_word_count: Number of words dropped as immediate repetitions; a span without words counts as one.
        word_count: Number of all words, without punctuation.
        is_complete: Whether the sentence has a grammatical end with a full stop.
    """

    phrases: tuple[Phrase, ...]
    stray_tokens: tuple[str, ...]
    repeated_word_count: int
    word_count: int
    is_complete: bool


def tokenize(text: str) -> list[str]:
    """Splits a text into words (with their 's) and punctuation marks.

    Args:
        text: The text. Upper-case words match no phrase, because the world writes in lower case.
    """
    return _TOKEN.findall(text)


def _slots(template: str) -> list[list[str]]:
    parts = _SLOT.split(template)
    return [part.split("|") if index % 2 else [part] for index, part in enumerate(parts)]


def spellings(template: str) -> list[str]:
    """Returns all texts that the generator writes for a phrase with slots: ``lasts [two|three] days`` has two.

    Args:
        template: The phrase with its slots.
    """
    return ["".join(choice) for choice in itertools.product(*_slots(template))]


def _accepted_spellings(template: str) -> list[str]:
    """Returns all texts that are read as a phrase: its spellings, and its spellings with other numbers."""
    slots = [list(lex.NUMBERS) if set(slot) <= set(lex.NUMBERS) else slot for slot in _slots(template)]
    return ["".join(choice) for choice in itertools.product(*slots)]


def subjects(product: str, aspect: str) -> list[str]:
    """Returns the neutral openings that name an aspect of a product, such as ``the phone's battery``.

    Args:
        product: Name of the product.
        aspect: Name of the aspect.
    """
    possessive_openings = [f"{determiner} {product}'s {aspect}" for determiner in lex.DETERMINERS]
    return possessive_openings + [f"the {aspect} of {determiner} {product}" for determiner in lex.DETERMINERS]


@dataclass
class _Trie:
    """Phrases by their tokens; several phrases may have the same spelling."""

    children: dict[str, _Trie] = field(default_factory=dict)
    phrases: list[Phrase] = field(default_factory=list)

    def add(self, phrase: Phrase) -> None:
        node = self
        for token in tokenize(phrase.text):
            node = node.children.setdefault(token, _Trie())
        node.phrases.append(phrase)

    def match(self, tokens: list[str], start: int) -> list[tuple[int, list[Phrase]]]:
        """Returns (end, phrases) for each spelling that begins at ``start``, the shortest first."""
        matches: list[tuple[int, list[Phrase]]] = []
        node = self
        for end in range(start, len(tokens)):
            child = node.children.get(tokens[end])
            if child is None:
                break
            node = child
            if node.phrases:
                matches.append((end + 1, node.phrases))
        return matches


def _build() -> dict[str, _Trie]:
    tries: dict[str, _Trie] = {}

    def add(kind: str, key: str, text: str, **attributes: object) -> None:
        tries.setdefault(kind, _Trie()).add(Phrase(kind, key, text, **attributes))  # type: ignore[arg-type]

    for aspect in lex.ASPECTS:
        groups = [("detail", aspect.praise, +1), ("detail", aspect.complaint, -1),
                ("consequence", aspect.good_outcomes, +1), ("consequence", aspect.bad_outcomes, -1)]  # fmt: skip
        for kind, templates, polarity in groups:
            for template in templates:
                for text in _accepted_spellings(template):
                    add(kind, template, text, polarity=polarity, aspect=aspect.name)
        for product in lex.PRODUCTS:
            for text in subjects(product, aspect.name):
                add("subject", aspect.name, text, aspect=aspect.name, product=product)
        for text in (f"the {aspect.name}", f"its {aspect.name}"):
            add("bare subject", aspect.name, text, aspect=aspect.name)
    for polarity, adjectives in lex.VAGUE.items():
        for adjective in adjectives:
            for be in ("is", "are"):
                add("vague " + be, adjective, f"{be} {adjective}", polarity=polarity)
                if polarity and " " not in adjective:
                    for intensifier in lex.INTENSIFIERS:
                        text = f"{be} {intensifier} {adjective}"
                        add("vague " + be, adjective, text, polarity=polarity, intensified=True)
    for polarity, verdicts in lex.VERDICTS.items():
        for verdict in verdicts:
            add("verdict", verdict, verdict, polarity=polarity)
    for filler in lex.FILLERS:
        add("filler", filler, f", {filler}")
        add("aside", filler, f", {filler},")
    for kind, links in (("and", lex.ADDITIVE), ("but", lex.CONTRASTIVE), ("so", lex.CONSEQUENCE)):
        for link in links:
            add(kind, link, link)
    for pronoun in ("it", "they"):
        add(pronoun, pronoun, pronoun)
        for link in lex.CAUSE:
            add("because " + pronoun, link, f"{link} {pronoun}")
    add("stop", ".", ".")
    return tries


_TRIES = _build()

_OPINION = ("aside", "detail", "vague is", "vague are")
#: State of the reader -> the kinds of phrases that it accepts.
_ALLOWED: dict[str, tuple[str, ...]] = {
    "start": ("subject",),
    "subject": _OPINION,
    "because": ("detail",),
    "vague": ("stop", "filler", "and", "but", "so", "because it", "because they"),
    "opinion": ("stop", "filler", "and", "but", "so"),
    "linked": ("subject", "bare subject", "it", "they", "verdict"),
    "so": ("consequence",),
    "end": (),
}
#: States in which the reader also accepts the kinds of `_RECOVERY` after a stray word.
_RECOVERABLE = ("subject", "because", "linked", "so")
_RECOVERY = ("stop", "filler", "and", "but", "so")
#: Kind of a phrase -> the state after it.
_NEXT = {
    "subject": "subject", "bare subject": "subject", "it": "subject", "they": "subject", "aside": "subject",
    "detail": "opinion", "consequence": "opinion", "verdict": "opinion", "filler": "opinion",
    "vague is": "vague", "vague are": "vague", "because it": "because", "because they": "because",
    "and": "linked", "but": "linked", "so": "so", "stop": "end",
}  # fmt: skip
_REPORTED_KIND = {
    "vague is": "vague", "vague are": "vague", "because it": "because", "because they": "because",
    "it": "pronoun", "they": "pronoun", "bare subject": "subject",
}  # fmt: skip


def _fold_repeats(tokens: list[str]) -> tuple[list[str], int]:
    """Drops immediate repetitions, as in ``very very`` or ``it works it works``.

    Returns the remaining tokens and the number of words dropped.
    """
    kept_tokens: list[str] = []
    dropped_count = 0
    for token in tokens:
        kept_tokens.append(token)
        if token not in kept_tokens[-1 - _MAX_REPEAT_TOKENS : -1]:
            continue
        for span in range(1, min(_MAX_REPEAT_TOKENS, len(kept_tokens) // 2) + 1):
            if kept_tokens[-1] == kept_tokens[-1 - span] and kept_tokens[-span:] == kept_tokens[-2 * span : -span]:
                dropped_count += max(1, sum(map(is_word, kept_tokens[-span:])))
                del kept_tokens[-span:]
                break
    return kept_tokens, dropped_count


def is_word(token: str) -> bool:
    """Whether a token is a word rather than a punctuation mark.

    Args:
        token: A token of `tokenize`.
    """
    return token[0].isalnum() or token[0] == "_"


def _is_plural(aspect: str | None) -> bool:
    return aspect is not None and lex.ASPECT_BY_NAME[aspect].plural


@dataclass
class _Reader:
    """The state of reading: what the grammar allows next, and the current product and aspect."""

    state: str = "start"
    aspect: str | None = None
    product: str | None = None
    polarity: int = 0
    after_stray: bool = False

    def read_phrase(self, tokens: list[str], start: int) -> tuple[int, Phrase] | None:
        """Returns (end, phrase) of the longest allowed phrase at ``start``, with its aspect and product filled in."""
        best: tuple[int, Phrase, bool] | None = None
        recovery = _RECOVERY if self.after_stray and self.state in _RECOVERABLE else ()
        for kind in (*_ALLOWED[self.state], *recovery):
            for end, phrases in _TRIES[kind].match(tokens, start):
                candidates = [phrase for phrase in phrases if self._agrees(kind, phrase)]
                if candidates and (best is None or end > best[0]):
                    fitting_phrases = [phrase for phrase in candidates if self._fits(phrase)]
                    best = end, (fitting_phrases or candidates)[0], bool(fitting_phrases)
        self.after_stray = best is None
        if best is None:
            return None
        end, phrase, fits = best
        reported_phrase = self._fill_in(phrase, fits=fits)
        self._advance(phrase)
        return end, reported_phrase

    def _agrees(self, kind: str, phrase: Phrase) -> bool:
        if kind == "detail":
            return _is_plural(phrase.aspect) == _is_plural(self.aspect)
        if kind in ("vague is", "it", "because it"):
            return not _is_plural(self.aspect)
        if kind in ("vague are", "they", "because they"):
            return _is_plural(self.aspect)
        return True

    def _fits(self, phrase: Phrase) -> bool:
        if phrase.kind in ("subject", "bare subject"):
            product = phrase.product or self.product
            is_same_product = self.product in (None, product)
            return is_same_product and product is not None and phrase.aspect in lex.PRODUCTS[product]
        if phrase.kind == "detail":
            return phrase.aspect == self.aspect
        if phrase.kind == "consequence":
            return phrase.aspect == self.aspect and phrase.polarity == self.polarity
        return True

    def _fill_in(self, phrase: Phrase, *, fits: bool) -> Phrase:
        aspect = phrase.aspect if phrase.kind in ("subject", "bare subject") else self.aspect
        if phrase.kind == "verdict":
            aspect = "product"
        kind, product = _REPORTED_KIND.get(phrase.kind, phrase.kind), phrase.product or self.product
        return replace(phrase, kind=kind, aspect=aspect, product=product, fits=fits)

    def _advance(self, phrase: Phrase) -> None:
        self.state = _NEXT[phrase.kind]
        if phrase.kind in ("subject", "bare subject"):
            self.aspect, self.polarity = phrase.aspect, 0
            self.product = self.product or phrase.product
        elif phrase.kind in ("detail", "vague is", "vague are"):
            self.polarity = phrase.polarity


def read(text: str) -> Reading:
    """Reads a text as phrases of the world, in time linear in its length. It never raises.

    Args:
        text: Any text.
    """
    tokens = tokenize(text)
    word_count = sum(map(is_word, tokens))
    tokens, repeated_word_count = _fold_repeats(tokens)
    reader = _Reader()
    phrases: list[Phrase] = []
    stray_tokens: list[str] = []
    position = 0
    while position < len(tokens):
        match = reader.read_phrase(tokens, position)
        if match is None:
            stray_tokens.append(tokens[position])
            position += 1
        else:
            position, phrase = match
            phrases.append(phrase)
    return Reading(tuple(phrases), tuple(stray_tokens), repeated_word_count, word_count, reader.state == "end")
