"""Summarizes people's votes on two policies, as a judge."""

from collections.abc import Sequence
from typing import Any

from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.refusals import translate_hub_errors
from ...hub.client.weights import Origin, commits_have_same_weights
from ..votes.data import HubVotes
from ..votes.ratings import summarize_votes
from ..votes.vote import ShownCompletion


def compare_by_votes(
    name: str, *, ppo_origins: Sequence[Origin], sft_origins: Sequence[Origin], seed: int, hub: Hub = DEFAULT_HUB
) -> dict[str, Any]:
    """Summarizes a data set's votes on a policy and its SFT policy.

    A vote counts only if the weights of these two policies wrote its completions.

    Args:
        name: The data set NAMESPACE/NAME.
        ppo_origins: The policy's published revisions, all with the same weights; [] if it was not published.
        sft_origins: The SFT policy's published revisions, all with the same weights; [] if it was not published.
        seed: Seed of the resamples.
        hub: The Hub of the data set.

    Returns:
        The figures as JSON. If no vote counts, `win_rate` is None and `problem` gives the reason.

    Raises:
        ZooError: The data set cannot be read.
    """
    # The Hub gives the same answer for a missing data set and for a private one that the token may not read.
    with translate_hub_errors(f"Cannot read the votes of {name} on {hub.name}", "check the name, --hub and the token."):
        votes = HubVotes(name, hub=hub).read()
    has_same_weights: dict[tuple[str, Origin], bool] = {}  # by role and origin of a completion

    def is_of_compared_policy(shown: ShownCompletion) -> bool:
        # Weights that were not published cannot be compared.
        if shown.repo is None or shown.commit is None:
            return False
        origin = (shown.repo, shown.commit)
        if (shown.role, origin) not in has_same_weights:
            origins = ppo_origins if shown.role == "ppo" else sft_origins
            has_same_weights[shown.role, origin] = any(
                commits_have_same_weights(origin, other, hub=hub) for other in origins
            )
        return has_same_weights[shown.role, origin]

    # Both sides of a vote must have these weights, but may come from another repository or commit.
    valid_votes = [vote for vote in votes if all(map(is_of_compared_policy, (vote.left, vote.right)))]
    figures = summarize_votes(valid_votes, seed=seed)
    return {
        "description": f"Votes of visitors of the comparison page, from the data set {name}.",
        "votes": figures["votes"],
        "of": len(votes),
        "counts": figures["counts"],
        "win_rate": figures["win_rate"],
        "problem": _explain_no_votes(
            name, len(valid_votes), len(votes), are_published=bool(ppo_origins and sft_origins)
        ),
    }


def _explain_no_votes(name: str, valid_count: int, total: int, *, are_published: bool) -> str | None:
    if valid_count:
        return None
    if not are_published:
        return (
            "Votes are on published models, but these two are not both published: publish both, or evaluate published "
            "models."
        )
    if not total:
        return f"{name} holds no votes."
    return f"None of the {total} votes in {name} compares these two policies."
