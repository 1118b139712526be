"""Reads the files of a run directory for `StageFacts`, and decides whether the evaluation belongs to the run."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import parse_json, read_json
from ...hub.client.step_tags import tagged_steps
from ...modeling.integrity import weights_digest
from ...runs.record import StageRecord

# Keys that a card must not show, because they are secret or concern only this machine.
_PRIVATE = re.compile(r"(^|_)(token|api_key|password)$|^(output|logging|cache|home)_dir$|^resume_from_checkpoint$")
_PUBLIC_TOKENS = ("stop_token", "eos_token", "pad_token", "bos_token", "unk_token")


def read_evaluation(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns (content of evaluation.json, rows of samples.jsonl); ({}, []) without an evaluation.

    Args:
        folder: The folder of the evaluation.

    Raises:
        ZooError: A line of samples.jsonl is not JSON.
    """
    if not (folder / "evaluation.json").is_file():
        return {}, []
    samples = folder / "samples.jsonl"
    rows = []
    if samples.is_file():
        for number, line in enumerate(samples.read_text(encoding="utf-8").split("\n"), start=1):
            try:
                rows += [parse_json(line)] if line.strip() else []
            except ValueError as error:
                raise ZooError(
                    f"Line {number} of {samples} is not JSON ({error}): run the evaluation again."
                ) from error
    return read_json(folder / "evaluation.json"), rows


def read_frontier(path: Path, eval_run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of baselines; {} if there are none, or if they belong to another evaluation.

    Args:
        path: frontier.json of the baselines.
        eval_run: The content of ../eval/run.json.
    """
    frontier: dict[str, Any] = read_json(path) if path.is_file() else {}
    fingerprint = frontier.get("evaluation")
    return frontier if fingerprint is not None and fingerprint == eval_run.get("fingerprint") else {}


def describe_foreign_evaluation(record: StageRecord, run: Mapping[str, Any], eval_run: Mapping[str, Any]) -> str | None:
    """Describes what ../eval measured, if that is not the checkpoint at the end of this stage.

    Checkpoints are compared by their weights, because the same weights may be published under several names.

    Args:
        record: The stage's directory.
        run: The content of its run.json.
        eval_run: The content of ../eval/run.json.

    Returns:
        A phrase such as "step 40"; None if the evaluation belongs to the end of this stage, or there is none.
    """
    if run.get("status") in ("running", "interrupted"):
        return "an earlier run" if eval_run else None
    measured_model = (eval_run.get("parents") or {}).get(run["stage"]) or {}
    checkpoint = record.chosen_checkpoint()
    # A checkpoint restored from its repository may have rounded weights, so either digest counts as this run's.
    own_weights = {run.get("weights"), None if checkpoint is None else weights_digest(checkpoint)} - {None}
    weights = measured_model.get("weights")
    if weights in own_weights:
        return None
    fingerprints = measured_model.get("fingerprint"), run.get("fingerprint")
    if None not in fingerprints and fingerprints[0] != fingerprints[1]:
        return f"other settings (fingerprint {str(fingerprints[0])[:10]})"
    step = (run.get("chosen") or {}).get("step")
    path = str(measured_model.get("path"))
    if step is not None and path.startswith("checkpoint-") and path != f"checkpoint-{step}":
        return f"step {path.removeprefix('checkpoint-')}"
    return f"other weights (sha256 {str(weights)[:10]})" if weights and own_weights else None


def published_commits(run: Mapping[str, Any]) -> dict[int, str]:
    """Returns step -> commit of every checkpoint that has a tag.

    Args:
        run: The content of a stage's run.json.
    """
    tags = (run.get("repo") or {}).get("tags") or {}
    return {step: tags[tag] for step, tag in tagged_steps(tags).items()}


def without_private_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings without the keys of secrets, and of folders of outputs, logs and caches.

    Args:
        settings: Settings, which may be nested.
    """
    return {
        key: without_private_keys(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key in _PUBLIC_TOKENS or not _PRIVATE.search(key)
    }


def is_transformers_class(architecture: str) -> bool:
    """Whether an auto class of transformers loads the architecture.

    Reads the source file of the auto classes, because importing transformers is slow.

    Args:
        architecture: The name of a model class, as in config.json.
    """
    spec = importlib.util.find_spec("transformers")
    source_file = Path(str(spec and spec.origin)).parent / "models" / "auto" / "modeling_auto.py"
    return f'"{architecture}"' in source_file.read_text(encoding="utf-8")
