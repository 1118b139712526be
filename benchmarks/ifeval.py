"""Scores a policy on prompts with instructions that a program checks: IFEval, IFBench, or another file in that format.

    python benchmarks/ifeval.py MODEL --prompts ifeval/test.jsonl.gz --output scores.json
    python benchmarks/ifeval.py --text "My answer is no." --prompts ifeval/test.jsonl.gz --output constant.json
    python benchmarks/ifeval.py MODEL --prompts FILE --output scores.json --verifiers lm_eval.tasks.ifeval

MODEL is a folder, a Hub id or a GGUF file. With --text no model is loaded, and every answer is that text: its score
shows how much a meaningless answer gains. Answers are appended to OUTPUT with the suffix .answers.jsonl, and a second
call resumes from there. The package if-verifiable verifies IFBench's kinds; kinds that need a download are skipped and
listed. With --verifiers, another package also verifies IFEval's kinds, as a second implementation of the score.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import importlib
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_zoo.errors import ZooError
from rlhf_zoo.rewards.instructions import read_instructions
from rlhf_zoo.rewards.instructions_kinds import KINDS, answer_forms
from rlhf_zoo.rewards.instructions_text import ABBREVIATIONS
from rlhf_zoo.runs.answers import Answer, resume_answers, sample_answers

MAX_TOKENS = 320
RESAMPLES = 2000
Row = dict[str, Any]


def read_rows(path: Path, limit: int | None = None) -> list[Row]:
    """Reads prompts (texts or messages) and their instructions; with a limit, a random sample by a fixed seed."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return rows if limit is None or limit >= len(rows) else random.Random(7).sample(rows, limit)


def messages(row: Row) -> list[dict[str, str]]:
    prompt = row["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


@functools.cache
def load_nltk() -> Any:
    """Imports NLTK so that it downloads nothing: its word tokenizer is applied to the complete text.

    NLTK's own word_tokenize needs the trained Punkt model, which is a download.
    """
    import nltk

    nltk.download = lambda *_, **__: False  # the packages of the verifiers call it on import
    nltk.word_tokenize = nltk.tokenize.NLTKWordTokenizer().tokenize
    return nltk


@functools.cache
def google_verifiers(package: str) -> dict[str, Any]:
    """Loads Google's verifiers of IFEval from a package that contains them.

    They need NLTK's trained Punkt model, which is a download. Here their sentences come from Punkt without that model
    but with our abbreviations.

    Args:
        package: `if_verifiable.ifeval` or `lm_eval.tasks.ifeval`.

    Returns:
        The classes by kind.
    """
    import langdetect

    nltk = load_nltk()
    langdetect.DetectorFactory.seed = 0
    util = importlib.import_module(f"{package}.instructions_util")
    tokenizer = nltk.tokenize.punkt.PunktSentenceTokenizer()
    tokenizer._params.abbrev_types = {*ABBREVIATIONS}
    util._get_sentence_tokenizer = lambda: tokenizer
    return importlib.import_module(f"{package}.instructions_registry").INSTRUCTION_DICT


def make_verifier(kind: str, values: Row, prompt: str, package: str | None) -> Callable[[str], bool]:
    """Returns a function that checks whether an answer follows an instruction.

    Args:
        kind: The kind of the instruction.
        values: The arguments of the instruction.
        prompt: The text of the prompt.
        package: The package that verifies IFEval's kinds; None for our own code.

    Raises:
        ZooError: Arguments are missing.
        Exception: Any error of the package, if it does not have the kind or the kind cannot run here.
    """
    if kind in KINDS and package is None:
        [instruction] = read_instructions([kind], [values], where="a prompt")
        return instruction.is_followed
    if kind in KINDS:
        registry = google_verifiers(package)
    else:
        load_nltk()
        registry = importlib.import_module("if_verifiable.ifbench.instructions_registry").INSTRUCTION_DICT
    checker = registry[kind](kind)
    checker.build_description(**{name: value for name, value in values.items() if value is not None})
    arguments = checker.get_instruction_args()
    if arguments and "prompt" in arguments:
        checker.build_description(prompt=prompt)
    # Google's harness counts an empty answer as a failure before it asks its verifiers.
    return lambda answer: bool(answer.strip()) and bool(checker.check_following(answer))


def check_answer(row: Row, answer: str, skipped: Counter[str], package: str | None) -> list[tuple[bool, bool]]:
    """Returns whether the answer follows each instruction, (strict, loose). Counts kinds that cannot run here."""
    results = []
    state = random.getstate()
    for kind, values in zip(row["instruction_id_list"], row["kwargs"], strict=True):
        random.seed(0)
        try:
            follows = make_verifier(kind, values, messages(row)[-1]["content"], package)
            results.append(tuple(any(map(follows, answer_forms(answer, loose=loose))) for loose in (False, True)))
        except ZooError:
            raise
        except Exception as error:
            skipped[f"{kind} ({type(error).__name__})"] += 1
    random.setstate(state)
    return results  # type: ignore[return-value]


def bootstrap_interval(*shares: Sequence[tuple[int, int]]) -> list[float]:
    """Bootstraps the 95% interval of the mean of shares over the same prompts, which are resampled together.

    Args:
        *shares: For each prompt, (instructions followed, instructions).
    """
    rng, means = random.Random(0), []
    for _ in range(RESAMPLES):
        drawn = rng.choices(range(len(shares[0])), k=len(shares[0]))
        means.append(sum(_share([clusters[index] for index in drawn]) for clusters in shares) / len(shares))
    means.sort()
    return [round(means[int(RESAMPLES * quantile)], 4) for quantile in (0.025, 0.975)]


def _share(clusters: Sequence[tuple[int, int]]) -> float:
    return sum(part for part, _ in clusters) / max(1, sum(total for _, total in clusters))


def accuracy(clusters: Sequence[tuple[int, int]]) -> dict[str, Any]:
    total = sum(count for _, count in clusters)
    return {"share": round(_share(clusters), 4), "interval": bootstrap_interval(clusters), "n": total}


def score(rows: Sequence[Row], answers: Sequence[Answer], package: str | None = None) -> dict[str, Any]:
    """Scores answers.

    Args:
        rows: The prompts with their instructions.
        answers: An answer to each prompt.
        package: The package that verifies IFEval's kinds; None for our own code.

    Returns:
        Strict and loose accuracy of prompts and of instructions, and their mean, as on model cards, all with 95%
        intervals; strict accuracy by kind; the mean number of words; the share of answers that ended; and the skipped
        kinds.
    """
    skipped: Counter[str] = Counter()
    results = [check_answer(row, answer, skipped, package) for row, (answer, _) in zip(rows, answers, strict=True)]
    scored = [result for result in results if result]
    if not scored:
        raise ZooError(f"None of the kinds of instructions can be verified here: {', '.join(sorted(skipped))}.")
    figures: dict[str, Any] = {"prompts": len(rows), "prompts_scored": len(scored)}
    clusters: dict[str, list[tuple[int, int]]] = {}
    for index, reading in enumerate(("strict", "loose")):
        by_prompt = [[follows[index] for follows in result] for result in scored]
        clusters[f"prompt_{reading}"] = [(all(follows), 1) for follows in by_prompt]
        clusters[f"instruction_{reading}"] = [(sum(follows), len(follows)) for follows in by_prompt]
    figures |= {name: accuracy(share) for name, share in clusters.items()}
    figures["average"] = round(sum(figures[name]["share"] for name in clusters) / len(clusters), 4)
    figures["average_interval"] = bootstrap_interval(*clusters.values())
    by_kind: dict[str, list[bool]] = {}
    for row, result in zip(rows, results, strict=True):
        if len(result) == len(row["instruction_id_list"]):
            for kind, (strict, _) in zip(row["instruction_id_list"], result, strict=True):
                by_kind.setdefault(kind, []).append(strict)
    figures["kinds_strict"] = {kind: [sum(follows), len(follows)] for kind, follows in sorted(by_kind.items())}
    figures["words"] = round(sum(len(answer.split()) for answer, _ in answers) / len(answers), 1)
    figures["ended"] = round(sum(ended for _, ended in answers) / len(answers), 4)
    figures["skipped"] = dict(sorted(skipped.items()))
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder, Hub id or GGUF file")
    parser.add_argument("--text", help="use this text as every answer, instead of a model")
    parser.add_argument("--hub", help="'local' or the address of a Hub, for Hub ids and the bases of adapters")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="number of prompts, drawn at random by a fixed seed (default: all)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--verifiers", metavar="PACKAGE", help="also verify IFEval's kinds with this package")
    options = parser.parse_args(arguments)
    if (options.model is None) == (options.text is None):
        parser.error("give a model or --text")
    from rlhf_zoo.hub.client.connect import choose_hub, connect

    rows = read_rows(options.prompts, options.limit)
    if options.text is not None:
        answers: list[Answer] = [(options.text, True)] * len(rows)
    else:
        prompts = [messages(row) for row in rows]
        sampling = {"temperature": options.temperature, "batch_size": options.batch, "max_tokens": options.tokens}
        with connect(choose_hub(options.hub, push_to_hub=False)) as hub:
            answers = resume_answers(
                options.output.with_suffix(".answers.jsonl"),
                prompts,
                lambda answered: sample_answers(options.model, hub, prompts, answered, **sampling),
            )
    settings = {name: str(value) for name, value in vars(options).items() if value is not None and name != "output"}
    figures = {"settings": settings, **score(rows, answers)}
    if options.verifiers is not None:
        figures["second"] = score(rows, answers, options.verifiers)
    options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    names = ("average", "average_interval", "prompt_strict", "words", "ended", "skipped")
    shown = {name: figures[name] for name in names}
    if "second" in figures:
        shown["average by the other verifiers"] = figures["second"]["average"]
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
