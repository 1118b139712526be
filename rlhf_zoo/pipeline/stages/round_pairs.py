"""The pairs of a later round: the pairs of the previous round, and labeled samples of its PPO policy."""

import logging
import random
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ZooError
from ...evaluation.judges.named import open_panel
from ...evaluation.judges.panel import score_completions
from ...fileio import read_json, write_json, write_text
from ...hub.client.publish import publish_files
from ...hub.client.refusals import translate_hub_errors
from ...hub.client.weights import commits_have_same_weights
from ...modeling.chat import plain_text
from ...modeling.chat_template import Prompt
from ...modeling.reserved_columns import columns_for_functions
from ...plugins import PREFERENCES, load_object
from ...runs.context import RunContext
from ...runs.corpus_data import card_head, write_configuration
from ...runs.data.digests import digest
from ...runs.dataset import PAIRS_RECORD_FILE, labeled_rows, stage_rows, stage_source, training_rows
from ...runs.judge import evaluation_settings
from ...runs.record import first_difference
from ...runs.rounds import GOLD, PAIRS_CONFIGURATION
from ...runs.settings.judge_names import split_judge_name
from . import ppo
from .evaluate import origins
from .pairs import open_pairs
from .samples import Labeler, labeler_of, ordered_pairs, sample_pairs

log = logging.getLogger(__name__)

#: Random stream of a round's samples. Their keys begin with the stream and the round's number.
ROUND_STREAM = 11


def make_pairs(context: RunContext, previous: RunContext, *, count: int) -> dict[str, Any]:
    """Writes the pairs of a round, unless they exist, and publishes them if the run publishes.

    Args:
        context: The run of the round.
        previous: The run of the previous round.
        count: Number of pairs to sample and label.

    Returns:
        The content of made.json: the numbers of new and old pairs, and the lineage of the data.

    Raises:
        ZooError: The folder has pairs that were made with other settings, or no pair could be made.
    """
    assert context.round is not None
    folder, policy = context.round.folder, context.round.previous_policy
    request = {
        "policy": policy.lineage["fingerprint"],
        "step": policy.path.name,
        "labels": context.round.labeler,
        "pairs": count,
        "seed": context.settings("reward").trainer.seed,
    }
    document_path = folder / PAIRS_RECORD_FILE
    document = read_json(document_path) if document_path.is_file() and not context.restart else None
    if document is not None and document["request"] != request:
        key = first_difference(document["request"], request)
        raise ZooError(
            f"{folder} has pairs that were made with a different value of {key!r}: choose another --output_dir, or "
            f"remove {folder.parent} to repeat this round (--restart would repeat all rounds)."
        )
    if document is None:
        rows = _sample_and_label(context, previous, count)
        shutil.rmtree(folder, ignore_errors=True)
        splits = _previous_pairs(previous)
        splits["train"] += rows
        write_configuration(folder, PAIRS_CONFIGURATION, splits)
        write_text(folder / "README.md", _card(context, splits))
        lineage = {"repo": None, "commit": None, "fingerprint": digest(folder, ".jsonl")}
        document = {"request": request, "new": len(rows), "old": len(splits["train"]) - len(rows), "lineage": lineage}
        write_json(document_path, document)
    if context.publish and document["lineage"]["repo"] is None:
        document["lineage"] |= _publish(context)
        write_json(document_path, document)
    return document


def _previous_pairs(previous: RunContext) -> dict[str, list[dict[str, Any]]]:
    """Returns split -> rows of the pairs on which the previous round's reward model was trained and measured."""
    context, source = open_pairs(previous)
    data_keys = context.settings("reward").data
    splits = {"train": [_row_of_round(row) for row in training_rows(context, "reward", source)[0]]}
    for name, split in (("test", data_keys.dataset_test_split), ("validation", data_keys.dataset_validation_split)):
        # With held_out_share, the reward model was measured on pairs of the training split.
        if split is not None and (name != "test" or data_keys.held_out_share is None):
            splits[name] = [_row_of_round(row) for row in stage_rows(context, "reward", source, split)]
    return splits


def _row_of_round(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"round": row.get("round") or 1, **{name: row[name] for name in ("prompt", "chosen", "rejected")}}


def _sample_and_label(context: RunContext, previous: RunContext, count: int) -> list[dict[str, Any]]:
    """Samples pairs of completions for PPO's training prompts, and labels them. Prompts repeat if there are too few.

    With a labeler votes:NAME, nothing is sampled: people have voted on the policy's completions already.
    """
    assert context.round is not None
    if split_judge_name(context.round.labeler)[0] == "votes":
        return _pairs_from_votes(context, previous)
    policy, data = context.round.previous_policy, ppo.load_data(previous, stage_source(previous, "ppo"))
    tokenizer = ppo.load_policy_tokenizer(previous, policy.path, data)
    usable_prompts = ppo.drop_too_long_prompts(previous.settings("ppo"), tokenizer, data)[0]["train_dataset"]
    prompt_columns = usable_prompts.select([index % len(usable_prompts) for index in range(count)]).to_dict()
    prompts, columns = prompt_columns["prompt"], columns_for_functions(prompt_columns)
    seed = context.settings("reward").trainer.seed
    indices, first, second = sample_pairs(previous, prompts, seed, (ROUND_STREAM, context.round.number), policy)
    prompts = [prompts[index] for index in indices]
    columns = {key: [values[index] for index in indices] for key, values in columns.items()}
    rows = ordered_pairs(prompts, first, second, _labeler(context)(prompts, first, second, columns))
    pairs = [{"round": context.round.number, **row} for row in rows]
    if not pairs:
        raise ZooError(
            f"None of {count} pairs of samples of round {context.round.number - 1} can be used: a pair needs two "
            "different samples that ended by themselves and got different scores; stop PPO earlier, or raise kl_coef."
        )
    return pairs


def _labeler(context: RunContext) -> Labeler:
    assert context.round is not None
    name, config, seed = context.round.labeler, evaluation_settings(context), context.shared.seed
    if name == GOLD:
        prefer = load_object(context.settings("reward").data.preference, group=PREFERENCES)
        rng = random.Random(f"round {context.round.number} {context.settings('reward').trainer.seed}")
        return labeler_of(prefer, rng)
    panel = open_panel(
        [name],
        llm=config.llm_settings,
        load_labeled=lambda: labeled_rows(context),
        folder=context.round.folder.parent,
        seed=seed,
        use_cpu=context.settings("ppo").trainer.use_cpu,
        hub=context.hub,
        has_headline=False,
    )
    if split_judge_name(name)[0] in ("llm", "pairs"):
        compare = panel.pair_judges[-1].compare
        label_of_score = {1.0: 0, 0.0: 1}  # the score is the first completion's; any other score is a tie
        return lambda prompts, first, second, _: [
            label_of_score.get(comparison.score)
            for comparison in compare([plain_text(prompt) for prompt in prompts], list(first), list(second))
        ]
    judge = panel.scoring_judges[-1]

    def by_score(
        prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[int | None]:
        margins = np.subtract(
            score_completions(judge, prompts, first, columns), score_completions(judge, prompts, second, columns)
        )
        return [None if margin == 0 else int(margin < 0) for margin in margins.tolist()]

    return by_score


def _pairs_from_votes(context: RunContext, previous: RunContext) -> list[dict[str, Any]]:
    """Returns the pairs that people voted on at a comparison page, if the policy wrote at least one of the two sides.

    Ties, and votes on completions that did not end by themselves, are left out.
    """
    from ...evaluation.votes.data import HubVotes

    assert context.round is not None
    name = split_judge_name(context.round.labeler)[1]
    policy_origins = origins(previous, "ppo", context.round.previous_policy)
    with translate_hub_errors(
        f"The votes of {name} cannot be read on {context.hub.name}", "check the name, --hub and the token."
    ):
        votes = HubVotes(name, hub=context.hub).read()
    pairs = []
    for vote in votes:
        preferred, other = vote.chosen, vote.rejected
        if preferred is None or other is None or not (preferred.ended and other.ended):
            continue
        published_sides = [(side.repo, side.commit) for side in (preferred, other) if side.repo and side.commit]
        if any(
            commits_have_same_weights((str(repo), str(commit)), policy_origin, hub=context.hub)
            for repo, commit in published_sides
            for policy_origin in policy_origins
        ):
            pair = {"chosen": preferred.completion, "rejected": other.completion}
            pairs.append({"round": context.round.number, "prompt": vote.prompt, **pair})
    if not pairs:
        repo = previous.repo("ppo")
        raise ZooError(
            f"None of the {len(votes)} votes of {name} decides between a text of {repo} and another text: collect "
            f"votes with `rlhf-zoo compare {repo} --votes {name}`, then run the same command again."
        )
    return pairs


def _card(context: RunContext, splits: Mapping[str, Sequence[Any]]) -> str:
    assert context.round is not None
    number, recipe = context.round.number, context.recipe.name
    counts = ", ".join(f"{len(rows)} {split}" for split, rows in splits.items())
    head = card_head(vars(context.shared), recipe, {PAIRS_CONFIGURATION: splits})
    return (
        f"{head}# {recipe}: pairs of round {number}\n\n"
        f"The reward model of round {number} learns from these pairs: {counts}. The column `round` says when a pair "
        f"was made. The pairs of round {number} are samples of the PPO policy of round {number - 1}, labeled by "
        f"{context.round.labeler}; the test split is the first round's.\n"
    )


def _publish(context: RunContext) -> dict[str, Any]:
    """Publishes the pairs and returns their lineage. If the Hub refuses, this warns and returns {}."""
    assert context.round is not None
    repo = f"{context.dataset_repo}-round-{context.round.number}"
    try:
        with translate_hub_errors(
            f"The pairs cannot be published as {repo} on {context.hub.description}", "cards will not name them."
        ):
            commit = publish_files(
                context.round.folder,
                repo,
                repo_type="dataset",
                message=f"{context.recipe.name}: pairs of round {context.round.number}",
                private=context.private,
                hub=context.hub,
            )
    except ZooError as error:
        log.warning("%s", error)
        return {}
    return {"repo": repo, "commit": commit, "hub": context.hub.label}
