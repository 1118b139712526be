"""Keeps the figures and curves of finished runs of smollm2-reviews, for the table and the plot of its page.

    python benchmarks/reviews.py "one CPU thread, float32=RUN" "H200, bf16=RUN"

Each RUN is the output folder of `rlhf-zoo ablate smollm2-reviews --kl_coef 0.05,0`; MACHINE names where it ran. A β
without an evaluation is left out. The figures are written to docs/evidence/smollm2-reviews.json (with --add, beside
those that it has), and `python benchmarks/evidence.py --render` renders them in the docs.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import keep
from figures.experiments import REVIEWS

from rlhf_zoo.errors import ZooError
from rlhf_zoo.fileio import read_json
from rlhf_zoo.pipeline.experiments.sweep import ABLATION
from rlhf_zoo.runs.record import StageRecord

BETAS = (0.05, 0.0)
FIGURES = ("reward", "kl", "repetition", "distinct_2")
LOCAL_OPTIONS = re.compile(r" --(?:output_dir|namespace|source_hub) \S+| --overwrite_repo")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=parse_run, metavar="MACHINE=RUN", help="a run, and where it ran")
    parser.add_argument("--add", action="store_true", help="keep the figures of other seeds, β and machines")
    options = parser.parse_args(arguments)
    rows = keep.load(REVIEWS).get("runs", []) if options.add else []
    rows += [row for machine, run in options.runs for row in read_variants(machine, run)]
    newest = {(row["seed"], row["beta"], row["machine"]): row for row in rows}
    keep.write(REVIEWS, {"schema": 2, "recipe": REVIEWS, "runs": sorted(newest.values(), key=lambda row: row["seed"])})
    print(f"docs/evidence/{REVIEWS}.json has {len(newest)} policies.")


def parse_run(argument: str) -> tuple[str, Path]:
    """Parses MACHINE=RUN.

    Raises:
        ArgumentTypeError: The machine or the run is missing.
    """
    machine, _, run = argument.partition("=")
    if not machine or not run:
        raise argparse.ArgumentTypeError(f"{argument} lacks the machine or the run: write MACHINE=RUN.")
    return machine, Path(run)


def read_variants(machine: str, run: Path) -> list[dict[str, Any]]:
    """Reads the figures of each evaluated β of a run.

    Raises:
        ZooError: No β was evaluated.
    """
    folders = {beta: run / ABLATION / f"kl-coef-{beta:g}" for beta in BETAS}
    rows = [_read_variant(machine, beta, folder) for beta, folder in folders.items() if keep.is_finished(folder)]
    if not rows:
        raise ZooError(f"{run} has no evaluated policy: finish `rlhf-zoo ablate {REVIEWS} --kl_coef 0.05,0` first.")
    return rows


def _read_variant(machine: str, beta: float, folder: Path) -> dict[str, Any]:
    summary, evaluation = read_json(folder / "summary.json"), read_json(folder / "eval" / "evaluation.json")
    over = evaluation["over_training"]
    return {
        "seed": summary["seed"],
        "beta": beta,
        "machine": machine,
        "command": public_command(StageRecord(folder / "ppo").read()["command"]),
        "seconds": summary["seconds"],
        "prompts": evaluation["prompts"],
        "reward_model": {key: evaluation["reward_model"][key] for key in ("accuracy", "n", "ci95")},
        **{side: {name: evaluation[side][name] for name in FIGURES} for side in ("sft", "ppo")},
        "reward_gain": evaluation["difference"]["reward"],
        **{name: {key: evaluation[name][key] for key in ("value", "ci95", "n")} for name in ("win_rate", "control")},
        "judges": {
            name: {key: judge[key] for key in ("sft", "ppo", "win_rate")}
            for name, judge in evaluation["judges"].items()
        },
        **{name: over[name] for name in ("verdict", "without_judge", "fired", "reasons", "recommended")},
        "rule": over["rule"]["version"],
        "checkpoints": [
            {"step": row["step"], **{name: row[name]["value"] for name in ("reward", "judge", "kl")}}
            for row in over["checkpoints"]
        ],
        "curve": [
            {"step": row["step"], "reward": row["objective/score"], "kl": row["objective/kl"]}
            for row in StageRecord(folder / "ppo").metrics()
            if "objective/kl" in row
        ],
    }


def public_command(recorded: str) -> str:
    """Replaces the folder of the data by a variable, and removes options that name local folders or repositories."""
    return re.sub(r"(--dataset_name) \S+", r"\1 $RLHF_ZOO_DATA", LOCAL_OPTIONS.sub("", recorded))


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
