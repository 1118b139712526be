"""The eval stage: PPO against SFT on held-out prompts, by a judge that is not the training reward."""

import contextlib
import hashlib
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from ...errors import ZooError
from ...evaluation.head_to_head import HeadToHead, head_to_head
from ...evaluation.judges.check import JudgeCheck
from ...evaluation.judges.lexicon import lexicon_judge
from ...evaluation.judges.named import (
    JUDGES_OF_LABELS,
    check_endpoints,
    check_names,
    checked,
    checks_answers,
    settled_pairs,
)
from ...evaluation.judges.people import votes_on
from ...evaluation.judges.rule import RuleJudge
from ...evaluation.lm_eval import check_data, check_tasks, on_tasks
from ...evaluation.measure import Evaluator, make_evaluator, training_rewards
from ...evaluation.reference_answers import beside_references
from ...evaluation.trajectory import Trajectory, follow
from ...evaluation.trivial_comparison import score_trivial
from ...evaluation.verdict import JudgeReliability
from ...fileio import now, write_json, write_text
from ...hub.client.publish import NOTHING, checkpoint_files, tag_name
from ...hub.client.weights import Origin
from ...modeling import distributed
from ...modeling.devices import on_device
from ...modeling.integrity import weights_digest
from ...modeling.loading import load_tokenizer
from ...modeling.models import load_causal
from ...modeling.prompt_keys import count_distinct_prompts, describe_prompt_count
from ...plugins import PREFERENCES, load_object
from ...publishing.sent import published_tags
from ...runs.code import check_code, is_same_code, judges_code, stage_code
from ...runs.context import Publisher, RunContext
from ...runs.data.overlap import unmarked
from ...runs.dataset import DataSource, evaluated_part, evaluation_rows, labeled_rows, own_pairs, stage_source, to_train
from ...runs.judge import as_trained, check_same_labels, evaluation_of, judge_run, of_same_labels
from ...runs.lock import sole_writer
from ...runs.models import ParentCheckpoint
from ...runs.record import checkpoint_step, fingerprint
from ...runs.settings.evaluation import EvaluationConfig
from ...runs.settings.judge_names import SAME_LABELS, kind_of
from ...runs.status_line import doing
from . import reward
from .interrupt import Stopped
from .reward import held_out_pairs, open_pairs
from .seen import prompts_seen
from .train import code_lineage, quiet

log = logging.getLogger(__name__)


def run(context: RunContext, publisher: Publisher | None = None) -> bool:
    """Evaluates the finished PPO policy against its SFT policy. Returns False when that was done already.

    Writes eval/evaluation.json and eval/samples.jsonl. The figures are over held-out prompts, and it is counted how
    many of these each stage trained on. Another judge, or other prompts, make another evaluation, which takes the place
    of the one before once it is done; until then, and where it fails, nothing of the run directory changes. Several
    processes sample and measure; the first one asks the judges, and writes.
    """
    started = time.monotonic()
    quiet()
    record = context.record("eval")
    if not context.restart:
        record.check_recipe(context.recipe.name)
    context = as_trained(context, "ppo")
    check_code(stage_code(context.settings("ppo")), context.record("ppo").read().get("code"))
    shared, config = context.shared, evaluation_of(context)
    check_judges(context)
    own = own_pairs(context)
    source = stage_source(context, "ppo")
    checkpoints = {stage: context.checkpoint(stage) for stage in ("sft", "ppo")}
    resolved = {
        "evaluation": recorded(config),
        "seed": shared.seed,
        "data": source.lineage["fingerprint"],
        "parents": {stage: found.lineage["fingerprint"] for stage, found in checkpoints.items()},
        **({} if own is None else {"own_pairs": {name: own[1].lineage.get(name) for name in ("commit", "files")}}),
    }
    code_named = judges_code(config.names)
    before, undecided = record.read(), (context.record("ppo").read().get("chosen") or {}).get("open")
    done = before.get("status") == "finished" and before.get("fingerprint") == fingerprint(resolved)
    done = done and is_same_code(code_named, before.get("code"))
    if distributed.from_first(lambda: done and not context.restart and not undecided):
        return False
    distributed.from_first(lambda: check_data(config.lm_eval, context.hub))
    prompts, where = check_prompts(context, source, checkpoints["sft"].path), evaluated_part(context)
    check_rules(context, source, prompts, checkpoints["sft"].path)
    seen = prompts_seen(context, prompts)
    try:
        if SAME_LABELS in config.names:
            _train_judge(context)
        tools = make_evaluator(context, checkpoints["sft"].path)
        with doing("eval: looking at the judges"):
            checks = _checked_judges(context, tools, None if own is None else own[0])
        headline = checks[tools.judge.name]
        paid = training_rewards(context, tools)
        with doing("eval: following the checkpoints"):
            followed = follow(context, source, tools, standing=_standing(tools, paid, headline))

        def compared(step: int) -> HeadToHead:
            checkpoints["ppo"] = context.checkpoint("ppo", step=step)
            policy = load_causal(checkpoints["ppo"].path)
            asked: Any = {"samples": config.samples, "seed": shared.seed, "paid": paid, "checks": checks}
            with doing(f"eval: PPO at step {step} against SFT"):
                return head_to_head(policy, tools, prompts, **asked)

        candidate = None if isinstance(followed, str) else followed.verdict.candidate
        open_choice = (context.record("ppo").read().get("chosen") or {}).get("rule") == "recommended"
        step = checkpoint_step(checkpoints["ppo"].path)
        if open_choice:
            step = _last_step(context) if candidate is None else candidate
        found, trivial = compared(step), {}
        if candidate is not None and not isinstance(followed, str):
            policy = None if step == candidate else load_causal(context.checkpoint("ppo", step=candidate).path)
            followed = followed.confirmed(found.gain_of(policy, prompts))
        if not isinstance(followed, str):
            measured = score_trivial(found, followed.trivial, prompts)
            followed = followed.of(replace(followed.standing, winnable=measured.winnable))
            if open_choice and followed.verdict.recommended is None and step != (step := _last_step(context)):
                found = compared(step)
                measured = score_trivial(found, followed.trivial, prompts)
            trivial = {"trivial": measured.to_json()}
        chosen = _choose(step, followed) if open_choice else None
        beside = {}
        if (answers := config.reference_answers) is not None:
            path = checkpoints["ppo"].path
            compared_with = beside_references(found, prompts, lambda: load_causal(path), **vars(answers))
            beside = {"reference": compared_with}
        if not distributed.first():
            return True
        figures = {**found.to_json(), **trivial, **beside}
        if tools.panel.votes:
            figures["votes"] = {
                name: votes_on(
                    name,
                    ppo=origins(context, "ppo", checkpoints["ppo"]),
                    sft=origins(context, "sft", checkpoints["sft"]),
                    seed=shared.seed,
                    hub=context.hub,
                )
                for name in tools.panel.votes
            }
        if config.lm_eval:
            figures["lm_eval"] = _on_tasks(context, {side: one.path for side, one in checkpoints.items()})
    except KeyboardInterrupt as error:
        raise Stopped from error
    seconds = time.monotonic() - started
    document = {
        "schema": 1,
        "recipe": context.recipe.name,
        "seed": shared.seed,
        "split": where["split"],
        "data": {
            "location": source.lineage["repo"],
            "revision": source.lineage["commit"],
            **where,
            "seen": seen,
        },
        "simulated": shared.simulated,
        "reward_model": context.record("reward").read().get("reward_model"),
        **figures,
        **{name: keys for name in ("labeled", "own_pairs") if (keys := getattr(config, name))},
        **_verdict(record.path, followed),
        "seconds": seconds,
    }
    tools.panel.save(record.path)
    write_json(record.path / "evaluation.json", document)
    write_text(record.path / "samples.jsonl", found.jsonl())
    if chosen is not None:
        context.record("ppo").write(chosen=chosen, weights=weights_digest(checkpoints["ppo"].path))
    record.clear()
    record.write(
        **context.head("eval", "finished", seed=shared.seed, resolved=resolved),
        parents={
            stage: {**found.lineage, "weights": weights_digest(found.path)} for stage, found in checkpoints.items()
        },
        hub=context.hub.label,
        repo=None,
        command=context.command,
        seconds=seconds,
        finished=now(),
        **({"code": code_named} if code_named else {}),
        **({"remote_code": code} if (code := code_lineage(context)) else {}),
    )
    if publisher is not None:
        publisher.notify()  # the cards of what it measured are due
    return True


def _on_tasks(context: RunContext, paths: Mapping[str, Path]) -> dict[str, Any]:
    use_cpu = context.settings("ppo").trainer.use_cpu
    return on_tasks(
        {side: on_device(load_causal(path), use_cpu=use_cpu) for side, path in paths.items()},
        load_tokenizer(paths["sft"]),
        evaluation_of(context),
        seed=context.shared.seed,
        chat=context.shared.conversational,
        hub=context.hub,
    )


def recorded(config: EvaluationConfig) -> dict[str, Any]:
    """What tells evaluations apart, of a config whose judge is settled.

    Runs from before there were several judges keep their fingerprint.
    """
    later: dict[str, Any] = {
        "judges": [], "llm": {}, "dataset_test_split": None, "labeled": {}, "own_pairs": {}, "lm_eval": [],
        "lm_eval_limit": None, "lm_eval_fewshot": None, "reference": {},
    }  # fmt: skip
    return {key: value for key, value in asdict(config).items() if later.get(key) != value}


def origins(context: RunContext, stage: str, checkpoint: ParentCheckpoint) -> list[Origin]:
    """Where a stage's checkpoint is published; [] where it is not yet."""
    if stage not in context.recipe.stages:  # what PPO starts from in its place
        repo, commit = checkpoint.lineage["repo"], checkpoint.lineage["commit"]
        return [(repo, commit)] if repo and commit else []
    repo = context.repo(stage)
    tags = published_tags(context.record(stage), repo, hub=context.hub.label)
    commit = tags.get(tag_name(checkpoint_step(checkpoint.path)))
    return [(repo, commit)] if commit else []


def check_prompts(context: RunContext, source: DataSource, path: Path | None = None) -> Dataset:
    """Rows of the held-out prompts that the evaluation asks for, with as many different ones as so many rows can have.

    source: PPO's data. path: of the SFT policy, where it is trained. Raises ZooError when the split has too few rows.
    """
    wanted = context.shared.evaluation.prompts
    prompts = evaluation_rows(context, source, path=path)
    if len(prompts) < wanted:
        raise ZooError(
            f"The {_words(evaluated_part(context))} has {describe_prompt_count(prompts)} prompts and "
            f"evaluation.prompts asks for {wanted}: lower it, or prepare more data."
        )
    prompts = prompts.select(range(wanted))
    if (distinct := count_distinct_prompts(prompts["prompt"])) < wanted:
        log.warning(
            "evaluation.prompts asks for %d, and the %s has %d different prompts: %d rows repeat one, and intervals "
            "count each prompt once.",
            wanted, _words(evaluated_part(context)), distinct, wanted - distinct,
        )  # fmt: skip
    answers = context.shared.evaluation.reference_answers
    if answers is not None and answers.column not in prompts.column_names:
        raise ZooError(
            f"evaluation.reference names the column {answers.column}, and the evaluation's prompts have "
            f"{', '.join(unmarked(prompts).column_names)}: name one of these."
        )
    if answers is not None and not all(isinstance(one, str | list) for one in prompts[answers.column]):
        raise ZooError(
            f"evaluation.reference names the column {answers.column}, in which not every prompt has a text or "
            "messages: name one that holds answers."
        )
    return prompts


def _words(where: Mapping[str, Any]) -> str:
    share, split = where["held_out_share"], where["split"]
    return f"{split} split" if share is None else f"share of {share:g} that PPO holds out of the {split} split"


def check_judges(context: RunContext, *, anew: bool = False) -> None:
    """Raises ZooError for a judge or a lexicon that cannot be had, before anything trains. anew: all of it, again."""
    config = evaluation_of(context)
    check_same_labels(context, anew=anew)
    seed, hub = context.shared.seed, context.hub
    check_names(config.names, config.asked_llm, labeled=lambda: labeled_rows(context), seed=seed, hub=hub)
    own_pairs(context)
    check_tasks(config.lm_eval)
    if "ppo" in to_train(context):
        distributed.from_first(lambda: check_endpoints(config.names, config.asked_llm))
        distributed.from_first(lambda: check_data(config.lm_eval, context.hub))
    lexicon_judge(context.shared)


def check_rules(context: RunContext, source: DataSource, prompts: Dataset, path: Path | None = None) -> None:
    """Checks that judges which are rules can score answers to every prompt of the evaluation.

    Args:
        context: The run.
        source: PPO's data.
        prompts: Those of the evaluation at the end. Those that checkpoints are measured on are looked at too.
        path: The SFT policy, where it is trained.

    Raises:
        ZooError: A rule cannot score some prompt.
    """
    config = evaluation_of(context)
    rules = [RuleJudge(argument) for kind, argument in map(kind_of, config.names) if kind == "rule"]
    if not rules:
        return
    asked = {"test": prompts}
    if config.checkpoint_prompts > 0:
        with contextlib.suppress(ZooError):  # without validation prompts there is no verdict, which the evaluation says
            rows = evaluation_rows(context, source, "validation", path=path)
            asked["validation"] = rows.select(range(min(config.checkpoint_prompts, len(rows))))
    for rule in rules:
        for part, rows in asked.items():
            rule.check_prompts(rows, of=f"the {_words(evaluated_part(context, part))}")


def _train_judge(context: RunContext) -> None:
    """Trains the judge `same-labels`, unless that was done for this reward model."""
    judge, trained = judge_run(context), context.record("reward").read()
    if trained.get("status") != "finished":
        raise ZooError(
            f"The judge {SAME_LABELS} needs the reward model of this run, and {context.record('reward').path} holds no "
            "finished one: train it there, or name another judge."
        )
    before = judge.record("reward").read().get("fingerprint", trained["fingerprint"])
    with sole_writer(judge.directory, command=context.command):
        reward.run(replace(judge, restart=before != trained["fingerprint"]))


def _checked_judges(context: RunContext, tools: Evaluator, own: Dataset | None) -> dict[str, JudgeCheck]:
    """What is found of each judge on the reward model's held-out pairs, and on pairs of the policies' own outputs."""
    learned = tools.rewards.learned if tools.rewards is not None else []
    same_labels = [JUDGES_OF_LABELS[name] for name in evaluation_of(context).names if of_same_labels(context, name)]
    if context.round is not None:  # the judge that put its pairs in order
        same_labels += [judge.name for name, judge in tools.panel.named.items() if name == context.round.labels]
    return checked(
        tools.panel,
        _labeled_pairs(context),
        own=own,
        seed=context.shared.seed,
        reward=learned[0] if len(learned) == 1 else None,
        same_labels=same_labels,
    )


def _labeled_pairs(context: RunContext) -> Dataset | None:
    """The reward model's held-out pairs, simulated ones in the order that their preference means; None without any."""
    if "reward" not in context.recipe.stages:
        return None
    try:
        owner, source = open_pairs(context)
        found = held_out_pairs(owner, source)
    except ZooError as error:
        log.info("The judges are not checked on labeled pairs: %s", error)
        return None
    data = owner.settings("reward").data
    if found is None or not reward.are_simulated(owner, data):
        return None if found is None else found[0]
    prefer = load_object(data.preference, group=PREFERENCES)
    return settled_pairs(found[0], prefer, seed=context.shared.seed)


def _standing(tools: Evaluator, paid: Collection[str], check: JudgeCheck) -> JudgeReliability:
    """What is known of the headline's judge."""
    return JudgeReliability(
        name=tools.judge.name,
        is_reward=tools.judge.name in paid,
        verifiable=checks_answers(tools.judge),
        unfit=check.labeled.unfit if check.labeled else None,
        accuracy=check.labeled.accuracy if check.labeled else None,
        own_accuracy=check.own.accuracy if check.own else None,
        independent=check.independent,
    )


def _last_step(context: RunContext) -> int:
    last = context.record("ppo").last_checkpoint()
    assert last is not None  # a finished stage has one
    return checkpoint_step(last)


def _choose(step: int, followed: Trajectory | str) -> dict[str, Any]:
    """The chosen checkpoint, for run.json, where the run's rule leaves it to the verdict.

    Where none is recommended, the last one is chosen: `main`, and no tag `best`.
    """
    recommended = None if isinstance(followed, str) else followed.verdict.recommended
    chosen = {"step": step, "rule": "recommended", "metric": None, "value": None}
    return chosen if recommended is not None else {**chosen, "none": True}


def _verdict(folder: Path, followed: Trajectory | str) -> dict[str, Any]:
    """What evaluation.json says of the run's checkpoints; their scores by prompt go to a file beside it."""
    scores = folder / "over_training.json"
    if isinstance(followed, str):
        scores.unlink(missing_ok=True)
        return {"verdict": None, "recommended": None, "over_training": {"problem": followed}}
    write_json(scores, followed.arrays())
    found = followed.to_json()
    return {"verdict": found["verdict"], "recommended": found["recommended"], "over_training": found}


def same_weights(a: Path, b: Path, overrides: Mapping[str, Path | None] = NOTHING) -> bool:
    """Whether two checkpoints hold the same weight files, of those that are published, by sha256.

    overrides: what is sent in place of b's files.
    """
    ours, theirs = (
        {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in files.items()
            if name.endswith(".safetensors")
        }
        for files in (checkpoint_files(a), checkpoint_files(b, overrides=overrides))
    )
    return bool(ours) and ours == theirs
