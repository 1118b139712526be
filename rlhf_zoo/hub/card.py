"""The model card of a stage, made from its run directory alone: README.md, rlhf_card.json and plots.

Reads run.json, metrics.jsonl and the checkpoints of the stage, and ../eval beside it where there is one. A figure that
is not in these files reads "not measured". Needs neither torch nor anything of Hugging Face.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_zoo.hub import markdown
from rlhf_zoo.hub.facts import Facts, finite, hub_id
from rlhf_zoo.hub.markdown import Raw
from rlhf_zoo.hub.plots import plot_curves, plot_reward_and_kl
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
# Rows of the table of held-out figures: key in evaluation.json, how it reads.
_FIGURES = {
    "reward": "reward (the proxy that PPO maximises)",
    "judge": "judge",
    "kl": "KL to SFT, nats per completion",
    "length": "length, tokens",
    "eos_rate": "ended by EOS, share",
    "distinct_2": "distinct-2",
    "repetition": "repetition",
}
# Columns of the checkpoint table after the step: heading, metric of the row at that step.
_CHECKPOINT_COLUMNS = {
    "sft": {"loss": "loss", "validation loss": "eval_loss"},
    "reward": {"validation loss": "eval_loss", "validation accuracy": "eval_accuracy"},
    "ppo": {"episodes": "episodes", "reward": "objective/score", "KL, nats": "objective/kl"},
}
_SETTINGS = (
    "model_name_or_path", "learning_rate", "lr_scheduler_type", "warmup_ratio", "weight_decay", "num_train_epochs",
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "packing",
    "center_rewards_coefficient", "total_episodes", "num_ppo_epochs", "num_mini_batches", "response_length",
    "temperature", "kl_coef", "kl_estimator", "kl_target", "kl_horizon", "cliprange", "cliprange_value", "vf_coef",
    "gamma", "lam", "whiten_rewards", "missing_eos_penalty", "max_grad_norm", "use_peft",
)  # fmt: skip
_SAMPLES_SHOWN = 4
_PROMPTS_KEPT = 8
_WORST_SHOWN = 3


def make_card(stage_dir: Path | str, *, out: Path | str | None = None, step: int | None = None) -> Path:
    """Write README.md, rlhf_card.json and plots/*.png into `out` (default: the stage's directory); returns the README.

    step: describe the state at that step. Later metrics and checkpoints are left out, and held-out figures read "not
    measured", since the evaluation is of the end of the run. Equal run directories give equal cards.

    Raises ZooError where the directory holds no run of a stage that has a card, or no such step.
    """
    facts = Facts.read(Path(stage_dir), step)
    folder = Path(out) if out is not None else Path(stage_dir)
    text = _render(facts, _plots(facts, folder))
    write_json(folder / CARD_FILE, card_json(facts))
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
        "library_name": "transformers",
    }
    if facts.base:
        data["base_model"] = facts.base["repo"]
        data["base_model_relation"] = "adapter" if facts.setting("use_peft") else "finetune"
    if facts.datasets:
        data["datasets"] = facts.datasets
    data["tags"] = tags
    metrics = [
        {"type": kind, "value": value, "name": name} for kind, value, name in _index_metrics(facts) if finite(value)
    ]
    if metrics:
        name = facts.datasets[0] if facts.datasets else facts.recipe
        dataset = {"name": name, "type": name, "split": facts.evaluation.get("split", "test")}
        revision = facts.parents["data"]["commit"] if "data" in facts.parents else None
        if revision:
            dataset["revision"] = revision
        results = [{"task": {"type": task}, "dataset": dataset, "metrics": metrics}]
        data["model-index"] = [{"name": facts.title, "results": results}]
    return data


def card_json(facts: Facts) -> dict[str, Any]:
    """rlhf_card.json: what a program needs of the card. Figures that were not measured are null."""
    last = facts.last
    evaluation = {
        name: facts.evaluation.get(name)
        for name in ("judge", "reward_model", "sft", "ppo", "win_rate", "control")
        if name in facts.evaluation
    }
    return {
        "schema": _SCHEMA,
        "stage": facts.stage,
        "recipe": facts.recipe,
        "repo": facts.repo_id,
        "step": facts.step if facts.step is not None else last.get("step"),
        "status": facts.run.get("status") if facts.step is None else "checkpoint",
        "seed": facts.run.get("seed"),
        "simulated": facts.simulated,
        "base_model": facts.base["repo"] if facts.base else None,
        "parents": facts.parents,
        "reward": last.get("objective/score"),
        "kl": last.get("objective/kl"),
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
        "command": _command(facts),
    }


_JSON_COLUMNS = {
    "sft": {"loss": "loss", "eval_loss": "eval_loss"},
    "reward": {"eval_loss": "eval_loss", "eval_accuracy": "eval_accuracy"},
    "ppo": {"reward": "objective/score", "kl": "objective/kl"},
}


def _index_metrics(facts: Facts) -> Iterator[tuple[str, Any, str]]:
    """(type, value, name) for the model index: only what was measured on held-out data."""
    if facts.stage == "reward":
        yield "accuracy", (facts.accuracy or {}).get("value"), "accuracy on held-out pairs"
        return
    for key, name in _FIGURES.items():
        if not (facts.stage == "sft" and key == "kl"):
            yield key, (facts.figure(facts.stage, key) or {}).get("value"), name
    if facts.stage == "ppo":
        yield "win_rate", (facts.figure("win_rate") or {}).get("value"), "win rate over SFT"


def _render(facts: Facts, plots: Mapping[str, Raw]) -> str:
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
        versions=facts.run.get("versions") or {},
        best=((facts.run.get("repo") or {}).get("tags") or {}).get("best") if facts.step is None else None,
        last=facts.last,
        title=facts.title,
        plots=plots,
        figures=_FIGURES,
        columns=_CHECKPOINT_COLUMNS[facts.stage],
        lineage=_lineage(facts),
        settings={key: facts.settings[key] for key in _SETTINGS if facts.settings.get(key) is not None},
        others=_other_judges(facts),
        perplexity=_perplexity(facts.last.get("eval_loss")),
        picks=_picks(facts),
        unmeasured=_unmeasured(facts),
        foreign=facts.foreign_evaluation,
        pull=lambda tag: f"rlhf-zoo pull {facts.repo_id}@{tag} {facts.hub_flag}",
        command=_command(facts),
        snippet=_snippet(facts),
    )
    return f"---\n{head}---\n\n" + re.sub(r"\n{3,}", "\n\n", body.strip()) + "\n"


def _plots(facts: Facts, folder: Path) -> dict[str, Raw]:
    """Draw what the metrics allow; returns {alternative text: path relative to the card}."""
    plots = folder / "plots"
    loss = {"loss": "training", "eval_loss": "validation"}
    unit = "nats per token" if facts.stage == "sft" else "nats per pair"
    drawn = {}
    if facts.stage == "ppo":
        drawn["Reward and KL against the step"] = _draw(plots / "reward_kl.png", plot_reward_and_kl, facts.metrics)
    else:
        drawn["Loss against the step"] = _draw(
            plots / "loss.png", plot_curves, facts.metrics, loss, title="Loss", unit=unit
        )
    if facts.stage == "reward":
        curve = {"eval_accuracy": "validation"}
        drawn["Pair accuracy against the step"] = _draw(
            plots / "accuracy.png", plot_curves, facts.metrics, curve, title="Pair accuracy", unit="share of pairs"
        )
    return {alt: Raw(path.relative_to(folder).as_posix()) for alt, path in drawn.items() if path}


def _draw(path: Path, plot: Callable[..., bool], *args: Any, **kwargs: Any) -> Path | None:
    """`path` once drawn; None where there is too little to draw, and then no older figure stays either."""
    if plot(*args, path=path, **kwargs):
        return path
    path.unlink(missing_ok=True)
    return None


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


def _other_judges(facts: Facts) -> dict[str, dict[str, Any]]:
    """The judges beside the main one: {name: {description, sft, ppo, win_rate}}."""
    main = (facts.evaluation.get("judge") or {}).get("name")
    others = {}
    for name, figures in (facts.evaluation.get("judges") or {}).items():
        if name != main and isinstance(figures, Mapping):
            others[name] = {key: facts.figure("judges", name, key) for key in ("sft", "ppo", "win_rate")}
            others[name]["description"] = figures.get("description", "")
    return others


def _lineage(facts: Facts) -> list[tuple[str, Any, Any]]:
    """(what, repository, commit), ancestors first."""
    order = {role: place for place, role in enumerate(_ROLE_NAMES)}
    roles = sorted(facts.parents, key=lambda role: order.get(role, len(order)))
    lines = [
        (_ROLE_NAMES.get(role, role), facts.parents[role]["repo"], facts.parents[role]["commit"]) for role in roles
    ]
    at = facts.step if facts.step is not None else facts.last.get("step")
    commit = next((one.commit for one in facts.checkpoints if one.step == at), None)
    return [*lines, (f"this model, step {at}" if at is not None else "this model", facts.repo_id, commit)]


def _unmeasured(facts: Facts) -> list[str]:
    """What a reader might look for on this card and will not find."""
    missing = []
    if facts.stage == "reward":
        if facts.accuracy is None:
            missing.append("accuracy on held-out pairs")
        if not facts.score:
            missing.append("mean and deviation of its score over SFT samples")
        return [*missing, "calibration", "length bias", "agreement with people"]
    side = facts.stage
    missing += [
        name for key, name in _FIGURES.items() if facts.figure(side, key) is None and (side, key) != ("sft", "kl")
    ]
    if side == "ppo":
        missing += [] if facts.figure("win_rate") else ["win rate over SFT"]
        missing += [] if facts.figure("control") else ["the control (SFT against SFT under another seed)"]
    elif _perplexity(facts.last.get("eval_loss")) is None:
        missing.append("perplexity on validation text")
    return [*missing, "preferences of people", "other seeds", "safety, bias and truthfulness"]


def _command(facts: Facts) -> str:
    command = facts.run.get("command")
    if isinstance(command, list):
        command = shlex.join(map(str, command))
    if not command:
        seed = facts.run.get("seed")
        command = f"rlhf-zoo {facts.stage} {shlex.quote(facts.recipe)}" + (
            f" --seed {seed}" if seed is not None else ""
        )
    return re.sub(r"hf_\w{8,}", "hf_***", command)


def _snippet(facts: Facts) -> str | None:
    if facts.repo_id is None:
        return None
    sent = [one for one in facts.checkpoints if one.commit or one.step == facts.step]
    revision = f', revision="{sent[-1].tag}"' if sent else ""
    model = "AutoModelForSequenceClassification" if facts.stage == "reward" else "AutoModelForCausalLM"
    return (
        f"from transformers import {model}, AutoTokenizer\n\n"
        f'model = {model}.from_pretrained("{facts.repo_id}"{revision})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{facts.repo_id}"{revision})'
    )


def _perplexity(loss: Any) -> float | None:
    return math.exp(loss) if finite(loss) and loss < 100 else None
