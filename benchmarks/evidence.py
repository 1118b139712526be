"""Makes the figures of the docs: runs the recipes over seeds, writes their figures to docs/evidence, and renders them.

    python benchmarks/evidence.py             # every recipe; resumes, and does not repeat finished runs
    python benchmarks/evidence.py tiny-world  # one recipe
    python benchmarks/evidence.py --keep      # runs nothing: writes the figures of finished runs, and renders
    python benchmarks/evidence.py --render    # only renders the docs from the committed JSON

product-remarks, remarks-count and arguments need data: set RLHF_ZOO_DATA to the folder that contains pros_cons,
opinion_lexicon and ukp_convarg. The runs are in runs/evidence, or in RLHF_ZOO_EVIDENCE_RUNS.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from figures import keep, plots, tables
from figures.experiments import EXPERIMENTS, INSTRUCTIONS, REVIEWS, ROOT, RUNS, Experiment

from rlhf_zoo.errors import ZooError

DOCUMENTS = (
    "README.md",
    "recipes/tiny-world/README.md",
    "recipes/product-remarks/README.md",
    "recipes/remarks-count/README.md",
    "recipes/arguments/README.md",
    "recipes/smollm2-ifeval/README.md",
    "recipes/smollm2-reviews/README.md",
    "docs/performance.md",
)


def main(arguments: Sequence[str] | None = None) -> None:
    names = [experiment.recipe for experiment in EXPERIMENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"{', '.join(names)} (default: all)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--keep", action="store_true", help="run nothing; write the figures of finished runs, and render")
    only.add_argument("--render", action="store_true", help="only render the docs from the JSON")
    options = parser.parse_args(arguments)
    if unknown := set(options.recipes) - set(names):
        parser.error(f"unknown recipe {', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    for experiment in EXPERIMENTS:
        if not options.render and (not options.recipes or experiment.recipe in options.recipes):
            if not options.keep:
                run(experiment)
            collect(experiment)
    for experiment in EXPERIMENTS:
        plots.draw(experiment)
    plots.draw_reviews(keep.load(REVIEWS).get("runs", []), keep.FOLDER / f"{REVIEWS}.png")
    plots.draw_instructions(keep.load(INSTRUCTIONS).get("runs", []), keep.FOLDER / f"{INSTRUCTIONS}.png")
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(tables.render_blocks(path.read_text(encoding="utf-8")), encoding="utf-8")


def run(experiment: Experiment) -> None:
    """Runs a recipe under each seed whose run is not finished."""
    data = os.environ.get("RLHF_ZOO_DATA", "")
    if experiment.data and not data:
        print(f"{experiment.recipe}: not run, RLHF_ZOO_DATA is not set", file=sys.stderr)
        return
    runs = str(RUNS.relative_to(ROOT) if RUNS.is_relative_to(ROOT) else RUNS)
    for seed in experiment.seeds:
        directory = experiment.run_folder(seed, RUNS)
        if not keep.is_finished(directory):
            words = experiment.run_command(seed, data, runs)
            # Each run has its own Hub: all publish under the same name, so one would overwrite another.
            environment = {**os.environ, "RLHF_ZOO_HOME": str(RUNS / f"home-{directory.name}")}
            command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
            subprocess.run(command, check=True, cwd=ROOT, env=environment)


def collect(experiment: Experiment) -> None:
    """Writes the figures of a recipe's finished runs to docs/evidence. Without a finished run, nothing is changed."""
    figures = keep.read_runs(experiment, RUNS)
    if figures["runs"]:
        keep.write(experiment.recipe, figures)
    else:
        print(f"{experiment.recipe}: {RUNS} has no finished run, so nothing was written", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
