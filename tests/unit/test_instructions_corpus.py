"""The corpus `instructions`: what each split has, and that it shares nothing with the benchmarks."""

import gzip
import json
import random
import re
from collections import Counter
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.rewards.instructions import read_instructions
from rlhf_zoo.rewards.instructions_kinds import KINDS
from rlhf_zoo.runs.corpora.instructions import are_compatible, prepare, request, split_of
from rlhf_zoo.runs.corpora.instructions.demonstrations import demonstrate, sentences
from rlhf_zoo.runs.corpora.instructions.tasks import Task, tasks
from rlhf_zoo.runs.corpora.instructions.wordings import INSTRUCTIONS

N = 8
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def splits() -> dict[str, Rows]:
    return prepare(seed=1)["prompts"]


def text(row: dict[str, Any]) -> str:
    [message] = row["prompt"]
    assert message["role"] == "user"
    return message["content"]


def test_sizes_and_distinct_prompts(splits: dict[str, Rows]) -> None:
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 2992, "validation": 189, "test": 345}
    texts = [text(row) for rows in splits.values() for row in rows]
    assert len({*texts}) == len(texts)


def test_no_task_is_in_two_splits(splits: dict[str, Rows]) -> None:
    groups = {split: {row["group"] for row in rows} for split, rows in splits.items()}
    assert not any(groups[first] & groups[second] for first, second in combinations(groups, 2))


def test_seed_changes_training_prompts_only(splits: dict[str, Rows]) -> None:
    assert prepare(seed=1)["prompts"] == splits
    other = prepare(seed=2, prompts=50)["prompts"]
    assert len(other["train"]) == 50
    assert other["train"] != splits["train"][:50]
    assert other["test"] == splits["test"]


def test_not_trained_kinds_are_left_out_of_training_only(splits: dict[str, Rows]) -> None:
    left_out = {"startend:quotation", "combination:repeat_prompt"}
    other = prepare(seed=1, not_trained=sorted(left_out))["prompts"]
    trained = {*chain.from_iterable(row["instruction_id_list"] for row in other["train"])}
    assert trained == {*KINDS} - left_out
    assert {split: other[split] for split in ("validation", "test")} == {
        split: splits[split] for split in ("validation", "test")
    }


def test_every_instruction_can_be_read_and_every_kind_occurs(splits: dict[str, Rows]) -> None:
    assert {*INSTRUCTIONS} == {*KINDS}
    for split, rows in splits.items():
        for number, row in enumerate(rows):
            read_instructions(row["instruction_id_list"], row["kwargs"], where=f"{split} {number}")
        counts = Counter(chain.from_iterable(row["instruction_id_list"] for row in rows))
        total = sum(counts.values())
        shares = {kind: counts[kind] / total for kind in KINDS}
        if split == "train":
            assert min(shares.values()) > 0.015
            assert max(shares.values()) < 0.09
        assert min(shares.values()) > 0


def test_instructions_are_one_to_three_and_compatible(splits: dict[str, Rows]) -> None:
    for row in chain.from_iterable(splits.values()):
        kinds = row["instruction_id_list"]
        assert 1 <= len(kinds) <= 3
        assert all(are_compatible(*pair) for pair in combinations(kinds, 2))


def test_compatibility_keeps_the_conflicts_of_ifeval() -> None:
    registry = pytest.importorskip("if_verifiable.ifeval.instructions_registry", reason="the extra ifeval")
    conflicts = registry.conflict_make({kind: {*kinds} for kind, kinds in registry.INSTRUCTION_CONFLICTS.items()})
    for kind, other in combinations(KINDS, 2):
        assert not (are_compatible(kind, other) and other in conflicts[kind]), (kind, other)


def test_repeat_prompt_instructions_can_be_followed(splits: dict[str, Rows]) -> None:
    for row in chain.from_iterable(splits.values()):
        for kind, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            if kind == "combination:repeat_prompt":
                assert text(row).startswith(arguments["prompt_to_repeat"])
                assert "punctuation:no_comma" not in row["instruction_id_list"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "./x"}, "There is no data set at ./x: write it with python -m rlhf_zoo.runs.corpora.instructions"),
        ({"prompts": 0}, "give 1 or more"),
        ({"not_trained": ["commas"]}, "unknown kind 'commas'"),
        ({"not_trained": [*INSTRUCTIONS]}, "leaves no kind"),
        ({"requests": 0}, "requests of the corpus instructions is 0: give 1 or more"),
    ],
)
def test_prepare_rejects_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError, match=message):
        prepare(seed=1, **arguments)


def grams(prompt: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", prompt.lower())
    return {tuple(words[start : start + N]) for start in range(len(words) - N + 1)}


@pytest.mark.parametrize("benchmark", ["ifeval", "ifbench"])
def test_corpus_shares_no_ngram_with_benchmarks(splits: dict[str, Rows], real_data: Path, benchmark: str) -> None:
    with gzip.open(real_data / benchmark / "test.jsonl.gz", "rt", encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    benchmark_grams = set().union(*map(grams, prompts))
    assert len(benchmark_grams) > 5000
    shared = {gram for row in chain.from_iterable(splits.values()) for gram in grams(text(row)) & benchmark_grams}
    assert shared == set()


ANSWER = (
    "The tides rise and fall twice a day, and the moon pulls the water. Sailors read them in printed tables. "
    "Low water uncovers the sand for a few hours. Children look for shells and small crabs there. "
    "High water brings the boats back to the quay. A storm can raise it far above the wall. "
    "The old town has marked such floods on its houses. Some marks are higher than a tall person."
)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_edited_answers_follow_every_kind_but_languages(kind: str) -> None:
    """An answer of eight sentences is edited for drawn arguments of the kind, alone and with other kinds."""
    pytest.importorskip("langdetect", reason="the extra ifeval")
    rng = random.Random(kind)
    is_question = kind == "detectable_format:constrained_response"
    task = Task("explanation", "tides", "Explain the basics of tides.", is_question=is_question)
    requests = [made for made in (request(task, rng) for _ in range(600)) if kind in made["instruction_id_list"]]
    edited = [(made, demonstrate(made, ANSWER, "tides", rng)) for made in requests]
    followed = [(made, text) for made, text in edited if text is not None]
    assert len(requests) > 8
    assert len(followed) / len(edited) > 0.5 if kind != "language:response_language" else not followed
    for made, text in followed:
        instructions = read_instructions(made["instruction_id_list"], made["kwargs"], where="a request")
        assert all(instruction.is_followed(text) for instruction in instructions)
        assert text == text.strip()


def test_edited_answer_has_three_sentences_unless_more_are_asked_for() -> None:
    rng = random.Random(0)
    free = {"instruction_id_list": ["keywords:forbidden_words"], "kwargs": [{"forbidden_words": ["jazz"]}]}
    assert demonstrate(free, ANSWER, "tides", rng) == " ".join(sentences(ANSWER)[:3])
    limit = {"num_sentences": 8, "relation": "at least"}
    long = {"instruction_id_list": ["length_constraints:number_sentences"], "kwargs": [limit]}
    assert demonstrate(long, ANSWER, "tides", rng) == ANSWER
    limit["num_sentences"] = 9
    assert demonstrate(long, ANSWER, "tides", rng) is None


def test_sentences_are_whole_distinct_and_without_marks() -> None:
    answer = '# Tides\n\n1. The *moon* pulls. The sea follows!\n- The sea follows!\nOh no. "It rises." It breaks off he'
    assert sentences(answer) == ["The moon pulls.", "The sea follows!"]


def test_demonstrations_come_from_answers_to_training_tasks(tmp_path: Path, splits: dict[str, Rows]) -> None:
    pytest.importorskip("langdetect", reason="the extra ifeval")
    by_split = {split: [task for task in tasks() if split_of(task) == split] for split in ("train", "test")}
    answered = [*by_split["train"][:40], *by_split["test"][:5]]
    rows = [{"prompt": [{"role": "user", "content": task.text}], "answer": ANSWER} for task in answered]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare(str(tmp_path), seed=1)
    assert data["prompts"] == splits
    [(split, demonstrations)] = data["demonstrations"].items()
    assert split == "train" and 20 < len(demonstrations) < 40
    for row in demonstrations:
        assert any(text(row).startswith(task.text) for task in by_split["train"][:40])
        assert [message["role"] for message in row["completion"]] == ["assistant"]
    assert prepare(str(tmp_path), seed=2)["demonstrations"] != data["demonstrations"]
    more = prepare(str(tmp_path), seed=1, requests=3)["demonstrations"]["train"]
    assert 60 < len(more) < 120
    assert len({text(row) for row in more}) > 2 * len(demonstrations), "each answer gets other requests"
    (tmp_path / "train.jsonl").write_text('{"prompt": "Sing.", "answer": "La."}\n')
    with pytest.raises(ZooError, match=r"Row 1 of .* has the prompt 'Sing.', which is no task"):
        prepare(str(tmp_path), seed=1)
