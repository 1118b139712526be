"""Win rates, and Elo ratings of several checkpoints, from people's votes between two completions.

A vote is left, right, tie or both_bad. A tie counts one half for each side. "Both bad" does not say which is better, so
it is counted separately and left out of win rates and ratings. Votes on one prompt, or on prompts that ask the same
question (see `prompt_groups`), are not independent, so intervals treat a group of prompts as one unit. Voters are
unknown, so intervals do not reflect that one voter may cast several votes.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..logistic import fit_logistic, sigmoid
from ..prompt_groups import near_duplicate_key
from ..stats import Estimate, WinRate, group_indices, proportion, quantile_levels, resample_counts, win_rate
from .vote import ROLES, ShownCompletion, Vote

ELO_SCALE = 400 / math.log(10)  # points per nat of log-odds: 400 points are odds of 10 to 1 (Elo 1978)
ELO_MEAN = 1000.0
FEW_PROMPTS = 20  # with fewer prompts, resampling understates how much they differ
_Z = NormalDist().inv_cdf(0.975)

Player = TypeVar("Player", bound=Hashable)


def preference_rate(scores: ArrayLike, prompts: Sequence[Hashable]) -> WinRate:
    """Computes how often a side is preferred.

    With `FEW_PROMPTS` prompts or more, the interval is that of `stats.win_rate`. With fewer, it is Wilson's with one
    trial per prompt, however many votes each prompt has. If the number of wins is not whole, it is rounded down for the
    lower bound and up for the upper bound.

    Args:
        scores: (N,) 1 won, ½ tied, 0 lost.
        prompts: (N,) the prompt of each vote.

    Raises:
        ValueError: There are no votes.
    """
    sample = np.asarray(scores, dtype=float)
    estimate = win_rate(sample, 1 - sample, prompts)
    prompt_count = len(set(prompts))
    if prompt_count >= FEW_PROMPTS:
        return estimate
    # Rounded first, so that 3.0000000001 wins do not count as 4.
    wins = round(estimate.value * prompt_count, 9)
    low, high = proportion(math.floor(wins), prompt_count).ci95[0], proportion(math.ceil(wins), prompt_count).ci95[1]
    return WinRate(estimate.value, (low, high), estimate.n, estimate.ties)


def fit_bradley_terry(wins: ArrayLike, *, prior: float) -> NDArray[np.float64]:
    """Fits strengths θ such that P(i beats j) = σ(θ_i − θ_j), by maximum likelihood with a prior.

    Args:
        wins: (K, K) how often player i beat player j; a tie counts ½ for each.
        prior: Number of virtual games of each player against a player of strength 0, half won and half lost. They keep
            θ finite for a player that never lost, and matter less with every vote.

    Returns:
        (K,) θ in log-odds, with mean 0.

    Source: Bradley & Terry 1952.
    """
    win_counts = np.array(wins, dtype=float)
    np.fill_diagonal(win_counts, 0.0)  # votes on a model against itself say nothing
    games = win_counts + win_counts.T
    one_hot = np.eye(len(win_counts))
    first, second = np.nonzero(np.triu(games))
    # Each pair of players is one weighted row of a logistic regression; the prior adds a row for each player.
    theta = fit_logistic(
        np.vstack([one_hot[first] - one_hot[second], one_hot]),
        np.concatenate([win_counts[first, second] / games[first, second], np.full(len(games), 0.5)]),
        np.concatenate([games[first, second], np.full(len(games), prior)]),
        ridge=0.0,
    )
    return np.asarray(theta - theta.mean())


def fit_elo(
    first: Sequence[Player],
    second: Sequence[Player],
    scores: ArrayLike,
    prompts: Sequence[Hashable],
    *,
    seed: int,
    prior: float = 1.0,
    resamples: int = 500,
) -> dict[Player, Estimate]:
    """Computes Elo ratings by `fit_bradley_terry`, with mean `ELO_MEAN`. There must be at least one vote.

    Intervals resample whole prompts. With fewer than `FEW_PROMPTS` prompts they are ±1.96 standard errors, from a
    likelihood in which all votes on a prompt together weigh as much as one vote. Ratings can be compared only between
    players that a chain of votes links.

    Args:
        first: (N,) one player of each vote.
        second: (N,) the other player.
        scores: (N,) 1 if the first was preferred, ½ for a tie, 0 for the second.
        prompts: (N,) the prompt of each vote.
        seed: Seed of the resamples.
        prior: As in `fit_bradley_terry`.
        resamples: Number of resamples.

    Returns:
        The ratings in order of first appearance; n counts the player's votes.
    """
    sample = np.asarray(scores, dtype=float)
    players = list(dict.fromkeys([name for pair in zip(first, second, strict=True) for name in pair]))
    index_by_player = {name: index for index, name in enumerate(players)}
    first_ids, second_ids = (np.array([index_by_player[name] for name in side]) for side in (first, second))
    prompt_ids = group_indices(prompts)
    prompt_count = int(prompt_ids.max()) + 1

    def win_table(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        table = np.zeros((len(players), len(players)))
        np.add.at(table, (first_ids, second_ids), weights * sample)
        np.add.at(table, (second_ids, first_ids), weights * (1 - sample))
        return table

    theta = fit_bradley_terry(win_table(np.ones(len(sample))), prior=prior)
    if prompt_count < FEW_PROMPTS:
        # All votes on a prompt together weigh as much as one vote.
        table = win_table((1 / np.bincount(prompt_ids))[prompt_ids])
        # Without a prior, only differences of strengths are identified, so use the pseudo-inverse.
        covariance = np.linalg.pinv(_fisher_information(theta, table + table.T, prior), hermitian=True)
        # Ratings are relative to their mean, so the mean's uncertainty is projected out.
        centering = np.eye(len(players)) - 1 / len(players)
        standard_error = np.sqrt(np.diag(centering @ covariance @ centering))
        low, high = theta - _Z * standard_error, theta + _Z * standard_error
    else:
        resampled_counts = [row for counts in resample_counts(prompt_count, seed, resamples) for row in counts]
        thetas = [fit_bradley_terry(win_table(row[prompt_ids]), prior=prior) for row in resampled_counts]
        low, high = np.quantile(thetas, quantile_levels(prompt_count), axis=0)
    vote_counts = Counter([*first_ids.tolist(), *second_ids.tolist()])
    return {
        name: Estimate(_to_elo(theta[k]), (_to_elo(low[k]), _to_elo(high[k])), vote_counts[k])
        for k, name in enumerate(players)
    }


def summarize_votes(votes: Iterable[Vote], *, seed: int = 1) -> dict[str, Any]:
    """Summarizes votes for JSON. A vote that occurs twice (by its id) counts once.

    Args:
        votes: The votes, possibly with copies.
        seed: Seed of the resamples.

    Returns:
        votes: The number of votes.
        counts: Votes between a PPO and an SFT model that prefer ppo, prefer sft, are a tie, or are both_bad.
        win_rate: PPO's win rate over SFT, with the number of prompts that ask different things; None if there are no
            votes besides both_bad.
        pairs: Counts and win rate of each pair of revisions, most votes first.
        elo: A rating of each revision from all votes besides both_bad. `among` is the index of the set of models that a
            chain of votes links; ratings are comparable only within a set. The set with most votes comes first, and
            within a set the best revision.
        left: The left side's share of votes that prefer a side; about ½ if voters favor neither; None without such
            votes.
    """
    # A batch that was sent twice, or a copy in another file, must not count twice.
    votes = list({vote.id: vote for vote in votes}.values())
    # Votes between two checkpoints of PPO say nothing about PPO against SFT.
    ppo_against_sft = [vote for vote in votes if {vote.left.role, vote.right.role} == set(ROLES)]
    identities = _describe_models(votes)
    pairs: dict[tuple[_ModelKey, _ModelKey], list[Vote]] = {}
    for vote in ppo_against_sft:
        ppo, sft = (vote.left, vote.right) if vote.left.role == "ppo" else (vote.right, vote.left)
        pairs.setdefault((_model_key(ppo), _model_key(sft)), []).append(vote)
    side_counts = Counter(vote.verdict for vote in votes if vote.verdict in ("left", "right"))
    return {
        "votes": len(votes),
        **_count_votes(ppo_against_sft),
        "pairs": [
            {"ppo": identities[ppo], "sft": identities[sft], **_count_votes(pair_votes)}
            for (ppo, sft), pair_votes in sorted(pairs.items(), key=lambda pair: -len(pair[1]))
        ],
        "elo": _rate_models([vote for vote in votes if vote.verdict != "both_bad"], identities, seed),
        "left": proportion(side_counts["left"], side_counts.total()).to_json() if side_counts else None,
    }


_ModelKey = tuple[str, str | None, str | None]  # role, repo, commit (else tag)


def _model_key(model: ShownCompletion) -> _ModelKey:
    # A tag may move and a commit cannot, so the tag identifies a model only where the commit is unknown.
    return (model.role, model.repo, model.commit or model.tag)


def _describe_models(votes: Iterable[Vote]) -> dict[_ModelKey, dict[str, str | None]]:
    """Returns {role, repo, commit, tag} of every model, from its last vote in the list."""
    models = [model for vote in votes for model in (vote.left, vote.right)]
    return {
        _model_key(model): {"role": model.role, "repo": model.repo, "commit": model.commit, "tag": model.tag}
        for model in models
    }


def _left_score(vote: Vote) -> float:
    """Returns 1 if the left side was preferred, ½ for a tie, 0 for the right side."""
    return {"left": 1.0, "tie": 0.5, "right": 0.0}[vote.verdict]


def _count_votes(votes: Sequence[Vote]) -> dict[str, Any]:
    """Computes counts and win rate of votes between a PPO and an SFT model."""
    counts = dict.fromkeys((*ROLES, "tie", "both_bad"), 0)
    scores, prompts = [], []
    for vote in votes:
        if vote.verdict in ("tie", "both_bad"):
            counts[vote.verdict] += 1
        else:
            counts[(vote.left if vote.verdict == "left" else vote.right).role] += 1
        if vote.verdict != "both_bad":
            scores.append(_left_score(vote) if vote.left.role == "ppo" else 1 - _left_score(vote))
            prompts.append(near_duplicate_key(vote.prompt))
    rate = None
    if scores:
        rate = {**preference_rate(scores, prompts).to_json(), "prompts": len(set(prompts))}
    return {"counts": counts, "win_rate": rate}


def _rate_models(
    votes: Sequence[Vote], identities: Mapping[_ModelKey, Mapping[str, str | None]], seed: int
) -> list[dict[str, Any]]:
    """Returns rows {role, repo, commit, tag, elo, among}; each set of linked models is rated separately."""
    rows = []
    for set_number, linked_votes in enumerate(_group_linked_votes(votes)):
        ratings = fit_elo(
            [_model_key(vote.left) for vote in linked_votes],
            [_model_key(vote.right) for vote in linked_votes],
            [_left_score(vote) for vote in linked_votes],
            [near_duplicate_key(vote.prompt) for vote in linked_votes],
            seed=seed,
        )
        ranking = sorted(ratings.items(), key=lambda item: -item[1].value)
        rows += [{**identities[key], "elo": rating.to_json(), "among": set_number} for key, rating in ranking]
    return rows


def _group_linked_votes(votes: Sequence[Vote]) -> list[list[Vote]]:
    """Groups votes by the sets of models that a chain of votes links, the set with most votes first."""
    from scipy.cluster.hierarchy import DisjointSet  # importing it takes long, and few commands rate models

    models = DisjointSet(_model_key(model) for vote in votes for model in (vote.left, vote.right))
    for vote in votes:
        models.merge(_model_key(vote.left), _model_key(vote.right))
    votes_by_set: dict[_ModelKey, list[Vote]] = {}
    for vote in votes:
        votes_by_set.setdefault(models[_model_key(vote.left)], []).append(vote)
    return sorted(votes_by_set.values(), key=len, reverse=True)


def _to_elo(theta: float) -> float:
    return float(ELO_MEAN + ELO_SCALE * theta)


def _fisher_information(theta: NDArray[np.float64], games: NDArray[np.float64], prior: float) -> NDArray[np.float64]:
    """Computes the Fisher information (K, K) at strengths (K,): minus the Hessian of the log-likelihood."""
    win_probability = sigmoid(theta[:, None] - theta)
    weight = games * win_probability * (1 - win_probability)
    prior_weight = sigmoid(theta) * (1 - sigmoid(theta))
    return np.diag(weight.sum(1) + prior * prior_weight) - weight
