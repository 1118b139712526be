"""Choosing and pruning checkpoints: by rule, never by what PPO maximizes or by the test split."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_run import make_context, make_recipe

from rlhf_zoo.errors import ZooError
from rlhf_zoo.runs.checkpoint_choice import (
    PPOReleaseArguments,
    ReleaseArguments,
    best_step,
    check_release_rule,
    checkpoints_to_keep,
    choice_of_verdict,
    choose_checkpoint,
    chosen_is_best,
    delete_old_checkpoints,
    steps_to_protect,
)
from rlhf_zoo.runs.record import StageRecord, checkpoint_step
from rlhf_zoo.runs.settings.declared import default_of

LAST, BEST = ReleaseArguments(), ReleaseArguments(release="best")
RECOMMENDED = PPOReleaseArguments()
ROWS = [
    {"step": 10, "eval_gold": 0.5, "loss": 1.0},
    {"step": 20, "eval_gold": 0.9},
    {"step": 20, "loss": 0.5},
    {"step": 30, "eval_gold": 0.9},
    {"step": 40, "eval_gold": None},
    {"step": 45, "eval_gold": 2.0},
]
STEPS = [10, 20, 30, 40]


def trainer(**fields):
    defaults = {
        "metric_for_best_model": "gold", "greater_is_better": True, "eval_strategy": "steps", "eval_steps": 10,
        "save_strategy": "steps", "save_steps": 20,
    }  # fmt: skip
    return SimpleNamespace(**defaults | fields)


def record(folder: Path, *, steps=STEPS, rows=ROWS) -> StageRecord:
    stage = StageRecord(folder / "ppo")
    for row in rows:
        stage.append_metrics(row)
    for step in steps:
        stage.checkpoint_path(step).mkdir(parents=True)
        stage.mark_complete(stage.checkpoint_path(step))
    return stage


def remaining_steps(stage: StageRecord) -> list[int]:
    return [checkpoint_step(path) for path in stage.checkpoints()]


def test_best_step_prefers_first_of_equal_checkpoints():
    assert best_step(ROWS, "eval_gold", greater_is_better=True, steps=STEPS) == (20, 0.9)
    assert best_step(ROWS, "eval_gold", greater_is_better=False, steps=STEPS) == (10, 0.5)
    assert best_step(ROWS, "eval_gold", greater_is_better=True, steps=[40]) is None
    assert best_step([{"step": 10, "eval_gold": float("nan")}], "eval_gold", greater_is_better=True, steps=[10]) is None


def test_choose_follows_release_rule(tmp_path):
    stage = record(tmp_path)
    assert choose_checkpoint(stage, LAST, trainer()) == {"step": 40, "rule": "last", "metric": None, "value": None}
    best = {"step": 20, "rule": "best", "metric": "eval_gold", "value": 0.9}
    assert choose_checkpoint(stage, BEST, trainer()) == best
    with pytest.raises(ZooError, match="has eval_silver, by which release: best chooses"):
        choose_checkpoint(stage, BEST, trainer(metric_for_best_model="silver"))
    with pytest.raises(ZooError, match="no complete checkpoint"):
        choose_checkpoint(StageRecord(tmp_path / "empty"), LAST, trainer())


@pytest.mark.parametrize(
    ("release", "keep", "unsent", "stay"),
    [
        (LAST, None, [], [10, 20, 30, 40]),
        (LAST, 0, [], [10, 20, 30, 40]),
        (LAST, 2, [], [30, 40]),
        (LAST, 1, [10, 20], [10, 20, 40]),
        (BEST, 2, [], [20, 40]),
        (BEST, 1, [10], [10, 20, 40]),
        (LAST, 9, [], [10, 20, 30, 40]),
        (RECOMMENDED, None, [], [10, 20, 30, 40]),
        (RECOMMENDED, 2, [10], [10, 40]),
    ],
)
def test_pruning_spares_last_best_and_unpublished(tmp_path, release, keep, unsent, stay):
    stage = record(tmp_path)
    delete_old_checkpoints(stage, keep=keep, protected_steps={*unsent, *steps_to_protect(stage, release, trainer())})
    assert remaining_steps(stage) == stay


@pytest.mark.parametrize(
    ("fields", "evaluated_split", "message"),
    [
        ({"metric_for_best_model": None}, "validation", "needs metric_for_best_model"),
        ({"metric_for_best_model": "objective/score"}, "validation", "which PPO maximizes"),
        ({"metric_for_best_model": "eval_objective/shaped_score"}, "validation", "which PPO maximizes"),
        (
            {"metric_for_best_model": "win_rate"},
            "validation",
            "by eval_win_rate, which no evaluation of that stage logs",
        ),
        ({"eval_strategy": "no"}, "validation", "needs metrics of the validation split"),
        ({}, None, "needs metrics of the validation split"),
        ({}, "test", "would choose the checkpoint by the test split"),
        ({"save_steps": 15}, "validation", "an evaluation at every checkpoint"),
        ({"save_strategy": "epoch"}, "validation", "an evaluation at every checkpoint"),
    ],
)
def test_check_release_rule_rejects_unusable_rules(fields, evaluated_split, message):
    arguments = trainer(**{"metric_for_best_model": "rewards/gold", **fields})
    check_release_rule("ppo", LAST, arguments, evaluated_split=evaluated_split)
    with pytest.raises(ZooError, match=message):
        check_release_rule("ppo", BEST, arguments, evaluated_split=evaluated_split)


def test_check_release_rule_accepts_valid_rules():
    check_release_rule("ppo", BEST, trainer(metric_for_best_model="eval_rewards/gold"), evaluated_split="validation")
    epochs = trainer(metric_for_best_model="loss", eval_strategy="epoch", save_strategy="epoch")
    check_release_rule("sft", BEST, epochs, evaluated_split="validation")
    check_release_rule("reward", BEST, trainer(metric_for_best_model="accuracy"), evaluated_split="validation")


def test_recommended_rule_is_provisional_until_verdict(tmp_path):
    """Until the evaluation has chosen, the last checkpoint stands in, and none is best."""
    check_release_rule("ppo", RECOMMENDED, trainer(), evaluated_split=None)
    ppo = record(tmp_path)
    chosen = choose_checkpoint(ppo, RECOMMENDED, trainer())
    assert chosen == {"step": 40, "rule": "recommended", "metric": None, "value": None, "provisional": True}
    ppo.write(chosen=chosen, status="finished")
    assert not chosen_is_best(ppo) and ppo.chosen_checkpoint() == ppo.checkpoint_path(40)
    for choice, best in (
        (choice_of_verdict(20, recommends=True), True),
        (choice_of_verdict(40, recommends=False), False),
    ):
        ppo.write(chosen=choice)
        assert chosen_is_best(ppo) is best and ppo.chosen_checkpoint() == ppo.checkpoint_path(choice["step"])


def test_ppo_release_defaults_to_recommended(tmp_path):
    """The default is that of the stage, in the dataclass as in what `recipes keys` reads from its source."""
    make_recipe(tmp_path)
    settings = make_context(tmp_path).settings("ppo")
    assert settings.release == RECOMMENDED and "release" not in settings.resolved
    assert make_context(tmp_path).settings("sft").release == LAST
    defaults = {stage: default_of(stage, "release") for stage in ("sft", "reward", "ppo")}
    assert defaults == {"sft": "last", "reward": "last", "ppo": "recommended"}
    assert make_context(tmp_path, release="last").settings("ppo").release.release == "last"
    (tmp_path / "toy" / "sft.yaml").write_text("release: recommended\n")
    with pytest.raises(ZooError, match="is 'recommended', but it takes one of last, best"):
        make_context(tmp_path).settings("sft")


def test_settings_parse_release_and_save_total_limit(tmp_path):
    make_recipe(tmp_path, ppo={"save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 1})
    settings = make_context(tmp_path, release="best", metric_for_best_model="rewards/judge").settings("ppo")
    assert (settings.save_total_limit, settings.trainer.save_total_limit) == (2, None)
    assert settings.release.release == "best" and settings.resolved["save_total_limit"] == 2
    with pytest.raises(ZooError, match="push_merged of the stage ppo needs use_peft"):
        make_context(tmp_path, push_merged="true").settings("ppo")
    with pytest.raises(ZooError, match="takes one of last, best, recommended"):
        make_context(tmp_path, release="first").settings("ppo")
    assert json.dumps(settings.resolved)


@pytest.mark.parametrize(
    ("keep", "chosen", "stay"),
    [
        (None, {"step": 20}, [10, 20, 30, 40]),
        (2, {"step": 40}, [30, 40]),
        (2, {"step": 20}, [20, 40]),
        (1, {"step": 20}, [20, 40]),
        (2, {"step": 40, "provisional": True}, [10, 20, 30, 40]),
        (2, None, [30, 40]),
    ],
)
def test_checkpoints_to_keep_is_known_before_publishing(tmp_path, keep, chosen, stay):
    """The evaluation needs this list while other checkpoints may still be deleted."""
    stage = record(tmp_path)
    stage.write(resolved={"save_total_limit": keep}, chosen=chosen)
    assert [checkpoint_step(path) for path in checkpoints_to_keep(stage)] == stay
    assert remaining_steps(stage) == [10, 20, 30, 40]
