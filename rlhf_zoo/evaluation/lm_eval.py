"""Runs tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) on SFT and PPO policies.

The package `lm_eval` is imported only if a recipe or a flag names tasks. A task is a name that the package knows, or
the path of a YAML file. Such a file can run code, so only a text with a folder or the ending .yaml counts as a path,
and nothing downloaded may name such a file (`runs.settings.key_classes`). Both policies get the same seed and examples.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ZooError
from ..fileio import is_finite
from ..hub.client.checked_data import refuse_file_systems
from ..hub.client.connect import Hub
from ..plugins import did_you_mean
from ..runs.data.sources import reading_from
from ..runs.settings.evaluation import HARNESS, EvaluationConfig, check_harness

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_SIZE = 16  # requests in one forward pass


def check_tasks(tasks: Sequence[str]) -> None:
    """Checks that lm-evaluation-harness is installed and knows the tasks.

    Args:
        tasks: Names, or paths of YAML files.

    Raises:
        ZooError: The package is missing, or a task is unknown.
    """
    if not tasks:
        return
    check_harness()
    known_tasks = _task_manager().all_tasks
    unknown_task = next(
        (task for task in tasks if task not in known_tasks and not (_is_path(task) and Path(task).is_file())), None
    )
    if unknown_task is not None:
        # Suggest a similar name, or else say how to name a task.
        hint = did_you_mean(unknown_task, known_tasks) or (
            ": `lm_eval ls tasks` lists tasks. Write a YAML file with its folder or its ending, such as ./TASK.yaml."
        )
        raise ZooError(f"lm-evaluation-harness has no task {unknown_task!r}{hint}")


def _is_path(task: str) -> bool:
    """Whether a task is written as a path. A bare name is never looked up in the working directory."""
    return Path(task).name != task or task.lower().endswith((".yaml", ".yml"))


def check_data(tasks: Sequence[str], hub: Hub) -> None:
    """Downloads the tasks' data into the cache, so that missing data are noticed before training.

    Args:
        tasks: Names, or paths of YAML files.
        hub: The run's Hub; the data come from its source Hub.

    Raises:
        ZooError: A task is unknown, or the source Hub lacks its data.
    """
    # Names are checked first, because loading an unknown name could load a file of that name.
    check_tasks(tasks)
    if tasks:
        with _translate_harness_errors(hub, tasks):
            _task_manager().load(list(tasks))


@contextlib.contextmanager
def _translate_harness_errors(hub: Hub, tasks: Sequence[str]) -> Iterator[None]:
    """Reads tasks' data from the run's source Hub while open, and turns the harness's exceptions into ZooErrors."""
    try:
        with reading_from(hub.source_hub or hub):
            yield
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        raise ZooError(
            f"lm-evaluation-harness ended with {type(error).__name__} ({message}) on {', '.join(tasks)}: fix this "
            "or remove the task from lm_eval."
        ) from error


@cache
def _task_manager() -> Any:
    # Only the harness's errors concern the user.
    logging.getLogger(HARNESS).setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    return TaskManager()


def run_tasks(
    policies: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    config: EvaluationConfig,
    *,
    seed: int,
    apply_chat_template: bool,
    hub: Hub,
) -> dict[str, Any]:
    """Runs lm-evaluation-harness on each policy.

    Args:
        policies: Models on their devices, by side (`sft`, `ppo`).
        tokenizer: The tokenizer of all policies.
        config: The tasks, the number of few-shot examples, and the limit on examples per task.
        seed: Seed of examples, few-shot examples and sampling, the same for all policies.
        apply_chat_template: Whether to render requests with the tokenizer's chat template.
        hub: The run's Hub; the tasks' data come from its source Hub.

    Returns:
        The results as JSON, by task and metric.

    Raises:
        ZooError: The harness failed: data are missing, or a task would run code.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    # A task's YAML may contain addresses that fsspec would open.
    refuse_file_systems()
    results = {}
    with _translate_harness_errors(hub, config.lm_eval):
        for side, policy in policies.items():
            model = HFLM(pretrained=policy, tokenizer=tokenizer, backend="causal", batch_size=BATCH_SIZE)
            results[side] = simple_evaluate(
                model=model,
                tasks=list(config.lm_eval),
                num_fewshot=config.lm_eval_fewshot,
                limit=config.lm_eval_limit,
                apply_chat_template=apply_chat_template,
                log_samples=False,
                task_manager=_task_manager(),
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
    # All policies ran the same tasks, so the first result has the names of all tasks and metrics.
    first_result = next(iter(results.values()))
    metrics_by_task = {task: _metric_names(values) for task, values in first_result["results"].items()}
    return {
        "version": importlib.metadata.version(HARNESS),
        "limit": config.lm_eval_limit,
        "tasks": {
            task: {
                "n": (first_result.get("n-samples", {}).get(task) or {}).get("effective"),
                "fewshot": first_result.get("n-shot", {}).get(task),
                "metrics": {
                    metric: {side: _read_estimate(result["results"][task], metric) for side, result in results.items()}
                    for metric in metrics
                },
            }
            for task, metrics in metrics_by_task.items()
            if metrics
        },
    }


def _metric_names(task_results: Mapping[str, object]) -> list[str]:
    """Returns the names METRIC,FILTER of a task's metrics, without standard errors and entries such as the alias."""
    return [key for key, value in task_results.items() if "," in key and "_stderr," not in key and is_finite(value)]


def _read_estimate(task_results: Mapping[str, Any], metric: str) -> dict[str, Any]:
    name, _, filter_name = metric.partition(",")
    stderr = task_results.get(f"{name}_stderr,{filter_name}")
    return {"value": float(task_results[metric]), "stderr": float(stderr) if is_finite(stderr) else None}
