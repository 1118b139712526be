"""Makes every figure of the docs: runs the recipes over seeds, keeps what they say as JSON, and renders it.

    python benchmarks/evidence.py                      # all of it, resumable; what is finished is not run again
    python benchmarks/evidence.py tiny-world-ablation  # one part: RECIPE, RECIPE-ablation, -ensemble, -baselines
    python benchmarks/evidence.py tiny-sums            # sums over seeds, beside what could be had for less
    python benchmarks/evidence.py plan                 # memory that the planner says, and that runs take
    python benchmarks/evidence.py --keep               # runs nothing: keeps what is finished, and renders it
    python benchmarks/evidence.py --render             # only writes the docs again from the committed JSON

product-remarks, remarks-count and arguments need their text: set RLHF_ZOO_DATA to the folder that holds pros_cons,
opinion_lexicon and ukp_convarg. The runs lie in runs/evidence, or where RLHF_ZOO_EVIDENCE_RUNS says.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import plan_check
import sums
from figures import keep, plots, tables
from figures.experiments import EXPERIMENTS, METHODS, PLAN, REVIEWS, ROOT, RUNS, SUMS, Experiment, shown

from rlhf_zoo.errors import ZooError

DOCUMENTS = (
    "README.md",
    "recipes/tiny-world/README.md",
    "recipes/product-remarks/README.md",
    "recipes/remarks-count/README.md",
    "recipes/arguments/README.md",
    "docs/evaluation.md",
    "docs/baselines.md",
    "docs/performance.md",
    "recipes/tiny-sums/README.md",
    "recipes/smollm2-ifeval/README.md",
    "recipes/smollm2-reviews/README.md",
    "docs/plan.md",
    "docs/ledger.md",
    "docs/verdict-before-after.md",
)


def main(arguments: Sequence[str] | None = None) -> None:
    names = [experiment.name(part) for experiment in EXPERIMENTS for part in experiment.parts]
    names += [SUMS, PLAN]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; all when left out")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--keep", action="store_true", help="run nothing; keep what is finished, and render it")
    only.add_argument("--render", action="store_true", help="only write the docs again from the JSON")
    parser.add_argument("--seeds", type=int, nargs="+", help="run only these of the recipes' seeds")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.parts) - set(names):
        parser.error(f"no part is called {', '.join(sorted(unknown))}: the parts are {', '.join(names)}")
    for experiment in EXPERIMENTS:
        for part in experiment.parts:
            if not asked.render and (not asked.parts or experiment.name(part) in asked.parts):
                if not asked.keep:
                    run(experiment, part, asked.seeds or experiment.seeds)
                collect(experiment, part)
    if not asked.render and (not asked.parts or SUMS in asked.parts):
        if not asked.keep:
            sums.run(_call, asked.seeds or sums.SEEDS)
        if (kept := sums.kept_runs())["runs"]:
            keep.write(SUMS, kept)
    if not (asked.render or asked.keep) and (not asked.parts or PLAN in asked.parts):
        keep.write(PLAN, plan_check.check(list(plan_check.SETTINGS)))
    for experiment in EXPERIMENTS:
        plots.draw(experiment)
    plots.draw_sums(keep.load(SUMS).get("runs", []), keep.FOLDER / f"{SUMS}.png")
    plots.draw_reviews(keep.load(REVIEWS).get("runs", []), keep.FOLDER / f"{REVIEWS}.png")
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(tables.rendered(path.read_text(encoding="utf-8")), encoding="utf-8")


def run(experiment: Experiment, part: str, seeds: Sequence[int]) -> None:
    """Runs what is not finished of a part. Ablation and baselines need the run of the recipe's first seed."""
    data = os.environ.get("RLHF_ZOO_DATA", "")
    if experiment.data and not data:
        print(f"{experiment.name(part)}: not run, RLHF_ZOO_DATA is not set", file=sys.stderr)
        return
    runs = str(shown(RUNS))
    base = experiment.directory(experiment.ablated_seed if part == "ablation" else experiment.seeds[0], RUNS)
    if part == "runs":
        for seed in (one for one in experiment.seeds if one in seeds):
            directory = experiment.directory(seed, RUNS)
            if not keep.finished(directory):
                _call(experiment.run(seed, data, runs), directory)
        return
    if not keep.finished(base):
        print(f"{experiment.name(part)}: not run, {shown(base)} is not finished", file=sys.stderr)
        return
    if part == "ablation":
        directories = [variant.directory(base) for variant in experiment.variants]
        if not all(map(keep.finished, directories)):
            _call(experiment.ablate(data, runs), base)
        return
    if part == "ensemble":
        if not (base / part / "overview.json").is_file():
            _call(experiment.ensemble(data, runs), base)
        return
    if not all(keep.finished(variant.directory(base)) for variant in experiment.spread):
        _call(experiment.repeat(data, runs), base)
    for method in METHODS:
        if not (base / "baseline" / method / "baseline.json").is_file():
            _call(experiment.baseline(method, data, runs), base)


def _call(words: Sequence[str], directory: Path) -> None:
    # A Hub of its own for each run: they publish under one name, and none may overwrite another.
    environment = {**os.environ, "RLHF_ZOO_HOME": str(RUNS / f"home-{directory.name}")}
    subprocess.run([str(Path(sys.executable).parent / words[0]), *words[1:]], check=True, cwd=ROOT, env=environment)


def collect(experiment: Experiment, part: str) -> None:
    """Keeps what is finished of a part; where nothing is, what was kept before stays."""
    makers = {
        "runs": keep.kept_runs,
        "ablation": keep.kept_ablation,
        "ensemble": keep.kept_ensemble,
        "baselines": keep.kept_baselines,
    }
    kept = makers[part](experiment, RUNS)
    if any(kept.get(key) for key in ("runs", "methods", "models")):
        keep.write(experiment.name(part), kept)
    else:
        print(f"{experiment.name(part)}: nothing finished in {shown(RUNS)}, so nothing is kept", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
