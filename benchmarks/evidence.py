"""Makes every figure of the docs: runs the recipes over seeds, keeps what they say as JSON, and renders it.

    python benchmarks/evidence.py                 # all of it, resumable; runs that are finished are not run again
    python benchmarks/evidence.py tiny-world      # one experiment
    python benchmarks/evidence.py --render        # only write the docs again from the committed JSON

product-remarks needs its text: set RLHF_ZOO_DATA to the folder that holds pros_cons and opinion_lexicon.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "docs" / "evidence"
RUNS = ROOT / "runs" / "evidence"
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Experiment:
    """One recipe over seeds; `base` names the experiment whose data, SFT and reward model it shares."""

    name: str
    recipe: str
    flags: tuple[str, ...] = ()
    base: str | None = None
    needs_data: bool = False
    seeds: tuple[int, ...] = SEEDS


EXPERIMENTS = (
    Experiment("tiny-world", "tiny-world", seeds=(1, 2)),
    Experiment(
        "tiny-world-beta-0",
        "tiny-world",
        ("--ppo.kl_coef", "0", "--ppo.total_episodes", "7680"),
        base="tiny-world",
        seeds=(1,),
    ),
    Experiment("product-remarks", "product-remarks", needs_data=True),
    Experiment(
        "product-remarks-beta-0",
        "product-remarks",
        ("--ppo.kl_coef", "0", "--ppo.total_episodes", "5120"),
        base="product-remarks",
        needs_data=True,
        seeds=(1,),
    ),
)


def data_flags(data: str) -> tuple[str, ...]:
    return ("--dataset_name", f"{data}/pros_cons", "--evaluation.lexicon", f"{data}/opinion_lexicon")


def command(experiment: Experiment, seed: int, data: str) -> list[str]:
    given = data_flags(data) if experiment.needs_data else ()
    directory = (RUNS / f"{experiment.name}-{seed}").relative_to(ROOT)
    return ["rlhf-zoo", "run", experiment.recipe, "--output_dir", str(directory), "--hub", "local", "--seed", str(seed),
            *given, *experiment.flags]  # fmt: skip


def run(experiment: Experiment, seed: int) -> dict[str, Any]:
    """Runs one seed unless its summary is there, and returns what is kept of it."""
    directory = RUNS / f"{experiment.name}-{seed}"
    if not (directory / "summary.json").is_file():
        if experiment.base is not None and not directory.exists():
            for stage in ("data", "sft", "reward"):
                shutil.copytree(RUNS / f"{experiment.base}-{seed}" / stage, directory / stage)
        data = os.environ.get("RLHF_ZOO_DATA", "")
        words = command(experiment, seed, data)
        # A Hub of its own for each run: they publish under one name, and none may overwrite another.
        environment = {**os.environ, "RLHF_ZOO_HOME": str(RUNS / f"home-{experiment.name}-{seed}")}
        subprocess.run([str(Path(sys.executable).parent / words[0]), *words[1:]], check=True, cwd=ROOT, env=environment)
    return kept(directory, experiment, seed)


def kept(directory: Path, experiment: Experiment, seed: int) -> dict[str, Any]:
    summary = json.loads((directory / "summary.json").read_text())
    evaluation = json.loads((directory / "eval" / "evaluation.json").read_text())
    rows = [json.loads(line) for line in (directory / "ppo" / "metrics.jsonl").read_text().splitlines()]
    curve = [
        {"step": row["step"], **{name: round(row[key], 4) for name, key in CURVE.items() if key in row}}
        for row in rows
        if "objective/kl" in row
    ]
    for name in ("repos", "hub", "seconds"):  # of this machine and its load: they say nothing about the recipe
        summary.pop(name, None)
    judges = {
        name: {key: judge[key] for key in ("sft", "ppo", "win_rate")} for name, judge in evaluation["judges"].items()
    }
    words = command(experiment, seed, "$RLHF_ZOO_DATA")
    return {**summary, "judges": judges, "curve": curve, "command": " ".join(words)}


CURVE = {"reward": "objective/score", "kl": "objective/kl", "gold": "rewards/gold"}


# Rendering: the tables between markers in the docs are written here and checked by a test.


def load(name: str) -> list[dict[str, Any]]:
    path = KEPT / f"{name}.json"
    return json.loads(path.read_text())["runs"] if path.is_file() else []


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, and the range over seeds."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


ROWS = (
    ("reward (the proxy)", "reward", 2),
    ("judge", "judge", 2),
    ("KL to SFT, nats per completion", "kl", 2),
    ("length, tokens", "length", 1),
    ("ended by itself, share", "eos_rate", 3),
    ("distinct-2", "distinct_2", 2),
    ("repetition", "repetition", 3),
)


def table(name: str) -> str:
    """One experiment beside its β = 0 twin, as a Markdown table: mean over seeds, range in brackets."""
    runs, cut = load(name), load(f"{name}-beta-0")
    columns = [("SFT", runs, "sft"), ("PPO", runs, "ppo")]
    if cut:
        fewer = "" if len(cut) == len(runs) else f" (seed {', '.join(str(run['seed']) for run in cut)})"
        columns.append((f"PPO, β = 0, {len(cut[0]['curve'])} updates{fewer}", cut, "ppo"))
    lines = ["| held-out prompts | " + " | ".join(title for title, _, _ in columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    for label, key, digits in ROWS:
        # The reference against itself: what is left of zero is rounding.
        cells = [
            "0" if (key, side) == ("kl", "sft") else spread([run[side][key] for run in group], digits)
            for _, group, side in columns
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    wins = [spread([run["win_rate"]["value"] for run in group], 3) for _, group, side in columns if side == "ppo"]
    control = spread([run["control"]["value"] for run in runs], 3)
    lines.append(f"| win rate over SFT, by the judge | {control} (SFT itself, other seed) | " + " | ".join(wins) + " |")
    for judge in list(runs[0]["judges"])[1:]:
        wins = [
            spread([run["judges"][judge]["win_rate"]["value"] for run in group], 3)
            for _, group, side in columns
            if side == "ppo"
        ]
        lines.append(f"| win rate over SFT, by the {judge} | | " + " | ".join(wins) + " |")
    accuracy = spread([run["reward_model"]["accuracy"] for run in runs], 3)
    seeds = ", ".join(str(run["seed"]) for run in runs)
    first = runs[0]
    lowest = min(run["win_rate"]["ci95"][0] for run in runs)
    lines += [
        "",
        f"Seeds {seeds}: mean, and the range in brackets; {first['win_rate']['n']} completions each. Reward model: "
        f"accuracy {accuracy} on {first['reward_model']['n']} held-out pairs. Lowest end of a win rate's 95% interval: "
        f"{lowest:.3f}. Peak memory: {max(run['peak_rss_mib'] for run in runs):.0f} MiB.",
        "",
        f"Made by `{first['command']}` and the other seeds: `make evidence`.",
    ]
    return "\n".join(lines)


def rendered(text: str) -> str:
    """A document with every block between `<!-- evidence:NAME -->` and `<!-- /evidence -->` written anew."""
    parts = text.split("<!-- evidence:")
    out = [parts[0]]
    for part in parts[1:]:
        name, _, rest = part.partition(" -->")
        _, _, after = rest.partition("<!-- /evidence -->")
        out.append(f"{name} -->\n{table(name)}\n<!-- /evidence -->{after}")
    return "<!-- evidence:".join(out)


def plot(name: str) -> None:
    """Proxy, gold where it is known, and KL against the update, seed by seed; β = 0 beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = [(f"{name}: the recipe's β", load(name)), (f"{name}: β = 0", load(f"{name}-beta-0"))]
    pairs = [(title, runs) for title, runs in pairs if runs]
    figure, axes = pyplot.subplots(1, len(pairs), figsize=(5.2 * len(pairs), 3.8), squeeze=False, layout="constrained")
    for panel, (title, runs) in zip(axes[0], pairs, strict=True):
        right = panel.twinx()
        for run_ in runs:
            steps = [row["step"] for row in run_["curve"]]
            first = run_ is runs[0]
            panel.plot(steps, [row["reward"] for row in run_["curve"]], color="#1f5fa8", alpha=0.8,
                       label="reward model (proxy)" if first else None)  # fmt: skip
            if "gold" in run_["curve"][0]:
                panel.plot(steps, [row["gold"] for row in run_["curve"]], color="#2d7d46", alpha=0.8,
                           label="gold utility (truth)" if first else None)  # fmt: skip
            right.plot(steps, [row["kl"] for row in run_["curve"]], color="#c8501e", alpha=0.7, linestyle="--",
                       label="KL (right)" if first else None)  # fmt: skip
        panel.set_title(title)
        panel.set_xlabel("PPO update")
        panel.set_ylabel("reward, gold utility")
        right.set_ylabel("KL to SFT, nats per completion")
        handles = [*panel.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
        panel.legend(handles=handles, frameon=False, fontsize=8)
    figure.savefig(KEPT / f"{name}.png", dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help="names; all when left out")
    parser.add_argument("--render", action="store_true", help="only write the docs again from the JSON")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(SEEDS), help="only these of each experiment's seeds"
    )
    arguments = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    chosen = [e for e in EXPERIMENTS if not arguments.experiments or e.name in arguments.experiments]
    for experiment in [] if arguments.render else chosen:
        if experiment.needs_data and not os.environ.get("RLHF_ZOO_DATA"):
            print(f"{experiment.name}: skipped, RLHF_ZOO_DATA is not set", file=sys.stderr)
            continue
        runs = [run(experiment, seed) for seed in experiment.seeds if seed in arguments.seeds]
        text = json.dumps({"schema": 1, "experiment": experiment.name, "runs": runs}, indent=1) + "\n"
        (KEPT / f"{experiment.name}.json").write_text(text)
    for name in ("tiny-world", "product-remarks"):
        if load(name):
            plot(name)
    for document in DOCUMENTS:
        path = ROOT / document
        if path.is_file():
            path.write_text(rendered(path.read_text()))


DOCUMENTS = ("README.md", "recipes/tiny-world/README.md", "recipes/product-remarks/README.md")

if __name__ == "__main__":
    main()
