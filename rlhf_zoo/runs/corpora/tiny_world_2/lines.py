"""The lines and openings of the tiny world: one-sentence remarks of mixed quality from a seeded generator.

Remarks may be concrete or vague, praise or complain, ramble, or contradict themselves.
"""

import random
from collections.abc import Callable

from ....errors import ZooError
from .defects import DEFECTS
from .facts import FACTS
from .grammar import spellings, subjects
from .lexicon import (
    ADDITIVE,
    ASPECT_BY_NAME,
    CAUSE,
    CONSEQUENCE,
    CONTRASTIVE,
    FILLERS,
    INTENSIFIERS,
    PRODUCTS,
    VAGUE,
    VERDICTS,
)

Rows = list[dict[str, str]]
MISTAKE_RATE = 0.05
"""Share of the details that are drawn at random, so that they may be untrue of the product."""


class Writer:
    """Writes one remark by an owner of a product, from one random stream. It avoids repeating an opinion.

    Args:
        rng: The random stream.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.product = rng.choice(sorted(PRODUCTS))
        self.used_phrases: set[str] = set()
        self.turn_to(rng.choice(PRODUCTS[self.product]))
        self.text = rng.choice(subjects(self.product, self.aspect.name))

    def turn_to(self, aspect: str) -> None:
        """Makes an aspect of the product the subject.

        Args:
            aspect: Name of the aspect.
        """
        self.aspect = ASPECT_BY_NAME[aspect]

    def add(self, text: str) -> None:
        """Appends a text, after a space unless it begins with a mark.

        Args:
            text: Words, or a mark with the words after it.
        """
        self.text += text if text[0] in ",;." else " " + text

    def unused_spelling(self, phrases: tuple[str, ...]) -> str:
        """Draws a phrase, an unused one if possible, and returns one of its spellings.

        Args:
            phrases: The phrases to draw from.
        """
        phrase = self.rng.choice([phrase for phrase in phrases if phrase not in self.used_phrases] or list(phrases))
        self.used_phrases.add(phrase)
        return self.rng.choice(spellings(phrase))

    def detail(self, polarity: int) -> None:
        """Adds a fact of the product or, at the rate `MISTAKE_RATE`, a detail that need not be true.

        Args:
            polarity: +1 for praise, -1 for a complaint.
        """
        if self.rng.random() < MISTAKE_RATE:
            phrases = self.aspect.praise if polarity > 0 else self.aspect.complaint
            self.add(self.rng.choice(spellings(self.rng.choice(phrases))))
        else:
            self.add(FACTS[self.product, self.aspect.name][polarity])

    def vague(self, polarity: int) -> None:
        """Adds a vague opinion.

        Args:
            polarity: +1 for praise, -1 for a complaint, 0 for neither.
        """
        adjective = self.unused_spelling(VAGUE[polarity])
        if polarity and " " not in adjective and self.rng.random() < 0.2:
            adjective = f"{self.rng.choice(INTENSIFIERS)} {adjective}"
        self.add(f"{'are' if self.aspect.plural else 'is'} {adjective}")

    def opinion(self, polarity: int, *, may_give_reason: bool = True) -> None:
        """Adds a detail, a vague opinion, or a vague opinion with its reason.

        Args:
            polarity: +1 for praise, -1 for a complaint.
            may_give_reason: Whether a reason may follow a vague opinion.
        """
        draw = self.rng.random()
        if draw < 0.4:
            self.detail(polarity)
            return
        self.vague(polarity)
        if may_give_reason and draw > 0.75:
            self.add(f"{self.rng.choice(CAUSE)} {self.pronoun()}")
            self.detail(polarity)

    def pronoun(self) -> str:
        """Returns the pronoun of the current aspect."""
        return "they" if self.aspect.plural else "it"

    def consequence(self, polarity: int, *, subject: str | None = None) -> None:
        """Adds a consequence.

        Args:
            polarity: +1 for a consequence of praise, -1 for a consequence of a complaint.
            subject: Name of the aspect from which the consequence follows; None for the current aspect.
        """
        aspect = ASPECT_BY_NAME[subject] if subject else self.aspect
        outcomes = aspect.good_outcomes if polarity > 0 else aspect.bad_outcomes
        self.add(f"{self.rng.choice(CONSEQUENCE)} {self.unused_spelling(outcomes)}")

    def another_aspect(self, *, contrast: bool) -> None:
        """Turns to another aspect of the product.

        Args:
            contrast: Whether the link expresses a contrast.
        """
        self.turn_to(self.rng.choice([name for name in PRODUCTS[self.product] if name != self.aspect.name]))
        self.add(self.rng.choice(CONTRASTIVE if contrast else ADDITIVE))
        self.add(f"{self.rng.choice(('the', 'its'))} {self.aspect.name}")

    def verdict(self, polarity: int) -> None:
        """Adds a verdict.

        Args:
            polarity: +1 for praise, -1 for a complaint.
        """
        self.add(f"{self.rng.choice(ADDITIVE)} {self.unused_spelling(VERDICTS[polarity])}")

    def aside(self) -> None:
        """Adds a filler between commas."""
        self.add(f", {self.unused_spelling(FILLERS)},")

    def filler(self) -> None:
        """Adds a filler."""
        self.add(f", {self.unused_spelling(FILLERS)}")


def _write_vague(writer: Writer, polarity: int) -> None:
    writer.vague(writer.rng.choice((polarity, polarity, 0)))


def _write_detailed(writer: Writer, polarity: int) -> None:
    writer.detail(polarity)
    if writer.rng.random() < 0.5:
        writer.consequence(polarity)


def _write_reasoned(writer: Writer, polarity: int) -> None:
    writer.opinion(polarity)
    if writer.rng.random() < 0.4:
        writer.consequence(polarity)


def _write_double(writer: Writer, polarity: int) -> None:
    writer.opinion(polarity)
    writer.another_aspect(contrast=False)
    writer.opinion(polarity, may_give_reason=False)


def _write_mixed(writer: Writer, polarity: int) -> None:
    writer.opinion(polarity)
    writer.another_aspect(contrast=True)
    writer.opinion(-polarity, may_give_reason=False)


def _write_rambling(writer: Writer, polarity: int) -> None:
    writer.aside()
    writer.opinion(polarity)
    if writer.rng.random() < 0.5:
        writer.filler()


def _write_contradictory(writer: Writer, polarity: int) -> None:
    writer.opinion(polarity)
    writer.add(f"{writer.rng.choice(CONTRASTIVE)} {writer.pronoun()}")
    writer.opinion(-polarity)


def _write_misfitting(writer: Writer, polarity: int) -> None:
    writer.detail(polarity)
    other_aspects = [name for name in ASPECT_BY_NAME if name != writer.aspect.name]
    writer.consequence(polarity, subject=writer.rng.choice(other_aspects))


_WEIGHTS: dict[Callable[[Writer, int], None], float] = {
    _write_vague: 0.20,
    _write_detailed: 0.22,
    _write_reasoned: 0.14,
    _write_double: 0.12,
    _write_mixed: 0.13,
    _write_rambling: 0.10,
    _write_contradictory: 0.07,
    _write_misfitting: 0.02,
}
_VERDICT_RATE = 0.2


def generate_line(rng: random.Random) -> str:
    """Writes one remark of the simulated world: 4 to about 30 words, lower case, ending in a full stop.

    Args:
        rng: The random stream.
    """
    writer = Writer(rng)
    (write_remark,) = rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))
    polarity = rng.choice((+1, -1))
    write_remark(writer, polarity)
    if write_remark not in (_write_vague, _write_mixed, _write_contradictory) and rng.random() < _VERDICT_RATE:
        writer.verdict(polarity)
    writer.add(".")
    return writer.text


def _distinct_lines(count: int, rng: random.Random) -> list[str]:
    lines: dict[str, None] = {}
    while len(lines) < count:
        lines[generate_line(rng)] = None
    return list(lines)


_HELD_OUT_PAIR_COUNTS = {"test": 10, "validation": 20}
"""Number of pairs of product and aspect to hold out. A verdict needs 20 validation prompts of different pairs."""


def _openings(rng: random.Random) -> dict[str, Rows]:
    """Returns neutral openings by split. No two splits share a pair of product and aspect.

    A held-out split lists one spelling of each pair, then another of each, and so on. So if an evaluation takes only
    the first rows, it asks about each pair equally often.
    """
    pairs = [(product, aspect) for product in sorted(PRODUCTS) for aspect in PRODUCTS[product]]
    rng.shuffle(pairs)
    train_pairs = pairs[sum(_HELD_OUT_PAIR_COUNTS.values()) :]
    train = [prompt for product, aspect in train_pairs for prompt in subjects(product, aspect)]
    rng.shuffle(train)
    prompts = {"train": train}
    start = 0
    for split, count in _HELD_OUT_PAIR_COUNTS.items():
        prompts_by_pair = [subjects(product, aspect) for product, aspect in pairs[start : start + count]]
        for pair_prompts in prompts_by_pair:
            rng.shuffle(pair_prompts)
        prompts[split] = [prompt for one_of_each in zip(*prompts_by_pair, strict=True) for prompt in one_of_each]
        start += count
    return {split: [{"prompt": prompt} for prompt in prompts[split]] for split in ("train", "validation", "test")}


def prepare(source: str | None = None, *, seed: int, lines: int = 12_000) -> dict[str, dict[str, Rows]]:
    """Makes the world: ``lines`` (text) and ``prompts`` (prompt), each with train, validation and test.

    Prompts are neutral openings, such as "the phone's battery". No two splits share an aspect of a product. The same
    seed gives the same world.

    Args:
        source: None; the world reads no data.
        seed: Seed of the lines and of the split of the openings.
        lines: Distinct remarks for training; validation and test each get a twentieth as many.

    Returns:
        ``{configuration: {split: rows}}``.

    Raises:
        ZooError: There is a `source`, or there are fewer than 20 lines.
    """
    if source is not None:
        raise ZooError(f"tiny-world writes its own data and cannot read {source!r}: leave out dataset_name.")
    if lines < 20:
        raise ZooError(f"tiny-world needs at least 20 lines, not {lines}: raise the number of lines.")
    held_out = lines // 20
    rng = random.Random(f"tiny-world lines {seed}")
    texts = [{"text": text} for text in _distinct_lines(lines + 2 * held_out, rng)]
    return {
        "lines": {
            "train": texts[:lines],
            "validation": texts[lines : lines + held_out],
            "test": texts[lines + held_out :],
        },
        "prompts": _openings(random.Random(f"tiny-world prompts {seed}")),
    }


prepare.defects = DEFECTS  # type: ignore[attr-defined]  # read by `evaluation.defects`
