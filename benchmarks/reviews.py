"""Keeps the figures and curves of finished runs of smollm2-reviews, for the table and the picture of its page.

    python benchmarks/reviews.py "one CPU thread, float32=RUN" "H200, bf16=RUN"

Each RUN is the folder of a `rlhf-zoo ablate smollm2-reviews --kl_coef 0.05,0`, with the machine that it ran on; a β
that is not evaluated is left out. The figures are written to docs/evidence/smollm2-reviews.json, and
`python benchmarks/evidence.py --render` puts them into the docs.
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
PLACES = re.compile(r" --(?:output_dir|namespace|source_hub) \S+| --overwrite_repo")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=on_machine, metavar="MACHINE=RUN", help="a run, and where it ran")
    runs = [one for machine, run in parser.parse_args(arguments).runs for one in kept_variants(machine, run)]
    keep.write(REVIEWS, {"schema": 2, "recipe": REVIEWS, "runs": sorted(runs, key=lambda one: one["seed"])})
    print(f"Kept {len(runs)} policies in docs/evidence/{REVIEWS}.json.")


def on_machine(argument: str) -> tuple[str, Path]:
    """Parses MACHINE=RUN.

    Raises:
        ArgumentTypeError: One of the two is missing.
    """
    machine, _, run = argument.partition("=")
    if not machine or not run:
        raise argparse.ArgumentTypeError(f"{argument} has no machine: write MACHINE=RUN.")
    return machine, Path(run)


def kept_variants(machine: str, run: Path) -> list[dict[str, Any]]:
    """What is kept of each β of a run that is evaluated.

    Raises:
        ZooError: None is.
    """
    folders = {beta: run / ABLATION / f"kl-coef-{beta:g}" for beta in BETAS}
    kept = [_kept(machine, beta, folder) for beta, folder in folders.items() if keep.finished(folder)]
    if not kept:
        raise ZooError(f"{run} has no evaluated policy: finish `rlhf-zoo ablate {REVIEWS} --kl_coef 0.05,0` first.")
    return kept


def _kept(machine: str, beta: float, folder: Path) -> dict[str, Any]:
    summary, evaluation = read_json(folder / "summary.json"), read_json(folder / "eval" / "evaluation.json")
    over = evaluation["over_training"]
    return {
        "seed": summary["seed"],
        "beta": beta,
        "machine": machine,
        "command": command(StageRecord(folder / "ppo").read()["command"]),
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
            {"step": one["step"], **{name: one[name]["value"] for name in ("reward", "judge", "kl")}}
            for one in over["checkpoints"]
        ],
        "curve": [
            {"step": row["step"], "reward": row["objective/score"], "kl": row["objective/kl"]}
            for row in StageRecord(folder / "ppo").metrics()
            if "objective/kl" in row
        ],
    }


def command(recorded: str) -> str:
    """The command that a run was made by, with the folder of its data as a variable, and without its own places."""
    return re.sub(r"(--dataset_name) \S+", r"\1 $RLHF_ZOO_DATA", PLACES.sub("", recorded))


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
