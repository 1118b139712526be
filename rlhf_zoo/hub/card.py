"""The model card of a stage, made from its run directory alone: README.md, rlhf_card.json, plots, .eval_results.

Reads run.json, metrics.jsonl and the checkpoints of the stage, run.json of the stages beside it, and ../eval where
there is one. A figure that is not in these files reads "not measured". Needs neither torch nor anything of Hugging
Face.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_zoo.hub import card_commands as commands
from rlhf_zoo.hub import markdown, plots
from rlhf_zoo.hub.card_benchmark import benchmark_results, results_file
from rlhf_zoo.hub.card_kl import kl_settings, penalty_varies
from rlhf_zoo.hub.card_signs import reward_parts, signs
from rlhf_zoo.hub.facts import Facts, estimate_at, finite, hub_id
from rlhf_zoo.hub.markdown import Raw
from rlhf_zoo.hub.report import judge_notes
from rlhf_zoo.record import write_json, write_text

__all__ = ["CARD_FILE", "make_card"]

CARD_FILE = "rlhf_card.json"
_SCHEMA = 1
_ROLE_NAMES = {
    "base": "base model",
    "sft": "SFT policy",
    "reward": "reward model",
    "data": "data set",
}
# Rows of the tables of held-out figures: key in evaluation.json, how it reads. The first three are the headline's.
_HEADLINE = {
    "reward": "reward (the proxy that PPO maximises)",
    "kl": "KL to SFT, nats per completion",
    "length": "length, tokens",
}
_FIGURES = {
    **_HEADLINE,
    "judge": "judge",
    "eos_rate": "ended by EOS, share",
    "distinct_2": "distinct-2",
    "repetition": "repetition",
}
# Figures that evaluations have since they were added: in the table where they were measured.
_NEWER = {
    "exact_kl": "exact KL to SFT, nats per completion",
    "distinct_1": "distinct-1",
    "sft_perplexity": "perplexity under the SFT policy, per token",
}
# Columns of the checkpoint table after the step: heading, metric of the row at that step. One that no checkpoint has is
# left out, but for the last.
_CHECKPOINT_COLUMNS = {
    "sft": {"loss": "loss", "validation loss": "eval_loss"},
    "reward": {
        "loss": "loss",
        "accuracy on its batches": "accuracy",
        "validation loss": "eval_loss",
        "validation accuracy": "eval_accuracy",
    },
    "ppo": {"episodes": "episodes", "β": "kl_coef", "reward": "objective/score", "KL, nats": "objective/kl"},
}
_PANELS: tuple[plots.Panel, ...] = (
    ("completions/length", "Length", "tokens"),
    ("objective/entropy", "Entropy", "nats per token"),
    ("policy/clipfrac", "Clip fraction", "share of actions"),
    ("loss/value", "Value loss", "squared reward"),
)
_SETTINGS = (
    "model_name_or_path", "learning_rate", "critic_learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps",
    "weight_decay", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "max_length", "packing", "simulated_pairs", "preference", "center_rewards_coefficient", "score_samples",
    "reward_model_path", "reward_funcs", "reward_weights", "total_episodes", "num_ppo_epochs", "num_mini_batches",
    "num_generations", "response_length", "temperature", "kl_coef", "kl_in", "kl_estimator", "kl_target", "kl_horizon",
    "action_level", "cliprange", "cliprange_high", "cliprange_value", "vf_coef", "entropy_coef", "ptx_coef",
    "ptx_dataset_config", "gamma", "lam", "whiten_rewards", "score_centering", "score_scaling", "score_clip",
    "missing_eos_penalty", "missing_eos_score", "early_stop_kl", "max_grad_norm", "use_peft", "lora_r", "lora_alpha",
    "release", "metric_for_best_model",
)  # fmt: skip
_SAMPLES_SHOWN = 4
_PROMPTS_KEPT = 8
_WORST_SHOWN = 3


def make_card(
    stage_dir: Path | str, *, out: Path | str | None = None, step: int | None = None, merged: bool = False
) -> Path:
    """Write README.md, rlhf_card.json and plots/*.png into `out` (default: the stage's directory); returns the README.

    step: describe the state at that step. Later metrics and checkpoints are left out, and held-out figures read "not
    yet evaluated", since the evaluation is of the end of the run. Where the data set is a registered benchmark and was
    evaluated, `.eval_results/NAME.yaml` is written too. merged: describe the end with its adapter merged, as the branch
    `merged` holds it. Equal run directories give equal cards.

    Raises ZooError where the directory holds no run of a stage that has a card, or no such step.
    """
    facts = Facts.read(Path(stage_dir), step, merged=merged)
    folder = Path(out) if out is not None else Path(stage_dir)
    text = _render(facts, _plots(facts, folder))
    write_json(folder / CARD_FILE, card_json(facts))
    _write_benchmark(facts, folder)
    write_text(folder / "README.md", text)
    return folder / "README.md"


def front_matter(facts: Facts) -> dict[str, Any]:
    """The metadata at the head of the README, in the Hub's words."""
    task = "text-classification" if facts.stage == "reward" else "text-generation"
    tags = ["rlhf-zoo", f"stage:{facts.stage}"]
    reward_model = facts.parents.get("reward", {}).get("repo")
    if facts.stage == "ppo" and hub_id(reward_model):
        tags.append(f"reward-model:{reward_model}")
    if facts.simulated:
        tags.append("simulated")
    data: dict[str, Any] = {
        "license": facts.setting("license", "apache-2.0"),
        "pipeline_tag": task,
        "library_name": "peft" if facts.adapter else "transformers",
    }
    if facts.base:
        data["base_model"] = facts.base["repo"]
        data["base_model_relation"] = "adapter" if facts.adapter else "finetune"
    if facts.datasets:
        data["datasets"] = facts.datasets
    data["tags"] = tags
    results = [
        _index_result(facts, task, split, configuration, measured)
        for split, configuration, metrics in _index_metrics(facts)
        if (measured := [one for one in metrics if finite(one[1])])
    ]
    if results:
        data["model-index"] = [{"name": facts.title, "results": results}]
    return data


def card_json(facts: Facts) -> dict[str, Any]:
    """rlhf_card.json: what a program needs of the card. Figures that were not measured are null."""
    now = facts.now
    evaluation = {
        name: facts.evaluation.get(name)
        for name in (
            "judge",
            "reward_model",
            "sft",
            "ppo",
            "win_rate",
            "win_rate_at_equal_length",
            "control",
            "verdict",
            "recommended",
            "over_training",
        )
        if name in facts.evaluation
    }
    return {
        "schema": _SCHEMA,
        "stage": facts.stage,
        "recipe": facts.recipe,
        "repo": facts.repo_id,
        "step": facts.at,
        "tag": next((one.tag for one in facts.checkpoints if one.step == facts.at), None),
        "chosen": facts.chosen,
        "status": facts.run.get("status") if facts.step is None else "checkpoint",
        "seed": facts.run.get("seed"),
        "simulated": facts.simulated,
        "adapter": facts.adapter,
        "merged": facts.merged,
        "base_model": facts.base["repo"] if facts.base else None,
        "parents": facts.parents,
        "reward": now.get("objective/score"),
        "kl": now.get("objective/kl"),
        "reward_model": (facts.reward_report or None) if facts.stage == "reward" else None,
        "evaluation": evaluation or None,
        "prompts": list(dict.fromkeys(row["prompt"] for row in facts.samples))[:_PROMPTS_KEPT],
        "checkpoints": [
            {"step": one.step, "tag": one.tag, "commit": one.commit}
            | {name: one.metrics.get(key) for name, key in _JSON_COLUMNS[facts.stage].items()}
            for one in facts.checkpoints
        ],
        "created": facts.run.get("created"),
        "finished": facts.run.get("finished") if facts.step is None else None,
        "fingerprint": facts.run.get("fingerprint"),
        "settings": facts.settings,
        "versions": facts.run.get("versions") or {},
        "command": commands.of_the_run(facts),
    }


_JSON_COLUMNS = {
    "sft": {"loss": "loss", "eval_loss": "eval_loss"},
    "reward": {"loss": "loss", "eval_loss": "eval_loss", "eval_accuracy": "eval_accuracy"},
    "ppo": {"reward": "objective/score", "kl": "objective/kl"},
}

Metric = tuple[str, Any, str]


def _index_metrics(facts: Facts) -> Iterator[tuple[str, str, list[Metric]]]:
    """(split, configuration, [(type, value, name)]) for the model index: what was measured on data held out here."""
    if facts.stage == "reward":
        report = facts.reward_report
        yield report.get("split", "test"), facts.setting("dataset_config", "preferences"), [
            ("accuracy", (facts.accuracy or {}).get("value"), "accuracy on held-out pairs"),
            ("loss", (estimate_at(report, "loss") or {}).get("value"), "loss on held-out pairs, nats per pair"),
            ("ece", (report.get("calibration") or {}).get("ece"), "expected calibration error"),
        ]  # fmt: skip
        return
    found = [
        (key, (facts.figure(facts.stage, key) or {}).get("value"), name)
        for key, name in _FIGURES.items()
        if not (facts.stage == "sft" and key == "kl")
    ]
    if facts.stage == "ppo":
        found.append(("win_rate", (facts.figure("win_rate") or {}).get("value"), "win rate over SFT"))
    yield facts.evaluation.get("split", "test"), "prompts", found
    if facts.stage == "sft" and facts.when("eval_loss") == facts.at:
        loss = facts.now.get("eval_loss")
        yield facts.setting("dataset_test_split", "validation"), facts.setting("dataset_config", "lines"), [
            ("loss", loss, "loss, nats per token"),
            ("perplexity", _perplexity(loss), "perplexity, per token"),
        ]  # fmt: skip


def _index_result(facts: Facts, task: str, split: str, configuration: str, metrics: list[Metric]) -> dict[str, Any]:
    name = facts.datasets[0] if facts.datasets else facts.recipe
    dataset = {"name": name, "type": name, "config": configuration, "split": split}
    revision = facts.parents["data"]["commit"] if "data" in facts.parents else None
    if revision:
        dataset["revision"] = revision
    return {
        "task": {"type": task},
        "dataset": dataset,
        "metrics": [{"type": kind, "value": value, "name": name} for kind, value, name in metrics],
    }


def _write_benchmark(facts: Facts, folder: Path) -> None:
    import yaml

    name = results_file(facts)
    if name is None:
        return
    entries = benchmark_results(facts)
    if entries:
        write_text(folder / name, yaml.safe_dump(entries, sort_keys=False, allow_unicode=True, width=1000))
    else:
        (folder / name).unlink(missing_ok=True)


def _render(facts: Facts, drawn: Mapping[str, Raw]) -> str:
    import jinja2
    import yaml

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=False,  # escaping is `finalize`'s, for Markdown and not only for HTML
        finalize=markdown.escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        code=markdown.code, fence=markdown.fence, number=markdown.number, estimate=markdown.estimate
    )
    head = yaml.safe_dump(front_matter(facts), sort_keys=False, allow_unicode=True, width=1000)
    body = environment.get_template(f"{facts.stage}.md.jinja").render(
        facts=facts,
        run=facts.run,
        evaluation=facts.evaluation,
        judge=facts.evaluation.get("judge") or {},
        report=facts.reward_report,
        versions=facts.run.get("versions") or {},
        best=((facts.run.get("repo") or {}).get("tags") or {}).get("best") if facts.step is None else None,
        now=facts.now,
        kl=kl_settings(facts),
        adaptive=penalty_varies(facts),
        title=facts.title,
        plots=drawn,
        headline=_HEADLINE,
        figures=_FIGURES | {key: name for key, name in _NEWER.items() if facts.figure("ppo", key)},
        columns=_columns(facts),
        lineage=_lineage(facts),
        settings={key: facts.settings[key] for key in _SETTINGS if facts.settings.get(key) is not None},
        others=_other_judges(facts),
        judge_notes=_notes(facts.evaluation.get("judge") or {}),
        parts=reward_parts(facts),
        rewarded=_rewarded(facts),
        signs=signs(facts) if facts.stage == "ppo" else [],
        perplexity=_perplexity(facts.now.get("eval_loss")),
        picks=_picks(facts),
        unmeasured=_unmeasured(facts),
        held_out=_held_out(facts),
        results_file=results_file(facts) if benchmark_results(facts) else None,
        estimate_at=estimate_at,
        commands=commands,
    )
    return f"---\n{head}---\n\n" + re.sub(r"\n{3,}", "\n\n", body.strip()) + "\n"


def _held_out(facts: Facts) -> Callable[[Mapping[str, Any] | None], Raw]:
    """How a held-out figure reads: at a step before the end, what is missing is still to come."""
    if facts.step is None:
        return markdown.estimate
    return lambda figure: markdown.estimate(figure) if figure else Raw("not yet evaluated")


def _columns(facts: Facts) -> dict[str, str]:
    """Of the checkpoint table: heading -> metric."""
    every = _CHECKPOINT_COLUMNS[facts.stage]
    last = list(every)[-1] if facts.stage != "reward" else "loss"
    return {
        heading: key
        for heading, key in every.items()
        if heading == last
        or (
            any(one.metrics.get(key) is not None for one in facts.checkpoints)
            and (key != "kl_coef" or penalty_varies(facts))
        )
    }


def _plots(facts: Facts, folder: Path) -> dict[str, Raw]:
    """Draw what there is; returns {alternative text: path relative to the card}."""
    later = facts.at is not None and facts.last_step is not None and facts.at < facts.last_step
    rows, mark, report = facts.metrics, facts.at if later else None, facts.reward_report
    drawn: dict[str, Path | None] = {}

    def draw(name: str, what: str, plot: Callable[..., bool], *args: Any, **options: Any) -> None:
        path = folder / "plots" / f"{name}.png"
        if plot(*args, path=path, **options):
            drawn[what] = path
        else:
            path.unlink(missing_ok=True)  # no figure of an older card stays

    if facts.stage == "ppo":
        panels = _PANELS
        if any(row.get("completions/eos_rate", 1) < 1 for row in rows):
            panels += (("completions/eos_rate", "Ended by EOS", "share of completions"),)
        if penalty_varies(facts):
            panels += (("kl_coef", "β, the KL coefficient", "reward per nat"),)
        draw("reward_kl", "Reward and KL against the step", plots.plot_reward_and_kl, rows, mark=mark)
        draw("reward_sqrt_kl", "Reward against √KL", plots.plot_reward_against_kl, rows, mark=mark)
        what = ", ".join(title[0].lower() + title[1:] for _, title, _ in panels)
        draw(
            "over_training",
            "Training reward and judge against √KL, at each checkpoint",
            plots.plot_over_training,
            facts.evaluation.get("over_training"),
        )
        draw("training", f"Against the step: {what}", plots.plot_panels, rows, panels, mark=mark)
        return _relative(drawn, folder)
    loss = {"loss": "training", "eval_loss": "validation"}
    unit = "nats per token" if facts.stage == "sft" else "nats per pair"
    if facts.stage == "reward":
        draw("margins", "Histogram of margins on held-out pairs", plots.plot_margins, report)
        draw("calibration", "Calibration on held-out pairs", plots.plot_reliability, report)
        draw("length", "Score against length on held-out pairs", plots.plot_score_by_length, report)
    draw("loss", "Loss against the step", plots.plot_curves, rows, loss, title="Loss", unit=unit, mark=mark)
    if facts.stage == "reward":
        curves = {"accuracy": "training batches", "eval_accuracy": "validation"}
        options = {"title": "Pair accuracy", "unit": "share of pairs", "mark": mark}
        draw("accuracy", "Pair accuracy against the step", plots.plot_curves, rows, curves, **options)
    return _relative(drawn, folder)


def _relative(drawn: Mapping[str, Path | None], folder: Path) -> dict[str, Raw]:
    return {what: Raw(path.relative_to(folder).as_posix()) for what, path in drawn.items() if path}


def _picks(facts: Facts) -> dict[str, list[dict[str, Any]]]:
    """Samples by heading. For PPO the first prompts, the worst by the judge, and those farthest from SFT."""
    side = "ppo" if facts.stage == "ppo" else "sft"
    rows = [row for row in facts.samples if isinstance(row.get(side), Mapping)]
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["prompt"], row)
    picks = {"The first held-out prompts": list(first.values())[:_SAMPLES_SHOWN]}
    key = "judge" if any(finite(row[side].get("judge")) for row in rows) else "reward"
    worst = sorted((row for row in rows if finite(row[side].get(key))), key=lambda row: row[side][key])
    picks[f"The worst of all {len(rows)}, by the {key}"] = worst[:_WORST_SHOWN]
    if side == "ppo":
        far = sorted((row for row in rows if finite(row[side].get("kl"))), key=lambda row: -row[side]["kl"])
        picks["The farthest from the SFT policy, by log-ratio"] = far[:_WORST_SHOWN]
    return {heading: chosen for heading, chosen in picks.items() if chosen}


def _rewarded(facts: Facts) -> Raw:
    """What PPO was rewarded by, in words."""
    paid = [markdown.code(name) for name, weight in facts.rewards.items() if weight != 0]
    watched = [markdown.code(name) for name, weight in facts.rewards.items() if weight == 0]
    what = ["a learned reward"] if facts.learned_reward else []
    if paid:
        what.append(f"the reward function{'s' if len(paid) > 1 else ''} {', '.join(paid)}")
    seen = f" (with {', '.join(watched)} watched and never rewarded)" if watched else ""
    return Raw((" and ".join(what) or "a reward that is not recorded") + seen)


def _other_judges(facts: Facts) -> dict[str, dict[str, Any]]:
    """The judges beside the main one: {name: {description, notes, sft, ppo, win_rate}}, votes among them."""
    main = (facts.evaluation.get("judge") or {}).get("name")
    others: dict[str, dict[str, Any]] = {}
    for name, figures in (facts.evaluation.get("judges") or {}).items():
        if name != main and isinstance(figures, Mapping):
            others[name] = {key: facts.figure("judges", name, key) for key in ("sft", "ppo", "win_rate")}
            others[name] = {**others[name], "description": figures.get("description", ""), "notes": _notes(figures)}
    for name, figures in (facts.evaluation.get("votes") or {}).items():
        if isinstance(figures, Mapping):
            said = " ".join(str(figures[key]) for key in ("description", "problem") if figures.get(key))
            others[f"votes:{name}"] = {"win_rate": facts.figure("votes", name, "win_rate"), "description": said}
    return others


def _followed(facts: Facts) -> bool:
    """Whether the evaluation judged every checkpoint."""
    found = facts.evaluation.get("over_training")
    return isinstance(found, Mapping) and bool(found.get("checkpoints"))


def _notes(judge: Mapping[str, Any]) -> Raw:
    """What is to be known of a judge. That it is the reward itself, the template says of the main one."""
    return judge_notes({key: value for key, value in judge.items() if key != "is_training_reward"})


def _lineage(facts: Facts) -> list[tuple[str, Any, Any]]:
    """(what, repository or words, commit or words), ancestors first."""
    order = {role: place for place, role in enumerate(_ROLE_NAMES)}
    known = {"base": facts.origin, **facts.parents}
    lines = []
    for role in sorted(known, key=lambda role: order.get(role, len(order))):
        lines.append((_ROLE_NAMES.get(role, role), *_named(role, known[role])))
    saved = [one for one in facts.checkpoints if one.step == facts.at]
    commit = saved[0].commit if saved else None
    what = f"this model, step {facts.at}" if facts.at is not None else "this model"
    if facts.step is not None and not saved:
        return [*lines, (what, "no checkpoint was saved at this step", "")]
    own = {"repo": facts.repo_id, "commit": commit}
    name, commit = _named("self", own)
    if facts.repo_id and facts.step is not None and not own["commit"]:
        commit = Raw("the commit of this card")
    return [*lines, (what, name, commit)]


def _named(role: str, one: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """How a repository and a commit read. A path of this machine is no name."""
    if one is None:
        return "not recorded", ""
    if role == "base" and one["repo"] is None:
        return "none: it began with random weights", ""
    name = hub_id(one["repo"])
    if name is None:
        return "not published", "not published"
    unpinned = "not published" if role == "self" else "not recorded"
    return markdown.code(name), markdown.code(one["commit"]) if one["commit"] else unpinned


def _unmeasured(facts: Facts) -> list[str]:
    """What a reader might look for on this card and will not find."""
    missing = []
    if facts.stage == "reward":
        report = facts.reward_report
        if facts.accuracy is None:
            missing.append("accuracy on held-out pairs")
        if not report.get("calibration"):
            missing.append("calibration")
        if not report.get("length"):
            missing.append("correlation of its score with length")
        if not facts.score:
            missing.append("mean and deviation of its score over SFT samples")
        missing += ["agreement with people beyond its pairs", "its accuracy on what PPO will write"]
        return [*missing, "other seeds"]
    side = facts.stage
    missing += [
        name for key, name in _FIGURES.items() if facts.figure(side, key) is None and (side, key) != ("sft", "kl")
    ]
    if side == "ppo":
        missing += [] if facts.figure("win_rate") else ["win rate over SFT"]
        missing += [] if facts.figure("control") else ["the control (SFT against SFT under another seed)"]
        missing += [] if _followed(facts) else ["the judge before the end of training"]
    elif _perplexity(facts.now.get("eval_loss")) is None:
        missing.append("perplexity on validation text")
    return [*missing, "preferences of people", "other seeds", "safety, bias and truthfulness"]


def _perplexity(loss: Any) -> float | None:
    return math.exp(loss) if finite(loss) and loss < 100 else None
