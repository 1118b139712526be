"""Prompts that may ask the same in other words: reported where most are, and never for prompts of real data."""

import gzip
import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from smollm2_texts import load_questions
from test_probes import sft

from rlhf_zoo.cli.main import cli
from rlhf_zoo.evaluation.paraphrases import count_possible_paraphrases
from rlhf_zoo.evaluation.probes import Completions
from rlhf_zoo.evaluation.prompt_groups import group_prompts
from rlhf_zoo.evaluation.rollouts import probe_rollouts
from rlhf_zoo.runs.corpora import instructions, tiny_sums, tiny_world_2

PHRASINGS = (
    "What is the capital of France?", "Which city is the capital of France?", "Name the capital city of France.",
    "Tell me the capital of France, please.", "France's capital is which city?",
    "Can you say what France's capital is called?", "I would like to know the capital of France.",
    "Do you know which town France has as its capital?",
    "How do I boil an egg?", "What is the best way to boil an egg?", "Explain how to boil eggs.",
    "Give me instructions for boiling an egg.", "I want to boil an egg, how do I do that?",
    "Boiling an egg: what are the steps?", "Could you tell me how an egg is boiled?",
    "Please describe the boiling of an egg.",
    "Why is the sky blue?", "What makes the sky blue?", "Explain why the sky looks blue.",
    "For what reason is the sky blue?", "How come the sky is blue?", "The sky is blue. Why?",
    "Tell me the cause of the blue color of the sky.", "What causes the blue of the sky?",
)  # fmt: skip


def found(prompts: Sequence[str]) -> int:
    return count_possible_paraphrases(prompts, group_prompts(prompts))


def test_three_questions_in_eight_phrasings_are_paraphrases() -> None:
    assert len(set(group_prompts(PHRASINGS))) >= 20, "the normal form does not see them"
    assert found(PHRASINGS) == 24
    assert count_possible_paraphrases(PHRASINGS, [row // 8 for row in range(24)]) == 0, "grouped"
    assert found([*PHRASINGS, *(one.prompt for one in load_questions()[:30])]) == 0, "less than half"
    talks = [[{"role": "user", "content": text}] for text in PHRASINGS]
    assert count_possible_paraphrases(talks, range(24)) == 24


def test_prompts_of_corpora_are_no_paraphrases() -> None:
    """Sums, instructions of one template, a grid of products and aspects, and prompts of ours."""
    for corpus in (tiny_world_2, tiny_sums, instructions):
        prompts = [row["prompt"] for row in corpus.prepare(seed=1)["prompts"]["validation"]]
        assert count_possible_paraphrases(prompts, group_prompts(prompts)) == 0
    questions = [one.prompt for one in load_questions()]
    assert found(questions) == 0 and found(random.Random(0).sample(questions, 24)) == 0
    languages = ("English", "French", "German", "Latin", "Greek", "Czech")
    assert found([f"Translate it from {one} to {two}." for one in languages for two in languages if one < two]) == 0
    assert found([f"Was ist die Hauptstadt von {name}?" for name in languages]) == 0, "words in most prompts are a form"


@pytest.mark.skipif("RLHF_ZOO_DATA" not in os.environ, reason="needs RLHF_ZOO_DATA")
@pytest.mark.parametrize(("data", "key"), [("gsm8k", "question"), ("ifeval", "prompt"), ("hh_rlhf_harmless", "chosen")])
def test_prompts_of_real_data_are_no_paraphrases(data: str, key: str) -> None:
    path = Path(os.environ["RLHF_ZOO_DATA"]) / data / "test.jsonl.gz"
    if not path.exists():
        pytest.skip(f"RLHF_ZOO_DATA has no {data}")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        prompts = [json.loads(line)[key].split("\n\nAssistant:")[0] for line in file]
    for size in (24, 60, len(prompts)):
        assert found(random.Random(size).sample(prompts, size)) == 0


def sides(prompts: Sequence[str]) -> tuple[Completions, Completions]:
    rows = range(len(prompts))
    return tuple(Completions(prompts, [sft(seed).texts[row] for row in rows]) for seed in (1, 2))  # type: ignore[return-value]


def test_probe_reports_paraphrases_unless_groups_are_given(tmp_path: Path) -> None:
    result = probe_rollouts(*sides(PHRASINGS))
    assert result.possible_paraphrases == 24 and result.to_json()["possible_paraphrases"] == 24
    assert result.warning.startswith("24 prompts share nearly all their content words") and "`group`" in result.warning
    grouped = [replace(side, groups=[row // 8 for row in range(24)]) for side in sides(PHRASINGS)]
    assert probe_rollouts(*grouped).warning == ""
    assert probe_rollouts(sft(1), sft(2)).warning == ""
    files = []
    for name, side in zip(("a.jsonl", "b.jsonl"), sides(PHRASINGS), strict=True):
        lines = [{"prompt": p, "completion": text} for p, text in zip(side.prompts, side.texts, strict=True)]
        files.append(tmp_path / name)
        files[-1].write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    page = tmp_path / "page.html"
    ran = CliRunner().invoke(cli, ["probe", str(files[0]), "--against", str(files[1]), "--html", str(page)])
    assert ran.exit_code == 0 and "24 prompts share nearly all their content words" in " ".join(ran.output.split())
    assert "24 prompts share nearly all" in page.read_text(encoding="utf-8")


def test_probe_names_verifiable_for_short_answers() -> None:
    """Right labels look like a collapse: only a program can tell."""
    base, rng = sft(0, prompts=60, samples=1), random.Random(0)
    labels = replace(base, texts=[rng.choice(["yes", "no"]) for _ in range(60)], rewards=[1.0] * 60)
    found = probe_rollouts(labels, replace(base, rewards=[0.0] * 60))
    assert found.verdict.kind == "suspicious" and "pass --verifiable" in found.next_step
    checked = probe_rollouts(labels, replace(base, rewards=[0.0] * 60), verifiable=True)
    assert checked.verdict.kind == "better" and "--verifiable" not in checked.next_step
    long = replace(base, texts=[f"{text} {text} {text}" for text in base.texts])
    assert "--verifiable" not in probe_rollouts(long, base).next_step, "a long text, and other rewards than 0 and 1"
