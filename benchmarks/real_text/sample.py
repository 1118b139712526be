"""Samples text of a real model for `real_text_rates.py`: answers prompts.jsonl and writes sample.jsonl.gz.

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

from ifeval import Answer, Policy, Row, read_rows, resume_answers

from rlhf_zoo.hub.client.connect import choose_hub, connect

HERE = Path(__file__).parent
# The prompts are sorted by length, so each batch has prompts of similar length.
SHORT, MIDDLE, PASSAGES = [*range(40)], [*range(40, 80)], [*range(80, 102)]
#: The indices of the prompts in each batch, and the temperature.
BATCHES = (
    (SHORT, 1.0), (MIDDLE, 1.0), (SHORT, 1.0), (MIDDLE, 1.0), (SHORT, 1.0), (PASSAGES * 2, 1.0), (SHORT, 0.7),
)  # fmt: skip
MAX_TOKENS = 80


def sample_batches(policy: Policy, rows: Sequence[Row], done: int) -> Iterator[list[Answer]]:
    """Yields the answers of each batch, without the batches in the first `done` rows."""
    start = 0
    for prompt_indices, temperature in BATCHES:
        indices = range(start, start + len(prompt_indices))
        if start >= done:
            answers = policy.answers(rows, indices, temperature=temperature, tokens=MAX_TOKENS)
            print(f"{indices.stop} of {len(rows)} completions", file=sys.stderr, flush=True)
            yield [answers[index] for index in indices]
        start = indices.stop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, Hub id or GGUF file")
    parser.add_argument("--hub", help="'local' or the address of a Hub, for Hub ids")
    parser.add_argument("--answers", type=Path, required=True, help="file of answers; a second call resumes from it")
    options = parser.parse_args()
    prompts = read_rows(HERE / "prompts.jsonl")
    draws = [(index, temperature) for indices, temperature in BATCHES for index in indices]
    rows = [prompts[index] for index, _ in draws]
    with connect(choose_hub(options.hub, push_to_hub=False)) as hub:
        policy = Policy(options.model, hub)
        policy.model.to(torch.bfloat16)
        answers = resume_answers(options.answers, rows, partial(sample_batches, policy, rows))
    samples = [
        {"prompt": index, "temperature": temperature, "text": text, "ended": ended}
        for (index, temperature), (text, ended) in zip(draws, answers, strict=True)
    ]
    samples.sort(key=lambda row: (row["prompt"], -row["temperature"]))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples)
    # Without a time in the gzip header, equal samples give equal files.
    (HERE / "sample.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))


if __name__ == "__main__":
    main()
