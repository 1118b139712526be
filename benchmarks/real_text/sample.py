"""Samples the text of a real model for `real_text_rates.py`: answers to prompts.jsonl, kept as sample.jsonl.gz.

python benchmarks/real_text/sample.py HuggingFaceTB/SmolLM2-135M-Instruct --answers answers.jsonl
"""

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from ifeval import Answer, Policy, Row, read_rows, resumed

from rlhf_zoo.hub.client.connect import choose_hub, connect

HERE = Path(__file__).parent
# The prompts are in order of length, so that those of a batch are of like length.
SHORT, MIDDLE, PASSAGES = [*range(40)], [*range(40, 80)], [*range(80, 102)]
#: The prompts of each batch, and the temperature.
BATCHES = (
    (SHORT, 1.0), (MIDDLE, 1.0), (SHORT, 1.0), (MIDDLE, 1.0), (SHORT, 1.0), (PASSAGES * 2, 1.0), (SHORT, 0.7),
)  # fmt: skip
TOKENS = 80


def batches(policy: Policy, rows: Sequence[Row], done: int) -> Iterator[list[Answer]]:
    """The answers from a place among the rows on, where a batch begins."""
    start = 0
    for numbers, temperature in BATCHES:
        places = range(start, start + len(numbers))
        if start >= done:
            answers = policy.answers(rows, places, temperature=temperature, tokens=TOKENS)
            print(f"{places.stop} of {len(rows)} completions", file=sys.stderr, flush=True)
            yield [answers[place] for place in places]
        start = places.stop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a Hub id or a GGUF file")
    parser.add_argument("--hub", help="'local' or an address, for Hub ids")
    parser.add_argument(
        "--answers", type=Path, required=True, help="keeps what is done; a second call goes on from there"
    )
    options = parser.parse_args()
    prompts = read_rows(HERE / "prompts.jsonl")
    asked = [(number, temperature) for numbers, temperature in BATCHES for number in numbers]
    rows = [prompts[number] for number, _ in asked]
    with connect(choose_hub(options.hub, push_to_hub=False)) as hub:
        policy = Policy(options.model, hub)
        policy.model.to(torch.bfloat16)
        answers = resumed(options.answers, rows, partial(batches, policy, rows))
    samples = [
        {"prompt": number, "temperature": temperature, "text": text, "ended": ended}
        for (number, temperature), (text, ended) in zip(asked, answers, strict=True)
    ]
    samples.sort(key=lambda row: (row["prompt"], -row["temperature"]))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples)
    # Without a time in its header the file is the same whenever it is made.
    (HERE / "sample.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))


if __name__ == "__main__":
    main()
