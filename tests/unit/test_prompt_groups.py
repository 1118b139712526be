"""Prompts that ask the same are one group: how they are found, and that inference resamples a group as a whole."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import toy_run
from click.testing import CliRunner
from datasets import Dataset
from folders import write_data_set
from test_probes import sft
from test_verdict import FALLEN, GOOD, RISE, run

from rlhf_zoo.cli.main import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.evidence import Checkpoint, Evidence
from rlhf_zoo.evaluation.judges.pair_checks import check_panel
from rlhf_zoo.evaluation.judges.panel import Panel
from rlhf_zoo.evaluation.probes import Completions, probe
from rlhf_zoo.evaluation.probes.permutations import Permutations
from rlhf_zoo.evaluation.probes.texts import Pair
from rlhf_zoo.evaluation.prompt_groups import (
    NEAR_DUPLICATES,
    group_means,
    group_other_prompts,
    group_prompts,
    group_rows,
    normal_form,
)
from rlhf_zoo.evaluation.rollouts import probe_rollouts
from rlhf_zoo.evaluation.stats import Estimate
from rlhf_zoo.evaluation.trajectory import Trajectory
from rlhf_zoo.evaluation.verdict import decide
from rlhf_zoo.fileio import read_json
from rlhf_zoo.pipeline.stages import evaluate, ppo
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.runs.corpora import instructions, tiny_sums, tiny_world_2

# ---- which prompts ask the same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("EXPLAIN WHAT A MORTGAGE IS TO A TEENAGER", "Explain what a mortgage is to a teenager"),
        ("What's the capital of France?", "what is  the capital of France"),
        ("my phone's battery", "the battery of this phone"),
        ("Please review my essay.", "Review the essay!"),
        ("She said “no”.", 'she said "no"'),
        ("日本の首都は？", "日本の首都は?"),
    ],
)
def test_normal_form_joins_spellings_of_one_question(one: str, other: str) -> None:
    assert normal_form(one) == normal_form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is the capital of France?", "What is the capital of Spain?"),
        ("from English to French", "from French to English"),
        ("What is my name?", "What is your name?"),
        ("foods with vitamin A in them", "foods with vitamin B in them"),
        ("What is 1.5 + 2?", "What is 15 + 2?"),
        ("2+2=", "2-2="),
        ("What is 5!", "What is 5?"),
        ("a != b", "a = b"),
        ("(1+2)*3", "1+2*3"),
        ("it is not", "it is not a"),
        ("Do it.", "Do not do it."),
        ("...", "???"),
    ],
)
def test_group_prompts_separates_different_questions(one: str, other: str) -> None:
    assert len(set(group_prompts([one, other]))) == 2


def test_normal_form_handles_long_words_quickly() -> None:
    assert normal_form("a" * 300_000) == "a" * 300_000


def test_only_demo_corpus_has_near_duplicate_prompts() -> None:
    """Prompts from one template ask different things: sums, and instructions."""
    counts = {}
    for name, corpus in (("demo", tiny_world_2), ("sums", tiny_sums), ("instructions", instructions)):
        splits = corpus.prepare(seed=1)["prompts"]
        for split in ("validation", "test"):
            prompts = [row["prompt"] for row in splits[split]]
            counts[name, split] = (len(prompts), len(set(group_prompts(prompts))))
    assert (counts["demo", "validation"], counts["demo", "test"]) == ((160, 20), (80, 10))
    del counts["demo", "validation"], counts["demo", "test"]
    assert all(prompts == groups for prompts, groups in counts.values()), counts


def test_ngram_overlap_would_join_different_questions() -> None:
    def overlap(one: str, other: str) -> float:
        first, second = ({text[k : k + 3] for k in range(len(text) - 2)} for text in (one, other))
        return len(first & second) / len(first | second)

    asked = "the price of our chair"
    assert overlap(asked, "the price of our table") > 1.5 * overlap(asked, "my chair's price")


def test_group_prompts_compares_every_turn() -> None:
    def talk(*texts: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]

    prompts = [talk("Hello!"), "hello", talk("Hello!", "Hi.", "The sum?"), talk("hello", "Hi", "the sum")]
    assert group_prompts([*prompts, talk("Hello!", "Yes.", "The sum?")]) == [0, 0, 1, 1, 2]


def test_group_rows_reads_groups_from_a_column() -> None:
    rows = Dataset.from_dict({"prompt": ["a b", "c", "a  b", "A b"], "kind": [7, 8, 7, 8]})
    assert group_rows(rows, "kind") == [0, 1, 0, 1]
    assert (group_rows(rows, None), group_rows(rows, NEAR_DUPLICATES)) == ([0, 1, 2, 3], [0, 1, 0, 0])
    with pytest.raises(ZooError, match="names the column sort, but the prompts have prompt, kind: name one of these"):
        group_rows(rows, "sort")
    twice = Dataset.from_dict({"prompt": ["a", "a"], "kind": ["x", "y"]})
    with pytest.raises(ZooError, match="has 'x' and 'y' for one prompt, 'a': give each prompt one group"):
        group_rows(twice, "kind")
    with pytest.raises(ZooError, match="a group must be text or a whole number"):
        group_rows(Dataset.from_dict({"prompt": ["a"], "kind": [0.5]}), "kind")


def test_empty_prompts_form_no_near_duplicate_group() -> None:
    assert group_other_prompts(["", "a b", "", "A b", " "], NEAR_DUPLICATES) == [0, 1, 2, 1, 3]
    assert group_other_prompts(["", "a b", "", "A b"], None) == [0, 1, 2, 3]


# ---- the verdict counts a group once


def test_group_means_average_each_group_once() -> None:
    values = np.array([[1.0, 2.0, 6.0], [0.1, 0.2, 0.3]])
    assert group_means(values, "xyx").tolist() == [[3.5, 2.0], [pytest.approx(0.2), 0.2]]
    assert np.array_equal(group_means(values, "xyz"), values)
    with pytest.raises(ValueError, match="each value needs its group"):
        group_means(values, "xy")


def test_groups_of_single_prompts_change_nothing() -> None:
    points = run(RISE)
    alone = decide(Evidence(points[0], points[1:], GOOD), seed=0, resamples=500)
    numbered = decide(Evidence(points[0], points[1:], GOOD, groups=range(100, 200)), seed=0, resamples=500)
    assert alone.to_json() == numbered.to_json()
    policy, base = sft(1), sft(2)
    labels = [f"group of {prompt}" for prompt in policy.prompts]
    report = probe(policy, base).to_json()
    assert probe(replace(policy, groups=labels), replace(base, groups=labels)).to_json() == report


def test_verdict_needs_20_groups_not_20_spellings() -> None:
    points = run(RISE, prompts=48)
    found = decide(Evidence(points[0], points[1:], GOOD, groups=[k % 6 for k in range(48)]), seed=0, resamples=500)
    assert found.text == "not judged" and found.reasons[0] == (
        "A verdict needs 20 prompts that ask different things, not 6: the 48 prompts ask only 6 questions."
    )


def test_verdict_at_recommended_step_counts_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    points, groups = run(FALLEN, prompts=80), [prompt // 2 for prompt in range(80)]
    trajectory = Trajectory(
        prompt_count=80, samples_per_prompt=1, sft=None,
        checkpoints=[SimpleNamespace(step=point.step) for point in points[1:]],
        judge_name="judge", seed=0, reliability=GOOD, groups=groups, confirmation=(20, Estimate(0.9, (0.8, 1.0), 80)),
    )  # fmt: skip
    monkeypatch.setattr(Trajectory, "_policies", lambda self: points)
    assert trajectory.verdict.recommended == 20
    grouped = decide(Evidence(points[0], points[1:3], GOOD, groups=groups), seed=0)
    assert trajectory.verdict_at_recommended == grouped
    assert grouped != decide(Evidence(points[0], points[1:3], GOOD), seed=0), "40 questions, not 80"


def verdicts_on_nulls(*, known: bool, count: int) -> Counter[str]:
    """SFT again: 24 questions in 1 to 15 spellings, an intraclass correlation of 0.35, and a reward that rose."""
    kinds: Counter[str] = Counter()
    for seed in range(count):
        rng = np.random.default_rng(seed)
        questions = np.repeat(np.arange(24), rng.integers(1, 16, 24))
        size = len(questions)
        judged = np.sqrt(0.35) * rng.normal(size=24)[questions] + np.sqrt(0.65) * rng.normal(size=size)
        base = Checkpoint(0, 0.0, np.zeros(size), np.zeros(size))
        last = Checkpoint(1, 1.0, 1 + rng.normal(size=size), judged)
        groups = questions.tolist() if known else None
        kinds[decide(Evidence(base, [last], GOOD, groups=groups), seed=seed, resamples=200).kind] += 1
    return kinds


def test_verdict_rates_on_nulls_with_known_groups_are_as_stated() -> None:
    """Stated: *hacked* in 1%, *healthy* in 2.5%. Without groups both are some six times as frequent."""
    known, unknown = verdicts_on_nulls(known=True, count=400), verdicts_on_nulls(known=False, count=100)
    assert known["hacked"] <= 4 and known["healthy"] <= 10, known
    assert unknown["hacked"] >= 5 and unknown["healthy"] >= 10, unknown


# ---- the probes


def spelled(questions: int, spellings: int, samples: int = 1) -> Completions:
    """SFT, on so many spellings of each question: "my thing7", "our thing7", "my thing7.", …."""
    spelling = [(("my", "our")[k % 2], "." * (k // 2)) for k in range(spellings)]
    prompts = [f"{whose} thing{q}{mark}" for q in range(questions) for whose, mark in spelling for _ in range(samples)]
    groups = [q for q in range(questions) for _ in range(spellings * samples)]
    return Completions(prompts, [f"text {k}" for k in range(len(prompts))], groups=groups)


def test_permutations_assign_spellings_of_a_question_together() -> None:
    side = spelled(6, 4, samples=2)
    permutations = Permutations.of(Pair.of(side, side), seed=0, whole_prompts=False)
    assigned = permutations.assignments.reshape(len(permutations.assignments), 2, 6, 4, 2)
    assert (assigned == assigned[:, :, :, :1]).all() and len({row.tobytes() for row in assigned}) > 1500
    assert permutations.log_count == pytest.approx(6 * np.log(6))
    swaps = Permutations.of(Pair.of(side, side), seed=0, whole_prompts=True)
    assert swaps.log_count == pytest.approx(6 * np.log(2)) and not swaps.has_enough_assignments
    uneven = Completions(["a", "a", "A"], ["x", "y", "z"], groups=[0, 0, 0])
    assert Permutations.of(Pair.of(uneven, uneven), seed=0, whole_prompts=False).log_count == pytest.approx(np.log(6))


def test_permutation_p_is_calibrated_when_answers_correlate_in_groups() -> None:
    """The policy differs from SFT question by question, and by nothing on average; one completion of each of 6 x 20."""
    side = spelled(20, 6)
    alone = replace(side, groups=None)
    rates = []
    for sides in (side, alone):
        significant = 0
        for seed in range(60):
            rng = np.random.default_rng(seed)
            numbers = np.repeat(rng.normal(size=20), 6) + 0.3 * rng.normal(size=120)
            permutations = Permutations.of(Pair.of(sides, sides), seed=seed, whole_prompts=False)
            policy, base = permutations.means(numbers, np.zeros(120))
            significant += (policy - base >= policy[0] - base[0]).mean() <= 0.05
        rates.append(significant)
    assert rates[0] <= 6 and rates[1] >= 12, rates


def test_probes_are_skipped_on_too_few_groups() -> None:
    report = probe(spelled(6, 8), spelled(6, 8))
    assert report.probes == () and report.skipped["repetition"].startswith("not measurable on 48 prompts in 6 groups: ")
    assert not probe(replace(spelled(6, 8), groups=None), replace(spelled(6, 8), groups=None)).skipped.keys() & {
        "repetition", "templates"
    }  # fmt: skip


def test_same_answer_within_a_group_fires_no_templates() -> None:
    base = spelled(20, 4)
    answers = [" ".join(f"word{18 * (k // 4) + place}" for place in range(18)) for k in range(80)]
    once = replace(base, texts=answers)
    report = probe(once, base)
    assert (report["equal texts"].value, report["templates"].effect) == (0.0, 0.0)
    alone = probe(replace(once, groups=None), replace(base, groups=None))
    assert alone["equal texts"].value == 1.0


def test_rollouts_without_groups_use_near_duplicate_groups() -> None:
    base = replace(spelled(30, 4), judge_scores=[0.0] * 120, rewards=[0.0] * 120)
    policy = replace(base, judge_scores=[1.0] * 120, rewards=[1.0] * 120)
    found = probe_rollouts(policy, base)
    assert (found.prompts, found.groups) == (120, 30) and found.to_json()["groups"] == 30
    unnamed = probe_rollouts(replace(policy, groups=None), replace(base, groups=None))
    assert unnamed.to_json() == found.to_json()
    with pytest.raises(ValueError, match="Only one side has groups"):
        probe_rollouts(policy, replace(base, groups=None))
    with pytest.raises(ValueError, match="A prompt has two groups"):
        Completions(["a", "a"], ["x", "y"], groups=[0, 1])


def test_probe_command_reads_groups_from_a_column(tmp_path: Path) -> None:
    def write(name: str, rows: Completions, groups: list[object]) -> str:
        lines = [
            json.dumps({"prompt": prompt, "completion": text, "group": group})
            for prompt, text, group in zip(rows.prompts, rows.texts, groups, strict=True)
        ]
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    base = sft(1)
    groups = [f"pair {int(prompt.split()[-1]) // 2}" for prompt in base.prompts]
    ours, theirs = write("ours.jsonl", sft(2), groups), write("theirs.jsonl", base, groups)
    done = CliRunner().invoke(cli, ["probe", ours, "--against", theirs])
    assert done.exit_code == 0 and ", on 60 prompts in 30 groups." in done.output
    other = write("other.jsonl", base, ["another", *groups[1:]])
    for changed, message in (
        (other, "other.jsonl: the column group has 'another' and 'pair 0' for one prompt"),
        (write("shifted.jsonl", base, [f"{group}." for group in groups]), "have the groups 'pair 0' and 'pair 0.' for"),
        (write("wrong.jsonl", base, [0.5, *groups[1:]]), "line 1: group must be text or a whole number"),
    ):
        refused = CliRunner().invoke(cli, ["probe", ours, "--against", changed]).exception
        assert isinstance(refused, ZooError) and message in str(refused)


# ---- the eval stage


def test_eval_stage_resamples_groups_of_a_column(tmp_path: Path, quick_plots: None) -> None:
    toy_run.make_recipe(tmp_path, shared={"evaluation": {**toy_run.EVALUATION, "group": "kind"}})
    rows = [
        {"prompt": toy_run._letters(row, 2 + row % 3), "answer": "a", "row": row, "kind": row // 2} for row in range(12)
    ]
    shutil.rmtree(tmp_path / "data")
    write_data_set(tmp_path / "data", {"prompts": dict.fromkeys(("train", "validation", "test"), rows)})
    toy_run.save_start(tmp_path)
    context = toy_run.make_context(tmp_path)
    assert ppo.run(context) is True and evaluate.run(context) is True
    found = read_json(context.record("eval").path / "evaluation.json")
    over = found["over_training"]
    assert (found["prompts"], found["groups"], found["n"]) == (6, 3, 12) == (over["prompts"], over["groups"], 12)
    assert "not 3: the 6 prompts ask only 3 questions" in " ".join(over["reasons"])
    assert "not measurable on 6 prompts in 3 groups" in str(over["probes"]["skipped"])
    make_card(context.record("ppo").path)
    card = (context.record("ppo").path / "README.md").read_text()
    assert "6 prompts in 3 groups; 95% intervals over groups." in card
    assert "6 prompts in 3 groups that ask the same thing, each resampled as a whole, of the" in card
    assert "In brackets: 95% intervals over groups, paired" in card
    lost = replace(context, flags={**context.flags, "recipe": {"evaluation.group": "sort"}})
    with pytest.raises(ZooError, match="names the column sort"):
        evaluate.run(lost)


class Longer:
    name, description = "longer", "It likes long texts."

    def __call__(self, prompts: list[str], completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]


@pytest.mark.parametrize(("group", "questions"), [(None, 4), (NEAR_DUPLICATES, 2), ("a column of the data", 2)])
def test_judge_check_groups_pairs_like_the_evaluation(group: str | None, questions: int) -> None:
    prompts = ["the radio's price", "the price of my radio", "the chair's price", "The price of the chair."]
    pairs = Dataset.from_dict({"prompt": prompts, "chosen": ["a b c"] * 4, "rejected": ["a"] * 4})
    check = check_panel(Panel([Longer()]), pairs, own_pairs=pairs, seed=1, group=group)["longer"]
    labeled, own = check.labeled_check, check.own_check
    assert labeled is not None and own is not None
    assert labeled.prompt_count == own.prompt_count == questions and labeled.accuracy.n == 4
