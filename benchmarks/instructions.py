"""Scores the base of smollm2-ifeval and the policies of its runs on IFEval and IFBench, and keeps the scores.

    RLHF_ZOO_DATA=FOLDER python benchmarks/instructions.py runs/real --hub local
    python benchmarks/instructions.py RUN "with repetition penalized=RUN" --temperature 1 --limit 100

Each RUN is a run of smollm2-ifeval or smollm2-ifeval-sft, whose SFT policy is scored as well. Its released checkpoint
is scored, or the last one if it was interrupted; RUN/ppo/checkpoint-N is scored without the run's own figures. A run
with other settings than the recipe's needs a label, and runs with the same label need different seeds. Without a run,
only the base is scored. With --add, the figures of the base and of all other runs are kept. Prompts are read from
FOLDER/ifeval and FOLDER/ifbench. A second call resumes from the answers in the folder --answers. If IFEval is scored
without --limit, the figures are written to docs/evidence/smollm2-ifeval.json, and `python benchmarks/evidence.py
--render` renders them in the docs. Those of a --temperature are kept beside greedy ones, which must be measured first.
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
from figures.experiments import INSTRUCTIONS, ROOT

from rlhf_zoo.errors import ZooError
from rlhf_zoo.fileio import read_json
from rlhf_zoo.hub.client.connect import Hub, choose_hub, connect
from rlhf_zoo.rewards.form import Repetition
from rlhf_zoo.rewards.prose import grammar
from rlhf_zoo.rewards.relevance import relevance
from rlhf_zoo.runs.answers import Answer, resume_answers, sample_answers
from rlhf_zoo.runs.corpora.instructions import prepare
from rlhf_zoo.runs.record import StageRecord

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
BENCHMARKS = {"IFEval": "ifeval", "IFBench": "ifbench"}
#: A meaningless answer to every prompt: its score shows what the verifiers do not notice.
CONSTANT = "<<my answer>>\n\n* *my answer* is yes [a] [b] [c]\n* *this* and *that*\n* *more*\n***\np.s. thank you"
#: Judges of what verifiers do not check: whether an answer is about its prompt, and in good English.
JUDGES: dict[str, Any] = {"relevance": relevance, "grammar": grammar}
#: Name in a run's kept curve -> metric of the training log.
CURVE = {"step": "step", "followed": "instructions_followed/all", "kl": "objective/kl"}
PAIR_COUNT = 10
TOKENS = 320
Figures = dict[str, Any]
Rows = Sequence[ifeval.Row]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="*", type=parse_run, metavar="[LABEL=]RUN", help="run of the recipe (default label: PPO)"
    )
    parser.add_argument("--add", action="store_true", help="add these runs to the kept figures")
    parser.add_argument("--hub", default="local", help="the Hub with the base: 'local' or an address")
    parser.add_argument("--answers", type=Path, default=ROOT / "runs" / "instructions", help="folder for the answers")
    parser.add_argument(
        "--benchmarks", nargs="+", choices=BENCHMARKS, default=[*BENCHMARKS], help="score only these (default: both)"
    )
    parser.add_argument("--limit", type=int, help="number of prompts of each benchmark (default: all)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--judges", nargs="*", choices=JUDGES, default=[*JUDGES], help="score the answers with these, too"
    )
    parser.add_argument("--verifiers", metavar="PACKAGE", help="also verify IFEval's kinds with this package")
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
    kept = keep.load(INSTRUCTIONS) if options.add or options.temperature else {}
    if options.add and not kept:
        parser.error(
            f"--add: docs/evidence/{INSTRUCTIONS}.json does not exist; leave --add out to measure the base as well"
        )
    policies = policies_of(options.runs, options.answers)[1 if options.add else 0 :]
    is_kept = options.limit is None and "IFEval" in prompts
    if is_kept and options.temperature:
        for policy in policies:  # before anything is sampled
            _greedy_row(kept, policy)
    with connect(choose_hub(options.hub, push_to_hub=False)) as hub:
        measured = [measure(policy, prompts, hub, options) for policy in policies]
    if not is_kept:
        return
    if options.temperature:
        for figures in measured:
            _greedy_row(kept, figures)["sampled"] = {"temperature": options.temperature, **figures}
        document = kept
    else:
        document = {
            "schema": 2,
            "machine": cpu_name(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **_greedy_figures(kept, measured, prompts, options),
            "one_text_on_test_split": score_constant_on_test_split(),
        }
    keep.write(INSTRUCTIONS, document)
    print(f"Kept in docs/evidence/{INSTRUCTIONS}.json.")


def _greedy_row(kept: Figures, policy: Mapping[str, Any]) -> Figures:
    """Returns the kept figures of a policy.

    Raises:
        ZooError: The policy has none.
    """
    key = (policy["policy"], policy.get("seed"))
    for row in kept.get("policies", ()):
        if (row["policy"], row.get("seed")) == key:
            return row
    raise ZooError(f"{policy['policy']} has no greedy figures yet: score it without --temperature first.")


def _greedy_figures(
    kept: Figures, measured: Sequence[Figures], prompts: Mapping[str, Rows], options: argparse.Namespace
) -> Figures:
    """Returns the policies and runs of the document: with --add the kept ones too, else one text as the last."""
    runs = [run_figures(label, run) for label, run in options.runs if not is_checkpoint(run)]
    if not options.add:
        one_text = {"policy": "one text", "text": CONSTANT, **score_constant(prompts, options)}
        return {"policies": [*measured, one_text], "runs": runs}
    *kept_policies, one_text = kept["policies"]
    return {"policies": [*_merge(kept_policies, measured), one_text], "runs": _merge(kept["runs"], runs)}


def _merge(kept: Sequence[Figures], measured: Sequence[Figures]) -> list[Figures]:
    """Replaces kept figures by new ones of the same label and seed; sorts by first use of the label, then by seed."""
    measured_keys = {(row["policy"], row.get("seed")) for row in measured}
    rows = [*(row for row in kept if (row["policy"], row.get("seed")) not in measured_keys), *measured]
    labels = list(dict.fromkeys(row["policy"] for row in rows))
    return sorted(rows, key=lambda row: (labels.index(row["policy"]), row.get("seed", 0)))


def parse_run(argument: str) -> tuple[str, Path]:
    """Parses LABEL=RUN, or RUN with the label PPO."""
    label, _, run = argument.rpartition("=")
    return label or "PPO", Path(run).resolve()


def policies_of(runs: Sequence[tuple[str, Path]], answers: Path) -> list[Figures]:
    """Lists the base and each run's policies: the name in the table, the model, and the folder for its answers.

    Raises:
        ZooError: A run has no checkpoint, a run starts from a model other than the recipe's, or two runs have the same
            label and seed.
    """
    policies: list[Figures] = [{"policy": "base", "model": BASE, "answers": answers / "base"}]
    for label, path in runs:
        run = path.parents[1] if is_checkpoint(path) else path
        start = None if is_checkpoint(path) else sft_name(label, run)
        names = {"ppo": label} if start is None else {"sft": start, "ppo": label}
        for stage, name in names.items():
            record = StageRecord(run / stage)
            checkpoint = path if is_checkpoint(path) else record.chosen_checkpoint() or record.last_checkpoint()
            if checkpoint is None or not checkpoint.is_dir():
                raise ZooError(f"{path} has no checkpoint of the stage {stage}: run it first.")
            if (model := base_of(run)) != BASE:
                raise ZooError(f"{run} starts from {model} instead of {BASE}: give runs of {INSTRUCTIONS}.")
            seed = record.read()["seed"]
            folder = answers / re.sub(r"\W+", "-", f"{name} {seed}")
            if any(policy["answers"] == folder for policy in policies):
                raise ZooError(
                    f"Two runs are labeled {label!r} with seed {seed}: give one of them another label, as in x={path}."
                )
            policies.append({"policy": name, "seed": seed, "model": str(checkpoint), "answers": folder})
    return policies


def is_checkpoint(path: Path) -> bool:
    """Whether RUN names a single checkpoint of PPO, instead of a run."""
    return path.name.startswith("checkpoint-")


def has_sft(run: Path) -> bool:
    return StageRecord(run / "sft").run_file.exists()


def base_of(run: Path) -> str:
    """Returns the model that the first stage of a run started from."""
    return StageRecord(run / ("sft" if has_sft(run) else "ppo")).read()["resolved"]["model_name_or_path"]


def sft_name(label: str, run: Path) -> str | None:
    """Returns the name of a run's SFT policy in the table; None if PPO starts from the base."""
    name = label.replace("PPO", "SFT", 1) if label.startswith("PPO") else f"SFT, {label}"
    return name if has_sft(run) else None


def answers_file(policy: Mapping[str, Any], benchmark: str, options: argparse.Namespace) -> Path:
    """Returns the file of a policy's answers to a benchmark at this temperature and limit."""
    settings = f"t{options.temperature:g}{'' if options.limit is None else f'-{options.limit}'}"
    return policy["answers"] / f"{BENCHMARKS[benchmark]}-{settings}.jsonl"


def measure(policy: Mapping[str, Any], prompts: Mapping[str, Rows], hub: Hub, options: argparse.Namespace) -> Figures:
    """Answers the benchmarks with a policy, and scores the answers."""
    figures: Figures = {key: value for key, value in policy.items() if key in ("policy", "seed")}
    for name, rows in prompts.items():
        path = answers_file(policy, name, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        conversations = [ifeval.messages(row) for row in rows]
        answers = resume_answers(
            path,
            conversations,
            lambda answered, conversations=conversations: sample_answers(
                policy["model"], hub, conversations, answered,
                temperature=options.temperature, batch_size=options.batch, max_tokens=TOKENS,
            ),
        )  # fmt: skip
        seconds = time.monotonic() - start
        figures[name] = score_answers(rows, answers, options)
        print(f"{policy['policy']} {policy.get('seed', '')} on {name}: {summary(figures[name])}, {seconds:.0f} s")
    return figures


def score_answers(rows: Rows, answers: Sequence[Answer], options: argparse.Namespace) -> Figures:
    """Scores answers by the verifiers, repetition and the judges, and with --verifiers by another package too."""
    figures = ifeval.score(rows, answers)
    prompts, texts = [ifeval.messages(row) for row in rows], [text for text, _ in answers]
    judges = {"repetition": Repetition(unit="words"), **{name: JUDGES[name] for name in options.judges}}
    for name, judge in judges.items():
        scores = judge(prompts, texts)
        figures[name] = sum(scores) / len(scores)
    if options.verifiers is not None:
        average = ifeval.score(rows, answers, options.verifiers)["average"]
        figures["second"] = {"verifiers": options.verifiers, "average": average}
    return figures


def score_constant(prompts: Mapping[str, Rows], options: argparse.Namespace) -> Figures:
    return {name: score_answers(rows, [(CONSTANT, True)] * len(rows), options) for name, rows in prompts.items()}


def score_constant_on_test_split() -> Figures:
    """Scores the meaningless answer on the recipe's own test split."""
    rows = prepare(seed=1)["prompts"]["test"]  # the same for every seed
    scores = ifeval.score(rows, [(CONSTANT, True)] * len(rows))
    return {"judge": estimate(scores["prompt_strict"]), "loose": estimate(scores["prompt_loose"])}


def estimate(accuracy: Mapping[str, Any]) -> Figures:
    """Writes an accuracy in the form of an evaluation's figures."""
    return {"value": accuracy["share"], "ci95": accuracy["interval"], "n": accuracy["n"]}


def run_figures(label: str, run: Path) -> Figures:
    """Reads a run's own figures: its curve, and if it is evaluated those of its test split, KL and verdict."""
    record = StageRecord(run / "ppo")
    ppo, rows = record.read(), record.metrics()
    command = ppo["command"].replace(str(run.parent), "runs")
    command = re.sub(r"(--dataset_name )\S*/", r"\1", command)  # the folder's name, not its place on this machine
    # The sum over updates, as the stage's seconds miss the time before a run was killed and resumed.
    seconds = sum(spent for row in rows for name, spent in row.items() if name.startswith("time/"))
    start = sft_name(label, run) or "base"
    figures: Figures = {"policy": label, "start": start, "seed": ppo["seed"], "command": command, "seconds": seconds}
    updates = [row for row in rows if CURVE["followed"] in row]  # evaluations during training have rows, too
    figures["curve"] = [{name: row[key] for name, key in CURVE.items()} for row in updates]
    if (run / "eval" / "evaluation.json").is_file():
        evaluation = read_json(run / "eval" / "evaluation.json")
        for policy in ("sft", "ppo"):
            names = ("reward", "judge", "kl", "length", "eos_rate", "repetition")
            figures[policy] = {key: evaluation[policy][key] for key in names}
            for judge, document in evaluation["judges"].items():
                figures[policy][judge] = document[policy]
            figures[policy]["loose"] = estimate(score_samples(run, policy)["prompt_loose"])
        figures["verdict"] = evaluation["verdict"]
    figures["pairs"] = draw_pairs(run)
    return figures


def score_samples(run: Path, policy: str) -> Figures:
    """Scores a run's answers to its test split; policy is sft (or the base) or ppo."""
    requests = {json.dumps(row["prompt"]): row for row in ifeval.read_rows(run / "data/prompts/test.jsonl")}
    samples = read_samples(run)
    answers = [(row[policy]["completion"], row[policy]["ended"]) for row in samples]
    return ifeval.score([requests[json.dumps(row["messages"])] for row in samples], answers)


def read_samples(run: Path) -> list[Figures]:
    """Reads the answers to a run's test prompts; none without an evaluation."""
    path = run / "eval" / "samples.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []


def draw_pairs(run: Path) -> list[Figures]:
    """Draws test prompts of a run at random by a fixed seed, each with both answers."""
    rows = read_samples(run)
    drawn = random.Random(0).sample(rows, min(PAIR_COUNT, len(rows)))
    return [
        {"prompt": row["prompt"], "start": row["sft"]["completion"], "ppo": row["ppo"]["completion"]} for row in drawn
    ]


def summary(figures: Figures) -> str:
    """Returns the figures of a benchmark in one line."""
    return f"{100 * figures['average']:.1f}, {figures['words']:.0f} words, repetition {-figures['repetition']:.2f}"


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped; the same command goes on from there.")
