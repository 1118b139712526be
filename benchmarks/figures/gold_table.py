"""The table of what the tiny world's two gold utilities make of texts that need no training, and of raters' orders."""

from statistics import fmean
from typing import Any

from . import keep
from .experiments import EXPERIMENTS, GOLD
from .text import NOTHING, code, interval, number, spread, table


def gold_table() -> str:
    """A row for each figure, a column for each version."""
    kept = keep.load(GOLD)
    if not kept:
        return NOTHING
    worth, agreement, own = kept["worth"], kept["agreement"], kept["own"]

    def row(title: str, *cells: float, digits: int = 2) -> list[str]:
        return [title, *(number(cell, digits) for cell in cells)]

    versions = [worth[version] for version in ("1", "2")]
    rows = [
        row("the world's own lines, which SFT imitates", *(one["lines"] for one in versions)),
        row("the best constant of those tried", *(one["constant"]["value"] for one in versions)),
        row("the best template for each aspect", *(one["templates"]["value"] for one in versions)),
        ["what is true of the product, with a verdict", "", number(worth["2"]["informed"], 2)],
        row("lines that the best constant beats, share", *(one["constant"]["beats_lines"] for one in versions)),
        ["pairs that it orders as raters do, share", *(interval(agreement[version], 2) for version in ("1", "2"))],
        ["the same, of what SFT and PPO wrote to one prompt", "", interval(own["agreement"], 2)],
    ]
    n, same = agreement["2"]["n"], number(kept["raters_agree"]["value"], 2)
    weakest = min((one for one in kept["by_sources"] if one["n"] >= 10), key=lambda one: one["agreed"])
    least = f"{number(weakest['agreed'], 2)} of {weakest['n']}, on pairs of {' and '.join(weakest['sources'])}"
    return "\n".join(
        [
            table(["mean gold utility", "version 1", "version 2"], rows),
            "",
            f"Raters: {kept['rated_by']}, {n} pairs, all three alike in {same}; it knew the facts and what a good "
            "remark is, and not the formula. In brackets the 95% interval, by prompts. Version 2 agrees least, in "
            f"{least}: samples "
            "of version 1's policies with facts put in, many of them empty on both sides. What SFT and PPO wrote are "
            f"{own['agreement']['n']} pairs of seed 1, trained on version 2, all three alike in "
            f"{number(own['raters_agree']['value'], 2)}.",
            "",
            *_on_test_prompts(kept["on_test_prompts"]),
            "",
            f"Made by {code(kept['command'])}.",
        ]
    )


def _on_test_prompts(found: list[dict[str, Any]]) -> list[str]:
    """The same search among the prompts that SFT and PPO of each seed were evaluated on."""
    runs = {run["seed"]: run for run in keep.load(EXPERIMENTS[0].name("runs"))["runs"]}
    policies = {
        "SFT": [runs[one["seed"]]["sft"]["judge"] for one in found],
        "the best constant of those tried": [one["constant"]["value"] for one in found],
        "the best template for each aspect": [one["template"] for one in found],
        "PPO": [runs[one["seed"]]["ppo"]["judge"] for one in found],
    }
    templates, ppo = policies["the best template for each aspect"], policies["PPO"]
    above = sum(a > b for a, b in zip(templates, ppo, strict=True))
    alone, aspects = (number(fmean(one[key] for one in found), 1) for key in ("of_one_product", "aspects"))
    first = found[0]
    return [
        table(
            ["version 2, on each seed's own test prompts", "mean over seeds", *(f"{one['seed']}" for one in found)],
            [[name, spread(each, 2), *(number(value, 2) for value in each)] for name, each in policies.items()],
        ),
        "",
        f"{first['prompts']} prompts of {first['pairs']} pairs of product and aspect, {first['constant']['of']} "
        f"constants. Texts are chosen by the prompts that they are scored on: there {alone} of {aspects} aspects, "
        "on average, are of one product alone, and what is true of it is then a template. The best template is above "
        f"PPO in {above} of {len(found)} seeds.",
    ]
