"""Scores a policy on prompts with instructions that a program checks: IFEval, IFBench, or a file of the same form.

    python benchmarks/ifeval.py MODEL --prompts ifeval/test.jsonl.gz --output scores.json
    python benchmarks/ifeval.py --text "My answer is no." --prompts ifeval/test.jsonl.gz --output constant.json

MODEL is a folder, a Hub id or a GGUF file. With --text no model is loaded, and every answer is that text: what such
answers score is what the verifiers cannot see. Answers are appended to OUTPUT with the suffix .answers.jsonl, and a
second call goes on from there. IFBench's kinds are verified by the package if-verifiable; those that need a download
are counted and named.
"""

import argparse
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_zoo.errors import ZooError
from rlhf_zoo.rewards.instructions import read_instructions
from rlhf_zoo.rewards.instructions_kinds import KINDS, readings

LONGEST = 320
DRAWS = 2000
Row = dict[str, Any]
#: An answer, and whether it ended by itself.
Answer = tuple[str, bool]


def read_rows(path: Path, limit: int | None = None) -> list[Row]:
    """Reads prompts (texts or messages) and their instructions; with a limit, some drawn by a fixed seed."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return rows if limit is None or limit >= len(rows) else random.Random(7).sample(rows, limit)


def messages(row: Row) -> list[dict[str, str]]:
    prompt = row["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def verifier(kind: str, values: Row, prompt: str) -> Callable[[str], bool]:
    """Returns the check of one instruction.

    Raises:
        ZooError: Arguments are missing.
        Exception: What the package raises for a kind that it does not have, or that cannot run here.
    """
    if kind in KINDS:
        [instruction] = read_instructions([kind], [values], where="a prompt")
        return instruction.is_followed
    import nltk

    nltk.download = lambda *_, **__: False  # which the package calls when it is imported
    from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT

    checker = INSTRUCTION_DICT[kind](kind)
    checker.build_description(**{name: value for name, value in values.items() if value is not None})
    arguments = checker.get_instruction_args()
    if arguments and "prompt" in arguments:
        checker.build_description(prompt=prompt)
    return checker.check_following


def judged(row: Row, answer: str, skipped: Counter[str]) -> list[tuple[bool, bool]]:
    """Returns whether the answer fulfills each instruction, (strict, loose); kinds that cannot run are counted."""
    results = []
    state = random.getstate()
    for kind, values in zip(row["instruction_id_list"], row["kwargs"], strict=True):
        random.seed(0)
        try:
            follows = verifier(kind, values, messages(row)[-1]["content"])
            results.append(tuple(any(map(follows, readings(answer, loose=loose))) for loose in (False, True)))
        except ZooError:
            raise
        except Exception as error:
            skipped[f"{kind} ({type(error).__name__})"] += 1
    random.setstate(state)
    return results  # type: ignore[return-value]


def interval(clusters: Sequence[tuple[int, int]]) -> list[float]:
    """Bootstraps the 95% interval of a share, with prompts drawn as clusters of (fulfilled, instructions)."""
    rng, shares = random.Random(0), []
    for _ in range(DRAWS):
        drawn = rng.choices(clusters, k=len(clusters))
        shares.append(sum(part for part, _ in drawn) / max(1, sum(total for _, total in drawn)))
    shares.sort()
    return [round(shares[int(DRAWS * place)], 4) for place in (0.025, 0.975)]


def accuracy(clusters: Sequence[tuple[int, int]]) -> dict[str, Any]:
    total = sum(count for _, count in clusters)
    share = sum(part for part, _ in clusters) / max(1, total)
    return {"share": round(share, 4), "interval": interval(clusters), "n": total}


def score(rows: Sequence[Row], answers: Sequence[Answer]) -> dict[str, Any]:
    """Scores answers.

    Args:
        rows: The prompts with their instructions.
        answers: One for each.

    Returns:
        Accuracy of prompts and instructions, read strictly and loosely, with intervals; their mean, as model cards give
        it; accuracy by kind; length; and the kinds that could not be verified.
    """
    skipped: Counter[str] = Counter()
    results = [judged(row, answer, skipped) for row, (answer, _) in zip(rows, answers, strict=True)]
    scored = [result for result in results if result]
    if not scored:
        raise ZooError(f"None of the kinds of instructions can be verified here: {', '.join(sorted(skipped))}.")
    figures: dict[str, Any] = {"prompts": len(rows), "prompts_scored": len(scored)}
    for place, reading in enumerate(("strict", "loose")):
        figures[f"prompt_{reading}"] = accuracy([(all(each[place] for each in result), 1) for result in scored])
        figures[f"instruction_{reading}"] = accuracy(
            [(sum(each[place] for each in result), len(result)) for result in scored]
        )
    names = [f"{level}_{reading}" for level in ("prompt", "instruction") for reading in ("strict", "loose")]
    figures["average"] = round(sum(figures[name]["share"] for name in names) / len(names), 4)
    by_kind: dict[str, list[bool]] = {}
    for row, result in zip(rows, results, strict=True):
        if len(result) == len(row["instruction_id_list"]):
            for kind, (strict, _) in zip(row["instruction_id_list"], result, strict=True):
                by_kind.setdefault(kind, []).append(strict)
    figures["kinds_strict"] = {kind: [sum(each), len(each)] for kind, each in sorted(by_kind.items())}
    figures["words"] = round(sum(len(answer.split()) for answer, _ in answers) / len(answers), 1)
    figures["ended"] = round(sum(ended for _, ended in answers) / len(answers), 4)
    figures["skipped"] = dict(sorted(skipped.items()))
    return figures


def sampled(name: str, rows: Sequence[Row], *, temperature: float, batch: int, tokens: int) -> Iterator[list[Answer]]:
    """Yields a model's answers, batch by batch: greedy at the temperature 0."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(name)
    of = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    source = str(path.parent) if of else name
    tokenizer = AutoTokenizer.from_pretrained(source, **of)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **of).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    stops = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])} - {None}
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    for start in range(0, len(rows), batch):
        torch.manual_seed(start)
        texts = [
            tokenizer.apply_chat_template(messages(row), tokenize=False, add_generation_prompt=True)
            for row in rows[start : start + batch]
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        with torch.no_grad():
            ids = model.generate(
                **inputs, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id, eos_token_id=[*ends], **how
            )
        new = ids[:, inputs["input_ids"].shape[1] :].tolist()
        yield [(tokenizer.decode(row, skip_special_tokens=True), bool(ends & {*row})) for row in new]


def resumed(path: Path, rows: Sequence[Row], answer: Callable[[Sequence[Row]], Iterator[list[Answer]]]) -> list[Answer]:
    """Answers the prompts that a file has no answers to yet, and appends them there."""
    done = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    if any(line["prompt"] != messages(row) for line, row in zip(done, rows, strict=False)) or len(done) > len(rows):
        raise ZooError(f"{path} has answers to other prompts: remove it, or choose another --output.")
    answers = [(line["answer"], line["ended"]) for line in done]
    if len(answers) < len(rows):
        for batch in answer(rows[len(answers) :]):
            with path.open("a", encoding="utf-8") as file:
                for row, (text, ended) in zip(rows[len(answers) :], batch, strict=False):
                    line = {"prompt": messages(row), "answer": text, "ended": ended}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            answers += batch
    return answers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, a Hub id or a GGUF file")
    parser.add_argument("--text", help="answer every prompt by this text instead")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="so many prompts, drawn at random by a fixed seed")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=LONGEST)
    given = parser.parse_args(arguments)
    if (given.model is None) == (given.text is None):
        parser.error("give a model or --text")
    rows = read_rows(given.prompts, given.limit)
    if given.text is not None:
        answers: list[Answer] = [(given.text, True)] * len(rows)
    else:
        how = {"temperature": given.temperature, "batch": given.batch, "tokens": given.tokens}
        answers = resumed(
            given.output.with_suffix(".answers.jsonl"), rows, lambda left: sampled(given.model, left, **how)
        )
    settings = {name: str(value) for name, value in vars(given).items() if value is not None and name != "output"}
    figures = {"settings": settings, **score(rows, answers)}
    given.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: figures[name] for name in ("average", "prompt_strict", "words", "ended", "skipped")}))


if __name__ == "__main__":
    main()
