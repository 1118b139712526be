"""The pairs of a later round: the pairs of the previous round, and labeled samples of its PPO policy."""

import logging
import random
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ZooError
from ...evaluation.judges.named import open_panel
from ...evaluation.judges.panel import scores
from ...fileio import read_json, write_json, write_text
from ...hub.client.publish import publish_folder
from ...hub.client.refusals import refusals_as
from ...hub.client.weights import equal_weights
from ...modeling.chat import plain_text
from ...modeling.chat_template import Prompt
from ...modeling.reserved_columns import columns_for_functions
from ...plugins import PREFERENCES, load_object
from ...runs.context import RunContext
from ...runs.data.sources import digest
from ...runs.dataset import PAIRS_FILE, labeled_rows, learned_rows, stage_rows, stage_source
from ...runs.judge import evaluation_of
from ...runs.prepared import card_head, write_configuration
from ...runs.record import first_difference
from ...runs.rounds import CONFIGURATION, GOLD
from ...runs.settings.judge_names import kind_of
from . import ppo
from .evaluate import origins
from .pairs import open_pairs
from .samples import Labeler, labels_of, ordered_pairs, two_samples

log = logging.getLogger(__name__)

#: Random stream of a round's samples; the round's number follows it.
STREAM = 11


def make_pairs(this: RunContext, before: RunContext, *, wanted: int) -> dict[str, Any]:
    """Writes the pairs of a round, once.

    Args:
        this: The round.
        before: The previous round.
        wanted: Pairs to label.

    Returns:
        made.json: the numbers of new and old pairs, and the lineage of the data.

    Raises:
        ZooError: The folder holds other pairs, or none could be made.
    """
    assert this.round is not None
    folder, policy = this.round.folder, this.round.previous_policy
    request = {
        "policy": policy.lineage["fingerprint"],
        "step": policy.path.name,
        "labels": this.round.labeler,
        "pairs": wanted,
        "seed": this.settings("reward").trainer.seed,
    }
    document_path = folder / PAIRS_FILE
    document = read_json(document_path) if document_path.is_file() and not this.restart else None
    if document is not None and document["request"] != request:
        key = first_difference(document["request"], request)
        raise ZooError(
            f"{folder} holds pairs that another value of {key!r} made: choose another --output_dir, or remove "
            f"{folder.parent}, which makes this round again; --restart begins with the first."
        )
    if document is None:
        rows = _labeled(this, before, wanted)
        shutil.rmtree(folder, ignore_errors=True)
        splits = _older(before)
        splits["train"] += rows
        write_configuration(folder, CONFIGURATION, splits)
        write_text(folder / "README.md", _card(this, splits))
        lineage = {"repo": None, "commit": None, "fingerprint": digest(folder, ".jsonl")}
        document = {"request": request, "new": len(rows), "old": len(splits["train"]) - len(rows), "lineage": lineage}
        write_json(document_path, document)
    if this.publish and document["lineage"]["repo"] is None:
        document["lineage"] |= _send(this)
        write_json(document_path, document)
    return document


def _older(before: RunContext) -> dict[str, list[dict[str, Any]]]:
    """The pairs that the previous round was trained on, and measured on."""
    owner, source = open_pairs(before)
    data = owner.settings("reward").data
    splits = {"train": [_pair(row) for row in learned_rows(owner, "reward", source)[0]]}
    for name, split in (("test", data.dataset_test_split), ("validation", data.dataset_validation_split)):
        if split is not None and (name != "test" or data.held_out_share is None):
            splits[name] = [_pair(row) for row in stage_rows(owner, "reward", source, split)]
    return splits


def _pair(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"round": row.get("round") or 1, **{name: row[name] for name in ("prompt", "chosen", "rejected")}}


def _labeled(this: RunContext, before: RunContext, wanted: int) -> list[dict[str, Any]]:
    """Samples two completions of the policy for each of PPO's training prompts in turn, and labels them."""
    assert this.round is not None
    if kind_of(this.round.labeler)[0] == "votes":
        return _voted(this, before)
    policy, data = this.round.previous_policy, ppo.load_data(before, stage_source(before, "ppo"))
    tokenizer = ppo.policy_tokenizer(before, policy.path, data)
    usable = ppo.within_length(before.settings("ppo"), tokenizer, data)[0]["train_dataset"]
    rows = usable.select([index % len(usable) for index in range(wanted)]).to_dict()
    prompts, columns = rows["prompt"], columns_for_functions(rows)
    seed = this.settings("reward").trainer.seed
    indices, *texts = two_samples(before, prompts, seed, (STREAM, this.round.number), policy)
    prompts = [prompts[index] for index in indices]
    columns = {key: [values[index] for index in indices] for key, values in columns.items()}
    rows = ordered_pairs(prompts, texts[0], texts[1], _labeler(this)(prompts, texts[0], texts[1], columns))
    pairs = [{"round": this.round.number, **row} for row in rows]
    if not pairs:
        raise ZooError(
            f"Of {wanted} pairs of samples of round {this.round.number - 1} none is left: no two "
            "differed, ended by themselves and got different scores; stop PPO earlier, or raise kl_coef."
        )
    return pairs


def _labeler(context: RunContext) -> Labeler:
    assert context.round is not None
    labels, config, seed = context.round.labeler, evaluation_of(context), context.shared.seed
    if labels == GOLD:
        prefer = load_object(context.settings("reward").data.preference, group=PREFERENCES)
        rng = random.Random(f"round {context.round.number} {context.settings('reward').trainer.seed}")
        return labels_of(prefer, rng)
    panel = open_panel(
        [labels],
        llm=config.asked_llm,
        labeled=lambda: labeled_rows(context),
        folder=context.round.folder.parent,
        seed=seed,
        use_cpu=context.settings("ppo").trainer.use_cpu,
        hub=context.hub,
        headline=False,
    )
    if kind_of(labels)[0] in ("llm", "pairs"):
        comparing = panel.comparing[-1]
        return lambda prompts, first, second, _: [
            {1.0: 0, 0.0: 1}.get(comparison.score)
            for comparison in comparing.compare([plain_text(prompt) for prompt in prompts], list(first), list(second))
        ]
    judge = panel.scoring[-1]

    def by_score(
        prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[int | None]:
        margins = np.subtract(scores(judge, prompts, first, columns), scores(judge, prompts, second, columns))
        return [None if margin == 0 else int(margin < 0) for margin in margins.tolist()]

    return by_score


def _voted(this: RunContext, before: RunContext) -> list[dict[str, Any]]:
    """People's votes on completions of the policy, as stored by a comparison page; ties are left out."""
    from ...evaluation.votes.data import HubVotes

    assert this.round is not None
    name = kind_of(this.round.labeler)[1]
    policy_origins = origins(before, "ppo", this.round.previous_policy)
    with refusals_as(f"The votes of {name} cannot be read on {this.hub.name}", "check the name, --hub and the token."):
        votes = HubVotes(name, hub=this.hub).read()
    pairs = []
    for vote in votes:
        preferred, other = vote.chosen, vote.rejected
        if preferred is None or other is None or not (preferred.ended and other.ended):
            continue
        published_sides = [(side.repo, side.commit) for side in (preferred, other) if side.repo and side.commit]
        if any(
            equal_weights((str(repo), str(commit)), policy_origin, hub=this.hub)
            for repo, commit in published_sides
            for policy_origin in policy_origins
        ):
            pair = {"chosen": preferred.completion, "rejected": other.completion}
            pairs.append({"round": this.round.number, "prompt": vote.prompt, **pair})
    if not pairs:
        repo = before.repo("ppo")
        raise ZooError(
            f"None of the {len(votes)} votes of {name} prefers a text of {repo} or another to it: gather some by "
            f"`rlhf-zoo compare {repo} --votes {name}`; the same command then goes on."
        )
    return pairs


def _card(context: RunContext, splits: Mapping[str, Sequence[Any]]) -> str:
    assert context.round is not None
    number, recipe = context.round.number, context.recipe.name
    counts = ", ".join(f"{len(rows)} {split}" for split, rows in splits.items())
    return (
        f"{card_head(vars(context.shared), recipe, {CONFIGURATION: splits})}# {recipe}: pairs of round {number}\n\n"
        f"What the reward model of round {number} learns from: {counts}. The column `round` says when a pair was made. "
        f"Those of {number} are of the PPO policy of round {number - 1}, put in order by {context.round.labeler}; the "
        "test split is the first round's.\n"
    )


def _send(context: RunContext) -> dict[str, Any]:
    """Sends the pairs as a data set. If the Hub refuses, warns and returns {}; cards then name no commit."""
    assert context.round is not None
    repo = f"{context.dataset_repo}-round-{context.round.number}"
    try:
        with refusals_as(f"The pairs cannot be sent to {repo} on {context.hub.described}", "cards will not name them."):
            commit = publish_folder(
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
