"""A whole recipe: every stage, the cards, and what came of it, pulled back from the Hub."""

import logging
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..evaluation.measure import make_evaluator, measure
from ..fileio import read_json
from ..hub.client.refs import resolve
from ..modeling import distributed
from ..modeling.chat import plain_text
from ..modeling.models import load_causal
from ..modeling.prompt_keys import format_prompt_count
from ..modeling.reserved_columns import passed_on
from ..publishing.adapters import check_plan, sent_instead
from ..publishing.cards.card import make_card
from ..publishing.sender import claim_repository
from ..publishing.sent import published_tags, unpublished
from ..runs.checks.conversations import check_conversations
from ..runs.checks.models import check_prompt_lengths, policy_tokenizer, start_of
from ..runs.checks.splits import check_forms
from ..runs.context import Publisher, RunContext
from ..runs.data.layout import conversational
from ..runs.dataset import check_same_data, data_source, evaluation_rows, stage_source, to_train
from ..runs.lock import sole_writer
from ..runs.parents import check_members, check_parents
from ..runs.record import SUMMARY
from ..runs.registry import STAGES
from ..runs.settings.loading import check_installed
from ..runs.status_line import doing
from .stages import evaluate, ppo
from .stages.evaluate import check_judges, check_prompts, check_rules, same_weights
from .stages.merged import whole_model
from .stages.reward import check_pairs
from .stages.seen import prompts_seen
from .stages.summary import write_summary
from .stages.train import quiet

log = logging.getLogger(__name__)

SHOWN_PROMPTS = 6
SHOW_STREAM = 6


def run_stage(context: RunContext, stage: str, publisher: Publisher | None = None) -> bool:
    """Runs one stage.

    Args:
        context: The run.
        stage: Its name; eval too.
        publisher: Sends checkpoints and cards.

    Returns:
        False when the stage was finished before.

    Raises:
        ZooError: The adapter of this stage or a later one could not be published, or the data changed.
    """
    stages = list(context.recipe.stages)
    with sole_writer(context.directory, command=context.command):
        if publisher is not None and not context.checked and stage in stages:
            # A later stage may need a key of this one, such as push_merged, which cannot be set once this is trained.
            for later in stages[stages.index(stage) :]:
                check_plan(context, later)
        for earlier in context.recipe.stages:
            if earlier == stage:
                break
            with distributed.main_process_first():
                context.restore_chosen(earlier)
                if earlier == "sft" and context.record(earlier).read().get("status") == "finished":
                    whole_model(context, context.checkpoint(earlier))  # what later adapters lie on
        check_same_data(context, stage)
        if stage == "ppo" and not context.checked:
            _foresee(context)
        runs = evaluate.run if stage == "eval" else STAGES[stage].load("run")
        return runs(context, publisher)


def _foresee(context: RunContext) -> None:
    """Says, before PPO alone trains, what the evaluation would stumble over; it can be mended later."""
    if "ppo" not in to_train(context):
        return
    try:
        source = stage_source(context, "ppo")
        prompts = check_prompts(context, source)
        prompts_seen(context, prompts, planned=["ppo"])
        check_rules(context, source, prompts)
        check_judges(context)
    except ZooError as error:
        log.warning("`rlhf-zoo eval %s` will not work as it is: %s", context.recipe.called, error)


def check(context: RunContext) -> None:
    """Checks, before anything trains, whatever can be checked then, also for the last stages.

    Args:
        context: The run.

    Raises:
        ZooError: A setting, the data, a model, a reward or a judge does not work.
    """
    quiet()
    if distributed.first():  # which alone brings lost files back
        for stage in context.recipe.stages:
            _check_begun(context, stage)
    distributed.wait()
    settings_to_train = to_train(context)
    if context.round is not None:  # its pairs are the run's own
        settings_to_train.pop("reward", None)
    check_forms(context.shared, settings_to_train, context.hub)
    if "ppo" in settings_to_train:
        check_parents(context.recipe, settings_to_train["ppo"])
    models = start_of(context)
    check_members(context)
    if any(context.settings(stage).data.dataset_name is None for stage in context.recipe.stages):
        data_source(context, again=context.restart and context.base is None)
    tokenizer = policy_tokenizer(context, models.get("policy"))
    if "reward" in settings_to_train:
        check_pairs(context, tokenizer)
    if "ppo" in context.recipe.stages:
        settings, source = context.settings("ppo"), stage_source(context, "ppo")
        functions = ppo.reward_functions(settings)
        data = ppo.load_data(context, source)
        ppo.check_answers(settings, functions, data)
        ppo.check_batch(settings, data)
        if tokenizer is not None and conversational(data["train_dataset"]):
            check_conversations(context, "ppo", source, tokenizer)
        if "ppo" in to_train(context):
            distributed.from_first(lambda: ppo.try_functions(settings, functions, data))
            log.info("Prompts: %s.", check_prompt_lengths(context, models, data["train_dataset"]["prompt"]))
        prompts = check_prompts(context, source)
        prompts_seen(context, prompts, planned=to_train(context))
        check_rules(context, source, prompts)
        check_judges(context, anew=context.restart)
        if distributed.first() and not context.restart:
            context.record("eval").check_recipe(context.recipe.name)


def claim(context: RunContext, publisher: Publisher | None) -> None:
    """Makes the repositories of all stages this run's, where it publishes.

    Args:
        context: The run.
        publisher: None where it does not publish.

    Raises:
        ZooError: A repository cannot be made or belongs to another run.
    """
    if publisher is not None:
        for stage in context.recipe.stages:
            check_plan(context, stage)
        for stage in context.recipe.stages:
            claim_repository(context, stage)


def run(context: RunContext, console: Any, publisher: Publisher | None = None) -> Path | None:
    """Runs every stage of the recipe that is not finished, and publishes.

    Of several processes all run the stages. Then the first goes on alone, and the others return None.

    Args:
        context: The run.
        console: A rich console.
        publisher: Sends checkpoints and cards.

    Returns:
        The path of summary.json.
    """
    check(context)
    claim(context, publisher)
    distributed.wait()  # until none reads what --restart takes away
    if context.restart and distributed.first():
        _forget(context)
    distributed.wait()
    evaluates = "ppo" in context.recipe.stages
    context = replace(context, checked=True, restart=False)
    trained = run_stages(context, [*context.recipe.stages, *(["eval"] if evaluates else [])], console, publisher)
    if not distributed.part():
        return None
    try:
        if publisher is not None:
            publisher.drain()
            console.print(f"Every checkpoint and its card is on {context.hub.described}.", highlight=False)
    finally:
        path = write_summary(context, trained=trained)
        _make_cards(context, context.recipe.stages)  # now that each commit that was sent has its name
    return path


def run_stages(
    context: RunContext, stages: Iterable[str], console: Any, publisher: Publisher | None = None, *, note: str = ""
) -> bool:
    """Runs stages one after the other, and prints one line on each.

    Args:
        context: The run.
        stages: Their names; eval too.
        console: A rich console.
        publisher: Sends checkpoints and cards.
        note: Follows the name of a stage in its heading.

    Returns:
        Whether any was not finished before.
    """
    trained = False
    for stage in stages:
        if distributed.first():
            console.rule(f"[bold]{stage}{note}")
        ran = run_stage(context, stage, publisher)
        trained = trained or ran
        if distributed.first():
            finished = f"{stage}{note} was finished before; --restart does it again."
            console.print(summary_line(context, stage) if ran else finished)
    return trained


def renew_cards(context: RunContext, stage: str) -> None:
    """Makes the card of a stage that ran, and remakes the existing cards of the others, which may name it.

    Args:
        context: The run.
        stage: The stage that ran.
    """
    there = [name for name in context.recipe.stages if (context.record(name).path / "README.md").is_file()]
    _make_cards(context, [name for name in context.recipe.stages if name == stage or name in there])


def _make_cards(context: RunContext, stages: Iterable[str]) -> None:
    for stage in stages:
        with doing(f"{stage}: making the card and its plots"):
            make_card(context.record(stage).path)


def _check_begun(context: RunContext, stage: str) -> None:
    """Raises ZooError for keys that are wrong, or that differ from those of the run that the directory holds.

    Also where a stage that is finished has lost what the later ones start from.
    """
    settings, record = context.settings(stage), context.record(stage)
    check_installed(settings)
    before = record.read().get("resolved")
    if before and not context.restart:
        kept = {name: before[name] for name in ("data", "parents") if name in before}
        resolved = {**settings.resolved, **kept}
        if not record.came_to_nothing(resolved, context.recipe.name):
            context.check_begun(stage, resolved)
    again = context.restart and record.path.parent == context.directory
    if record.read().get("status") == "finished" and not again:
        context.restore_chosen(stage)
        context.checkpoint(stage)


def _forget(context: RunContext) -> None:
    """Clears all that stages left, and summary.json; what they start from stays until they make it anew."""
    (context.directory / SUMMARY).unlink(missing_ok=True)
    for record in map(context.record, reversed([*STAGES, "eval"])):
        if record.run_file.exists() and record.path.parent == context.directory:
            record.clear()


def summary_line(context: RunContext, stage: str) -> str:
    """Writes one line on a stage that is done: how long it took, where it was published, what it reached.

    Args:
        context: The run.
        stage: Its name; eval too.
    """
    record = context.record(stage)
    document = record.read()
    parts = [f"{document['seconds']:.0f} s"]
    if context.publish and document.get("publish"):
        sent = len([tag for tag in published_tags(record, context.repo(stage), hub=context.hub.label) if tag != "best"])
        left = len(unpublished(record, context.repo(stage), hub=context.hub.label))
        on_the_way = f", {left} on the way" if left else ""
        parts.append(f"{sent} of {sent + left} checkpoints are in {context.repo(stage)}{on_the_way}")
    if (document.get("chosen") or {}).get("open"):
        parts.append("`main` waits for the verdict of `rlhf-zoo eval`")
    if stage == "reward" and document.get("reward_model", {}).get("accuracy") is not None:
        reward_figures = document["reward_model"]
        parts.append(f"accuracy {reward_figures['accuracy']:.3f} on {reward_figures['n']} held-out pairs")
    if stage == "eval":
        figures = read_json(context.record("eval").path / "evaluation.json")
        win, rows = figures["win_rate"], figures["rows"]
        parts.append(
            f"win rate of PPO over SFT {win['value']:.3f} [{win['ci95'][0]:.3f}, {win['ci95'][1]:.3f}] on {win['n']} "
            f"completions of {format_prompt_count(figures['prompts'], rows)} prompts, "
            f"KL {figures['ppo']['kl']['value']:z.2f} nats"
        )
        parts.append(_verdict(figures))
    return f"{stage} done: " + ", ".join(parts)


def _verdict(figures: Mapping[str, Any]) -> str:
    """A run's verdict and recommended checkpoint, by its evaluation or its summary."""
    if figures.get("verdict") is None:
        return "no verdict"
    step = figures.get("recommended")
    over = figures.get("over_training") or {}
    why = ""
    if over.get("kind") == "not judged" and over.get("reasons"):
        why = f" ({over['reasons'][0].removeprefix('Not judged: ').rstrip('.')})"
    return f"verdict {figures['verdict']}{why}, recommended {f'step {step}' if step is not None else 'no checkpoint'}"


def show(context: RunContext, console: Any) -> None:
    """Pulls each stage from the Hub into an empty cache, and prints what SFT and PPO write to held-out prompts.

    Args:
        context: The run.
        console: A rich console.

    Raises:
        ZooError: Other weights came back than were sent.
    """
    from rich.table import Table
    from rich.text import Text

    source = stage_source(context, "ppo")
    config = context.shared.evaluation
    rows = evaluation_rows(context, source, path=context.checkpoint("sft").path)
    shown_rows = rows.select(range(min(len(rows), config.prompts, SHOWN_PROMPTS))).to_dict()
    prompts, columns = shown_rows["prompt"], passed_on(shown_rows)
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as altered:
        hub, pulled = replace(context.hub, cache=Path(cache)), {}
        for stage in context.recipe.stages:
            repo = context.record(stage).read()["repo"]
            with doing(f"{stage}: pulling back what was sent"):
                at = f"{repo['id']}@{repo['tags'].get('best') or repo['commit']}"
                pulled[stage] = resolve(at, hub, own=True).path
            here = context.checkpoint(stage).path
            if not same_weights(
                pulled[stage], here, sent_instead(context, context.record(stage), here, Path(altered) / stage)
            ):
                raise ZooError(f"{repo['id']} came back from the Hub with other weights than were sent: run --restart.")
        pulled.setdefault("sft", context.checkpoint("sft").path)  # of a recipe without SFT, what PPO starts from
        tools = make_evaluator(context, pulled["sft"]).with_one_judge
        keys = [(SHOW_STREAM, i) for i in range(len(prompts))]
        measured = {
            stage: measure(
                load_causal(path),
                tools,
                prompts,
                keys=keys,
                seed=context.shared.seed,
                desc=f"showing {stage}",
                columns=columns,
            )
            for stage, path in pulled.items()
            if stage != "reward"
        }
    judge = tools.judge.name
    title = "SFT and PPO, pulled back from the Hub into an empty cache (weights equal by sha256)"
    table = Table(title=title, show_lines=True)
    for name in ("", "completion of a held-out prompt", "reward", f"judge: {judge}", "log-ratio"):
        table.add_column(name, justify="left" if name in ("", "completion of a held-out prompt") else "right")
    for i, prompt in enumerate(prompts):
        for stage in ("sft", "ppo"):
            written = measured[stage]
            table.add_row(
                stage.upper(),
                Text(plain_text(prompt) + written.completions[i]),
                f"{written.reward[i]:.2f}",
                f"{written.judges[judge][i]:.2f}",
                f"{written.kl[i]:.2f}",
            )
    console.print(table)
    console.print(
        "log-ratio: Σ log π − log π_SFT of this one completion, in nats; its mean over many completions is the KL."
    )


def verdict(context: RunContext, console: Any) -> None:
    """Prints the headline figures of summary.json.

    Args:
        context: The run.
        console: A rich console.
    """
    summary = read_json(context.directory / SUMMARY)
    world = " in a simulated world" if summary["simulated"] else ""
    sft, ppo, win, control = (summary[name] for name in ("sft", "ppo", "win_rate", "control"))
    console.print(
        f"Win rate of PPO over SFT{world}: [bold]{win['value']:.3f}[/] [{win['ci95'][0]:.3f}, {win['ci95'][1]:.3f}], "
        f"n = {win['n']}; SFT against itself under another seed: {control['value']:.3f}.",
        highlight=False,
    )
    console.print(
        f"Reward {sft['reward']:.2f} → {ppo['reward']:.2f}, judge {sft['judge']:.2f} → {ppo['judge']:.2f}, "
        f"KL {ppo['kl']:z.2f} nats per completion, distinct-2 {sft['distinct_2']:.2f} → {ppo['distinct_2']:.2f}; "
        f"{summary['seconds']['total']:.0f} s, peak memory {summary['peak_rss_mib']:.0f} MiB.",
        highlight=False,
    )
    console.print(f"Over the checkpoints, on validation prompts: {_verdict(summary)}.", highlight=False)
