"""People's votes on two policies, as a judge of them."""

from collections.abc import Sequence
from typing import Any

from ...hub.client.connect import CLIENT, Hub
from ...hub.client.refusals import refusals_as
from ...hub.client.weights import Origin, equal_weights
from ..votes.data import HubVotes
from ..votes.ratings import summary
from ..votes.vote import Shown, Vote


def votes_on(
    name: str, *, ppo: Sequence[Origin], sft: Sequence[Origin], seed: int, hub: Hub = CLIENT
) -> dict[str, Any]:
    """What the votes in the data set NAMESPACE/NAME say of a policy against its SFT policy, as JSON.

    ppo, sft: where each was published, at one commit or at several of equal weights; [] where it was not. Votes count
    where both sides have these weights. win_rate is None without any, and `problem` then says why. Raises ZooError
    where the data set cannot be read.
    """
    with refusals_as(f"The votes of {name} cannot be read on {hub.name}", "check the name, --hub and the token."):
        votes = HubVotes(name, hub=hub).read()
    known: dict[tuple[str, Origin], bool] = {}

    def stood(shown: Shown) -> bool:
        if shown.repo is None or shown.commit is None:
            return False
        at = (shown.repo, shown.commit)
        if (shown.role, at) not in known:
            wanted = ppo if shown.role == "ppo" else sft
            known[shown.role, at] = any(equal_weights(at, one, hub=hub) for one in wanted)
        return known[shown.role, at]

    found: list[Vote] = [vote for vote in votes if stood(vote.left) and stood(vote.right)]
    figures = summary(found, seed=seed)
    return {
        "description": f"Votes of visitors of the comparison page, from the data set {name}.",
        "votes": figures["votes"],
        "of": len(votes),
        "counts": figures["counts"],
        "win_rate": figures["win_rate"],
        "problem": _problem(name, len(found), len(votes), published=bool(ppo and sft)),
    }


def _problem(name: str, found: int, there: int, *, published: bool) -> str | None:
    if found:
        return None
    if not published:
        return "A vote names published models, and these two were not: publish them, or evaluate the published ones."
    if not there:
        return f"{name} holds no votes."
    return f"None of the {there} votes of {name} is on these two policies."
