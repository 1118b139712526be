"""SFT and reward stages: resumed they log what an uninterrupted one logs, and they say what they do not learn from."""

import gc
import hashlib
import json
import shutil
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_run import make_context, make_recipe, save_stage, save_start, trained_policy
from trainer_fixture import make_tokenizer

from rlhf_zoo.errors import ZooError
from rlhf_zoo.pipeline import run_recipe as pipeline
from rlhf_zoo.pipeline.stages import evaluate, ppo, reward, sft
from rlhf_zoo.pipeline.stages.callbacks import ProgressCallback, StageCallback
from rlhf_zoo.pipeline.stages.interrupt import Stopped
from rlhf_zoo.runs.code import is_same_code, judges_code
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.corpus_data import add_preferences, send_data
from rlhf_zoo.runs.dataset import check_same_data, data_source, stage_source
from rlhf_zoo.runs.metrics_file import without_times
from rlhf_zoo.runs.record import COMPLETE

pytestmark = pytest.mark.attack

COMMON = {
    "per_device_train_batch_size": 2, "max_steps": 8, "logging_steps": 5, "save_strategy": "steps", "save_steps": 4,
    "learning_rate": 1e-3, "use_cpu": True, "eval_strategy": "no",
}  # fmt: skip

#: Saving a reward model scores with it: training must go on with dropout afterwards, as a resumed run does.
DROPOUT = {"attention_dropout": 0.3}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make_recipe(tmp_path)
    base = save_stage(tmp_path, "sft", trained_policy(**DROPOUT), make_tokenizer())
    base.rename(tmp_path / "base")
    (tmp_path / "run").rename(tmp_path / "not-a-run")
    return tmp_path


def _sft(folder: Path, name: str, **keys: Any) -> tuple[Callable[[RunContext], bool], RunContext]:
    own = {**COMMON, "model_name_or_path": str(folder / "base"), "dataset_test_split": None, "max_length": 16, **keys}
    return sft.run, replace(make_context(folder), directory=folder / name, flags={"sft": own})


def _reward(folder: Path, name: str) -> tuple[Callable[[RunContext], bool], RunContext]:
    save_stage(folder, "sft", trained_policy(**DROPOUT), make_tokenizer())
    (folder / "run").rename(folder / name)
    own = {**COMMON, "dataset_test_split": None, "score_samples": 4, "max_length": 16}
    return reward.run, replace(make_context(folder), directory=folder / name, flags={"reward": own})


def _ppo(folder: Path, name: str, **keys: Any) -> tuple[Callable[[RunContext], bool], RunContext]:
    save_start(folder)
    (folder / "run").rename(folder / name)
    own = {**COMMON, "dataset_test_split": None, "response_length": 4, **keys}
    return ppo.run, replace(make_context(folder), directory=folder / name, flags={"ppo": own})


def _rows(context: RunContext, stage: str) -> list[dict[str, Any]]:
    return [*map(without_times, context.record(stage).metrics())]


def _weights(context: RunContext, stage: str) -> str:
    path = context.record(stage).checkpoint_path(8) / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("stage", "start"), [("sft", _sft), ("reward", _reward)])
def test_resumed_stage_logs_same_metrics_as_uninterrupted_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, start: Callable[..., Any]
) -> None:
    run, whole = start(folder, "whole")
    assert run(whole)
    run, parts = start(folder, "parts")

    def interrupt(self: StageCallback, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (2, 5):  # before step 3, and, resumed, before step 6
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(StageCallback, "on_step_begin", interrupt)
        for step in (3, 6):
            with pytest.raises(Stopped):
                run(parts)
            assert parts.record(stage).last_checkpoint() == parts.record(stage).checkpoint_path(step)
    assert [row["step"] for row in _rows(parts, stage)] == [5], "no row is of the interruption"
    assert run(parts)
    assert _weights(parts, stage) == _weights(whole, stage)
    assert _rows(parts, stage) == _rows(whole, stage)
    metrics = {"sft": {"entropy", "mean_token_accuracy"}, "reward": {"accuracy", "margin", "mean_reward"}}
    assert [row["step"] for row in _rows(whole, stage)] == [5, 8]
    assert _rows(whole, stage)[0].keys() >= {"loss", "grad_norm", *metrics[stage]}


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_interrupted_evaluation_stops_at_next_batch_and_is_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    start = {"sft": _sft, "ppo": _ppo}[stage]
    keys = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1, "held_out_share": 0.25}
    run, whole = start(folder, "whole", **keys)
    assert run(whole)
    run, parts = start(folder, "parts", **keys)
    batches: list[int] = []

    def interrupt(self: ProgressCallback, args: Any, state: Any, control: Any, **_: Any) -> None:
        batches.append(state.global_step)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(ProgressCallback, "on_prediction_step", interrupt)
        for _ in range(2):  # the second run is interrupted in the evaluation that the first one owes
            with pytest.raises(Stopped):
                run(parts)
    assert batches == [3, 3], "one batch, and no step before it"
    record = parts.record(stage)
    assert [path.name for path in record.checkpoints()] == ["checkpoint-3"] and record.read()["status"] == "interrupted"

    def interrupt_last(self: ProgressCallback, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 8:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(ProgressCallback, "on_prediction_step", interrupt_last)
        with pytest.raises(Stopped):
            run(parts)
    assert record.last_checkpoint() == record.checkpoint_path(8) and record.read()["status"] == "interrupted"
    assert run(parts)
    assert record.read()["status"] == "finished"
    assert _weights(parts, stage) == _weights(whole, stage)
    assert _rows(parts, stage) == _rows(whole, stage)
    assert [row["step"] for row in _rows(whole, stage) if any(map(_is_evaluated, row))] == [3, 6, 8]


def _is_evaluated(name: str) -> bool:
    return name.startswith("eval_")


TEMPLATE = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def _other_weights(path: Path) -> None:
    save_file({name: weight + 1 for name, weight in load_file(path).items()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda folder: _append(folder / "texts.jsonl", json.dumps({"prompt": "ab", "completion": "ef"})), "data set"),
        (lambda folder: _append(folder / "base" / "chat_template.jinja", " "), "base model"),
        (lambda folder: _append(folder / "base" / "tokenizer_config.json", " "), "base model"),
        (lambda folder: _other_weights(folder / "base" / "model.safetensors"), "base model"),
        (lambda folder: _append(folder / "mine.jinja", "{# another #}"), "chat template"),
    ],
    ids=["rows", "template of the base", "tokenizer of the base", "weights of the base", "chat_template_path"],
)
def test_resume_rejects_changed_files(folder: Path, change: Callable[[Path], None], what: str) -> None:
    write_json_lines(folder / "texts.jsonl", [{"prompt": "ab", "completion": "cd"}] * 4)
    (folder / "base" / COMPLETE).unlink()  # a model of somebody else
    for path in (folder / "base" / "chat_template.jinja", folder / "mine.jinja"):
        path.write_text(TEMPLATE, encoding="utf-8")
    run, context = _sft(folder, "run")
    own = {"dataset_name": str(folder / "texts.jsonl"), "dataset_config": None, "max_steps": 4, "save_steps": 2}
    own |= {"chat_template_path": str(folder / "mine.jinja")}
    context = replace(context, flags={"sft": {**context.flags["sft"], **own}})
    assert run(replace(context, stop_after=2)) and context.record("sft").read()["status"] == "stopped"
    before = context.record("sft").read()
    (folder / "base" / "README.md").write_text("Not read by any loader.", encoding="utf-8")
    change(folder)
    for stop_after in (2, None):
        with pytest.raises(ZooError, match=f"The {what} .* has changed since this run started with it: .*--restart"):
            run(replace(context, stop_after=stop_after))
    assert context.record("sft").read() == before
    assert run(replace(context, restart=True)) and context.record("sft").read()["status"] == "finished"


def test_rows_without_answer_tokens_within_max_length_are_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = [{"prompt": "ab" * (3 if row else 40), "completion": "cd"} for row in range(6)]
    write_json_lines(folder / "long" / "train.jsonl", long)
    run, context = _sft(folder, "short")
    own = {**context.flags["sft"], "dataset_name": str(folder / "long"), "dataset_config": None, "max_steps": 1}
    assert run(replace(context, flags={"sft": own}))
    assert "1 of 6 rows are left out, because max_length, 16, leaves no token of their answers." in caplog.text
    assert context.record("sft").read()["left_out"] == {"max_length": 1}


def test_incomplete_pair_is_rejected_before_training(folder: Path) -> None:
    context = replace(make_context(folder), flags={"sft": {"model_name_or_path": str(folder / "base")}})
    pipeline.check(context)
    [path] = (folder / "data" / "preferences").glob("train*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[5]["rejected"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ZooError, match=r"Row 5 of .* has nothing in the column 'rejected'"):
        pipeline.check(context)


def strict(completions: Sequence[str], solution: Sequence[str]) -> list[float]:
    """Takes too little, and what the prompts do not have."""
    return [float(one == wanted) for one, wanted in zip(completions, solution, strict=True)]


def careless(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(one) for one in completions]


def alone(completions: Sequence[str], **_: Any) -> float:
    return float(len(completions))


def by_token(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[list[float]]:
    return [[1.0] * (len(ids) + 1) for ids in completion_ids]


def test_raising_reward_function_is_found_before_training(folder: Path) -> None:
    context = make_context(folder, reward_funcs="toy_run:answered", reward_weights="1,1")
    context = replace(context, flags={**context.flags, "sft": {"model_name_or_path": str(folder / "base")}})
    pipeline.check(context)
    own = {**context.flags["ppo"], "reward_funcs": "test_resumed_stages:by_token"}
    pipeline.check(replace(context, flags={**context.flags, "ppo": own}))
    for name, said in (
        ("strict", "The reward function strict cannot be called with prompts, completions, .* let it accept"),
        ("careless", "The reward function careless raised ValueError: could not convert .* on row 0, prompt 'ab'"),
        (
            "alone",
            "reward function alone returned .* instead of a list of numbers: return a float or None",
        ),
    ):
        own = {**context.flags["ppo"], "reward_funcs": f"test_resumed_stages:{name}"}
        with pytest.raises(ZooError, match=said):
            pipeline.check(replace(context, flags={**context.flags, "ppo": own}))


def test_unavailable_llm_judge_is_rejected_before_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "https://nobody.invalid/v1")
    flags = {"sft": {"model_name_or_path": str(folder / "base")}, "recipe": {"evaluation.judge": "llm:m"}}
    with pytest.raises(ZooError, match="The judge llm:m is not available"):
        pipeline.check(replace(make_context(folder), flags=flags))


def test_pairs_with_equal_sides_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    pairs = datasets.Dataset.from_list([{"chosen_ids": [3, 4], "rejected_ids": [3] * (2 + row)} for row in range(4)])
    same = pairs.map(lambda row: {"rejected_ids": row["chosen_ids"]})
    with pytest.raises(ZooError, match=r"All pairs of mine have equal sides"):
        reward._check_equal_sides(same, subject="mine")
    reward._check_equal_sides(pairs, subject="mine")
    assert not caplog.text
    reward._check_equal_sides(datasets.concatenate_datasets([pairs, same.select([0])]), subject="mine")
    assert "1 of 5 pairs of mine have equal sides" in caplog.text


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_finished_stage_leaves_no_model_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, make_trainer = [], sft.make_trainer

    def make_and_watch(*args: Any, **kwargs: Any) -> Any:
        trainer = make_trainer(*args, **kwargs)
        models.append(weakref.ref(trainer.model))
        return trainer

    monkeypatch.setattr(sft, "make_trainer", make_and_watch)
    own = {**COMMON, "model_name_or_path": str(folder / "base"), "dataset_test_split": None, "max_length": 16}
    context = replace(make_context(folder), flags={"sft": {**own, "max_steps": 1}})
    gc.disable()
    try:
        assert pipeline.run_stage(context, "sft")
    finally:
        gc.enable()
    assert [model() for model in models] == [None]


def test_separate_stages_read_data_recorded_by_first_stage(folder: Path) -> None:
    own = {**COMMON, "model_name_or_path": str(folder / "base"), "dataset_test_split": None, "max_length": 16}
    context = replace(make_context(folder), flags={"sft": {**own, "max_steps": 1}})
    assert pipeline.run_stage(context, "sft")
    dataset = context.record("sft").read()["dataset"]
    context.record("ppo").write(stage="ppo", recipe="toy", status="finished", dataset=dataset)
    for stage in ("reward", "ppo", "eval"):
        check_same_data(context, stage)
    shutil.copytree(folder / "data", folder / "copy")
    [file] = (folder / "data" / "prompts").glob("train*.jsonl")
    before = file.read_text()
    _append(file, json.dumps({"prompt": "ab", "answer": "c", "row": 12}) + "\n")
    for again, stage in ((context, "reward"), *((replace(context, restart=True), one) for one in ("ppo", "eval"))):
        with pytest.raises(
            ZooError, match=r"since the stage sft trained on it: .*`rlhf-zoo sft .*toy --output_dir .*run --restart`"
        ):
            pipeline.run_stage(again, stage)
    context.record("sft").write(dataset={})
    with pytest.raises(ZooError, match=r"data has changed since the stage ppo trained on it"):
        pipeline.run_stage(replace(context, restart=True), "eval")
    context.record("sft").write(dataset=dataset)
    assert context.record("reward").read() == {} and context.record("ppo").read()["dataset"] == dataset
    another = {**context.flags, "reward": {"dataset_name": str(folder / "copy")}}
    check_same_data(replace(context, flags=another), "reward")
    check_same_data(replace(context, restart=True), "sft")
    file.write_text(before)
    check_same_data(context, "ppo")


@pytest.mark.parametrize(
    ("make", "module", "loads"),
    [(_sft, sft, "_model_and_tokenizer"), (_reward, reward, "_load_model"), (_ppo, ppo, "_load_models")],
)
def test_adapter_initialization_does_not_depend_on_model_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], module: Any, loads: str
) -> None:
    """A model that is pulled draws no random numbers where merging it here did: `reproduce` got another adapter."""
    weights = []
    for name in ("merged", "pulled"):
        run, context = make(folder, name)
        stage = module.__name__.rpartition(".")[2]
        lora = {"use_peft": True, "lora_r": 2, "lora_target_modules": "all-linear", "max_steps": 1}
        run(replace(context, flags={stage: {**context.flags[stage], **lora}}))
        weights.append(load_file(context.record(stage).checkpoints()[-1] / "adapter_model.safetensors"))
        load = getattr(module, loads)
        monkeypatch.setattr(module, loads, lambda *args, load=load: (load(*args), torch.rand(7))[0])
    assert weights[0].keys() == weights[1].keys()
    assert [key for key, value in weights[0].items() if not torch.equal(value, weights[1][key])] == []


def letters(name: str | None, *, seed: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """A corpus."""
    rows = [{"prompt": "abc", "answer": "d"}, {"prompt": "bcd", "answer": "e"}]
    return {"prompts": dict.fromkeys(("train", "test"), rows), "lines": {"train": [{"text": "abcdef"}]}}


def test_changed_prepared_data_are_rejected_and_not_sent(folder: Path) -> None:
    context = make_context(folder)
    shared = {key: value for key, value in context.recipe.shared.items() if key != "dataset_name"}
    recipe = replace(context.recipe, shared={**shared, "corpus": "test_resumed_stages:letters"})
    context, data = replace(context, recipe=recipe), context.record("data")
    data_source(context)
    pairs = {"train": [{"prompt": "abc", "chosen": "d", "rejected": "e"}]}
    add_preferences(context, pairs)
    prepared = data.read()
    assert set(prepared["files"]) == {"prompts", "lines", "preferences"}
    for name in ("prompts", "preferences"):
        file = data.path / name / "train.jsonl"
        before = file.read_bytes()
        for content in (before.replace(b"abc", b"abd"), before * 2, None):
            file.unlink() if content is None else file.write_bytes(content)
            for use in (lambda: stage_source(context, "reward"), lambda: send_data(context)):
                with pytest.raises(ZooError, match=rf"data/{name} has changed since the run prepared it: .*--restart`"):
                    use()
        assert data.read() == prepared
        file.write_bytes(before)
    data_source(context)
    (data.path / "lines" / "train.jsonl").write_text("")
    data_source(replace(context, restart=True), refresh=True)
    assert (data.path / "lines" / "train.jsonl").read_text() == '{"text": "abcdef"}\n'
    data.write(files={})  # as a run has it that was begun before digests were recorded
    add_preferences(context, pairs)
    assert data.read()["files"] == {"preferences": prepared["files"]["preferences"]}


REWARD = "import {helper}\n\n\ndef pay(completions, **_):\n    return [float(len(one)) for one in completions]\n"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of somebody's reward function."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "paid_helper.py").write_text("RATE = 1\n")
    (code / "paid_reward.py").write_text(REWARD.format(helper="paid_helper"))
    monkeypatch.syspath_prepend(str(code))
    for name in ("paid_reward", "paid_helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return code


def test_resume_rejects_changed_reward_function(folder: Path, code: Path) -> None:
    save_start(folder)
    context = make_context(folder, reward_funcs="paid_reward:pay", reward_weights="1,1", max_steps=2)
    assert ppo.run(replace(context, stop_after=1)) and context.record("ppo").read()["status"] == "stopped"
    before = context.record("ppo").read()
    assert before["code"]["paid_reward:pay"]["module"] == "paid_reward"
    (code / "not_imported.py").write_text("RATE = 2\n")
    changed = r"The code of paid_reward:pay, module paid_reward, has changed since this run started"
    for name in ("paid_reward.py", "paid_helper.py"):
        text = (code / name).read_text()
        _append(code / name, "RATE = 2\n")
        with pytest.raises(ZooError, match=changed):
            ppo.run(context)
        assert context.record("ppo").read() == before
        (code / name).write_text(text)
    assert ppo.run(context) and context.record("ppo").read()["status"] == "finished"
    assert context.record("ppo").read()["code"] == before["code"]
    _append(code / "paid_reward.py", "RATE = 2\n")
    with pytest.raises(ZooError, match=changed):
        evaluate.run(context)
    assert not context.record("eval").run_file.exists()


def test_judges_code_detects_changed_judge_code(code: Path) -> None:
    names = ["toy_run:judge", "rule:paid_reward:pay", "classifier", "same-labels", "reward:model", "llm:model",
             "rule:exact_match", "votes:me/votes"]  # fmt: skip
    before = judges_code(names)
    assert set(before) == {"toy_run:judge", "rule:paid_reward:pay"}
    assert is_same_code(before, before) and is_same_code(before, None) and is_same_code(before, {})
    _append(code / "paid_reward.py", "RATE = 2\n")
    assert not is_same_code(judges_code(names), before)
    assert is_same_code(judges_code(names[:1]), before)
