"""Further rounds of a run: pairs of samples of the last round's PPO policy, put in order; then its stages anew."""

import logging
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ZooError
from ...evaluation.judges.named import check_endpoints, check_names, open_panel, scores
from ...evaluation.stats import Estimate, bootstrap_mean
from ...fileio import read_json, write_json, write_text
from ...hub.client.publish import publish_folder
from ...hub.client.refusals import refusals_as
from ...hub.client.weights import equal_weights
from ...modeling.chat import plain_text, wrap_completion
from ...modeling.reserved_columns import passed_on
from ...plugins import PREFERENCES, load_object
from ...runs.context import Publisher, RunContext
from ...runs.data.sources import digest
from ...runs.dataset import MADE, labeled_rows, learned_rows, stage_rows, stage_source
from ...runs.judge import evaluation_of
from ...runs.prepared import card_head, write_configuration
from ...runs.record import first_difference
from ...runs.rounds import CONFIGURATION, GOLD, JUDGE, check_rounds, note_round, round_run
from ...runs.settings.judge_names import SAME_LABELS, kind_of
from .. import run_recipe as pipeline
from ..stages import ppo
from ..stages.evaluate import origins
from ..stages.pairs import open_pairs
from ..stages.samples import two_samples

log = logging.getLogger(__name__)

#: Of the random numbers of a round's samples, with the round's number behind it.
STREAM = 11
#: Pairs to be put in order in a round, where the recipe simulates none.
PAIRS = 1000
ROUNDS = "rounds.json"
Publishing = Callable[[RunContext], AbstractContextManager[Publisher | None]]
#: (prompts, first texts, second texts, their columns) -> 0 or 1, the better one; None for a tie.
Labeler = Callable[[Sequence[Any], Sequence[str], Sequence[str], Mapping[str, Sequence[Any]]], list[int | None]]


def check_labels(context: RunContext, labels: str | None) -> str:
    """Who labels: 'gold', or a judge's name. None: gold where the recipe's own pairs are simulated, else the judge.

    Raises ZooError, before anything trains, for a labeler that is not to be had.
    """
    check_rounds(context)
    data, config = context.settings("reward").data, evaluation_of(context)
    known = data.preference is not None
    if labels is None:
        labels = GOLD if known else JUDGE
    if labels == GOLD:
        if not known:
            raise ZooError(
                "--labels gold puts pairs in order by `preference` of the stage reward, and the recipe has none: name "
                "a judge, such as --labels judge, or votes:NAMESPACE/NAME."
            )
        load_object(data.preference, group=PREFERENCES)
        return labels
    name = config.names[0] if labels == JUDGE else labels
    if kind_of(name)[0] == SAME_LABELS:
        asked = f"--labels {labels}" + ("" if labels == name else f", which is {name} here,")
        raise ZooError(
            f"{asked} would repeat the labels that are there: name another, such as reward:NAME, rule:NAME or "
            "votes:NAMESPACE/NAME."
        )
    check_names(
        [name],
        config.asked_llm,
        labeled=lambda: labeled_rows(context),
        seed=context.shared.seed,
        hub=None if kind_of(name)[0] == "votes" else context.hub,  # a page makes their repository, on what is to come
        headline=False,
    )
    check_endpoints([name], config.asked_llm)
    return name


def run_rounds(
    context: RunContext, console: Any, publishing: Publishing, *, rounds: int, labels: str, pairs: int | None
) -> list[RunContext]:
    """Runs rounds 2, 3, ... after the first, each of which is finished before the next begins. Returns all runs.

    context: of the first, which is finished. publishing: opens a run's publisher. pairs: to be put in order in a round;
    None is as many as the recipe simulates.
    """
    done = [context]
    for number in range(2, rounds + 1):
        console.rule(f"[bold]round {number}")
        this = round_run(context, number, labels, done[-1].checkpoint("ppo"))
        made = _make_pairs(this, done[-1], wanted=pairs or context.settings("reward").data.simulated_pairs or PAIRS)
        console.print(
            f"{made['new']} new pairs of samples of round {number - 1}, labeled by {labels}, and {made['old']} older.",
            highlight=False,
        )
        note_round(this)
        with publishing(this) as publisher:
            pipeline.run(this, console, publisher)
        done.append(this)
    return done


def _make_pairs(this: RunContext, before: RunContext, *, wanted: int) -> dict[str, Any]:
    """Writes the pairs of a round, once. Raises ZooError where others lie there, or too few could be made."""
    assert this.round is not None
    folder, policy = this.round.folder, this.round.before
    asked = {
        "policy": policy.lineage["fingerprint"],
        "step": policy.path.name,
        "labels": this.round.labels,
        "pairs": wanted,
        "seed": this.settings("reward").trainer.seed,
    }
    note = folder / MADE
    made = read_json(note) if note.is_file() and not this.restart else None
    if made is not None and made["asked"] != asked:
        key = first_difference(made["asked"], asked)
        raise ZooError(
            f"{folder} holds pairs that another value of {key!r} made: choose another --output_dir, or remove "
            f"{folder.parent}, which makes this round anew; --restart begins with the first."
        )
    if made is None:
        rows = _labeled(this, before, wanted)
        shutil.rmtree(folder, ignore_errors=True)
        older = _older(before)
        older["train"] += rows
        write_configuration(folder, CONFIGURATION, older)
        write_text(folder / "README.md", _card(this, older))
        lineage = {"repo": None, "commit": None, "fingerprint": digest(folder, ".jsonl")}
        made = {"asked": asked, "new": len(rows), "old": len(older["train"]) - len(rows), "lineage": lineage}
        write_json(note, made)
    if this.publish and made["lineage"]["repo"] is None:
        made["lineage"] |= _send(this)
        write_json(note, made)
    return made


def _older(before: RunContext) -> dict[str, list[dict[str, Any]]]:
    """The pairs that the round before learned from, and was measured on."""
    owner, source = open_pairs(before)
    data = owner.settings("reward").data
    found = {"train": [_pair(row) for row in learned_rows(owner, "reward", source)[0]]}
    for name, split in (("test", data.dataset_test_split), ("validation", data.dataset_validation_split)):
        if split is not None and (name != "test" or data.held_out_share is None):
            found[name] = [_pair(row) for row in stage_rows(owner, "reward", source, split)]
    return found


def _pair(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"round": row.get("round") or 1, **{name: row[name] for name in ("prompt", "chosen", "rejected")}}


def _labeled(this: RunContext, before: RunContext, wanted: int) -> list[dict[str, Any]]:
    """New pairs: two samples of the policy to each of PPO's training prompts in turn, the better one chosen."""
    assert this.round is not None
    if kind_of(this.round.labels)[0] == "votes":
        return _voted(this, before)
    policy, data = this.round.before, ppo.load_data(before, stage_source(before, "ppo"))
    tokenizer = ppo.policy_tokenizer(before, policy.path, data)
    asked = ppo.within_length(before.settings("ppo"), tokenizer, data)[0]["train_dataset"]
    rows = asked.select([place % len(asked) for place in range(wanted)]).to_dict()
    prompts, columns = rows["prompt"], passed_on(rows)
    seed = this.settings("reward").trainer.seed
    kept, *texts = two_samples(before, prompts, seed, (STREAM, this.round.number), policy)
    prompts = [prompts[place] for place in kept]
    beside = {key: [of[place] for place in kept] for key, of in columns.items()}
    better = _labeler(this)(prompts, texts[0], texts[1], beside)
    found = []
    for place, winner in enumerate(better):
        if winner is not None:
            prompt, pair = prompts[place], [texts[side][place] for side in (winner, 1 - winner)]
            chosen, rejected = (wrap_completion(prompt, text) for text in pair)
            found.append({"round": this.round.number, "prompt": prompt, "chosen": chosen, "rejected": rejected})
    if not found:
        raise ZooError(
            f"Of {wanted} pairs of samples of round {this.round.number - 1} none is left: no two "
            "differed, ended by themselves and were told apart by the labeler; stop PPO earlier, or raise kl_coef."
        )
    return found


def _labeler(context: RunContext) -> Labeler:
    assert context.round is not None
    labels, config, seed = context.round.labels, evaluation_of(context), context.shared.seed
    if labels == GOLD:
        prefer = load_object(context.settings("reward").data.preference, group=PREFERENCES)
        rng = random.Random(f"round {context.round.number} {context.settings('reward').trainer.seed}")
        return lambda prompts, first, second, _: [
            prefer(plain_text(prompt) + one, plain_text(prompt) + other, rng)
            for prompt, one, other in zip(prompts, first, second, strict=True)
        ]
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
            {1.0: 0, 0.0: 1}.get(one.score)
            for one in comparing.compare([plain_text(prompt) for prompt in prompts], list(first), list(second))
        ]
    judge = panel.scoring[-1]

    def by_score(
        prompts: Sequence[Any], first: Sequence[str], second: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[int | None]:
        margins = np.subtract(scores(judge, prompts, first, columns), scores(judge, prompts, second, columns))
        return [None if margin == 0 else int(margin < 0) for margin in margins.tolist()]

    return by_score


def _voted(this: RunContext, before: RunContext) -> list[dict[str, Any]]:
    """People's votes on completions of the policy, as a comparison page keeps them; ties are left out."""
    from ...evaluation.votes.data import HubVotes

    assert this.round is not None
    name = kind_of(this.round.labels)[1]
    own = origins(before, "ppo", this.round.before)
    with refusals_as(f"The votes of {name} cannot be read on {this.hub.name}", "check the name, --hub and the token."):
        votes = HubVotes(name, hub=this.hub).read()
    found = []
    for vote in votes:
        good, bad = vote.chosen, vote.rejected
        if good is None or bad is None or not (good.ended and bad.ended):
            continue
        at = [(side.repo, side.commit) for side in (good, bad) if side.repo and side.commit]
        if any(equal_weights((str(repo), str(commit)), one, hub=this.hub) for repo, commit in at for one in own):
            pair = {"chosen": good.completion, "rejected": bad.completion}
            found.append({"round": this.round.number, "prompt": vote.prompt, **pair})
    if not found:
        repo = before.repo("ppo")
        raise ZooError(
            f"None of the {len(votes)} votes of {name} prefers a text of {repo} or another to it: gather some by "
            f"`rlhf-zoo compare {repo} --votes {name}`; the same command then goes on."
        )
    return found


def _card(context: RunContext, splits: Mapping[str, Sequence[Any]]) -> str:
    assert context.round is not None
    number, recipe = context.round.number, context.recipe.name
    counts = ", ".join(f"{len(rows)} {split}" for split, rows in splits.items())
    return (
        f"{card_head(vars(context.shared), recipe, {CONFIGURATION: splits})}# {recipe}: pairs of round {number}\n\n"
        f"What the reward model of round {number} learns from: {counts}. The column `round` says when a pair was made. "
        f"Those of {number} are of the PPO policy of round {number - 1}, put in order by {context.round.labels}; the "
        "test split is the first round's.\n"
    )


def _send(context: RunContext) -> dict[str, Any]:
    """Sends the pairs as a data set; {} with a warning where the Hub does not take them: cards then name no commit."""
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


# What came of them


def write_rounds(runs: Sequence[RunContext]) -> tuple[Path, list[dict[str, Any]]]:
    """Writes rounds.json into the first round's directory; returns its path and the rounds.

    `judge_less_before` is the headline's judge of PPO less that of the round before: the same test prompts and random
    streams, so that samples are paired; the interval resamples prompts.
    """
    rounds = [_told(run, runs[place - 1] if place else None) for place, run in enumerate(runs)]
    path = runs[0].directory / ROUNDS
    write_json(path, {"schema": 1, "recipe": runs[0].recipe.name, "rounds": rounds})
    return path, rounds


def _told(run: RunContext, before: RunContext | None) -> dict[str, Any]:
    evaluation = read_json(run.record("eval").path / "evaluation.json")
    trained = run.record("reward").read().get("reward_model") or {}
    made = {} if run.round is None else read_json(run.round.folder / MADE)
    return {
        "round": 1 if run.round is None else run.round.number,
        "directory": str(run.directory),
        "repo": (run.record("ppo").read().get("repo") or {}).get("id"),
        "labels": None if run.round is None else run.round.labels,
        "pairs": None if run.round is None else {"new": made["new"], "old": made["old"]},
        "reward_model": {key: trained[key] for key in ("accuracy", "ci95", "n") if key in trained},
        "figures": {key: evaluation["ppo"][key] for key in ("reward", "judge", "kl", "length", "distinct_2")},
        "win_rate": evaluation["win_rate"],
        "verdict": evaluation.get("verdict"),
        "judge_less_before": None if before is None else _gain(run, before).to_json(),
    }


def _gain(run: RunContext, before: RunContext) -> Estimate:
    ours, theirs = (_judged(one) for one in (run, before))
    shared = [key for key in ours if key in theirs]
    return bootstrap_mean([ours[key] - theirs[key] for key in shared], [key[0] for key in shared], seed=run.shared.seed)


def _judged(run: RunContext) -> dict[tuple[str, int], float]:
    """(prompt, sample) -> the headline's judge of PPO's completion."""
    import json

    # A newline alone ends a row: a completion may hold what else counts as a line's end.
    lines = (run.record("eval").path / "samples.jsonl").read_text(encoding="utf-8").split("\n")
    return {(str(row["prompt"]), row["sample"]): row["ppo"]["judge"] for row in map(json.loads, filter(None, lines))}
