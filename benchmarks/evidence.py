"""Makes every figure of the docs: runs the recipes over seeds, keeps what they say as JSON, and renders it.

    python benchmarks/evidence.py                      # all of it, resumable; what is finished is not run again
    python benchmarks/evidence.py tiny-world-ablation  # one part: RECIPE, RECIPE-ablation, -ensemble,
                                                       # -ensemble-reward, -baselines, -critic, -bf16,
                                                       # -shared-bf16, -sweep, -rounds, or probe-rates, which reads
                                                       # tiny-world's runs
    python benchmarks/evidence.py objections           # what was held against version 1 of the verdict
    python benchmarks/evidence.py gold-2               # the second gold utility: what fools it, and who agrees with it
    python benchmarks/evidence.py remark-judges        # what a judge of product remarks may rest on
    python benchmarks/evidence.py tiny-sums            # sums over seeds, beside what could be had for less
    python benchmarks/evidence.py tiny-sums-twins      # two rewards that are hacked; -four-digits: shorter sums
    python benchmarks/evidence.py plan                 # memory that the planner says, and that runs take
    python benchmarks/evidence.py --keep               # runs nothing: keeps what is finished, and renders it
    python benchmarks/evidence.py --render             # only writes the docs again from the committed JSON

product-remarks, remarks-count and arguments need their text: set RLHF_ZOO_DATA to the folder that holds pros_cons,
opinion_lexicon and ukp_convarg. The runs lie in runs/evidence, or where RLHF_ZOO_EVIDENCE_RUNS says.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import gold
import objections
import plan_check
import remark_judges
import sums
from figures import gain, keep, plots, tables
from figures.experiments import (
    EXPERIMENTS,
    FOUR_DIGITS,
    GOLD,
    METHODS,
    OBJECTIONS,
    PAID_BY,
    PLAN,
    RATES,
    REMARK_JUDGES,
    ROOT,
    RUNS,
    SETTINGS,
    SUMS,
    TWINS,
    Experiment,
    shown,
)

from rlhf_zoo.errors import ZooError
from rlhf_zoo.record import read_json

DOCUMENTS = (
    "README.md",
    "recipes/tiny-world/README.md",
    "recipes/product-remarks/README.md",
    "recipes/remarks-count/README.md",
    "recipes/arguments/README.md",
    "docs/evaluation.md",
    "docs/experiments.md",
    "docs/baselines.md",
    "docs/performance.md",
    "recipes/tiny-sums/README.md",
    "docs/plan.md",
)


SUMS_PARTS = {
    SUMS: (sums.run, sums.kept_runs),
    TWINS: (sums.run_twins, sums.kept_twins),
    FOUR_DIGITS: (sums.run_four, sums.kept_four),
}


def main(arguments: Sequence[str] | None = None) -> None:
    names = [experiment.name(part) for experiment in EXPERIMENTS for part in experiment.parts]
    names += [RATES, GOLD, OBJECTIONS, REMARK_JUDGES, PLAN, *SUMS_PARTS]
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
    if not asked.render and (not asked.parts or RATES in asked.parts):
        if not asked.keep:
            measure_rates()
        if (made := RUNS / f"{RATES}.json").is_file():
            keep.write(RATES, read_json(made))
    if not (asked.render or asked.keep) and (not asked.parts or GOLD in asked.parts):
        keep.write(GOLD, gold.measured())
    if not (asked.render or asked.keep) and (not asked.parts or OBJECTIONS in asked.parts):
        keep.write(OBJECTIONS, objections.measured())
    if not (asked.render or asked.keep) and (not asked.parts or REMARK_JUDGES in asked.parts):
        if keep.finished(remark_judges.RUN):
            keep.write(REMARK_JUDGES, remark_judges.measured())
        else:
            print(f"{REMARK_JUDGES}: not measured, {shown(remark_judges.RUN)} is not finished", file=sys.stderr)
    for part, (train, collected) in SUMS_PARTS.items():
        if asked.render or (asked.parts and part not in asked.parts):
            continue
        if not asked.keep:
            train(_call, asked.seeds or sums.SEEDS)
        if (kept := collected())["runs"]:
            keep.write(part, kept)
    if not (asked.render or asked.keep) and (not asked.parts or PLAN in asked.parts):
        keep.write(PLAN, plan_check.check(list(plan_check.SETTINGS)))
    for experiment in EXPERIMENTS:
        plots.draw(experiment)
    plots.draw_sums(keep.load(SUMS).get("runs", []), keep.FOLDER / f"{SUMS}.png")
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
    base = experiment.directory(experiment.ablated if part == "ablation" else experiment.seeds[0], RUNS)
    if part == "runs":
        for seed in (one for one in experiment.seeds if one in seeds):
            directory = experiment.directory(seed, RUNS)
            if not keep.finished(directory):
                _call(experiment.run(seed, data, runs), directory)
            if experiment.gold:
                gain.measured(directory, directory)
        return
    if not keep.finished(base):
        print(f"{experiment.name(part)}: not run, {shown(base)} is not finished", file=sys.stderr)
        return
    if part == "ablation":
        directories = [variant.directory(base) for variant in experiment.variants]
        if not all(map(keep.finished, directories)):
            _call(experiment.ablate(data, runs), base)
        if experiment.gold:
            for directory in directories:
                gain.measured(directory, base)
        return
    if part in ("ensemble", "sweep"):
        if not (base / part / "overview.json").is_file():
            _call(getattr(experiment, part)(data, runs), base)
        return
    if part == "rounds":
        for seed in (one for one in experiment.setting_seeds if one in seeds):
            directory = experiment.directory(seed, RUNS)
            if keep.finished(directory) and not (directory / "rounds.json").is_file():
                _call(experiment.rounds(seed, data, runs), directory)
        return
    if part == "ensemble-reward":
        for by in PAID_BY:
            pay(experiment, by, data, runs)
        return
    if part in SETTINGS:
        for seed in (one for one in experiment.setting_seeds if one in seeds):
            set_and_run(experiment, part, seed, data, runs)
        return
    if not all(keep.finished(variant.directory(base)) for variant in experiment.spread):
        _call(experiment.repeat(data, runs), base)
    for method in METHODS:
        if not (base / "baseline" / method / "baseline.json").is_file():
            _call(experiment.baseline(method, data, runs), base)


def measure_rates() -> None:
    """How often the verdict accuses honest policies, those that were trained among them, and finds hackers."""
    made = RUNS / f"{RATES}.json"
    if made.is_file():
        return
    made.parent.mkdir(parents=True, exist_ok=True)
    script = str(ROOT / "benchmarks" / "probe_rates.py")
    subprocess.run([sys.executable, script, "--json", str(made)], check=True, cwd=ROOT)


def set_and_run(experiment: Experiment, part: str, seed: int, data: str, runs: str) -> None:
    """Runs PPO with the setting of a part from the SFT and reward model of that seed's run."""
    own, other = experiment.directory(seed, RUNS), experiment.set_directory(part, seed, RUNS)
    if keep.finished(other) or not keep.finished(own):
        return
    _begin(own, other, ("data", "sft", "reward"))
    _call(experiment.with_setting(part, seed, data, runs), other)


def pay(experiment: Experiment, by: str, data: str, runs: str) -> None:
    """Runs PPO under the small β from the first seed's SFT policy and reward models, where its ensemble is trained."""
    own, paid = experiment.directory(experiment.seeds[0], RUNS), experiment.paid_directory(by, RUNS)
    if keep.finished(paid):
        return
    if not (own / "ensemble" / "overview.json").is_file():
        print(f"{shown(paid)}: not run, {shown(own)} has no ensemble", file=sys.stderr)
        return
    _begin(own, paid, ("data", "sft", "reward", "ensemble"))
    _call(experiment.pay(by, data, runs), paid)


def _begin(own: Path, other: Path, parts: Sequence[str]) -> None:
    """A run that begins with the stages of another: the command would train them to the same bits."""
    if not (other / parts[-1]).is_dir():
        for part in parts:
            shutil.copytree(own / part, other / part, dirs_exist_ok=True)


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
        "ensemble-reward": keep.kept_paid,
        "baselines": keep.kept_baselines,
        "sweep": keep.kept_sweep,
        "rounds": keep.kept_rounds,
        **{part: partial(keep.kept_setting, part) for part in SETTINGS},
    }
    kept = makers[part](experiment, RUNS)
    if any(kept.get(key) for key in ("runs", "methods", "models", "over_seeds")):
        keep.write(experiment.name(part), kept)
    else:
        print(f"{experiment.name(part)}: nothing finished in {shown(RUNS)}, so nothing is kept", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
