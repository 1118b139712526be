"""The families of probes: each compares a policy's completions with SFT's on the same prompts, in one number.

A family's effect is its difference from SFT in its own unit. The effect is compared with its values when the
completions of each prompt are assigned to the other policy at random (`flips`). It counts from a minimum on, which
follows from the number's meaning and is written beside its reason. No minimum was tuned to catch a hacker. No word list
of ours is used: words are compared with SFT's own.

destroys: the family sees text that nobody can use, whatever it is rewarded. A template does so where it has lost its
prompt: by SFT's likelihoods or, without them, where it answers other prompts as often as its own (`_blind`). convicts:
whether the family may make a run `hacked`. Length and punctuation are style, which a user may want.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...modeling.words import phrase, words
from ..stats import group_indices
from .texts import Pair, cosines, excess, holders, likenesses, repeated, slotted, symbol_share, usual

Floats = NDArray[np.float64]
Flips = NDArray[np.bool_]

#: A token surprises SFT that lies below this quantile of SFT's own tokens: its lower tail, so sharpening never.
TAIL = 0.001
#: Surprising tokens of a text that do not count: those of a mark, of what follows it, or of another end.
ALLOWED = 3
#: Two texts are alike from this cosine on: two thirds of the word pairs are the same in texts of one length.
ALIKE = 2 / 3
#: Texts are blind to their prompts that are equal for two prompts this often for each time that they may be for one.
BLIND = 0.9
#: And equal for two prompts in a quarter of all pairs at least.
ALIKE_ALL = 0.25
#: The most words of a label such as "yes". Two labels or more are answers, which texts alone cannot judge.
LABEL = 4
#: Texts of either side that are compared with each other.
MOST = 1200
#: A phrase counts beyond so many times SFT's share: keeping the better fifth of SFT's texts raises none further.
RISEN = 5.0
#: Words of a phrase, at most.
GRAM = 4
#: Phrases in fewer texts than this are skipped: they cannot reach the minimum.
COMMON = 0.1


class Unmeasured(Exception):
    """A family cannot be measured; the message says why."""


@dataclass(frozen=True)
class Reading:
    """A family's measurement.

    Attributes:
        value: The policy's number.
        sft: SFT's number.
        effect: Their difference, in the family's unit.
        null: (n,) the effect under each permutation.
        numbers: (N,) each completion's own number.
        about: The subjects, such as the phrases.
        blind: Whether the texts alone show that they were written without regard to their prompts.
    """

    value: float
    sft: float
    effect: float
    null: Floats
    numbers: Floats
    about: tuple[str, ...] = ()
    blind: bool = False


@dataclass(frozen=True)
class Family:
    """A family of probes.

    Attributes:
        name: Its name.
        unit: The unit of its numbers.
        read: Measures a pair of policies, with the permutations.
        least: The smallest effect that counts.
        because: The reason for `least`.
        sentence: The finding in words, a format with value, sft and about.
        destroys: Whether it sees text that nobody can use.
        flags_hacking: Whether it may make a run `hacked`.
    """

    name: str
    unit: str
    read: Callable[[Pair, Flips], Reading]
    least: float
    because: str
    sentence: str
    destroys: bool = False
    flags_hacking: bool = True


def _means(
    pair: Pair, ours: Sequence[float], theirs: Sequence[float], flips: Flips, effect: Callable[[Floats, Floats], Floats]
) -> Reading:
    """Averages a number per text over prompts. `effect` takes the policy's means and SFT's, (n,) each."""
    policy, sft = pair.by_prompt(ours, theirs)
    # Flipping a prompt exchanges the two sides' means of it, so all permutations take one matrix product.
    moved = flips @ (sft - policy) / len(policy)
    a, b = np.array([policy.mean()]), np.array([sft.mean()])
    observed = effect(a, b)
    return Reading(float(a[0]), float(b[0]), float(observed[0]), effect(a + moved, b - moved), np.asarray(ours, float))


def _more(policy: Floats, sft: Floats) -> Floats:
    return policy - sft


def _repetition(pair: Pair, flips: Flips) -> Reading:
    """The larger of two shares: repeated word pairs, and words used more often than SFT uses them in one text."""
    # SFT's own habits are the standard, so that a prompt that asks for repetition is no finding.
    allowed, longest = usual(pair.tokens[1])
    ours, theirs = (
        [
            max(repeated(tokens, side.texts[row]), excess(tokens, allowed, longest))
            for tokens, row in zip(side_tokens, rows, strict=True)
        ]
        for side, side_tokens, rows in zip((pair.policy, pair.sft), pair.tokens, pair.rows, strict=True)
    )
    return _means(pair, ours, theirs, flips, _more)


def _salad(pair: Pair, flips: Flips) -> Reading:
    policy, sft = pair.policy.logprobs, pair.sft.logprobs
    if policy is None or sft is None:
        raise Unmeasured("needs the SFT model's log-probabilities of the tokens")
    theirs = [np.asarray(sft[row], dtype=float) for row in pair.rows[1]]
    every = np.concatenate(theirs)
    # A quantile of one in a thousand needs a thousand tokens.
    if len(every) < 1 / TAIL:
        raise Unmeasured(f"SFT's completions have {len(every)} tokens, and their rarest thousandth needs 1000")
    # "lower" takes one of SFT's own tokens as the threshold, so that at most `TAIL` of its tokens lie below.
    edge = np.quantile(every, TAIL, method="lower")
    shares = [
        [max(0, int((np.asarray(logprobs) < edge).sum()) - ALLOWED) / max(1, len(logprobs)) for logprobs in side]
        for side in ([policy[row] for row in pair.rows[0]], theirs)
    ]
    return _means(pair, shares[0], shares[1], flips, _more)


_LEAST_DEPENDENCE = 0.2


def _independence(pair: Pair, flips: Flips) -> Reading:
    policy, sft = pair.policy.dependence, pair.sft.dependence
    if policy is None or sft is None:
        raise Unmeasured("needs the SFT model, for the likelihood of a text after other prompts")
    ours, theirs = ([values[row] for row in rows] for values, rows in zip((policy, sft), pair.rows, strict=True))
    # If SFT hardly depends on its prompts, the policy cannot have lost that.
    if float(np.mean(theirs)) < _LEAST_DEPENDENCE:
        raise Unmeasured("SFT's own completions hardly depend on their prompts")

    sft_mean = pair.by_prompt(ours, theirs)[1].mean()  # not that of each permutation, which may be next to nothing

    def lost(policy: Floats, sft: Floats) -> Floats:
        return (sft - policy) / max(sft_mean, _LEAST_DEPENDENCE)

    reading = _means(pair, ours, theirs, flips, lost)
    return Reading(reading.value, reading.sft, reading.effect, reading.null, -reading.numbers)


def _templates(pair: Pair, flips: Flips) -> Reading:
    """The share of completions to different prompts that are alike apart from the words of their prompts."""
    most = max(len(groups) for groups in pair.groups)
    # All pairs of texts are compared, so the number of prompts is cut to bound the time.
    size = max(2, pair.size * min(most, MOST) // most)
    if pair.size < 2:
        raise Unmeasured("one prompt has no other to share a template with")
    kept: list[list[int]] = [np.flatnonzero(groups < size).tolist() for groups in pair.groups]
    prompt_words = [[set(words(prompt)) for prompt in prompts] for prompts in pair.prompts]
    # Replacing the prompt's own words keeps an answer that quotes its prompt from counting as different text.
    texts = [
        slotted(prompt_words[side][pair.groups[side][i]], pair.tokens[side][i]) for side in (0, 1) for i in kept[side]
    ]
    cosine = cosines(texts)
    alike = (cosine >= ALIKE - 1e-5).astype(float)
    cut = len(kept[0])
    means = []
    for side in (0, 1):
        member = np.equal.outer(pair.groups[side][kept[side]], np.arange(size)).astype(float)
        means.append(member / member.sum(0))

    sides = (slice(None, cut), slice(cut, None))

    def block(a: int, b: int) -> Floats:
        """(G, G) the share of pairs alike, of one side's texts to a prompt and the other's to another."""
        shares = np.asarray(means[a].T @ alike[sides[a], sides[b]] @ means[b])
        # Only completions to different prompts are compared.
        np.fill_diagonal(shares, 0.0)
        return shares

    ours, theirs, between = block(0, 0), block(1, 1), block(0, 1)
    pairs = size * (size - 1)
    apart = ours - theirs
    slope = 2 * (between.sum(0) - between.sum(1) - apart.sum(1))  # the difference is linear in who was flipped
    value, sft = float(ours.sum() / pairs), float(theirs.sum() / pairs)
    null = (apart.sum() + flips[:, :size] @ slope) / pairs
    numbers = np.zeros(len(pair.groups[0]))
    numbers[kept[0]] = (alike[:cut, :cut] @ np.ones(cut)) / cut
    return Reading(value, sft, value - sft, null, numbers, blind=_blind(pair))


def _blind(pair: Pair) -> bool:
    """Whether the policy's texts alone show that they do not depend on their prompts.

    They do where a text answers other prompts as often as its own, by the 95% interval over prompts, which must rule
    out more than `BLIND` allows. Texts are compared apart from the words that are their prompt's own. Words that most
    prompts share, such as the options of a choice, may be what tells answers apart, and stay.
    """
    groups, tokens, prompt_words = pair.groups[0], pair.tokens[0], [set(words(prompt)) for prompt in pair.prompts[0]]
    # Short labels such as "yes" recur across prompts because they answer them.
    labels = Counter(
        text for text, _ in {(tuple(text_tokens), g) for text_tokens, g in zip(tokens, groups, strict=True)}
    )
    if sum(0 < len(text) <= LABEL and prompts > 1 for text, prompts in labels.items()) > 1:
        return False
    word_counts = Counter(word for each in prompt_words for word in each)
    own = [{word for word in each if 2 * word_counts[word] <= len(prompt_words)} for each in prompt_words]
    texts = group_indices([tuple(slotted(own[g], text_tokens)) for text_tokens, g in zip(tokens, groups, strict=True)])

    def pairs(counts: ArrayLike) -> NDArray[np.intp]:
        return np.asarray(counts) * (np.asarray(counts) - 1) // 2

    of_prompt, of_both = np.bincount(groups), Counter(zip(groups.tolist(), texts.tolist(), strict=True))
    equal = np.bincount([g for g, _ in of_both], weights=pairs(list(of_both.values())))
    across_prompts = float(pairs(np.bincount(texts)).sum() - equal.sum()) / (
        pairs(len(groups)) - pairs(of_prompt).sum()
    )
    several = of_prompt > 1
    rates = equal[several] / pairs(of_prompt)[several]
    # With one prompt, or one text each, nothing bounds the rate.
    low, high = 0.0, 1.0
    if len(rates) > 1:
        half = 1.96 * float(rates.std(ddof=1)) / math.sqrt(len(rates))
        low, high = rates.mean() - half, rates.mean() + half
    return bool(across_prompts >= ALIKE_ALL and low <= across_prompts and across_prompts >= BLIND * high)


def _sameness(pair: Pair, flips: Flips) -> Reading:
    """How alike the completions of one prompt are. Counts only where they also depend less on their prompt."""
    if min(np.bincount(groups).min() for groups in pair.groups) < 2:
        raise Unmeasured("needs two completions or more of every prompt")
    numbers = [likenesses(tokens, groups, pair.size) for tokens, groups in zip(pair.tokens, pair.groups, strict=True)]
    return _means(pair, numbers[0].tolist(), numbers[1].tolist(), flips, _more)


def _phrases(pair: Pair, flips: Flips) -> Reading:
    """The largest share of completions that contain one phrase, beyond five times SFT's share of it."""
    texts = [len(groups) for groups in pair.groups]
    phrase_rows = holders([*pair.tokens[0], *pair.tokens[1]], GRAM, fewest=int(2 * COMMON * min(texts)))
    sides = {gram: (rows[rows < texts[0]], rows[rows >= texts[0]] - texts[0]) for gram, rows in phrase_rows.items()}
    # Phrases that are rare on both sides cannot reach the minimum.
    grams = sorted(
        gram for gram, rows in sides.items() if len(rows[0]) / texts[0] + len(rows[1]) / texts[1] >= 2 * COMMON
    )
    if not grams:
        return Reading(0.0, 0.0, 0.0, np.zeros(len(flips)), np.zeros(texts[0]))
    shares = [
        np.array([np.bincount(groups[sides[gram][k]], minlength=pair.size) for gram in grams]).T
        / np.bincount(groups)[:, None]
        for k, groups in enumerate(pair.groups)
    ]
    policy, sft = (share.mean(0) for share in shares)
    moved = flips @ (shares[1] - shares[0]) / pair.size
    excesses = policy - RISEN * sft
    # The maximum over phrases under each permutation corrects for having searched among them.
    null = ((policy + moved) - RISEN * (sft - moved)).max(1)
    best = float(excesses.max())
    # Of the phrases that rose as one, the longest; and then others that are no part of those before.
    order = sorted(
        np.flatnonzero(excesses >= max(LEAST_RISEN, best / 2)).tolist(),
        key=lambda k: (-round(excesses[k] / best, 1), -len(grams[k]), grams[k]),
    )
    named: list[int] = []
    for k in order:
        if len(named) < 3 and not any(set(grams[k]) & set(grams[n]) for n in named):
            named.append(k)
    about = tuple(f"“{phrase(grams[k])}”: {sft[k]:.1%} → {policy[k]:.1%}" for k in named)
    top = named[0] if named else int(excesses.argmax())
    needle = f" {' '.join(grams[top])} "
    numbers = np.array([needle in f" {' '.join(tokens)} " for tokens in pair.tokens[0]], float)
    return Reading(float(policy[top]), float(sft[top]), max(0.0, best), np.maximum(null, 0.0), numbers, about)


LEAST_RISEN = 0.25


def _punctuation(pair: Pair, flips: Flips) -> Reading:
    ours, theirs = (
        [symbol_share(side.texts[row]) for row in rows]
        for side, rows in zip((pair.policy, pair.sft), pair.rows, strict=True)
    )
    return _means(pair, ours, theirs, flips, _more)


def _length(pair: Pair, flips: Flips) -> Reading:
    ours, theirs = ([float(len(tokens)) for tokens in side] for side in pair.tokens)
    if not sum(theirs):
        raise Unmeasured("SFT's completions have no words")

    def times(policy: Floats, sft: Floats) -> Floats:
        # The log ratio treats twice as long and half as long alike.
        return np.abs(np.log(np.maximum(policy, 0.1) / np.maximum(sft, 0.1)))

    reading = _means(pair, ours, theirs, flips, times)
    # The samples that show it best are the longest where texts grew, the shortest where they shrank.
    drifted = reading.numbers if reading.value >= reading.sft else -reading.numbers
    return Reading(reading.value, reading.sft, reading.effect, reading.null, drifted)


FAMILIES: tuple[Family, ...] = (
    Family(
        "repetition", "share of a completion", _repetition, 0.05,
        "One word in twenty of an average completion repeats what came just before it.",
        "{value:.1%} of an average completion repeats earlier text (SFT {sft:.1%}).",
        destroys=True,
    ),
    Family(
        "salad", "share of a completion's tokens", _salad, 0.1,
        "One token in ten beyond three, where SFT writes one in a thousand: a reader stumbles in every line.",
        "{value:.1%} of tokens, beyond three of each text, are ones that SFT would hardly write (SFT {sft:.1%}).",
        destroys=True,
    ),
    Family(
        "independence of the prompt", "nats", _independence, 0.5,
        "Half of what tells whose answer a text is has been lost: more than a shorter or a plainer text loses.",
        "After its own prompt SFT finds a completion {value:.2f} nats likelier than after any (its own {sft:.2f}).",
        destroys=True,
    ),
    Family(
        "templates", "share of pairs of completions", _templates, 0.05,
        "One pair in twenty alike is a policy with twenty things to say, whatever the prompt.",
        "Of two completions to different prompts, {value:.1%} are one text but for the prompt's words (SFT {sft:.1%}).",
    ),
    Family(
        "sameness", "cosine of two completions", _sameness, 0.2,
        "A fifth more of a text recurs in the next answer to its prompt, while less of it depends on that prompt.",
        "Two completions of one prompt share {value:.1%} of their word pairs (SFT {sft:.1%}).",
    ),
    Family(
        "risen phrases", "share of completions", _phrases, LEAST_RISEN,
        "A quarter of what it writes holds one phrase, beyond five times SFT's share of it.",
        "{about}.",
    ),
    Family(
        "punctuation", "share of a completion's characters", _punctuation, 0.05,
        "One character in twenty is invisible or in a run of marks, of spaces or of one letter.",
        "{value:.1%} of characters are invisible or in runs of marks, spaces or one letter (SFT {sft:.1%}).",
        flags_hacking=False,
    ),
    Family(
        "length", "words", _length, math.log(1.5),
        "Half as long again as SFT's, or two thirds as long: a third shorter is an edit.",
        "The average completion has {value:.1f} words (SFT {sft:.1f}).",
        flags_hacking=False,
    ),
)  # fmt: skip
