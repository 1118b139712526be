"""Runs every stage of a recipe, publishes the models with their cards, and shows the result."""

import logging
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ZooError
from ..evaluation.measure import make_evaluator, measure
from ..fileio import read_json
from ..hub.client.publish import folders_have_same_weights
from ..hub.client.refs import resolve
from ..modeling import distributed
from ..modeling.chat import plain_text
from ..modeling.devices import free_cache
from ..modeling.models import load_causal
from ..modeling.prompt_keys import format_group_count, format_prompt_count
from ..modeling.reserved_columns import columns_for_functions
from ..publishing.adapters import check_planned_base, file_overrides
from ..publishing.cards.card import make_card
from ..publishing.cards.markdown import judge_title
from ..publishing.sender import claim_stage_repository
from ..publishing.sent_checkpoints import published_tags, unsent_checkpoints
from ..runs.checks.conversations import check_conversations
from ..runs.checks.models import check_prompt_lengths, policy_tokenizer, starting_models
from ..runs.checks.splits import check_forms
from ..runs.context import Publisher, RunContext, stages_to_train
from ..runs.data.layout import has_conversations
from ..runs.dataset import check_same_data, data_source, evaluation_rows, stage_source
from ..runs.lock import sole_writer
from ..runs.parents import check_members, check_parents
from ..runs.record import SUMMARY
from ..runs.registry import STAGES, starts_from_base
from ..runs.settings.loading import check_installed
from ..runs.status_line import show_activity
from .stages import evaluate, ppo
from .stages.evaluate import check_judges, check_rules, evaluation_prompts
from .stages.merged import merged_model
from .stages.reward import check_pairs
from .stages.summary import write_summary
from .stages.train import silence_libraries
from .stages.trained_prompts import count_trained_prompts

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

#: Number of prompts that `show_published` completes.
SHOWN_PROMPTS = 6
#: First part of the random keys of `show_published`, so that it draws other samples than the rest of the run.
SHOW_STREAM = 6


def run_stage(context: RunContext, stage: str, publisher: Publisher | None = None) -> bool:
    """Runs one stage.

    Args:
        context: The run.
        stage: Name of the stage, or "eval".
        publisher: Sends checkpoints and cards; None if the run does not publish.

    Returns:
        Whether the stage ran: False if it was already finished.

    Raises:
        ZooError: The adapter of this stage or of a later stage could not be published, or the data have changed.
    """
    stage_names = list(context.recipe.stages)
    with sole_writer(context.directory, command=context.command):
        if publisher is not None and not context.preflight_passed and stage in stage_names:
            # Publishing a later stage may need a key of this stage, such as push_merged, which must be set now.
            for later_stage in stage_names[stage_names.index(stage) :]:
                check_planned_base(context, later_stage)
        for earlier_stage in stage_names:
            if earlier_stage == stage:
                break
            with distributed.main_process_first():
                context.restore_chosen_checkpoint(earlier_stage)
                if earlier_stage == "sft" and context.record("sft").read().get("status") == "finished":
                    merged_model(context, context.checkpoint("sft"))  # later stages train their adapters on this model
        check_same_data(context, stage)
        if stage == "ppo" and not context.preflight_passed:
            _warn_if_evaluation_would_fail(context)
        run_function = evaluate.run if stage == "eval" else STAGES[stage].load("run")
        stage_ran: bool = run_function(context, publisher)
        free_cache()  # a trainer and its callbacks refer to each other, and would keep the models during the next stage
        return stage_ran


def _warn_if_evaluation_would_fail(context: RunContext) -> None:
    """Warns if the evaluation would fail. Raises no error, because the evaluation can be fixed after training."""
    if "ppo" not in stages_to_train(context):
        return
    try:
        source = stage_source(context, "ppo")
        prompts = evaluation_prompts(context, source)
        count_trained_prompts(context, prompts, planned_stages=["ppo"])
        check_rules(context, source, prompts)
        check_judges(context)
    except ZooError as error:
        log.warning("`rlhf-zoo eval %s` would fail: %s", context.recipe.cli_name, error)


def check(context: RunContext) -> None:
    """Checks all stages before the first stage trains.

    Args:
        context: The run.

    Raises:
        ZooError: A setting, the data, a model, a reward or a judge does not work.
    """
    silence_libraries()
    if distributed.is_main_process():  # only this process restores lost files
        for stage in context.recipe.stages:
            _check_existing_run(context, stage)
    distributed.wait()
    settings_to_train = stages_to_train(context)
    if context.round is not None:  # `make_pairs` writes a later round's pairs, so they need no check
        settings_to_train.pop("reward", None)
    check_forms(context.shared, settings_to_train, context.hub)
    if "ppo" in settings_to_train:
        check_parents(context.recipe, settings_to_train["ppo"])
    models = starting_models(context)
    check_members(context)
    if any(context.settings(stage).data.dataset_name is None for stage in context.recipe.stages):
        data_source(context, refresh=context.restart and context.base is None)
    tokenizer = policy_tokenizer(context, models.get("policy"))
    if "reward" in settings_to_train:
        check_pairs(context, tokenizer)
    if "ppo" in context.recipe.stages:
        settings, source = context.settings("ppo"), stage_source(context, "ppo")
        functions = ppo.load_reward_functions(settings)
        data = ppo.load_data(context, source)
        ppo.check_answers(settings, functions, data)
        ppo.check_batch(settings, data)
        if tokenizer is not None and has_conversations(data["train_dataset"]):
            check_conversations(context, "ppo", source, tokenizer)
        if "ppo" in settings_to_train:
            distributed.call_on_main_process(lambda: ppo.try_functions(settings, functions, data))
            log.info("Prompts: %s.", check_prompt_lengths(context, models, data["train_dataset"]["prompt"]))
        prompts = evaluation_prompts(context, source)
        count_trained_prompts(context, prompts, planned_stages=stages_to_train(context))
        check_rules(context, source, prompts)
        check_judges(context, restart=context.restart)
        if distributed.is_main_process() and not context.restart:
            context.record("eval").check_recipe(context.recipe.name)


def claim_repositories(context: RunContext, publisher: Publisher | None) -> None:
    """Claims the repositories of all stages for this run, if it publishes.

    Args:
        context: The run.
        publisher: The run's publisher; None if it does not publish.

    Raises:
        ZooError: A repository cannot be created or belongs to another run, or an adapter's base is on no Hub.
    """
    if publisher is not None:
        for stage in context.recipe.stages:
            check_planned_base(context, stage)
        for stage in context.recipe.stages:
            claim_stage_repository(context, stage)


def run(context: RunContext, console: "Console", publisher: Publisher | None = None) -> Path | None:
    """Runs every stage of the recipe that is not finished, evaluates PPO, and publishes if there is a publisher.

    All processes run the stages. Only the main process writes the summary and the cards.

    Args:
        context: The run.
        console: A rich console.
        publisher: Sends checkpoints and cards; None if the run does not publish.

    Returns:
        The path of summary.json; None in all processes but the main one.
    """
    check(context)
    claim_repositories(context, publisher)
    distributed.wait()  # every process must have read the files that --restart deletes
    if context.restart and distributed.is_main_process():
        _delete_records(context)
    distributed.wait()
    evaluates = "ppo" in context.recipe.stages
    context = replace(context, preflight_passed=True, restart=False)
    any_ran = run_stages(context, [*context.recipe.stages, *(["eval"] if evaluates else [])], console, publisher)
    is_main_process = distributed.leave()
    if not is_main_process:
        return None
    try:
        if publisher is not None:
            publisher.drain()
            console.print(f"Every checkpoint and its card is on {context.hub.description}.", highlight=False)
    finally:
        path = write_summary(context, any_stage_ran=any_ran)
        _make_cards(context, context.recipe.stages)  # the cards can name every commit now
    return path


def run_stages(
    context: RunContext,
    stages: Iterable[str],
    console: "Console",
    publisher: Publisher | None = None,
    *,
    note: str = "",
) -> bool:
    """Runs stages in order, and prints a line about each.

    Args:
        context: The run.
        stages: Names of stages, including "eval".
        console: A rich console.
        publisher: Sends checkpoints and cards; None if the run does not publish.
        note: Text appended to the name of each stage.

    Returns:
        Whether any stage ran.
    """
    any_ran = False
    for stage in stages:
        if distributed.is_main_process():
            console.rule(f"[bold]{stage}{note}")
        stage_ran = run_stage(context, stage, publisher)
        any_ran = any_ran or stage_ran
        if distributed.is_main_process():
            finished_message = f"{stage}{note} is already finished; --restart runs it again."
            console.print(summary_line(context, stage) if stage_ran else finished_message)
    return any_ran


def update_cards(context: RunContext, stage: str) -> None:
    """Makes the card of a stage, and updates existing cards of other stages, because these may name this stage.

    Args:
        context: The run.
        stage: The stage that ran.
    """
    names = context.recipe.stages
    stages = [name for name in names if name == stage or (context.record(name).path / "README.md").is_file()]
    _make_cards(context, stages)


def _make_cards(context: RunContext, stages: Iterable[str]) -> None:
    for stage in stages:
        with show_activity(f"{stage}: making the card and its plots"):
            make_card(context.record(stage).path)


def _check_existing_run(context: RunContext, stage: str) -> None:
    """Checks a stage's keys, compares them with an existing run, and restores the checkpoint of a finished stage.

    With --restart, settings are not compared, and only the stages of a base run are restored. Raises ZooError if a key
    is wrong or differs from the recorded key, or if the checkpoint cannot be restored.
    """
    settings, record = context.settings(stage), context.record(stage)
    check_installed(settings)
    recorded_settings = record.read().get("resolved")
    if recorded_settings and not context.restart:
        inputs = {name: recorded_settings[name] for name in ("data", "parents") if name in recorded_settings}
        resolved = {**settings.resolved, **inputs}
        if not record.can_be_replaced(resolved, context.recipe.name):
            context.check_settings_unchanged(stage, resolved)
    will_restart = context.restart and record.path.parent == context.directory
    if record.read().get("status") == "finished" and not will_restart:
        context.restore_chosen_checkpoint(stage)
        context.checkpoint(stage)


def _delete_records(context: RunContext) -> None:
    """Deletes summary.json and the records of all stages in this directory."""
    (context.directory / SUMMARY).unlink(missing_ok=True)
    # Later stages come first, so that after a kill no record remains whose parent is gone.
    for record in map(context.record, reversed([*STAGES, "eval"])):
        if record.run_file.exists() and record.path.parent == context.directory:
            record.clear()


def summary_line(context: RunContext, stage: str) -> str:
    """Describes a finished stage in one line: its duration, its checkpoints on the Hub, its metrics.

    Args:
        context: The run.
        stage: Name of the stage, or "eval".
    """
    record = context.record(stage)
    document = record.read()
    parts = [f"{document['seconds']:.0f} s"]
    if context.publish and document.get("publish"):
        repo, hub_label = context.repo(stage), context.hub.label
        sent_count = len(published_tags(record, repo, hub_label=hub_label).keys() - {"best"})
        unsent_count = len(unsent_checkpoints(record, repo, hub_label=hub_label))
        unsent_note = f", {unsent_count} still to be sent" if unsent_count else ""
        parts.append(f"{sent_count} of {sent_count + unsent_count} checkpoints are in {repo}{unsent_note}")
    if (document.get("chosen") or {}).get("provisional"):
        parts.append("`main` is the last checkpoint until `rlhf-zoo eval` has chosen one")
    if stage == "reward" and document.get("reward_model", {}).get("accuracy") is not None:
        reward_model = document["reward_model"]
        parts.append(f"accuracy {reward_model['accuracy']:.3f} on {reward_model['n']} held-out pairs")
    if stage == "eval":
        evaluation = read_json(context.record("eval").path / "evaluation.json")
        kl = evaluation["ppo"]["kl"]["value"]
        parts.append(f"win rate of PPO over {_start_name(context)} {_describe_win_rate(evaluation)}, KL {kl:z.2f} nats")
        parts.append(_verdict_phrase(evaluation))
    return f"{stage} done: " + ", ".join(parts)


def _describe_win_rate(results: Mapping[str, Any]) -> str:
    """Returns the win rate, its interval and its counts in words, from evaluation.json or summary.json."""
    win_rate, prompts = results["win_rate"], results["prompts"]
    return (
        f"{win_rate['value']:.3f} [{win_rate['ci95'][0]:.3f}, {win_rate['ci95'][1]:.3f}] on {win_rate['n']} "
        f"completions of {format_prompt_count(prompts, results['rows'])} prompts"
        f"{format_group_count(results.get('groups'), prompts)}"
    )


def _start_name(context: RunContext) -> str:
    """Returns what PPO started from: "SFT", or "the base" if the run has no SFT policy."""
    return "the base" if starts_from_base("ppo", context.record("ppo").read().get("resolved") or {}) else "SFT"


def _verdict_phrase(results: Mapping[str, Any]) -> str:
    """Returns the verdict and the recommended checkpoint in words, from evaluation.json or summary.json."""
    if results.get("verdict") is None:
        return "no verdict"
    step = results.get("recommended")
    over_training = results.get("over_training") or {}
    reason = ""
    if over_training.get("kind") == "not judged" and over_training.get("reasons"):
        first_reason = over_training["reasons"][0].rstrip(".")
        reason = f" ({first_reason[0].lower()}{first_reason[1:]})"
    recommendation = f"step {step}" if step is not None else "no checkpoint"
    return f"verdict {results['verdict']}{reason}, recommended {recommendation}"


def show_published(context: RunContext, console: "Console") -> None:
    """Pulls each stage from the Hub into an empty cache, and prints completions of SFT and PPO for held-out prompts.

    Args:
        context: The run.
        console: A rich console.

    Raises:
        ZooError: The weights on the Hub differ from the weights that the run sent.
    """
    from rich.table import Table
    from rich.text import Text

    source = stage_source(context, "ppo")
    config = context.shared.evaluation
    rows = evaluation_rows(context, source, policy_folder=context.checkpoint("sft").path)
    prompt_columns = rows.select(range(min(len(rows), config.prompts, SHOWN_PROMPTS))).to_dict()
    prompts, columns = prompt_columns["prompt"], columns_for_functions(prompt_columns)
    folders: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as override_dir:
        hub = replace(context.hub, cache=Path(cache))
        for stage in context.recipe.stages:
            repo = context.record(stage).read()["repo"]
            with show_activity(f"{stage}: pulling from the Hub"):
                name_at_revision = f"{repo['id']}@{repo['tags'].get('best') or repo['commit']}"
                folders[stage] = resolve(name_at_revision, hub, skip_source=True).path
            local = context.checkpoint(stage).path
            overrides = file_overrides(context, context.record(stage), local, Path(override_dir) / stage)
            if not folders_have_same_weights(folders[stage], local, overrides):
                raise ZooError(
                    f"The weights of {repo['id']} on the Hub differ from those that this run sent: pass --restart to "
                    "train again and replace them."
                )
        folders.setdefault("sft", context.checkpoint("sft").path)  # without an SFT stage, PPO starts from it
        evaluator = make_evaluator(context, folders["sft"]).with_only_headline_judge
        keys = [(SHOW_STREAM, index) for index in range(len(prompts))]
        measurements = {
            stage: measure(
                load_causal(path),
                evaluator,
                prompts,
                keys=keys,
                seed=context.shared.seed,
                desc=f"showing {stage}",
                columns=columns,
            )
            for stage, path in folders.items()
            if stage != "reward"
        }
    judge = evaluator.judge.name
    start = _start_name(context)
    title = (
        f"{start[0].upper()}{start[1:]} and PPO, pulled from the Hub into an empty cache (weights verified by SHA-256)"
    )
    table = Table(title=title, show_lines=True)
    for name in ("", "held-out prompts and their completions"):
        table.add_column(name)
    for name in ("reward", f"judge: {judge_title(judge)}", "log-ratio"):
        table.add_column(name, justify="right")
    for index, prompt in enumerate(prompts):
        table.add_row("prompt", Text(plain_text(prompt).strip(), style="dim"))
        for stage in ("sft", "ppo"):
            measurement = measurements[stage]
            table.add_row(
                "base" if stage == "sft" and start != "SFT" else stage.upper(),
                Text(measurement.completions[index].strip("\n")),
                f"{measurement.reward[index]:.2f}",
                f"{measurement.judge_scores[judge][index]:.2f}",
                f"{measurement.kl[index]:.2f}",
            )
    console.print(table)
    console.print(
        "log-ratio: Σ log π − log π_SFT of this completion, in nats; its mean over many completions is the KL."
    )


def print_headline(context: RunContext, console: "Console") -> None:
    """Prints the headline metrics and the verdict of summary.json.

    Args:
        context: The run.
        console: A rich console.
    """
    summary = read_json(context.directory / SUMMARY)
    note = " on simulated preferences" if summary["simulated"] else ""
    sft, ppo, control = (summary[name] for name in ("sft", "ppo", "control"))
    start = _start_name(context)
    console.print(
        f"Win rate of PPO over {start}{note}: {_describe_win_rate(summary)}; "
        f"{start} against itself with another seed: {control['value']:.3f}.",
        highlight=False,
    )
    console.print(
        f"Reward {sft['reward']:.2f} → {ppo['reward']:.2f}, judge {sft['judge']:.2f} → {ppo['judge']:.2f}, "
        f"KL {ppo['kl']:z.2f} nats per completion, distinct-2 {sft['distinct_2']:.2f} → {ppo['distinct_2']:.2f}; "
        f"{summary['seconds']['total']:.0f} s, peak memory {summary['peak_rss_mib']:.0f} MiB.",
        highlight=False,
    )
    console.print(f"Over the checkpoints, on validation prompts: {_verdict_phrase(summary)}.", highlight=False)
