"""The table of what a judge of product remarks may rest on."""

from typing import Any

from . import keep
from .experiments import REMARK_JUDGES
from .text import NOTHING, code, number, table


def remark_table() -> str:
    """A row for each construct."""
    kept = keep.load(REMARK_JUDGES)
    if not kept:
        return NOTHING

    def estimate(one: dict[str, Any], *, sign: bool = False) -> str:
        low, high = (number(end, 2, sign=sign) for end in one["ci95"])
        return f"{number(one['value'], 2, sign=sign)} ({low} to {high})"

    rows = [
        [
            judge["name"],
            *(estimate(judge[on]["accuracy"]) for on in ("labeled", "own")),
            *(estimate(judge[on]["excess"], sign=True) for on in ("labeled", "own")),
            number(judge["words"]["correlation"]["value"], 2),
            *(number(judge["words"][key]["value"], 2) for key in ("errs_where_words_err", "errs")),
            *(number(judge[policy]["value"], 2) for policy in ("constant", "ppo")),
        ]
        for judge in kept["judges"]
    ]
    numbers = [kept["judges"][0][on]["accuracy"]["n"] for on in ("labeled", "own")]
    headings = [
        "construct",
        "right on labeled pairs",
        "right on own outputs",
        "excess, labeled",
        "excess, own outputs",
        "rank correlation with words",
        "errs where words err",
        "errs",
        "best constant over SFT",
        "PPO over SFT",
    ]
    better = {tuple(one["sources"]): one["first_is_better"] for one in kept["by_sources"]}
    constant, ppo = better["constant", "sft"], better["ppo", "sft"]
    over = better["constant", "ppo"]
    return "\n".join(
        [
            table(headings, rows),
            "",
            f"{numbers[0]} held-out pairs of the reward model, and {numbers[1]} of the policies' own outputs. The "
            "excess is by how much more the judge errs where the reward model errs. *Words* is a bag of words, "
            "fitted on the pairs that the reward model learned from; beside it figures are on labeled pairs. In "
            "brackets 95% intervals. "
            f"Readers: {kept['ordered_by']}, all three alike in {estimate(kept['readers_agree'])} of the pairs. They "
            f"prefer PPO to SFT in {estimate(ppo)} of {ppo['n']} pairs, a constant to SFT in {estimate(constant)} of "
            f"{constant['n']}, and a constant to PPO in {estimate(over)} of {over['n']}.",
            "",
            f"Made by {code(kept['command'])}, from a run of the recipe.",
        ]
    )
