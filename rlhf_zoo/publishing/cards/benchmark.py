"""Writes `.eval_results/NAME.yaml`: held-out figures in the Hub's format for registered benchmarks.

A data set is a registered benchmark if its repository holds eval.yaml; a result must name one of its tasks. The
format is that of the Hub's documentation (docs/hub/eval-results): a list of {dataset: {id, task_id, revision}, value,
date, source, notes}.
"""

import re
from collections.abc import Mapping
from typing import Any

from .data import evaluated_on, measured_on
from .estimates import estimate_at
from .facts import StageFacts

_RESULTS_FOLDER = ".eval_results"


def results_file(facts: StageFacts) -> str | None:
    """Returns the path of the results file in the repository; None if the data set is not a registered benchmark.

    Args:
        facts: The facts of the stage.
    """
    if facts.benchmark is None or not facts.dataset_ids:
        return None
    return f"{_RESULTS_FOLDER}/{re.sub(r'[^A-Za-z0-9._-]', '-', facts.dataset_ids[0].rpartition('/')[2])}.yaml"


def benchmark_results(facts: StageFacts) -> list[dict[str, Any]]:
    """Returns results for the tasks in eval.yaml that have the evaluated split and configuration.

    A task whose id is the name of a figure gets that figure. A single other task gets the stage's main figure: the
    judge's mean, or a reward model's accuracy. Several others get none, because it is unknown which figure they mean.

    Args:
        facts: The facts of the stage.

    Returns:
        The entries of the results file; [] if no task has a figure.
    """
    if results_file(facts) is None:
        return []
    figures, main_key, split, configuration = _stage_figures(facts)
    tasks = [
        task["id"]
        for task in (facts.benchmark or {}).get("tasks") or []
        if isinstance(task, Mapping)
        and isinstance(task.get("id"), str)
        and (task.get("split") or "test") == split
        and task.get("config") in (None, configuration)
    ]
    other_tasks = [task for task in tasks if task not in figures]
    key_by_task = {task: task for task in tasks} | ({other_tasks[0]: main_key} if len(other_tasks) == 1 else {})
    task_figures = ((task, key, figures.get(key)) for task, key in key_by_task.items())
    return [_entry(facts, task, key, figure) for task, key, figure in task_figures if figure is not None]


def _stage_figures(facts: StageFacts) -> tuple[dict[str, Mapping[str, Any] | None], str, str | None, str | None]:
    """Returns (key -> figure, key of the main figure, split, configuration).

    The split is None if the figures cover only a held-out share of it, because a task means the whole split.
    """
    if facts.stage == "reward":
        report = facts.reward_report
        figures = {"accuracy": facts.accuracy, "loss": estimate_at(report, "loss")}
        data = measured_on(facts)
        return figures, "accuracy", data.split if data.share is None else None, data.config
    evaluation_figures = facts.evaluation.get(facts.stage)
    figures = {key: facts.estimate(facts.stage, key) for key in evaluation_figures or {}}
    if facts.stage == "ppo":
        figures["win_rate"] = facts.estimate("win_rate")
    data = evaluated_on(facts)
    return figures, "judge", data.split if data.share is None else None, data.config


def _entry(facts: StageFacts, task: str, key: str, figure: Mapping[str, Any]) -> dict[str, Any]:
    dataset: dict[str, Any] = {"id": facts.dataset_ids[0], "task_id": task}
    if commit := facts.parents["data"]["commit"]:
        dataset["revision"] = commit
    entry: dict[str, Any] = {"dataset": dataset, "value": figure["value"]}
    if facts.evaluated_at:
        entry["date"] = facts.evaluated_at
    if facts.hub_label != "local" and facts.repo_id:
        entry["source"] = {"url": f"{facts.hub_label.rstrip('/')}/{facts.repo_id}", "name": "Model card"}
    entry["notes"] = _notes(facts, key, figure)
    return entry


def _notes(facts: StageFacts, key: str, figure: Mapping[str, Any]) -> str:
    judge = (facts.evaluation.get("judge") or {}).get("name")
    parts = [f"{key} ({judge})" if key in ("judge", "win_rate") and judge else key]
    if interval := figure.get("ci95"):
        parts.append("95% interval [{:.4g}, {:.4g}]".format(*interval))
    parts += [f"n = {figure['n']}"] if figure.get("n") else []
    if facts.stage != "reward":
        parts.append(f"temperature {facts.evaluation.get('temperature')}")
    parts.append(f"seed {facts.run.get('seed')}")
    return ", ".join(parts) + "; measured by rlhf-zoo, not by the benchmark's own harness"
