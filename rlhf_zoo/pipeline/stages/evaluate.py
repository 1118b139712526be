"""The eval stage: compares PPO with SFT on held-out prompts, using a judge that is not the training reward."""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from ...errors import ZooError
from ...evaluation.defects import corpus_defects, defect_figures
from ...evaluation.head_to_head import HeadToHead, head_to_head
from ...evaluation.judges.check import JudgeCheck
from ...evaluation.judges.lexicon import lexicon_judge
from ...evaluation.judges.named import check_endpoints, check_judges_available
from ...evaluation.judges.people import compare_by_votes
from ...evaluation.judges.rule import RuleJudge
from ...evaluation.lm_eval import check_data, check_tasks, run_tasks
from ...evaluation.measure import Evaluator, find_reward_judges, make_evaluator
from ...evaluation.prompt_groups import check_column
from ...evaluation.reference_answers import compare_with_references
from ...evaluation.saved_measurements import SavedMeasurements
from ...evaluation.simple_filters import score_filters
from ...evaluation.trajectory import Trajectory, evaluate_checkpoints
from ...evaluation.trivial_comparison import score_trivial_policies
from ...fileio import now, write_json, write_text
from ...hub.client.step_tags import tag_name
from ...hub.client.weights import Origin
from ...modeling import distributed
from ...modeling.devices import move_to_best_device
from ...modeling.integrity import weights_digest
from ...modeling.loading import load_tokenizer
from ...modeling.models import load_causal
from ...modeling.prompt_keys import count_distinct_prompts, describe_prompt_count
from ...publishing.sent_checkpoints import published_tags
from ...runs.checkpoint_choice import choice_of_verdict
from ...runs.code import check_code, is_same_code, judges_code, stage_code
from ...runs.context import Publisher, RunContext, stages_to_train
from ...runs.data.overlap import drop_question_column
from ...runs.dataset import DataSource, evaluation_location, evaluation_rows, labeled_rows, own_pairs, stage_source
from ...runs.judge import check_same_labels, evaluation_settings, with_trained_keys
from ...runs.models import ParentCheckpoint
from ...runs.record import checkpoint_step, fingerprint
from ...runs.settings.evaluation import EvaluationConfig
from ...runs.settings.judge_names import SAME_LABELS, split_judge_name
from ...runs.status_line import show_activity
from .interrupt import Stopped
from .judges import check_on_pairs, judge_reliability, train_same_labels
from .merged import merge_chosen
from .train import code_lineage, silence_libraries
from .trained_prompts import count_trained_prompts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Inputs:
    """The inputs of an evaluation.

    Attributes:
        source: PPO's data.
        own_pairs: Pairs of the policies' own outputs, and their data set; None if there are none.
        sft: The SFT policy.
        ppo: The PPO checkpoint that the run has chosen so far.
    """

    source: DataSource
    own_pairs: tuple[Dataset, DataSource] | None
    sft: ParentCheckpoint
    ppo: ParentCheckpoint

    def identity(self, context: RunContext) -> dict[str, Any]:
        """Returns the settings and inputs that identify an evaluation, for its fingerprint."""
        identity: dict[str, Any] = {
            "evaluation": identity_keys(evaluation_settings(context)),
            "seed": context.shared.seed,
            "data": self.source.lineage["fingerprint"],
            "parents": {"sft": self.sft.lineage["fingerprint"], "ppo": self.ppo.lineage["fingerprint"]},
        }
        if self.own_pairs is not None:
            lineage = self.own_pairs[1].lineage
            identity["own_pairs"] = {name: lineage.get(name) for name in ("commit", "files")}
        return identity


@dataclass(frozen=True)
class _Results:
    """The results of an evaluation.

    Attributes:
        comparison: The comparison of PPO with SFT.
        ppo: The checkpoint that was compared.
        trajectory: The measurements of all checkpoints, or the reason why they were not measured.
        figures: Figures for evaluation.json on trivial policies, reference answers, defects and simple filters.
        choice: The verdict's choice of a checkpoint, for run.json; None if the recipe's release rule chose it.
    """

    comparison: HeadToHead
    ppo: ParentCheckpoint
    trajectory: Trajectory | str
    figures: dict[str, Any]
    choice: dict[str, Any] | None


def run(context: RunContext, publisher: Publisher | None = None) -> bool:
    """Evaluates the finished PPO policy against its SFT policy.

    Writes eval/evaluation.json and eval/samples.jsonl. The figures are over held-out prompts; evaluation.json also says
    on how many of these prompts each stage was trained. A finished evaluation is repeated with --restart, or if its
    judges, prompts or policies have changed. The earlier files are replaced only at the end, so a failure does not
    change the run directory. After an interruption, the same evaluation continues with the policies that are not
    measured yet. All processes sample and measure; the main process asks the judges and writes the files.

    Args:
        context: The run.
        publisher: Sends the new cards at the end; None if the run does not publish.

    Returns:
        Whether it evaluated: False if the same evaluation was already finished.

    Raises:
        ZooError: A judge, the data or a checkpoint is not available.
        Stopped: Ctrl-C was pressed. Finished measurements are saved.
    """
    start_time = time.monotonic()
    silence_libraries()
    record = context.record("eval")
    if not context.restart:
        record.check_recipe(context.recipe.name)
    context = with_trained_keys(context, "ppo")
    check_code(stage_code(context.settings("ppo")), context.record("ppo").read().get("code"))
    config = evaluation_settings(context)
    # A missing checkpoint or judge is reported before data are prepared.
    checkpoints = {name: context.checkpoint(name) for name in ("sft", "ppo")}
    check_judges(context)
    inputs = _Inputs(own_pairs=own_pairs(context), source=stage_source(context, "ppo"), **checkpoints)
    source, identity = inputs.source, inputs.identity(context)
    code = judges_code(config.judge_names)  # read before the judges score, because files may be edited meanwhile
    if distributed.call_on_main_process(lambda: _is_done(context, identity, code)):
        return False
    distributed.call_on_main_process(lambda: check_data(config.lm_eval, context.hub))
    prompts = evaluation_prompts(context, source, inputs.sft.path)
    check_rules(context, source, prompts, inputs.sft.path)
    trained_on = count_trained_prompts(context, prompts)
    keys = {"resolved": identity, "code": code}
    saved_measurements = SavedMeasurements(context.directory, keys, restart=context.restart)
    try:
        if SAME_LABELS in config.judge_names:
            train_same_labels(context)
        evaluator = replace(make_evaluator(context, inputs.sft.path), saved_measurements=saved_measurements)
        with show_activity("eval: checking the judges"):
            checks = check_on_pairs(context, evaluator, None if inputs.own_pairs is None else inputs.own_pairs[0])
        results = _compare(context, inputs, evaluator, prompts, checks)
        if not distributed.is_main_process():
            return True
        parents = {"sft": inputs.sft, "ppo": results.ppo}
        figures = {
            **results.comparison.to_json(),
            **results.figures,
            **_collect_votes(context, evaluator.panel.vote_repos, parents),
            **_run_lm_eval(context, parents),
        }
    except KeyboardInterrupt as error:
        raise Stopped from error
    seconds = time.monotonic() - start_time + saved_measurements.seconds
    evaluator.panel.save(record.path)
    _write_results(context, results, {**_document_head(context, source, trained_on), **figures}, seconds)
    if results.choice is not None:
        merge_chosen(context, results.ppo.path)
        context.record("ppo").write(chosen=results.choice, weights=weights_digest(results.ppo.path))
    _write_record(context, parents, identity, code, seconds)
    saved_measurements.delete()
    if publisher is not None:
        publisher.notify()  # the cards of both stages are new
    return True


def _is_done(context: RunContext, identity: Mapping[str, Any], code: Mapping[str, Any]) -> bool:
    """Whether the run directory already has this evaluation."""
    document = context.record("eval").read()
    # With `release: recommended`, PPO's choice is provisional until an evaluation chooses a checkpoint.
    is_provisional = (context.record("ppo").read().get("chosen") or {}).get("provisional")
    is_same = document.get("status") == "finished" and document.get("fingerprint") == fingerprint(identity)
    return is_same and is_same_code(code, document.get("code")) and not context.restart and not is_provisional


def _compare(
    context: RunContext, inputs: _Inputs, evaluator: Evaluator, prompts: Dataset, checks: Mapping[str, JudgeCheck]
) -> _Results:
    """Measures every checkpoint on validation prompts, and compares one checkpoint with SFT on the test prompts.

    The compared checkpoint is the run's chosen one. With `release: recommended`, it is the one that the verdict
    recommends, or the last one if it recommends none.
    """
    config, seed = evaluation_settings(context), context.shared.seed
    reward_judges = find_reward_judges(context, evaluator)
    with show_activity("eval: measuring the checkpoints"):
        reliability = judge_reliability(evaluator, reward_judges, checks[evaluator.judge.name])
        # Whether a constant text beats SFT by this judge is measured on the test prompts, below. Until then assume that
        # none does; otherwise the judge would count as unchecked while the candidate is chosen.
        reliability = replace(reliability, winnable=False)
        trajectory_or_reason = evaluate_checkpoints(context, inputs.source, evaluator, reliability=reliability)
    trajectory = None if isinstance(trajectory_or_reason, str) else trajectory_or_reason

    def compare_step(step: int) -> tuple[ParentCheckpoint, HeadToHead]:
        checkpoint = context.checkpoint("ppo", step=step)
        policy = load_causal(checkpoint.path)
        with show_activity(f"eval: PPO at step {step} against SFT"):
            return checkpoint, head_to_head(
                policy, evaluator, prompts, samples_per_prompt=config.samples, seed=seed,
                reward_judges=reward_judges, checks=checks, group=config.group,
            )  # fmt: skip

    candidate = None if trajectory is None else trajectory.verdict.candidate
    verdict_chooses = (context.record("ppo").read().get("chosen") or {}).get("rule") == "recommended"
    step = checkpoint_step(inputs.ppo.path)
    if verdict_chooses:
        step = _last_step(context) if candidate is None else candidate
    ppo, comparison = compare_step(step)
    # The candidate was chosen on validation prompts, so its gain is measured again on the test prompts. None stands for
    # the policy that was just compared.
    if trajectory is not None and candidate is not None:
        policy = None if step == candidate else load_causal(context.checkpoint("ppo", step=candidate).path)
        trajectory = trajectory.with_confirmation(comparison.judge_gain(policy, prompts))
    figures: dict[str, Any] = {}
    if trajectory is not None:
        trivial = score_trivial_policies(comparison, trajectory.trivial_policies, prompts)
        trajectory = replace(trajectory, reliability=replace(trajectory.reliability, winnable=trivial.winnable))
        # The trivial policies' win rates may cancel the recommendation. Then the last checkpoint is compared instead.
        if verdict_chooses and trajectory.verdict.recommended is None and step != _last_step(context):
            step = _last_step(context)
            ppo, comparison = compare_step(step)
            trivial = score_trivial_policies(comparison, trajectory.trivial_policies, prompts)
        figures["trivial"] = trivial.to_json()
    if (keys := config.reference_arguments) is not None:
        figures["reference"] = compare_with_references(comparison, prompts, lambda: load_causal(ppo.path), **vars(keys))
    if defects := corpus_defects(context.shared):
        figures["defects"] = defect_figures(defects, comparison)
    if config.filter_samples:
        figures["filters"] = score_filters(comparison, prompts, samples_per_prompt=config.filter_samples)
    recommends = trajectory is not None and trajectory.verdict.recommended is not None
    choice = choice_of_verdict(step, recommends=recommends) if verdict_chooses else None
    return _Results(comparison, ppo, trajectory or trajectory_or_reason, figures, choice)


def _write_results(context: RunContext, results: _Results, figures: Mapping[str, Any], seconds: float) -> None:
    """Writes evaluation.json, samples.jsonl, and the scores of the checkpoints."""
    config, folder = evaluation_settings(context), context.record("eval").path
    document = {
        **figures,
        **{name: keys for name in ("labeled", "own_pairs") if (keys := getattr(config, name))},
        **_write_verdict(folder, results.trajectory),
        "seconds": seconds,
    }
    write_json(folder / "evaluation.json", document)
    write_text(folder / "samples.jsonl", results.comparison.to_jsonl())


def _collect_votes(
    context: RunContext, names: Sequence[str], parents: Mapping[str, ParentCheckpoint]
) -> dict[str, Any]:
    """Returns people's votes on these checkpoints, for evaluation.json; {} if no data set of votes is named."""
    if not names:
        return {}
    votes = {
        name: compare_by_votes(
            name,
            ppo_origins=origins(context, "ppo", parents["ppo"]),
            sft_origins=origins(context, "sft", parents["sft"]),
            seed=context.shared.seed,
            hub=context.hub,
        )
        for name in names
    }
    return {"votes": votes}


def _run_lm_eval(context: RunContext, parents: Mapping[str, ParentCheckpoint]) -> dict[str, Any]:
    """Returns the results of lm-evaluation-harness on both policies, for evaluation.json; {} if no task is named."""
    config = evaluation_settings(context)
    if not config.lm_eval:
        return {}
    use_cpu = context.settings("ppo").trainer.use_cpu
    tasks = run_tasks(
        {side: move_to_best_device(load_causal(parent.path), use_cpu=use_cpu) for side, parent in parents.items()},
        load_tokenizer(parents["sft"].path),
        config,
        seed=context.shared.seed,
        apply_chat_template=context.shared.conversational,
        hub=context.hub,
    )
    return {"lm_eval": tasks}


def _document_head(context: RunContext, source: DataSource, trained_on: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first keys of evaluation.json: the run, its data and its reward model."""
    prompt_location = evaluation_location(context)
    return {
        "schema": 1,
        "recipe": context.recipe.name,
        "seed": context.shared.seed,
        "split": prompt_location["split"],
        "data": {
            "location": source.lineage["repo"],
            "revision": source.lineage["commit"],
            **prompt_location,
            "trained_on": trained_on,
        },
        "simulated": context.shared.simulated,
        "reward_model": context.record("reward").read().get("reward_model"),
    }


def _write_record(
    context: RunContext,
    parents: Mapping[str, ParentCheckpoint],
    identity: Mapping[str, Any],
    code: Mapping[str, Any],
    seconds: float,
) -> None:
    """Writes run.json of the evaluation. `code` identifies the code of the judges."""
    record = context.record("eval")
    record.clear()
    record.write(
        **context.run_json_header("eval", "finished", seed=context.shared.seed, settings=identity),
        parents={
            stage: {**parent.lineage, "weights": weights_digest(parent.path)} for stage, parent in parents.items()
        },
        hub=context.hub.label,
        repo=None,
        command=context.command,
        seconds=seconds,
        finished=now(),
        **({"code": code} if code else {}),
        **({"remote_code": remote} if (remote := code_lineage(context)) else {}),
    )


def identity_keys(config: EvaluationConfig) -> dict[str, Any]:
    """Returns the keys that identify an evaluation, without those that are None or empty.

    Args:
        config: The settings of the evaluation, including its judge.
    """
    # These keys were added over time. Leaving out their defaults keeps the fingerprints of earlier evaluations.
    defaults: dict[str, Any] = {
        "judges": [], "llm": {}, "labeled": {}, "own_pairs": {}, "lm_eval": [], "reference": {}, "filter_samples": 0
    }  # fmt: skip
    return {key: value for key, value in asdict(config).items() if value is not None and defaults.get(key) != value}


def origins(context: RunContext, stage: str, checkpoint: ParentCheckpoint) -> list[Origin]:
    """Finds where a stage's checkpoint is published.

    Args:
        context: The run.
        stage: "sft" or "ppo".
        checkpoint: The stage's checkpoint.

    Returns:
        (repository, commit) pairs; [] if the checkpoint is not published yet.
    """
    if stage not in context.recipe.stages:  # PPO starts from a model that this recipe did not train
        repo, commit = checkpoint.lineage["repo"], checkpoint.lineage["commit"]
        return [(repo, commit)] if repo and commit else []
    repo = context.repo(stage)
    tags = published_tags(context.record(stage), repo, hub_label=context.hub.label)
    commit = tags.get(tag_name(checkpoint_step(checkpoint.path)))
    return [(repo, commit)] if commit else []


def evaluation_prompts(context: RunContext, source: DataSource, policy_folder: Path | None = None) -> Dataset:
    """Loads and checks the held-out prompts of the evaluation. Prompts repeat only if too few are distinct.

    Args:
        context: The run.
        source: PPO's data.
        policy_folder: Folder of the SFT policy, whose tokenizer counts tokens for max_prompt_length; None, before SFT
            is trained, keeps all prompts.

    Returns:
        `evaluation.prompts` rows.

    Raises:
        ZooError: The split has too few rows, or no column with the reference answers.
    """
    prompt_count = context.shared.evaluation.prompts
    prompts = evaluation_rows(context, source, policy_folder=policy_folder)
    if len(prompts) < prompt_count:
        raise ZooError(
            f"The {_describe_location(evaluation_location(context))} has {describe_prompt_count(prompts)} prompts, but "
            f"evaluation.prompts is {prompt_count}: lower it, or prepare more data."
        )
    prompts = prompts.select(range(prompt_count))
    if (distinct_count := count_distinct_prompts(prompts["prompt"])) < prompt_count:
        log.warning(
            "evaluation.prompts is %d, but the %s has %d different prompts: %d rows repeat one, and intervals count "
            "each prompt once.",
            prompt_count, _describe_location(evaluation_location(context)), distinct_count,
            prompt_count - distinct_count,
        )  # fmt: skip
    check_column(prompts, context.shared.evaluation.group)
    reference = context.shared.evaluation.reference_arguments
    if reference is not None and reference.column not in prompts.column_names:
        raise ZooError(
            f"evaluation.reference names the column {reference.column}, but the evaluation's prompts have "
            f"{', '.join(drop_question_column(prompts).column_names)}: name one of these."
        )
    if reference is not None and not all(isinstance(value, str | list) for value in prompts[reference.column]):
        raise ZooError(
            f"evaluation.reference names the column {reference.column}, but some of its values are neither text nor "
            "messages: name a column of answers."
        )
    return prompts


def _describe_location(location: Mapping[str, Any]) -> str:
    share, split = location["held_out_share"], location["split"]
    return f"{split} split" if share is None else f"share of {share:g} that PPO holds out of the {split} split"


def check_judges(context: RunContext, *, restart: bool = False) -> None:
    """Checks, before training, that the judges, the lexicon and the tasks of lm-evaluation-harness are available.

    Args:
        context: The run.
        restart: Whether all stages will be trained again, including the judge `same-labels`.

    Raises:
        ZooError: A judge, its data, its endpoint or a task of lm-evaluation-harness is not available.
    """
    config = evaluation_settings(context)
    check_same_labels(context, restart=restart)
    names, seed, hub = config.judge_names, context.shared.seed, context.hub
    check_judges_available(names, config.llm_settings, load_labeled=lambda: labeled_rows(context), seed=seed, hub=hub)
    own_pairs(context)  # raises ZooError if this data set does not work; so does `lexicon_judge` below
    check_tasks(config.lm_eval)
    if "ppo" in stages_to_train(context):
        distributed.call_on_main_process(lambda: check_endpoints(names, config.llm_settings))
        distributed.call_on_main_process(lambda: check_data(config.lm_eval, context.hub))
    lexicon_judge(context.shared)


def check_rules(context: RunContext, source: DataSource, prompts: Dataset, policy_folder: Path | None = None) -> None:
    """Checks that rule judges can score answers to every prompt of the evaluation.

    Args:
        context: The run.
        source: PPO's data.
        prompts: The test prompts. Validation prompts, if there are any, are checked too.
        policy_folder: Folder of the SFT policy, as in `evaluation_prompts`.

    Raises:
        ZooError: A rule cannot score answers to a prompt.
    """
    config = evaluation_settings(context)
    rules = [RuleJudge(argument) for kind, argument in map(split_judge_name, config.judge_names) if kind == "rule"]
    if not rules:
        return
    rows_by_part = {"test": prompts}
    if config.checkpoint_prompts > 0:
        with contextlib.suppress(ZooError):  # the evaluation reports missing validation prompts
            rows = evaluation_rows(context, source, "validation", policy_folder=policy_folder)
            rows_by_part["validation"] = rows.select(range(min(config.checkpoint_prompts, len(rows))))
    for rule in rules:
        for part, rows in rows_by_part.items():
            rule.check_prompts(rows, subject=f"the {_describe_location(evaluation_location(context, part))}")


def _last_step(context: RunContext) -> int:
    checkpoint = context.record("ppo").last_checkpoint()
    assert checkpoint is not None, "a finished stage has a checkpoint"
    return checkpoint_step(checkpoint)


def _write_verdict(folder: Path, trajectory: Trajectory | str) -> dict[str, Any]:
    """Returns the verdict for evaluation.json, and writes each checkpoint's scores by prompt to a file next to it."""
    scores_file = folder / "over_training.json"
    if isinstance(trajectory, str):
        scores_file.unlink(missing_ok=True)
        return {"verdict": None, "recommended": None, "over_training": {"problem": trajectory}}
    write_json(scores_file, trajectory.arrays())
    figures = trajectory.to_json()
    return {"verdict": figures["verdict"], "recommended": figures["recommended"], "over_training": figures}
