"""Scores the base of smollm2-ifeval and the policies of its runs on IFEval and IFBench, and keeps what they score.

    RLHF_ZOO_DATA=FOLDER python benchmarks/instructions.py runs/real --hub local
    python benchmarks/instructions.py RUN "with repetition penalized=RUN" --temperature 1 --limit 100

Each RUN is a run of the recipe; of one that was interrupted, the last checkpoint is scored. A run with other settings
than the recipe's gets a label, which the table shows; runs with one label have different seeds. Without a run the base
alone is scored; with --add the base and all other runs stay as they were kept, and only the given runs are scored and
added. Prompts are read from FOLDER/ifeval and FOLDER/ifbench. Answers are greedy unless --temperature says otherwise.
They are kept in --answers, so a second call goes on where the first one stopped. Without --limit and --temperature, and
with IFEval, the figures are written to docs/evidence/smollm2-ifeval.json, and `python benchmarks/evidence.py --render`
puts them into the docs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ifeval
from bench import cpu_name
from figures import keep
from figures.experiments import ROOT

from rlhf_zoo.errors import ZooError
from rlhf_zoo.fileio import read_json
from rlhf_zoo.hub.client.connect import Hub, choose_hub, connect
from rlhf_zoo.rewards.form import Repetition
from rlhf_zoo.rewards.prose import grammar
from rlhf_zoo.rewards.relevance import relevance
from rlhf_zoo.runs.record import StageRecord

NAME = "smollm2-ifeval"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
BENCHMARKS = {"IFEval": "ifeval", "IFBench": "ifbench"}
#: One text for every prompt, without a meaning: what it scores is what the verifiers cannot see.
CONSTANT = "<<my answer>>\n\n* *my answer* is yes [a] [b] [c]\n* *this* and *that*\n* *more*\n***\np.s. thank you"
#: What verifiers do not see: whether an answer is about its prompt, and in good English.
JUDGES: dict[str, Any] = {"relevance": relevance, "grammar": grammar}
PAIRS = 10
TOKENS = 320
Figures = dict[str, Any]
Rows = Sequence[ifeval.Row]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=labeled, metavar="[LABEL=]RUN", help="a run of the recipe (label: PPO)")
    parser.add_argument("--add", action="store_true", help="add these runs to the kept figures")
    parser.add_argument("--hub", default="local", help="where the base is: 'local' or an address")
    parser.add_argument(
        "--answers", type=Path, default=ROOT / "runs" / "instructions", help="the folder of the answers"
    )
    parser.add_argument(
        "--benchmarks", nargs="+", choices=BENCHMARKS, default=[*BENCHMARKS], help="score only these (default: both)"
    )
    parser.add_argument("--limit", type=int, help="so many prompts of each benchmark, drawn at random by a fixed seed")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--judges", nargs="*", choices=JUDGES, default=[*JUDGES], help="what else scores the answers")
    parser.add_argument("--verifiers", metavar="PACKAGE", help="also verify IFEval's kinds by this package")
    options = parser.parse_args(arguments)
    if not (data := os.environ.get("RLHF_ZOO_DATA")):
        parser.error("RLHF_ZOO_DATA is not set: give the folder that holds ifeval and ifbench")
    if options.verifiers is not None:
        try:
            ifeval.google_verifiers(options.verifiers)
        except ModuleNotFoundError as error:
            parser.error(f"--verifiers {options.verifiers}: {error}; install the package that has it")
    prompts = {
        name: ifeval.read_rows(Path(data) / BENCHMARKS[name] / "test.jsonl.gz", options.limit)
        for name in options.benchmarks
    }
    kept = keep.load(NAME) if options.add else None
    if kept == {}:
        parser.error(f"--add: docs/evidence/{NAME}.json does not exist; leave --add out to measure the base as well")
    policies = policies_of(options.runs, options.answers)
    document: Figures = {
        "schema": 2,
        "machine": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    with connect(choose_hub(options.hub, push_to_hub=False)) as hub:
        measured = [measure(policy, prompts, hub, options) for policy in (policies if kept is None else policies[1:])]
    document["policies"] = measured
    document["runs"] = [run_figures(label, run) for label, run in options.runs]
    if kept is None:
        document["policies"].append({"policy": "one text", "text": CONSTANT, **constant(prompts, options)})
    else:
        *others, one_text = kept["policies"]
        document["policies"] = [*_with_seeds_together([*_without(others, measured), *measured]), one_text]
        document["runs"] = _with_seeds_together([*_without(kept["runs"], document["runs"]), *document["runs"]])
    if options.limit is None and not options.temperature and "IFEval" in prompts:
        keep.write(NAME, document)
        print(f"Kept in docs/evidence/{NAME}.json.")


def _without(kept: Sequence[Figures], measured: Sequence[Figures]) -> list[Figures]:
    """Leaves out what was measured again: figures with the same label and seed."""
    again = {(figures["policy"], figures.get("seed")) for figures in measured}
    return [figures for figures in kept if (figures["policy"], figures.get("seed")) not in again]


def _with_seeds_together(figures: Sequence[Figures]) -> list[Figures]:
    """Orders figures by label, in the order in which the labels first appear, and by seed."""
    labels = list(dict.fromkeys(each["policy"] for each in figures))
    return sorted(figures, key=lambda each: (labels.index(each["policy"]), each.get("seed", 0)))


def labeled(argument: str) -> tuple[str, Path]:
    """Parses LABEL=RUN, or RUN of the label PPO."""
    label, _, run = argument.rpartition("=")
    return label or "PPO", Path(run).resolve()


def policies_of(runs: Sequence[tuple[str, Path]], answers: Path) -> list[Figures]:
    """Lists the base and each run's policy: the name in the table, the model, and the folder of its answers.

    Raises:
        ZooError: A run has no checkpoint or starts from another model than the recipe's, or two have the same label and
            seed.
    """
    policies: list[Figures] = [{"policy": "base", "model": BASE, "answers": answers / "base"}]
    for label, run in runs:
        record = StageRecord(run / "ppo")
        checkpoint, document = record.chosen_checkpoint() or record.last_checkpoint(), record.read()
        if checkpoint is None:
            raise ZooError(f"{run} has no checkpoint of {NAME}: run it first.")
        if (base := document["resolved"]["model_name_or_path"]) != BASE:
            raise ZooError(f"{run} starts from {base}, and not from {BASE}: give runs of {NAME}.")
        seed, folder = document["seed"], answers / re.sub(r"\W+", "-", f"{label} {document['seed']}")
        if any(policy["answers"] == folder for policy in policies):
            raise ZooError(f"Two runs are labeled {label!r} with seed {seed}: give one another label, as in x={run}.")
        policies.append({"policy": label, "seed": seed, "model": str(checkpoint), "answers": folder})
    return policies


def answers_file(policy: Mapping[str, Any], benchmark: str, options: argparse.Namespace) -> Path:
    """The file of a policy's answers to a benchmark, of this temperature and so many prompts."""
    settings = f"t{options.temperature:g}{'' if options.limit is None else f'-{options.limit}'}"
    return policy["answers"] / f"{BENCHMARKS[benchmark]}-{settings}.jsonl"


def measure(policy: Mapping[str, Any], prompts: Mapping[str, Rows], hub: Hub, options: argparse.Namespace) -> Figures:
    """Answers and scores both benchmarks by one policy."""
    figures: Figures = {key: value for key, value in policy.items() if key in ("policy", "seed")}
    for name, rows in prompts.items():
        path = answers_file(policy, name, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        answers = ifeval.resumed(
            path,
            rows,
            lambda done, rows=rows: ifeval.sampled(
                policy["model"], hub, rows, done,
                temperature=options.temperature, batch=options.batch, tokens=TOKENS,
            ),
        )  # fmt: skip
        seconds = time.monotonic() - start
        figures[name] = scored(rows, answers, options)
        print(f"{policy['policy']} {policy.get('seed', '')} on {name}: {shown(figures[name])}, {seconds:.0f} s")
    return figures


def scored(rows: Rows, answers: Sequence[ifeval.Answer], options: argparse.Namespace) -> Figures:
    """Scores answers, by another package's verifiers and by the judges too, and says how repetitive they are."""
    figures = ifeval.score(rows, answers)
    requests, texts = [ifeval.messages(row) for row in rows], [text for text, _ in answers]
    for name, judge in {
        "repetition": Repetition(unit="words"),
        **{name: JUDGES[name] for name in options.judges},
    }.items():
        scores = judge(requests, texts)
        figures[name] = sum(scores) / len(scores)
    if options.verifiers is not None:
        average = ifeval.score(rows, answers, options.verifiers)["average"]
        figures["second"] = {"verifiers": options.verifiers, "average": average}
    return figures


def constant(prompts: Mapping[str, Rows], options: argparse.Namespace) -> Figures:
    return {name: scored(rows, [(CONSTANT, True)] * len(rows), options) for name, rows in prompts.items()}


def run_figures(label: str, run: Path) -> Figures:
    """Reads what a run says of itself: its own test split, KL, verdict and seconds."""
    record = StageRecord(run / "ppo")
    ppo, rows = record.read(), record.metrics()
    command = ppo["command"].replace(str(run.parent), "runs")
    # Of the updates, and not of the stage: a run may have been killed and resumed.
    seconds = sum(value for row in rows for name, value in row.items() if name.startswith("time/"))
    figures: Figures = {"policy": label, "seed": ppo["seed"], "command": command, "seconds": seconds}
    if (run / "eval" / "evaluation.json").is_file():
        evaluation = read_json(run / "eval" / "evaluation.json")
        for policy in ("sft", "ppo"):
            names = ("reward", "judge", "kl", "length", "eos_rate", "repetition")
            figures[policy] = {key: evaluation[policy][key] for key in names}
            for judge, document in evaluation["judges"].items():
                figures[policy][judge] = document[policy]
        figures["verdict"] = evaluation["verdict"]
    figures["pairs"] = pairs(run)
    return figures


def pairs(run: Path) -> list[Figures]:
    """Draws own test prompts of a run at random by a fixed seed, with both answers as they are."""
    path = run / "eval" / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    drawn = random.Random(0).sample(rows, min(PAIRS, len(rows)))
    return [
        {"prompt": row["prompt"], "base": row["sft"]["completion"], "ppo": row["ppo"]["completion"]} for row in drawn
    ]


def shown(figures: Figures) -> str:
    """The figures of a benchmark in a line."""
    return f"{100 * figures['average']:.1f}, {figures['words']:.0f} words, repetition {-figures['repetition']:.2f}"


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped; the same command goes on from there.")
