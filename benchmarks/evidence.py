"""Makes the figures of the docs: runs the recipes over seeds, writes their figures to docs/evidence, and renders them.

    python benchmarks/evidence.py                      # every part; resumes, and does not repeat finished runs
    python benchmarks/evidence.py tiny-world-ablation  # one part: RECIPE or RECIPE-ablation
    python benchmarks/evidence.py plan                 # the planner's memory beside that of real runs
    python benchmarks/evidence.py --keep               # runs nothing: writes the figures of finished runs, and renders
    python benchmarks/evidence.py --render             # only renders the docs from the committed JSON

product-remarks, remarks-count and arguments need data: set RLHF_ZOO_DATA to the folder that contains pros_cons,
opinion_lexicon and ukp_convarg. The runs are in runs/evidence, or in RLHF_ZOO_EVIDENCE_RUNS.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import plan_check
from figures import keep, plots, tables
from figures.experiments import EXPERIMENTS, PLAN, REVIEWS, ROOT, RUNS, Experiment, relative

from rlhf_zoo.errors import ZooError

DOCUMENTS = (
    "README.md",
    "recipes/tiny-world/README.md",
    "recipes/product-remarks/README.md",
    "recipes/remarks-count/README.md",
    "recipes/arguments/README.md",
    "docs/evaluation.md",
    "docs/performance.md",
    "recipes/smollm2-ifeval/README.md",
    "recipes/smollm2-reviews/README.md",
    "docs/plan.md",
)


def main(arguments: Sequence[str] | None = None) -> None:
    names = [experiment.name(part) for experiment in EXPERIMENTS for part in experiment.parts]
    names.append(PLAN)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)} (default: all)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--keep", action="store_true", help="run nothing; write the figures of finished runs, and render")
    only.add_argument("--render", action="store_true", help="only render the docs from the JSON")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(names):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    for experiment in EXPERIMENTS:
        for part in experiment.parts:
            if not options.render and (not options.parts or experiment.name(part) in options.parts):
                if not options.keep:
                    run(experiment, part)
                collect(experiment, part)
    if not (options.render or options.keep) and (not options.parts or PLAN in options.parts):
        keep.write(PLAN, plan_check.check(list(plan_check.SETTINGS)))
    for experiment in EXPERIMENTS:
        plots.draw(experiment)
    plots.draw_reviews(keep.load(REVIEWS).get("runs", []), keep.FOLDER / f"{REVIEWS}.png")
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(tables.render_blocks(path.read_text(encoding="utf-8")), encoding="utf-8")


def run(experiment: Experiment, part: str) -> None:
    """Runs a part of an experiment, without its finished runs. The ablation starts from the run of `ablated_seed`."""
    data = os.environ.get("RLHF_ZOO_DATA", "")
    if experiment.data and not data:
        print(f"{experiment.name(part)}: not run, RLHF_ZOO_DATA is not set", file=sys.stderr)
        return
    runs = str(relative(RUNS))
    if part == "runs":
        for seed in experiment.seeds:
            directory = experiment.run_folder(seed, RUNS)
            if not keep.is_finished(directory):
                _run_command(experiment.run_command(seed, data, runs), directory)
        return
    base = experiment.run_folder(experiment.ablated_seed, RUNS)
    if not keep.is_finished(base):
        print(f"{experiment.name(part)}: not run, {relative(base)} is not finished", file=sys.stderr)
    elif not all(keep.is_finished(variant.directory(base)) for variant in experiment.variants):
        _run_command(experiment.ablate_command(data, runs), base)


def _run_command(words: Sequence[str], directory: Path) -> None:
    # Each run has its own Hub: all publish under the same name, so one would overwrite another.
    environment = {**os.environ, "RLHF_ZOO_HOME": str(RUNS / f"home-{directory.name}")}
    subprocess.run([str(Path(sys.executable).parent / words[0]), *words[1:]], check=True, cwd=ROOT, env=environment)


def collect(experiment: Experiment, part: str) -> None:
    """Writes the figures of a part's finished runs to docs/evidence. Without a finished run, nothing is changed."""
    figures = (keep.read_runs if part == "runs" else keep.read_ablation)(experiment, RUNS)
    if figures["runs"]:
        keep.write(experiment.name(part), figures)
    else:
        print(f"{experiment.name(part)}: {relative(RUNS)} has no finished run, so nothing was written", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
