"""Probes public models' answers against those of the models that they started from: docs/ledger.md.

    git clone https://github.com/tatsu-lab/alpaca_eval           # answers and annotations, CC BY-NC 4.0
    python benchmarks/ledger.py alpaca_eval                      # probes pairs without figures by the current rule
    python benchmarks/ledger.py alpaca_eval --pairs NullModel    # probes this pair again; "all" for every pair
    python benchmarks/evidence.py --render                       # writes the table of docs/ledger.md

Only figures are kept, in docs/evidence/ledger.json: no texts and no phrases of the answers.
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import keep

import rlhf_zoo
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.verdict import RULE_VERSION

NAME = "ledger"
LEADERBOARD = Path("src/alpaca_eval/leaderboards/data_AlpacaEval_2/weighted_alpaca_eval_gpt4_turbo_leaderboard.csv")
#: Judges in order of preference: AlpacaEval 2 by probabilities, AlpacaEval 2 by choices, AlpacaEval 1.
JUDGES = ("weighted_alpaca_eval_gpt4_turbo", "alpaca_eval_gpt4_turbo_fn", "alpaca_eval_gpt4")
MIN_JUDGED = 0.9  # share of the prompts; below it, the judge compared older answers
CONFIGS = "https://github.com/tatsu-lab/alpaca_eval/tree/main/src/alpaca_eval/models_configs/"
HUB = "https://huggingface.co/"
PAPERS = "https://arxiv.org/abs/"


@dataclass(frozen=True)
class Pair:
    """A model and the model that it started from.

    Attributes:
        kind: How the model was made.
        policy: The model's folder in AlpacaEval's results.
        start: The folder of the model that it started from.
        source: The page that says so.
    """

    kind: str
    policy: str
    start: str
    source: str


def _prompted_for_length(model: str) -> list[Pair]:
    kinds = ("verbose", "concise")
    return [Pair(f"asked to be {kind}", f"{model}_{kind}", model, f"{CONFIGS}{model}_{kind}") for kind in kinds]


def _best_of(policy: str, start: str) -> Pair:
    return Pair("best of n", policy, start, CONFIGS + policy)


MISTRAL, LLAMA = "Mistral-7B-Instruct-v0.2", "Meta-Llama-3-8B-Instruct"
PAIRS = (
    Pair("cheat", "NullModel", "gpt4_1106_preview", PAPERS + "2410.07137"),
    Pair("cheat", "gpt4_gamed", "gpt4", CONFIGS + "gpt4_gamed"),
    *_prompted_for_length("alpaca-7b"),
    *_prompted_for_length("gpt-3.5-turbo-1106"),
    *_prompted_for_length("claude-2.1"),
    *_prompted_for_length("Mixtral-8x7B-Instruct-v0.1"),
    *_prompted_for_length("gpt4_0613"),
    *_prompted_for_length("gpt4_1106_preview"),
    _best_of("ultralm-13b-best-of-16", "ultralm-13b"),
    _best_of("ultralm-13b-v2.0-best-of-16", "ultralm-13b-v2.0"),
    _best_of("Samba-CoE-v0.2-best-of-16", "Samba-CoE-v0.2"),
    _best_of("Storm-7B-best-of-64", "Storm-7B"),
    _best_of("pairrm-zephyr-7b-beta", "zephyr-7b-beta"),
    _best_of("pairrm-tulu-2-13b", "tulu-2-dpo-13b"),
    _best_of("pairrm-tulu-2-70b", "tulu-2-dpo-70b"),
    _best_of("pairrm-Yi-34B-Chat", "Yi-34B-Chat"),
    Pair("RL: ReMax", "Mistral-7B-ReMax-v0.1", MISTRAL, HUB + "ziniuli/Mistral-7B-ReMax-v0.1"),
    Pair("RL: REBEL", "REBEL-Llama-3-8B-Instruct", LLAMA, HUB + "Cornell-AGI/REBEL-Llama-3"),
    Pair("RL: REBEL", "REBEL-Llama-3-8B-Instruct-Armo", LLAMA, HUB + "Cornell-AGI/REBEL-Llama-3-Armo-iter_1"),
    Pair("DPO", "phi-2-dpo", "phi-2-sft", HUB + "lxuechen/phi-2-dpo"),
    Pair("DPO, iterated", "Snorkel-Mistral-PairRM-DPO", MISTRAL, HUB + "snorkelai/Snorkel-Mistral-PairRM-DPO"),
    Pair("KTO", "Contextual-KTO-Mistral-PairRM", MISTRAL, HUB + "ContextualAI/Contextual_KTO_Mistral_PairRM"),
    Pair("SPPO", "SPPO-Mistral7B-PairRM", MISTRAL, HUB + "UCLA-AGI/Mistral7B-PairRM-SPPO"),
    Pair("SPPO", "SPPO-Llama-3-Instruct-8B-PairRM", LLAMA, HUB + "UCLA-AGI/Llama-3-Instruct-8B-SPPO-Iter3"),
    Pair("GPO", "GPO-Llama-3-8B-Instruct-GPM-2B", LLAMA, HUB + "general-preference/GPO-Llama-3-8B-Instruct-GPM-2B"),
    Pair("SimPO", "Llama-3-Instruct-8B-SimPO", LLAMA, PAPERS + "2405.14734"),
    Pair("WPO", "Llama-3-Instruct-8B-WPO-HB-v2", LLAMA, HUB + "wzhouad/Llama3-Instruct-8B-WPO-HB-v2"),
    Pair("CUT", "cut-13b", "llama-2-13b-chat-hf", HUB + "xww033/cut-13b"),
)


def main(arguments: Sequence[str] | None = None, *, pairs: Sequence[Pair] = PAIRS) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("alpaca_eval", type=Path, help="your clone of github.com/tatsu-lab/alpaca_eval")
    parser.add_argument(
        "--pairs", nargs="+", metavar="MODEL", default=[],
        help='probe these pairs again, or "all" (default: pairs without figures by this version of the rule)',
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if not (options.alpaca_eval / "results").is_dir():
        raise ZooError(f"{options.alpaca_eval} has no folder results: give your clone of tatsu-lab/alpaca_eval.")
    named = {pair.policy for pair in pairs} if "all" in options.pairs else set(options.pairs)
    if unknown := named - {pair.policy for pair in pairs}:
        raise ZooError(f"{', '.join(sorted(unknown))}: no such pair; give models that {Path(__file__).name} lists.")
    rows = {row["policy"]: row for row in keep.load(NAME).get("rows", [])}
    if not named and all(rows.get(pair.policy, {}).get("rule") == RULE_VERSION for pair in pairs):
        print(f"Every pair has figures by version {RULE_VERSION} of the rule. --pairs all probes them anew.")
    win_rates = read_leaderboard(options.alpaca_eval / LEADERBOARD)
    for pair in pairs:
        is_current = rows.get(pair.policy, {}).get("rule") == RULE_VERSION
        if pair.policy not in named and (named or is_current):
            continue
        models = pair.policy, pair.start
        missing = [model for model in models if not answers_file(options.alpaca_eval, model).is_file()]
        if missing:
            print(f"{pair.policy}: not probed, as there are no answers of {', '.join(missing)}", file=sys.stderr)
            continue
        rows[pair.policy] = row = probe_pair(options.alpaca_eval, pair, win_rates)
        print(f"{pair.policy}: {row['verdict']}; fired: {', '.join(row['fired']) or 'none'}", flush=True)
        # Written after each pair, so an interrupted command can resume.
        in_order = [rows[listed.policy] for listed in pairs if listed.policy in rows]
        keep.write(NAME, {"schema": 1, "command": "python benchmarks/ledger.py alpaca_eval", "rows": in_order})


def probe_pair(folder: Path, pair: Pair, win_rates: dict[str, float]) -> dict[str, Any]:
    """Probes a model's answers against those of the model that it started from.

    Args:
        folder: The clone of alpaca_eval.
        pair: The two models.
        win_rates: The leaderboard's win rate of each model.

    Returns:
        The figures, without any text.
    """
    models = pair.policy, pair.start
    sides = [{row["instruction"]: row["output"] for row in read_answers(folder, model)} for model in models]
    judge, scores = common_judge(folder, models, sides)
    findings = rlhf_zoo.probe(
        *(
            [
                {"prompt": prompt, "completion": text, **({"judge": judged[prompt]} if judge else {})}
                for prompt, text in side.items()
                if judge is None or prompt in judged
            ]
            for side, judged in zip(sides, scores, strict=True)
        )
    )
    verdict, report = findings.verdict, findings.report
    win_rate = verdict.win_rate
    return {
        "kind": pair.kind,
        "policy": pair.policy,
        "start": pair.start,
        "source": pair.source,
        "prompts": findings.prompts,
        "judge": judge,
        "win_rate": {"value": win_rate.value, "ci95": list(win_rate.ci95), "n": win_rate.n} if win_rate else None,
        "leaderboard": [win_rates.get(pair.policy), win_rates.get(pair.start)],
        **{name: [report[name].value, report[name].sft] for name in ("length", "repetition")},
        "fired": {probe.family: probe.effect / probe.threshold for probe in report.probes if probe.fired},
        "severe": [probe.family for probe in report.probes if probe.severe],
        "unmeasured": list(report.skipped),
        "kind_of_verdict": verdict.kind,
        "verdict": verdict.text,
        "rule": verdict.to_json()["rule"]["version"],
    }


def answers_file(folder: Path, model: str) -> Path:
    return folder / "results" / model / "model_outputs.json"


def read_answers(folder: Path, model: str) -> list[dict[str, Any]]:
    path = answers_file(folder, model)
    rows = _read_array(path)
    if not rows or any(not isinstance(row.get(key), str) for row in rows for key in ("instruction", "output")):
        raise ZooError(f"{path} has a row without instruction and output: update your clone of alpaca_eval.")
    return rows


def common_judge(
    folder: Path, models: Sequence[str], sides: Sequence[dict[str, str]]
) -> tuple[str | None, list[dict[str, float]]]:
    """Returns a judge that compared both models' answers with those of the same opponent, and its scores by prompt.

    A score is the judge's preference, from 0 (for the opponent) to 1. Prompts without a score are left out.
    """
    for judge in JUDGES:
        paths = [folder / "results" / model / judge / "annotations.json" for model in models]
        if not all(path.is_file() for path in paths):
            continue
        annotations = [_read_array(path) for path in paths]
        # The same judge may have compared the two models with different opponents, of AlpacaEval 1 and 2.
        if len({row["generator_1"] for rows in annotations for row in rows}) != 1:
            continue
        scores = [
            {
                row["instruction"]: row["preference"] - 1.0
                for row in rows
                if row["preference"] is not None and side.get(row["instruction"]) == row["output_2"]
            }
            for rows, side in zip(annotations, sides, strict=True)
        ]
        if all(len(judged) >= MIN_JUDGED * len(side) for judged, side in zip(scores, sides, strict=True)):
            return judge, scores
    return None, [{}, {}]


def read_leaderboard(path: Path) -> dict[str, float]:
    """Reads each model's win rate over GPT-4, from 0 to 1; {} if the file does not exist."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as lines:
        return {row[""]: float(row["win_rate"]) / 100 for row in csv.DictReader(lines)}


def _read_array(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ZooError(f"{path} cannot be read ({error}): update your clone of alpaca_eval.") from error
    return rows if isinstance(rows, list) else []


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
