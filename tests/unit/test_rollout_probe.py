"""`rlhf_zoo.probe` and `ProbeCallback`: rollouts in memory, and the completions that a trainer logs."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pandas
import pytest
from datasets import Dataset
from miniatures import load
from test_probes import sft
from test_rollouts import write
from transformers import TrainerControl, TrainerState, TrainingArguments

import rlhf_zoo
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.probes import Completions
from rlhf_zoo.evaluation.watch import Hacked

GARBAGE = " is great; i love it."


def rows(completions: Completions) -> list[dict[str, object]]:
    return [
        {"prompt": prompt, "completion": text, "reward": reward}
        for prompt, text, reward in zip(completions.prompts, completions.texts, completions.rewards, strict=True)
    ]


def test_probe_accepts_paths_rows_data_sets_and_completions(tmp_path):
    policy = replace(sft(1), texts=[GARBAGE] * 120)
    path = write(tmp_path / "policy.jsonl", policy, reward=policy.rewards)
    result = rlhf_zoo.probe(path, sft(2))
    assert isinstance(result, rlhf_zoo.RolloutFindings)
    assert (result.verdict.kind, result.report["templates"].fired) == ("hacked", True)
    assert (result.completions, result.reference_completions, result.left_out) == (120, 120, (0, 0))
    for other in (str(path), rows(policy), (row for row in rows(policy)), Dataset.from_list(rows(policy)), policy):
        assert rlhf_zoo.probe(other, sft(2)).to_json() == result.to_json()


def test_probe_names_reward_column_and_side_and_row_of_mistakes():
    policy, reference = rows(sft(1)), rows(sft(2))
    renamed = [[{**row, "brevity": row["reward"], "reward": None} for row in side] for side in (policy, reference)]
    assert rlhf_zoo.probe(*renamed, reward="brevity").to_json() == rlhf_zoo.probe(policy, reference).to_json()
    without = [{key: row[key] for key in ("prompt", "completion")} for row in reference]
    for sides, message in (
        ((policy, without), "reference has no reward, but policy does: provide it in both files or in neither"),
        (([*policy, 3], reference), "policy, row 121 is not an object"),
        ((policy, [{"completion": "x"}]), "reference, row 1 has no prompt"),
        ((pandas.DataFrame(policy), reference), "policy, row 1 is not an object"),
        ((policy, []), "reference holds no completions"),
        ((policy, 5), "reference must be a file, rows with prompt and completion, or Completions, not 5"),
        ((policy, [{**row, "prompt": "x"} for row in reference]), "policy and reference share no prompt"),
    ):
        with pytest.raises(ZooError, match=message):
            rlhf_zoo.probe(*sides)


class Trainer:
    """What transformers' trainer and TRL's log do around a callback: the file comes after the step's callbacks."""

    def __init__(self, folder, callback, *, step: int = 0) -> None:
        self.args = TrainingArguments(str(folder), report_to=[], use_cpu=True)
        self.state, self.control, self.callback = TrainerState(global_step=step), TrainerControl(), callback
        (folder / "completions").mkdir(exist_ok=True)
        callback.on_train_begin(self.args, self.state, self.control)

    def step(self, completions: Completions, start: int, size: int = 40, *, name: str | None = None) -> None:
        self.callback.on_step_begin(self.args, self.state, self.control)
        self.state.global_step += 1
        part = slice(start, start + size)
        chats = [[{"role": "user", "content": prompt}] for prompt in completions.prompts[part]]
        answers = [[{"role": "assistant", "content": text}] for text in completions.texts[part]]
        table = pandas.DataFrame({"prompt": chats, "completion": answers, "reward_func": float("nan")})
        name = name or f"completions_{self.state.global_step:05d}.parquet"
        table.to_parquet(f"{self.args.output_dir}/completions/{name}")

    def end(self) -> None:
        self.callback.on_train_end(self.args, self.state, self.control)


class Trackers:
    """A run of Weights & Biases and one of trackio, as far as they are used."""

    def __init__(self, monkeypatch) -> None:
        self.logged: list[tuple[str, dict[str, float]]] = []
        self.alerts: list[tuple[str, str, str, object]] = []
        run = SimpleNamespace(
            log=lambda row: self.logged.append(("wandb", row)),
            alert=lambda title, text, level: self.alerts.append(("wandb", title, text, level)),
        )
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
        import trackio

        monkeypatch.setattr(trackio.context_vars, "current_run", SimpleNamespace(get=lambda: object()))
        monkeypatch.setattr(trackio, "log", lambda row: self.logged.append(("trackio", row)))
        monkeypatch.setattr(
            trackio, "alert", lambda title, text, level: self.alerts.append(("trackio", title, text, level.value))
        )


def test_probe_callback_probes_logged_completions_and_sends_alerts(tmp_path, monkeypatch, caplog):
    trackers = Trackers(monkeypatch)
    trainer = Trainer(tmp_path, rlhf_zoo.ProbeCallback(size=40, every=40))
    for start in (0, 40, 80):
        trainer.step(sft(1), start)
    assert {name for name, _ in trackers.logged} == {"wandb", "trackio"} and not trackers.alerts
    trainer.step(replace(sft(1), texts=[GARBAGE] * 120), 0)
    trainer.end()
    last = trackers.logged[-1][1]
    assert (last["train/global_step"], last["probes/risen_phrases"]) == (4, 1.0)
    assert len(trackers.alerts) == 2 * len({title for _, title, _, _ in trackers.alerts})
    assert ("wandb", "Probe templates fired", "ERROR") in [
        (name, title, level) for name, title, _, level in trackers.alerts
    ]
    assert ("trackio", "error") in [(name, level) for name, _, _, level in trackers.alerts]
    assert all(len(title) < 64 for _, title, _, _ in trackers.alerts)
    assert "“great i love it”" in caplog.text


def test_probe_callback_stops_training_and_counts_rows_once(tmp_path):
    trainer = Trainer(tmp_path, rlhf_zoo.ProbeCallback(against=rows(sft(2)), size=40, every=80, stop=True))
    garbage = replace(sft(1), texts=[GARBAGE] * 120)
    trainer.step(garbage, 0)
    trainer.step(garbage, 0)  # no new batch since the last file
    trainer.step(garbage, 20)  # half of it is new
    trainer.step(garbage, 60, 10)
    trainer.step(garbage, 70, 10)
    with pytest.raises(Hacked, match="Training was stopped"):  # 40 + 20 + 10 + 10 rows
        trainer.end()


def test_probe_callback_ignores_earlier_files_unless_resumed(tmp_path, caplog):
    first = Trainer(tmp_path, rlhf_zoo.ProbeCallback(size=40, every=40))
    first.step(sft(1), 0)
    garbage = replace(sft(1), texts=[GARBAGE] * 120)
    new = Trainer(tmp_path, rlhf_zoo.ProbeCallback(size=40, every=40, stop=True))
    new.state.global_step = 1
    for _ in range(2):
        new.step(garbage, 0)
    new.end()  # its first completions were garbage already
    (tmp_path / "completions/completions_00002.parquet").unlink()
    resumed = Trainer(tmp_path, rlhf_zoo.ProbeCallback(size=40, every=40, stop=True), step=1)
    resumed.step(garbage, 0)
    with pytest.raises(Hacked):
        resumed.end()
    assert "Nothing was probed" not in caplog.text
    (tmp_path / "empty").mkdir()
    Trainer(tmp_path / "empty", rlhf_zoo.ProbeCallback()).end()
    assert "Nothing was probed: the trainer wrote no completions into" in caplog.text
    with pytest.raises(ZooError, match="set log_completions=True"):
        rlhf_zoo.ProbeCallback().on_train_begin(SimpleNamespace(log_completions=False), None, None)
    with pytest.raises(ZooError, match="size >= 40 and every >= 1, not size=3"):
        rlhf_zoo.ProbeCallback(size=3)
    bad = Trainer(tmp_path / "empty", rlhf_zoo.ProbeCallback())
    pandas.DataFrame({"prompt": ["x"], "completion": [None]}).to_parquet(
        tmp_path / "empty/completions/completions_1.parquet"
    )
    with pytest.raises(ZooError, match=r"row 1 has no prompt or no completion"):
        bad.end()


def test_probe_callback_runs_in_trl_grpo_trainer(tmp_path, monkeypatch):
    from trl import GRPOConfig, GRPOTrainer

    trackers = Trackers(monkeypatch)
    model, tokenizer = load("GPT-2")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = Dataset.from_list([{"prompt": f"the {k} of"} for k in range(100)])
    config = GRPOConfig(
        str(tmp_path), use_cpu=True, report_to=[], max_steps=5, per_device_train_batch_size=40, num_generations=2,
        max_completion_length=12, logging_steps=1, log_completions=True, num_completions_to_print=1, save_strategy="no",
        learning_rate=0.0, bf16=False,
    )  # fmt: skip
    callback = rlhf_zoo.ProbeCallback(size=40, every=40)
    GRPOTrainer(
        model, lambda completions, **_: [float(len(text)) for text in completions], args=config, train_dataset=prompts,
        processing_class=tokenizer, callbacks=[callback],
    ).train()  # fmt: skip
    assert [row["train/global_step"] for name, row in trackers.logged if name == "wandb"] == [2, 3, 4, 5]
    assert "probes/repetition" in trackers.logged[-1][1]
