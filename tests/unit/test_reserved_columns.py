"""Columns of the data whose names are taken: reward functions, rules and judges always get the policy's own texts."""

import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from toy_run import make_context, make_recipe
from trainer_fixture import LETTERS, good, make_tokenizer, make_trainer, prompt_rows, trained

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.panel import score_completions
from rlhf_zoo.evaluation.judges.rule import RuleJudge
from rlhf_zoo.evaluation.measure import repeat_prompts
from rlhf_zoo.modeling.reserved_columns import FUNCTION_ARGUMENTS, PROMPT_INDEX, RESERVED
from rlhf_zoo.pipeline.experiments.baseline_trainers import TokenCounter, ppo_reward
from rlhf_zoo.pipeline.stages.ppo import try_functions
from rlhf_zoo.rewards import Rewards
from rlhf_zoo.rewards.verifiable import exact_match

DECOY = "gggg"  # what `good` would like best


def decoys(count: int = 16) -> Dataset:
    """Prompts with a column of every name that is taken, and one that is not."""
    others = sorted(RESERVED - {"prompt", "input_ids", "attention_mask"})
    return prompt_rows(count, topic=list(range(count)), **{name: [DECOY] * count for name in others})


def test_reserved_columns_are_ignored_in_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[dict[str, Any]] = []

    def keep(**options: Any) -> list[float]:
        calls.append(options)
        return good(options["completions"])

    caplog.set_level(logging.WARNING)
    plain = trained(tmp_path / "a", reward_funcs=good, max_steps=1)
    decoyed = trained(tmp_path / "b", reward_funcs=keep, train_dataset=decoys(), max_steps=1)
    assert calls[0].keys() == {*FUNCTION_ARGUMENTS, "topic"}
    assert not any(DECOY in (values if isinstance(values, list) else [values]) for values in calls[0].values())
    assert all(set(text) <= set(LETTERS) for text in calls[0]["prompts"])
    assert calls[0]["trainer_state"] is decoyed.state
    assert decoyed.state.log_history[0]["objective/score"] == plain.state.log_history[0]["objective/score"]
    told = {name for name in (*FUNCTION_ARGUMENTS, "completion") if f"column '{name}'" in caplog.text}
    assert told == {*FUNCTION_ARGUMENTS, "completion"}, "each with its mend"
    assert "`columns: {given_completions: completions}`" in caplog.text


def test_reserved_columns_are_ignored_in_evaluation_and_checks(tmp_path: Path) -> None:
    _, prompts, columns = repeat_prompts(decoys(4), 1)
    assert columns.keys() == {"topic"}
    rule = RuleJudge("exact_match", lambda completions, **_: good(completions))
    others = {name: [DECOY] * 4 for name in RESERVED}
    assert score_completions(rule, prompts, ["g", "a", "ga", "gaaa"], others) == [1.0, 0.0, 0.5, 0.25]

    make_recipe(tmp_path)
    seen: list[Any] = []

    def look(completions: list[str], **given: Any) -> list[float]:
        seen.append((completions, given))
        return [0.0] * len(completions)

    try_functions(make_context(tmp_path).settings("ppo"), [look], {"train_dataset": decoys()})
    completions, given = seen[0]
    assert DECOY not in completions and given.keys() == {*FUNCTION_ARGUMENTS, "topic"} - {"completions"}


def test_reserved_columns_are_ignored_in_baselines() -> None:
    tokenizer, seen = make_tokenizer(), []

    def look(**options: Any) -> list[float]:
        seen.append(options)
        return good(options["completions"])

    none: dict[str, float | None] = {"penalty": None, "score": None}
    reward = ppo_reward(Rewards([look]), tokenizer, TokenCounter(), missing_eos=none, score_clip=None)
    ids = [tokenizer("ga")["input_ids"]]
    assert reward(prompts=["a"], completions=["ga"], completion_ids=ids, trainer_state="state", topic=[1]) == [0.5]
    assert seen[0]["trainer_state"] == "state" and seen[0]["topic"] == [1]


def test_prompt_index_column_does_not_key_random_streams(tmp_path: Path) -> None:
    """It once keyed the random streams: equal ones made equal completions, and a text ended in a traceback."""
    same = prompt_rows(1).select([0] * 16)
    calls: list[dict[str, Any]] = []

    def keep(**options: Any) -> list[float]:
        calls.append(options)
        return good(options["completions"])

    for column in ([0] * 16, [f"q{row}" for row in range(16)]):
        calls.clear()
        rows = same.add_column("prompt_index", column)
        trainer = make_trainer(tmp_path, reward_funcs=keep, train_dataset=rows, eval_dataset=rows, max_steps=1)
        trainer.train()
        assert len({tuple(ids) for ids in calls[0]["completion_ids"]}) > 1
        assert set(calls[0]["prompt_index"]) <= set(column)
        trainer.evaluate(rows)
        assert sorted(trainer.train_dataset[PROMPT_INDEX]) == list(range(16))


def test_check_columns_rejects_answers_in_reserved_column() -> None:
    with pytest.raises(ZooError, match=r"reads the column 'answer', but the prompts have 'topic': set"):
        exact_match.check_columns(["prompt", "completions", "topic"])
    reward = type(exact_match)(column="completion")
    with pytest.raises(
        ZooError,
        match=r'by `columns: {given_completion: completion}`, and set exact_match\(column="given_completion"\)',
    ):
        reward.check_columns(["prompt", "completion"])


def test_logged_extras_do_not_replace_completions(tmp_path: Path) -> None:
    def keep(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("completion", [DECOY] * len(completions))
        return good(completions)

    trainer = make_trainer(tmp_path, reward_funcs=keep, log_completions=True, logging_steps=1, max_steps=1)
    tables: list[dict[str, Any]] = []
    trainer.show = lambda table, title, **_: tables.append(table)
    trainer.train()
    assert DECOY not in tables[0]["completion"] and set(tables[0]["completion (keep)"]) == {DECOY}
