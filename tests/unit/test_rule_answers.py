"""Answers that rules read in a column of the prompts: looked at before anything trains, for rewards and for judges."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from toy_run import make_context, make_recipe, save_stage, trained_policy
from trainer_fixture import make_tokenizer

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.pair_checks import check_panel
from rlhf_zoo.evaluation.judges.panel import Panel
from rlhf_zoo.evaluation.judges.rule import RuleJudge
from rlhf_zoo.pipeline import run_recipe as pipeline
from rlhf_zoo.rewards.verifiable import ExactMatch, NumericMatch
from rlhf_zoo.runs.context import RunContext


def solved(completions: Sequence[str], solution: Sequence[str]) -> list[float]:
    """Reads a column that the prompts do not have."""
    return [float(text == expected) for text, expected in zip(completions, solution, strict=True)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stage(tmp_path_factory.mktemp("base"), "sft", trained_policy(), make_tokenizer())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make_recipe(tmp_path)
    return tmp_path


def change(folder: Path, split: str, row: int, **values: Any) -> None:
    path = folder / "data" / "prompts" / f"{split}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[row] |= values
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rewarded_by(folder: Path, base: Path, **flags: Any) -> RunContext:
    return replace(make_context(folder), flags={"sft": {"model_name_or_path": str(base)}, "ppo": flags})


def judged_by(folder: Path, base: Path, rule: str) -> RunContext:
    context = rewarded_by(folder, base)
    evaluation = {**context.recipe.shared["evaluation"], "judge": rule}
    return replace(context, recipe=replace(context.recipe, shared={**context.recipe.shared, "evaluation": evaluation}))


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("exact_match(column='solution')", "reads the column 'solution'"),
        ("numeric_match", "cannot read the answer of row 0 of the test split"),
        ("test_rule_answers:solved", r"tried with prompts as their own answers: .*solution"),
    ],
)
def test_rule_judge_rejects_missing_column(folder: Path, base: Path, rule: str, told: str) -> None:
    with pytest.raises(ZooError, match=told):
        pipeline.check(judged_by(folder, base, f"rule:{rule}"))


@pytest.mark.parametrize("split", ["test", "validation"])
def test_rule_judge_rejects_row_without_answer(folder: Path, base: Path, split: str) -> None:
    pipeline.check(judged_by(folder, base, "rule:exact_match"))
    change(folder, split, 3, answer=None)
    with pytest.raises(ZooError, match=f"Row 3 of the {split} split has no answer in the column 'answer'"):
        pipeline.check(judged_by(folder, base, "rule:exact_match"))


def test_sole_rule_reward_rejects_row_without_answer(folder: Path, base: Path) -> None:
    change(folder, "train", 4, answer=None)
    with_model = rewarded_by(folder, base, reward_funcs="exact_match")
    pipeline.check(with_model)
    alone = rewarded_by(folder, base, reward_funcs="exact_match", reward_model_path="none")
    with pytest.raises(ZooError, match=r"Row 4 of the prompts has no answer .* no other reward"):
        pipeline.check(alone)
    both = rewarded_by(
        folder,
        base,
        reward_model_path="none",
        reward_funcs="[\"exact_match\", \"exact_match(column='row', name='other')\"]",
    )
    pipeline.check(both)
    unread = rewarded_by(folder, base, reward_funcs="numeric_match")
    with pytest.raises(ZooError, match="numeric_match cannot read the answer of row 0 of the prompts"):
        pipeline.check(unread)


def test_answer_flags_reads_answers_like_the_reward() -> None:
    rows = datasets.Dataset.from_dict({"answer": ["#### 4", "about 5", None, "six"], "accepted": [[1], [2.0], [], [3]]})
    assert NumericMatch().answer_flags(rows.select([0, 1, 2]), subject="it") == [True, True, False]
    assert NumericMatch(column="accepted").answer_flags(rows, subject="it") == [True, True, False, True]
    assert ExactMatch().answer_flags(rows, subject="it") == [True, True, False, True]
    with pytest.raises(ZooError, match="cannot read the answer of row 3 of it"):
        NumericMatch().answer_flags(rows, subject="it")


def test_rule_judge_is_checked_only_on_pairs_with_answers() -> None:
    """A judge that no pair has an answer for is not tried on any; the evaluation once ended there."""
    pairs = datasets.Dataset.from_dict({"prompt": ["a"] * 4, "chosen": ["1"] * 4, "rejected": ["2"] * 4})
    rule = RuleJudge("numeric_match")
    assert check_panel(Panel([rule]), pairs, seed=1)[rule.name].labeled_check is None
    some = pairs.add_column("answer", ["1", None, "1", None])
    result = check_panel(Panel([rule]), some, seed=1)[rule.name].labeled_check
    assert result is not None and (result.accuracy.n, result.accuracy.value) == (2, 1.0)
