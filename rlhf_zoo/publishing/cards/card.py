"""Writes the model card of a stage from local files alone: README.md, rlhf_card.json, plots, .eval_results.

It reads the stage's run.json, metrics.jsonl and checkpoints, the run.json of other stages, and ../eval and ../baseline
where they exist. Main metrics that are not in these files are shown as "not measured". This module imports neither
torch nor any library of Hugging Face.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from ...fileio import get_nested, hub_id, is_finite, write_json, write_text
from ...modeling.prompt_keys import format_group_count
from ...runs.registry import PARENT_TITLES, REWARD_ROLES, STAGES
from . import commands, markdown
from .benchmark import benchmark_results, results_file
from .data import DataPart, evaluated_on, left_out, overlap_with_training, trained_on
from .estimates import estimate_at
from .facts import StageFacts
from .hacking_signs import watched_metrics
from .kl import penalty_varies
from .markdown import Raw, round_significant
from .parts import TEMPLATES, Metric, StageCard
from .reproducible import obstacle
from .summary import links, trained_with

CARD_FILE = "rlhf_card.json"
_SCHEMA = 1
_ROLE_TITLES = {"base": "base model", **PARENT_TITLES, "value": "value model", "data": "data set"}  # in table order
_PPO_BASE_TITLE = "base model, from which PPO started"
_SHOWN_KEYS = (  # the settings that README.md shows, in this order
    "model_name_or_path", "learning_rate", "critic_learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps",
    "weight_decay", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "max_length", "max_prompt_length", "held_out_share", "packing", "simulated_pairs", "preference",
    "center_rewards_coefficient", "score_samples",
    "reward_model_path", "reward_label", "reward_output", "reward_pad_token", "reward_model_loader", "reward_ensemble",
    "reward_ensemble_lambda", "reward_funcs", "reward_weights", "total_episodes", "num_ppo_epochs", "num_mini_batches",
    "num_generations", "response_length", "response_length_min", "truncate_text", "truncate_after", "skip_equal_scores",
    "temperature", "kl_coef", "kl_in", "kl_estimator", "kl_target", "kl_horizon", "action_level", "cliprange",
    "cliprange_high", "cliprange_value", "vf_coef", "entropy_coef", "ptx_coef", "ptx_dataset_config", "gamma", "lam",
    "whiten_rewards", "score_centering", "score_scaling", "score_clip", "missing_eos_penalty", "missing_eos_score",
    "early_stop_kl", "max_grad_norm", "critic", "use_peft", "lora_r", "lora_alpha", "lora_target_modules", "dtype",
    "load_in_4bit", "load_in_8bit", "release", "metric_for_best_model",
)  # fmt: skip
_EVALUATION_KEYS = (  # the keys of evaluation.json that rlhf_card.json copies
    "judge", "reward_model", "sft", "ppo", "win_rate", "win_rate_at_equal_length", "control", "verdict", "recommended",
    "over_training", "labeled", "lm_eval", "reference",
)  # fmt: skip
_FRONTIER_KEYS = ("judge", "served", "sft", "ppo", "methods")  # the keys of frontier.json that rlhf_card.json copies
_MAX_PROMPTS = 8
_STAGE_TAGS = {"sft": ("sft",), "reward": ("reward-model",), "ppo": ("ppo",)}
_TASK_NAMES = {
    "sft": "Language modeling",
    "reward": "Ranking pairs of answers",
    "ppo": "Answers, against the SFT model",
}
_SAMPLED_TASK_NAME = "Answers to held-out prompts"  # the task of an SFT model's metrics other than the perplexity


def make_card(
    stage_dir: Path | str,
    *,
    out: Path | str | None = None,
    step: int | None = None,
    merged: bool = False,
    is_trusted: bool = True,
) -> Path:
    """Writes README.md, rlhf_card.json and plots/*.png. Equal run directories give equal cards.

    If the data set's repository registers it as a benchmark, with a task for a measured figure, also writes
    `.eval_results/NAME.yaml`.

    Args:
        stage_dir: The stage's directory.
        out: Folder for the files; None for the stage's directory.
        step: The step to describe; None for the end of the run. Later metrics and checkpoints are left out, and so
            are held-out metrics, because the evaluation measures the end.
        merged: Whether to describe the branch `merged`: the end of the run with its adapter merged.
        is_trusted: Whether this user wrote the run or trusts it (see `run_signature`). If not, metrics are left out.

    Returns:
        The path of README.md.

    Raises:
        ZooError: The directory holds no run of a stage that has a card, or the run has no such step.
    """
    facts = StageFacts.read(Path(stage_dir), step, merged=merged, is_trusted=is_trusted)
    folder = Path(out) if out is not None else Path(stage_dir)
    stage_card: StageCard = STAGES[facts.stage].load("card")
    text = _render(facts, stage_card, _draw_plots(facts, stage_card, folder))
    write_json(folder / CARD_FILE, card_json(facts))
    _write_results_file(facts, folder)
    write_text(folder / "README.md", text)
    return folder / "README.md"


def front_matter(facts: StageFacts, stage_card: StageCard) -> dict[str, Any]:
    """Returns the metadata at the head of the README, in the Hub's terms.

    Args:
        facts: The facts of the stage.
        stage_card: The parts that differ between the cards of stages.
    """
    task = STAGES[facts.stage].task
    tags = ["rlhf", *_STAGE_TAGS.get(facts.stage, ()), "trl", "rlhf-zoo", f"stage:{facts.stage}"]
    tags += ["conversational"] if facts.is_chat else []
    reward_models = (facts.parents.get(role, {}).get("repo") for role in REWARD_ROLES)
    tags += [f"reward-model:{name}" for name in reward_models if hub_id(name)]
    if facts.is_simulated:
        tags.append("simulated")
    metadata: dict[str, Any] = {
        **({"language": facts.setting("language")} if facts.setting("language") else {}),
        "license": facts.setting("license", "apache-2.0"),
        "pipeline_tag": task,
        "library_name": "peft" if facts.is_adapter else "transformers",
    }
    if facts.parent_model:
        metadata["base_model"] = facts.parent_model["repo"]
        metadata["base_model_relation"] = "adapter" if facts.is_adapter else "finetune"
    if facts.dataset_ids:
        metadata["datasets"] = facts.dataset_ids
    metadata["tags"] = tags
    results = []
    for part, metrics in stage_card.model_index_metrics(facts):
        finite_metrics = [(kind, value, name) for kind, value, name in metrics if is_finite(value)]
        if finite_metrics:
            results.append(_model_index_result(facts, task, part, finite_metrics))
    if results:
        metadata["model-index"] = [{"name": facts.title, "results": results}]
    return metadata


def card_json(facts: StageFacts) -> dict[str, Any]:
    """Returns rlhf_card.json, the card for programs. Metrics that were not measured are null.

    Args:
        facts: The facts of the stage.
    """
    stage_card: StageCard = STAGES[facts.stage].load("card")
    evaluation = {name: facts.evaluation[name] for name in _EVALUATION_KEYS if name in facts.evaluation}
    baselines = {name: facts.frontier[name] for name in _FRONTIER_KEYS if name in facts.frontier}
    return {
        "schema": _SCHEMA,
        "stage": facts.stage,
        "recipe": facts.recipe,
        "repo": facts.repo_id,
        "step": facts.described_step,
        "tag": facts.described_checkpoint.tag if facts.described_checkpoint else None,
        "chosen": facts.choice,
        "status": facts.run.get("status") if facts.step is None else "checkpoint",
        "seed": facts.run.get("seed"),
        "simulated": facts.is_simulated,
        "adapter": facts.is_adapter,
        "merged": facts.merged,
        **({"dtype": facts.setting("push_dtype")} if facts.setting("push_dtype") else {}),
        **({"remote_code": facts.remote_code} if facts.remote_code else {}),
        **({"round": facts.run["round"]} if facts.run.get("round") else {}),
        **({"package": facts.run["package"]} if facts.run.get("package") else {}),
        "base_model": facts.parent_model["repo"] if facts.parent_model else None,
        "parents": facts.parents,
        "reward": facts.latest_metrics.get("objective/score"),
        "kl": facts.latest_metrics.get("objective/kl"),
        "reward_model": (facts.reward_report or None) if facts.stage == "reward" else None,
        "evaluation": evaluation or None,
        **({"baselines": baselines} if facts.stage == "ppo" and baselines else {}),
        "prompts": list(dict.fromkeys(row["prompt"] for row in facts.samples))[:_MAX_PROMPTS],
        "checkpoints": [
            {"step": checkpoint.step, "tag": checkpoint.tag, "commit": checkpoint.commit}
            | {name: checkpoint.metrics.get(key) for name, key in stage_card.json_columns.items()}
            | {key: checkpoint.metrics.get(key) for key in watched_metrics(facts)}
            for checkpoint in facts.checkpoints
        ],
        "created": facts.run.get("created"),
        "finished": facts.run.get("finished") if facts.step is None else None,
        "fingerprint": facts.run.get("fingerprint"),
        "settings": _without_folders(facts.settings),
        "versions": facts.run.get("versions") or {},
        "command": commands.training_command(facts),
    }


def _without_folders(value: object) -> Any:
    """Returns settings with each absolute path reduced to the name of its file or folder."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return PurePath(value).name if isinstance(value, str) and PurePath(value).is_absolute() else value


def _model_index_result(facts: StageFacts, task: str, part: DataPart, metrics: list[Metric]) -> dict[str, Any]:
    data_name = part.name or facts.recipe
    subset = " ".join(filter(None, (part.config, part.split)))
    dataset = {"name": f"{data_name.rpartition('/')[2]} ({subset})", "type": data_name}
    dataset |= {key: value for key, value in (("config", part.config), ("split", part.split)) if value is not None}
    if part.repo in facts.dataset_ids and (commit := facts.parents["data"]["commit"]):
        dataset["revision"] = commit
    has_perplexity = any(kind == "perplexity" for kind, _, _ in metrics)
    is_sampled_sft = facts.stage == "sft" and not has_perplexity
    task_name = _SAMPLED_TASK_NAME if is_sampled_sft else _TASK_NAMES.get(facts.stage, task)
    result = {
        "task": {"type": task, "name": task_name},
        "dataset": dataset,
        "metrics": [{"type": kind, "value": round_significant(value), "name": name} for kind, value, name in metrics],
    }
    if facts.hub_label != "local" and facts.repo_id:
        url = f"{facts.hub_label.rstrip('/')}/{facts.repo_id}/blob/main/{CARD_FILE}"
        result["source"] = {"name": CARD_FILE, "url": url}
    return result


def _write_results_file(facts: StageFacts, folder: Path) -> None:
    import yaml

    path_in_repo = results_file(facts)
    if path_in_repo is None:
        return
    entries = benchmark_results(facts)
    if entries:
        write_text(folder / path_in_repo, yaml.safe_dump(entries, sort_keys=False, allow_unicode=True, width=1000))
    else:
        (folder / path_in_repo).unlink(missing_ok=True)


@cache
def _environment(folder: Path) -> Any:
    """Returns a Jinja environment for the templates in `folder` and in `TEMPLATES`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]),
        autoescape=False,  # `finalize` escapes, for Markdown as well as HTML
        finalize=markdown.escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        code=markdown.code,
        fence=markdown.fence,
        number=markdown.number,
        estimate=markdown.estimate,
        short=markdown.short,
        with_interval=markdown.with_interval,
    )
    return environment


def _render(facts: StageFacts, stage_card: StageCard, plot_paths: Mapping[str, Raw]) -> str:
    import yaml

    head = yaml.safe_dump(front_matter(facts, stage_card), sort_keys=False, allow_unicode=True, width=1000)
    body = (
        _environment(stage_card.template.parent)
        .get_template(stage_card.template.name)
        .render(
            facts=facts,
            run=facts.run,
            evaluation=facts.evaluation,
            judge=facts.evaluation.get("judge") or {},
            versions=facts.run.get("versions") or {},
            best_tag=get_nested(facts.run, "repo", "tags", "best") if facts.step is None else None,
            latest=facts.latest_metrics,
            title=facts.title,
            plots=plot_paths,
            columns=_columns(facts, stage_card),
            lineage=_lineage_rows(facts),
            trained_on=trained_on(facts),
            left_out=left_out(facts),
            overlap_with_training=Raw(overlap_with_training(facts)),
            evaluated_on=lambda part=None: evaluated_on(facts, part),
            in_groups=_in_groups,
            settings={
                key: _without_folders(facts.settings[key]) for key in _SHOWN_KEYS if facts.settings.get(key) is not None
            },
            unmeasured=stage_card.unmeasured(facts),
            evaluated_step_figures=stage_card.evaluated_step_figures,
            links=links(facts),
            trained_with=list(trained_with(facts)),
            has_samples=facts.stage != "reward",
            held_out=_held_out_formatter(facts),
            no_samples=_no_samples_note(facts),
            results_file=results_file(facts) if benchmark_results(facts) else None,
            estimate_at=estimate_at,
            obstacle=obstacle(facts),  # why the checkpoint cannot be reproduced, or None
            commands=commands,
            **stage_card.variables(facts),
        )
    )
    return f"---\n{head}---\n\n" + re.sub(r"\n{3,}", "\n\n", body.strip()) + "\n"


def _held_out_formatter(facts: StageFacts) -> Callable[[Mapping[str, Any] | None], Raw]:
    """Returns a formatter of held-out metrics. The card of a step lacks them: it shows "–" and says why at the top."""
    missing = facts.missing_metric_text if facts.step is None else "–"
    return lambda estimate: markdown.estimate(estimate) if estimate else Raw(missing)


def _in_groups(evaluation: object) -> str:
    """Returns a clause on an evaluation's groups of prompts that ask the same thing; "" if each prompt is a group.

    Templates put it after "12 prompts", so it ends with a comma.
    """
    prompt_count, group_count = (get_nested(evaluation, key) for key in ("prompts", "groups"))
    if not (isinstance(prompt_count, int) and isinstance(group_count, int)) or group_count == prompt_count:
        return ""
    return f"{format_group_count(group_count, prompt_count)} that ask the same thing, each resampled as a whole,"


def _no_samples_note(facts: StageFacts) -> str:
    run_or_step = "run" if facts.step is None else "step"
    return f"{facts.missing_metric_text.capitalize()}: there are no samples of this {run_or_step}."


def _columns(facts: StageFacts, stage_card: StageCard) -> dict[str, str]:
    """Returns the columns of the checkpoint table: heading -> metric."""
    keys = {key for row in facts.checkpoints for key, value in row.metrics.items() if value is not None}
    if not penalty_varies(facts):
        keys.discard("kl_coef")  # a constant β is among the settings
    required = stage_card.required_column
    return {heading: key for heading, key in stage_card.columns.items() if heading == required or key in keys}


def _draw_plots(facts: StageFacts, stage_card: StageCard, folder: Path) -> dict[str, Raw]:
    """Draws the plots that have data; returns alternative text -> path relative to the card."""
    plot_paths: dict[str, Raw] = {}

    def draw(name: str, alternative_text: str, plot: Callable[..., bool], *args: Any, **options: Any) -> None:
        path = folder / "plots" / f"{name}.png"
        if plot(*args, path=path, **options):
            plot_paths[alternative_text] = Raw(path.relative_to(folder).as_posix())
        else:
            path.unlink(missing_ok=True)  # remove the plot of an older card

    stage_card.draw(facts, draw)
    return plot_paths


def _lineage_rows(facts: StageFacts) -> list[tuple[str, Any, Any]]:
    """Returns (title, repository, commit) of each ancestor, and then of the model itself."""
    titles, order = dict(_ROLE_TITLES), {role: index for index, role in enumerate(_ROLE_TITLES)}
    ancestors = {"base": facts.sft_base_model, **facts.parents}
    if facts.ppo_starts_from_base:  # the base model is also the parent with the role "sft"
        ancestors.pop("sft", None)
        titles["base"] = _PPO_BASE_TITLE
    rows = []
    for role in sorted(ancestors, key=lambda role: order.get(role, len(order))):
        name, commit = _repository_and_commit(role, ancestors[role])
        if merged_commit := _merged_commit(facts, role):
            commit = Raw(f"{commit}; used from its branch `merged`: {markdown.code(merged_commit)}")
        rows.append((titles.get(role, role), name, commit))
    checkpoint = facts.described_checkpoint
    own_title = f"this model, step {facts.described_step}" if facts.described_step is not None else "this model"
    if facts.step is not None and checkpoint is None:
        return [*rows, (own_title, "no checkpoint was saved at this step", "")]
    own_commit = checkpoint.commit if checkpoint else None
    name, commit = _repository_and_commit("self", {"repo": facts.repo_id, "commit": own_commit})
    if facts.repo_id and facts.step_in_this_commit is not None and not own_commit:
        commit = Raw("the commit of this card")
    return [*rows, (own_title, name, commit)]


def _merged_commit(facts: StageFacts, role: str) -> str | None:
    """Returns the commit of a parent's branch `merged`, if this stage started from that branch; None otherwise."""
    parent = facts.parents.get(role)
    if facts.parent_model is None or parent is None or facts.parent_model["repo"] != parent["repo"]:
        return None
    return facts.parent_model["commit"] if facts.parent_model["commit"] != parent["commit"] else None


def _repository_and_commit(role: str, entry: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """Formats a lineage entry: returns its repository or local folder, and its commit, as Markdown."""
    if entry is None:
        return "not recorded", ""
    if role == "base" and entry["repo"] is None and not entry.get("folder"):
        return "none: random initial weights", ""
    name = hub_id(entry["repo"])
    if name is None and entry.get("folder") and entry.get("gguf"):
        digest = f"sha256 {markdown.code(str(entry['gguf']))}, not published"
        return Raw(f"the GGUF file {markdown.code(entry['folder'])}"), Raw(digest)
    if name is None and entry.get("folder"):
        files = f"files {markdown.code(str(entry['files'])[:10])}" if entry.get("files") else "not published"
        return Raw(f"the folder {markdown.code(entry['folder'])}"), Raw(files)
    if name is None:
        return "not published", "not published"
    unpinned = "not published" if role == "self" else "not recorded"
    commit = markdown.code(entry["commit"]) if entry["commit"] else unpinned
    if entry.get("gguf"):  # `hub add` unpacked it
        commit = Raw(f"{commit}; unpacked from a GGUF file, sha256 {markdown.code(str(entry['gguf']))}")
    return markdown.code(name), commit
