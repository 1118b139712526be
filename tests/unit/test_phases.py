"""Where the time of an update goes: phases count apart, in every row of training, and in nothing that is compared."""

import time
from pathlib import Path

import pytest
import torch
from trainer_fixture import good, make_reward_model, make_trainer, prompt_rows

from rlhf_zoo.ppo.timing import Phases
from rlhf_zoo.runs.metrics_file import without_times

PHASES = {f"time/{name}" for name in ("rollout", "reference", "values", "reward", "update")}


def test_phase_time_excludes_nested_phases_and_time_outside_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    phases = Phases(torch.device("cpu"))
    assert phases.pop_means() == {}
    with phases("reference"):  # of an evaluation
        now += 100
        phases.count_tokens(100)
    for _ in range(2):
        with phases.time_update():
            now += 1
            with phases("rollout"):
                now += 2
                with phases("reference"):
                    now += 4
                now += 1
            phases.count_tokens(24)
    assert phases.pop_means() == {"time/rollout": 3.0, "time/reference": 4.0, "tokens_per_second": 48 / 16}
    assert phases.pop_means() == {}


def test_training_rows_hold_phases_of_their_updates(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, reward_model=make_reward_model(), reward_funcs=good, max_steps=4, logging_steps=2,
        eval_dataset=prompt_rows(8), eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    began = time.perf_counter()
    trainer.train()
    spent = time.perf_counter() - began
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        times = {name: value for name, value in row.items() if name.startswith("time/")}
        assert times.keys() == PHASES and all(value > 0 for value in times.values())
        tokens = row["completions/length"] * trainer.args.episodes_per_update
        assert row["tokens_per_second"] == pytest.approx(tokens / sum(times.values()), rel=0.05)
        assert not without_times(row).keys() & {*PHASES, "tokens_per_second"}
    assert sum(2 * row[name] for row in rows for name in PHASES) < spent
    evaluated = [row for row in trainer.state.log_history if "eval_objective/score" in row]
    assert len(evaluated) == 4 and not any(row.keys() & PHASES for row in evaluated)
