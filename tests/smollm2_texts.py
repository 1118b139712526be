"""Text of a real model: prompts with the answers of SmolLM2-135M-Instruct (tests/real_text/README.md)."""

import gzip
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "real_text"


@dataclass(frozen=True)
class Question:
    """A prompt, and the model's completions at temperature 1."""

    prompt: str
    texts: list[str] = field(default_factory=list)


@cache
def load_questions() -> list[Question]:
    """Loads the prompts, the shortest first."""
    lines = (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [Question(json.loads(line)["prompt"]) for line in lines]
    with gzip.open(FOLDER / "sample.jsonl.gz", "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            if row["temperature"] == 1.0:
                questions[row["prompt"]].texts.append(row["text"])
    return questions
