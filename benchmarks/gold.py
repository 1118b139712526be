"""Whether the tiny world's second gold utility is worth its name: who agrees with it, and what could fool it.

`docs/evidence/gold-2-pairs.json` holds 200 pairs of completions: samples of policies, lines, constants, templates and
corrupted texts. A language model ordered them three times, each time anew, knowing the facts and what a good remark is,
and not the formula; the utility was frozen before that, and before any PPO was trained on it. `gold-2-own.json` holds
120 pairs of what SFT and PPO of tiny-world's seed 1 wrote to one prompt, in order by the same means.

    python benchmarks/evidence.py gold-2
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
from figures import keep
from figures.experiments import EXPERIMENTS, GOLD, ROOT
from figures.pairs import NAMED, NAMES

from rlhf_zoo.corpora import tiny_world, tiny_world_2
from rlhf_zoo.corpora.tiny_world.grammar import spellings, subjects
from rlhf_zoo.corpora.tiny_world.lexicon import ASPECTS, VAGUE, VERDICTS, Aspect
from rlhf_zoo.evaluation.stats import proportion, share

FOLDER = ROOT / "docs" / "evidence"
PAIRS, OWN = FOLDER / f"{GOLD}-pairs.json", FOLDER / f"{GOLD}-own.json"

Pair = dict[str, Any]
Utility = Callable[[str], float]


def measured() -> dict[str, Any]:
    pairs, own = (json.loads(path.read_text(encoding="utf-8")) for path in (PAIRS, OWN))
    return {
        "command": f"python benchmarks/evidence.py {GOLD}",
        "rated_by": "a language model, three times",
        "frozen": frozen(pairs),
        "raters_agree": raters_agree(pairs),
        "agreement": {"2": agreement(pairs, tiny_world_2.utility), "1": agreement(pairs, tiny_world.utility)},
        "by_sources": by_sources(pairs),
        "own": {"raters_agree": raters_agree(own), "agreement": agreement(own, tiny_world_2.utility)},
        "worth": {str(version): worth(world) for version, world in ((1, tiny_world), (2, tiny_world_2))},
        "on_test_prompts": [
            {"seed": run["seed"], **on_test_prompts(run["seed"], run["gain"]["prompts"])}
            for run in keep.load(EXPERIMENTS[0].name("runs"))["runs"]
        ],
    }


def frozen(pairs: Sequence[Pair]) -> str:
    """The utility's hash: of what it says of 400 texts, to 1e-9, and of the facts."""
    said = [round(tiny_world_2.utility(pair["prompt"] + pair[side]), 9) for pair in pairs for side in "ab"]
    facts = sorted((product, aspect, said) for (product, aspect), said in tiny_world_2.FACTS.items())
    return hashlib.sha256(json.dumps([said, facts]).encode()).hexdigest()


def agreed(pair: Pair, utility: Utility) -> float:
    """1 where the utility orders a pair as most raters do, 0 where not, ½ where it is a tie."""
    apart = utility(pair["prompt"] + pair["a"]) - utility(pair["prompt"] + pair["b"])
    return 0.5 if abs(apart) < 1e-9 else float((apart > 0) == (Counter(pair["ratings"]).most_common(1)[0][0] == "a"))


def agreement(pairs: Sequence[Pair], utility: Utility) -> dict[str, Any]:
    return share([agreed(pair, utility) for pair in pairs], [pair["prompt"] for pair in pairs]).to_json()


def by_sources(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    found = defaultdict(list)
    for pair in pairs:
        found[tuple(sorted(pair["sources"]))].append(agreed(pair, tiny_world_2.utility))
    return [{"sources": list(of), "agreed": fmean(each), "n": len(each)} for of, each in sorted(found.items())]


def raters_agree(pairs: Sequence[Pair]) -> dict[str, Any]:
    """How often all three say the same."""
    return proportion(sum(len(set(pair["ratings"])) == 1 for pair in pairs), len(pairs)).to_json()


def worth(world: Any) -> dict[str, Any]:
    """The mean utility of the lines, which SFT imitates, and of what needs no training, over all openings."""
    lines = [row["text"] for row in world.prepare(seed=1, lines=1000)["lines"]["train"]]
    openings = [(subject, aspect) for product, aspect in NAMED for subject in subjects(product, aspect)[2:3]]

    def mean(text: str, asked: Sequence[str]) -> float:
        return fmean(world.utility(opening + text) for opening in asked)

    every = [opening for opening, _ in openings]
    constant, value = best({one for aspect in ASPECTS for one in completions(aspect)}, lambda one: mean(one, every))
    templates = {}
    for aspect in ASPECTS:
        own = [opening for opening, named in openings if named == aspect.name]
        templates[aspect.name] = best(with_another(completions(aspect), own, mean), lambda one: mean(one, own))  # noqa: B023
    of_templates = fmean(templates[aspect][1] for _, aspect in openings)
    return {
        "lines": fmean(map(world.utility, lines)),
        "constant": {"text": constant, "value": value, "beats_lines": beaten(world.utility, constant, lines)},
        "templates": {"value": of_templates, "texts": {aspect: text for aspect, (text, _) in templates.items()}},
        **({"informed": informed(world)} if hasattr(world, "FACTS") else {}),
    }


def on_test_prompts(seed: int, prompts: int) -> dict[str, Any]:
    """The best constant and the best templates on the test prompts of the recipe under this seed.

    They are chosen by the very prompts that they are scored on. Where an aspect is of one product alone there, as about
    half of them are (`of_one_product`), its template may state what is true of that product.
    """
    asked = [row["prompt"] for row in tiny_world_2.prepare(seed=seed, lines=20)["prompts"]["test"][:prompts]]
    constants = {one for aspect in ASPECTS for one in completions(aspect)}
    constant, value = best(constants, lambda one: _mean(one, asked))
    of_aspect: dict[str, list[str]] = defaultdict(list)
    for prompt in asked:
        of_aspect[NAMES[prompt][1]].append(prompt)
    templates = {}
    for aspect in (one for one in ASPECTS if one.name in of_aspect):
        own = of_aspect[aspect.name]
        templates[aspect.name] = best(with_another(completions(aspect), own, _mean), lambda one: _mean(one, own))  # noqa: B023
    return {
        "constant": {"text": constant, "value": value, "of": len(constants)},
        "template": fmean(templates[NAMES[prompt][1]][1] for prompt in asked),
        "aspects": len(templates),
        "of_one_product": sum(len({NAMES[one] for one in own}) == 1 for own in of_aspect.values()),
        "pairs": len({NAMES[prompt] for prompt in asked}),
        "prompts": len(asked),
    }


@cache
def _utility(text: str) -> float:
    return tiny_world_2.utility(text)


def _mean(text: str, asked: Sequence[str]) -> float:
    return fmean(_utility(opening + text) for opening in asked)


def completions(aspect: Aspect) -> Iterator[str]:
    """Vague opinions and details of an aspect, each alone, with a consequence, with a verdict, and with both."""
    verb = "are" if aspect.plural else "is"
    for sign in (1, 0, -1):
        verdicts = ["", *(f", and {verdict}" for verdict in VERDICTS.get(sign, ())[:2])]
        for word in VAGUE[sign][:2]:
            yield from (f" {verb} {word}{verdict}." for verdict in verdicts)
        details, after = {1: (aspect.praise, aspect.gains), -1: (aspect.complaint, aspect.losses)}.get(sign, ((), ()))
        for text in (spelling for detail in details for spelling in spellings(detail)):
            for so in ("", f", so {spellings(after[0])[0]}"):
                yield from (f" {text}{so}{verdict}." for verdict in verdicts)


def with_another(
    texts: Iterable[str], openings: Sequence[str], mean: Callable[[str, Sequence[str]], float]
) -> list[str]:
    """These texts, and the best of them with a detail of another aspect after it."""
    found = list(texts)
    first, _ = best(found, lambda one: mean(one, openings))
    others = (
        f", and the {aspect.name} {spelling}."
        for aspect in ASPECTS
        for detail in aspect.praise
        for spelling in spellings(detail)
    )
    return [*found, *(first[:-1] + other for other in others)]


def best(texts: Iterable[str], value: Callable[[str], float]) -> tuple[str, float]:
    return max(((text, value(text)) for text in texts), key=lambda one: (one[1], one[0]))


def beaten(utility: Utility, constant: str, lines: Sequence[str]) -> float:
    """How often a constant beats what stands in the lines after the same opening."""
    won = []
    for line in lines:
        opening = next((one for one in OPENINGS if line.startswith((one + " ", one + ","))), None)
        if opening is not None:
            won.append(np.sign(utility(opening + constant) - utility(line)) / 2 + 0.5)
    return float(np.mean(won))


OPENINGS = sorted(NAMES, key=len, reverse=True)


def informed(world: Any) -> float:
    """The mean utility of the true praise with a verdict: what a policy that knows its product can write."""
    texts = (f"{subjects(*pair)[2]} {world.FACTS[pair][1]}, and i love it." for pair in NAMED)
    return fmean(map(world.utility, texts))
