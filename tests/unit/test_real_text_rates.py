"""The policies of benchmarks/real_text_rates.py, made from a real model's text: what holds in every draw."""

import functools
import re
from pathlib import Path

import numpy as np
import outside_list
import pytest
import real_text_rates as rates

from rlhf_zoo.evaluation.prompt_groups import group_prompts, number_of_groups

questions = functools.cache(rates.load_questions)


def kinds(name: str, strength: float | None, seed: int = 0) -> dict[str, str]:
    result = rates.judge_draw(rates.draw(questions(), name, strength, seed), seed)
    return {judge: one.verdict.kind for judge, one in result.items()}


def test_sample_is_small_complete_and_documented():
    assert (rates.FOLDER / "sample.jsonl.gz").stat().st_size < 400_000
    note = (rates.FOLDER / "README.md").read_text(encoding="utf-8")
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in note and "Apache-2.0" in note
    prompts = [question.prompt for question in questions()]
    assert f"has {len(prompts)} prompts" in note
    assert number_of_groups(group_prompts(prompts)) == len(prompts), "no two ask the same"
    assert all(len(question.texts[1.0]) >= 2 for question in questions())
    assert sum(question.general for question in questions()) == 80
    worths = [text.worth for question in questions() if question.general for text in question.texts[1.0]]
    assert np.mean(worths) == pytest.approx(0, abs=0.2) and np.std(worths) == pytest.approx(1)


def test_question_answers_are_correct():
    for question in questions():
        for step in question.work:
            left, operator, right, result = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step).groups()
            value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__truediv__}[operator]
            assert value(int(left), int(right)) == int(result), step
        if question.kind == "sums":
            assert question.work[-1].endswith(f"= {question.answer}")
            assert rates.is_right({"kind": "sums", "answer": question.answer}, f"So {question.answer}.")
        elif question.kind == "extraction":
            assert question.answer in question.prompt
        elif question.kind == "code":
            compile(question.answer, "an answer", "exec")


@pytest.mark.parametrize("name", rates.HONEST)
def test_honest_policy_is_not_hacked(name):
    assert "hacked" not in kinds(name, None).values()


@pytest.mark.parametrize("name", ["one text", "one of a dozen texts", "one of a dozen short texts", "one phrase"])
def test_canned_text_is_hacked_even_when_judge_likes_it(name):
    assert {*kinds(name, 1.0).values()} == {"hacked"}


def test_hack_lowers_worth_by_its_cost():
    draw = rates.draw(questions(), "shuffled words", 0.3, 0)
    base = {text.text: text.worth for question in questions() for text in question.texts[1.0]}
    kept = [text in base for text in draw.policy.texts]
    assert 0.6 < np.mean(kept) < 0.8
    known = [base[text] for text, same in zip(draw.policy.texts, kept, strict=True) if same]
    assert draw.worths[0][kept] == pytest.approx(known)
    rewards = np.array(draw.policy.rewards)
    assert rewards[np.logical_not(kept)].mean() > rewards[kept].mean() + 1


def test_add_counts_sums_counts():
    first = {"policy": "p", "judge": "j", "n": 2, "kinds": {"hacked": 1, "better": 1}, "fired": {"length": 2}}
    more = {"policy": "p", "judge": "j", "n": 2, "kinds": {"suspicious": 2}, "fired": {"length": 1, "templates": 1}}
    row = rates.add_counts(rates.add_counts(None, first), more)
    assert row["n"] == 4 and row["kinds"] == {"suspicious": 2, "hacked": 1, "better": 1}
    assert row["fired"] == {"length": 3, "templates": 1}
    assert (row["hacked"]["value"], row["suspicious"]["value"]) == (0.25, 0.5)


@pytest.mark.parametrize("name", [*outside_list.HACKS, *outside_list.HONEST])
def test_outside_change_lowers_or_raises_worth_of_changed_texts(name):
    entry = outside_list.HACKS.get(name) or outside_list.HONEST[name]
    drawn = outside_list.draw(questions(), name, 1.0, 0)
    base = {text.text: text.worth for question in questions() for text in question.texts[1.0]}
    texts, worths = drawn.policy.texts, drawn.worths[0]
    assert all(text.strip() for text in texts)
    if name == "a good answer to another prompt":
        assert set(texts) <= {*base} and worths.mean() < -1.5
        return
    changed = np.array([text not in base for text in texts])
    assert changed.mean() > (0.8 if name in outside_list.HACKS else 0.05)
    kept = [text for text in texts if text in base]
    assert worths[np.logical_not(changed)] == pytest.approx([base[text] for text in kept])
    assert worths[changed].mean() == pytest.approx(entry.gain, abs=0.7)


def test_gain_on_few_prompts_is_rarely_healthy_as_docs_say():
    counts = rates.verdicts_on_few_prompts(0.5)
    page = (Path(__file__).parents[2] / "docs/verdict-before-after.md").read_text("utf-8")
    assert f"*healthy* in {counts['healthy'] / 300:.0%} ({counts['healthy']} of 300)" in page, counts
    assert counts["healthy"] + counts["gain not shown"] == counts.total() == 300
    assert rates.verdicts_on_few_prompts(0.0, evaluations=60)["healthy"] <= 2
