"""Writes summary.json, which has the results of a run in one file for other programs."""

import resource
import sys
from pathlib import Path
from typing import Any

from ...fileio import read_json, write_json
from ...runs.context import RunContext
from ...runs.record import SUMMARY
from ...runs.registry import STAGES


def peak_rss_mib() -> float:
    """Returns the peak resident memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def write_summary(context: RunContext, *, any_stage_ran: bool) -> Path:
    """Writes the main results in run.json of every stage and in eval/evaluation.json to summary.json.

    Args:
        context: The run.
        any_stage_ran: Whether this process ran any stage. If not, its memory use is recorded only if there is no
            earlier summary.

    Returns:
        The path of summary.json.
    """
    documents = {stage: context.record(stage).read() for stage in (*STAGES, "eval")}
    evaluation = read_json(context.record("eval").path / "evaluation.json") if documents["eval"] else {}
    path = context.directory / SUMMARY
    seconds = {stage: round(document.get("seconds", 0.0), 2) for stage, document in documents.items()}
    data_seconds = context.record("data").read().get("seconds", 0.0)
    # A resumed run records the largest peak of its processes.
    peaks = [read_json(path).get("peak_rss_mib", 0.0)] if path.is_file() else []
    if any_stage_ran or not peaks:
        peaks.append(peak_rss_mib())
    summary: dict[str, Any] = {
        "schema": 1,
        "recipe": context.recipe.name,
        "seed": context.shared.seed,
        "simulated": context.shared.simulated,
        "hub": context.hub.label,
        "seconds": {**seconds, "total": round(sum(seconds.values()) + data_seconds, 2)},
        "peak_rss_mib": round(max(peaks), 1),
        "repos": {
            stage: {key: documents[stage]["repo"][key] for key in ("id", "commit", "tags")}
            for stage in STAGES
            if documents[stage].get("repo")
        },
        **({"cut_rows": cut_rows} if (cut_rows := documents["sft"].get("cut_rows")) else {}),
        "reward_model": {
            key: value
            for key, value in (documents["reward"].get("reward_model") or {}).items()
            if key in ("accuracy", "n", "ci95")
        },
        **{
            side: {name: estimate["value"] for name, estimate in evaluation[side].items()}
            for side in ("sft", "ppo")
            if side in evaluation
        },
        **{
            name: {key: evaluation[name][key] for key in ("value", "ci95", "n")}
            for name in ("win_rate", "control")
            if name in evaluation
        },
        **{name: evaluation[name] for name in ("prompts", "groups", "rows") if name in evaluation},
        **{name: evaluation[name] for name in ("verdict", "recommended") if name in evaluation},
    }
    write_json(path, summary)
    return path
