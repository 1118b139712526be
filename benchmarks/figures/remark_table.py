"""The table of what a judge of product remarks may rest on."""

from . import keep
from .experiments import REMARK_JUDGES
from .text import NOTHING, code, interval, number, table


def remark_table() -> str:
    """A row for each construct."""
    kept = keep.load(REMARK_JUDGES)
    if not kept:
        return NOTHING
    rows = [
        [
            judge["name"],
            *(interval(judge[on]["accuracy"], 2) for on in ("labeled", "own")),
            *(interval(judge[on]["excess"], 2, sign=True) for on in ("labeled", "own")),
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
            f"Readers: {kept['ordered_by']}, all three alike in {interval(kept['readers_agree'], 2)} of the pairs. "
            f"They prefer PPO to SFT in {interval(ppo, 2)} of {ppo['n']} pairs, a constant to SFT in "
            f"{interval(constant, 2)} of {constant['n']}, and a constant to PPO in {interval(over, 2)} of {over['n']}.",
            "",
            f"Made by {code(kept['command'])}, from a run of the recipe.",
        ]
    )
