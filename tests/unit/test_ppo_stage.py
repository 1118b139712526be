"""What the ppo and eval stages hand on: every column of the prompts to reward functions, and the texts of ptx_coef."""

import json
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from accelerate import Accelerator
from toy_run import make_context, make_recipe, save_start
from trainer_fixture import LETTERS, make_policy, make_reward_model, make_tokenizer

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.panel import Panel
from rlhf_zoo.evaluation.measure import Evaluator, measure
from rlhf_zoo.modeling import time_limit as deadline
from rlhf_zoo.pipeline import run_recipe as pipeline
from rlhf_zoo.pipeline.stages import evaluate, ppo
from rlhf_zoo.pipeline.stages.interrupt import Stopped
from rlhf_zoo.ppo.guards import GuardWarning
from rlhf_zoo.rewards import Rewards

FILES = ("evaluation.json", "run.json")
EVALUATION = {"judge": "toy_run:judge", "prompts": 6, "samples": 2}
ASKED: list[tuple[str, str, int, str]] = []


def asked(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], row: Sequence[int], **_: Any
) -> list[float]:
    """Remembers what it is asked, and reads two columns of the prompts."""
    ASKED.extend(zip(prompts, answer, row, completions, strict=True))
    return [float(one.startswith(expected)) for one, expected in zip(completions, answer, strict=True)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    ASKED.clear()
    make_recipe(tmp_path, ppo={"max_steps": 2, "save_steps": 2}, shared={"evaluation": EVALUATION})
    save_start(tmp_path)
    return tmp_path


def truth(folder: Path, split: str) -> dict[str, tuple[str, int]]:
    """Prompt -> answer and row, as they stand on the disk."""
    rows = [json.loads(line) for line in (folder / "data/prompts" / f"{split}.jsonl").read_text().splitlines()]
    return {row["prompt"]: (row["answer"], row["row"]) for row in rows}


def test_every_column_reaches_reward_functions_in_training_and_evaluation(folder: Path) -> None:
    context = make_context(folder, reward_funcs="test_ppo_stage:asked", reward_weights="0,2")
    assert ppo.run(context)
    expected = truth(folder, "train")
    assert len(ASKED) == 2 * 4 and all(expected[prompt] == (answer, row) for prompt, answer, row, _ in ASKED)
    ASKED.clear()
    assert evaluate.run(context)
    validated, expected = truth(folder, "validation"), truth(folder, "test")
    both = validated | expected
    assert all(both[prompt] == (answer, row) for prompt, answer, row, _ in ASKED)
    assert {prompt for prompt, *_ in ASKED} >= {*validated, *list(expected)[:6]}
    rows = [json.loads(line) for line in (folder / "run/eval/samples.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [prompt for prompt in list(expected)[:6] for _ in range(2)]
    scored = {(prompt, text): float(text.startswith(answer)) for prompt, answer, _, text in ASKED}
    given = [scored[row["prompt"], row["ppo"]["completion"]] for row in rows]
    assert [row["ppo"]["reward"] for row in rows] == [2 * each for each in given] and set(given) == {0.0, 1.0}


def lengths(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[list[float]]:
    """One for each token: the sum is the length."""
    return [[1.0] * len(ids) for ids in completion_ids]


def test_completions_are_cut_and_a_label_is_read_in_training_and_evaluation(folder: Path) -> None:
    """A classifier of two labels beside a reward by token; what the evaluation measures was cut as PPO cuts."""
    model = make_reward_model(num_labels=2, statistics=None)
    model.config.id2label, model.config.label2id = {0: "BAD", 1: "GOOD"}, {"BAD": 0, "GOOD": 1}
    for part in (model, make_tokenizer()):
        part.save_pretrained(folder / "classifier")
    context = make_context(
        folder, reward_model_path=str(folder / "classifier"), reward_label="GOOD", reward_output="logprob",
        reward_funcs="test_ppo_stage:lengths", reward_weights="1,0.5", response_length_min="2", truncate_text="c",
        truncate_after="1",
    )  # fmt: skip
    assert ppo.run(context)
    [first, *_] = metrics(folder)
    assert first["rewards/lengths"] == pytest.approx(first["completions/length"])
    assert first["objective/score"] == pytest.approx(first["rewards/reward_model"] + 0.5 * first["rewards/lengths"])
    assert first["rewards/reward_model"] < 0
    assert evaluate.run(context)
    sides = [json.loads(line)[side] for line in (folder / "run/eval/samples.jsonl").open() for side in ("sft", "ppo")]
    at_text = [side for side in sides if "c" in side["completion"][1:]]
    with (folder / "classifier" / "config.json").open("a") as config:
        config.write(" ")
    with pytest.raises(ZooError, match=r"The reward model in .*classifier has changed since this run started with it"):
        ppo.run(context)
    assert at_text and all(side["ended"] and side["completion"].index("c", 1) == side["length"] - 1 for side in at_text)
    assert len({side["length"] for side in sides if not side["ended"]}) > 1


def never_asked(completions: Sequence[str], **_: Any) -> list[float]:
    raise ZooError("The service refuses: pay it.")


def test_a_reward_that_refuses_ends_the_run_in_its_own_sentence(folder: Path) -> None:
    """Columns that are not there are said before anything trains."""
    context = make_context(folder, reward_model_path="none", reward_funcs='exact_match(column="solution")')
    with pytest.raises(ZooError, match="reads the column 'solution', but the prompts have 'answer', 'row': set the"):
        ppo.run(context)
    with pytest.raises(ZooError, match="The service refuses: pay it") as caught:
        ppo.run(make_context(folder, reward_model_path="none", reward_funcs="test_ppo_stage:never_asked"))
    assert caught.value.__cause__ is None


def test_what_ended_before_its_first_checkpoint_stands_in_nobodys_way(folder: Path) -> None:
    with pytest.raises(ZooError, match="The service refuses"):
        ppo.run(make_context(folder, max_prompt_length="3", reward_funcs="test_ppo_stage:never_asked"))
    begun = json.loads((folder / "run/ppo/run.json").read_text())
    assert begun["status"] == "running" and begun["left_out"]
    other = make_context(folder, learning_rate="1e-3")
    pipeline._check_existing_run(other, "ppo")
    assert ppo.run(other)
    ended = json.loads((folder / "run/ppo/run.json").read_text())
    assert ended["status"] == "finished" and ended["fingerprint"] != begun["fingerprint"] and "left_out" not in ended
    for look in (ppo.run, lambda context: pipeline._check_existing_run(context, "ppo")):
        with pytest.raises(ZooError, match=r"has a run with .*learning_rate = 0.001, and this one has 0.003: choose"):
            look(make_context(folder))


DOWN: list[int] = []


def service(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Does not answer for the third update, where DOWN says so."""
    DOWN[0] += len(completions)
    if DOWN[0] == 3 * len(completions):
        raise ConnectionError("the service is down")
    return _right(completions, answer)


def slow_service(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Hangs in the third update, where DOWN says so; below -1,000 it presses Ctrl-C first."""
    DOWN[0] += 1
    if DOWN[0] in (3, -1000):
        if DOWN[0] < 0:
            signal.raise_signal(signal.SIGINT)
        try:
            time.sleep(100)
        except Exception:  # as careless functions have it
            return [0.0] * len(completions)
    return _right(completions, answer)


def _right(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    return [float(one.startswith(expected)) for one, expected in zip(completions, answer, strict=True)]


@pytest.mark.parametrize("way", ["raises", "reward_timeout", "Ctrl-C"])
def test_updates_before_a_reward_that_cannot_be_had_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(deadline, "GRACE_SECONDS", 0.5)
    name = "service" if way == "raises" else "slow_service"
    keys = {"reward_funcs": f"test_ppo_stage:{name}", "reward_weights": "1,1", "max_steps": "4", "save_steps": "4"}
    whole, parts = (replace(make_context(folder, **keys), directory=folder / name) for name in ("whole", "parts"))
    for context in (whole, parts):
        shutil.copytree(folder / "run", context.directory)
    DOWN[:] = [100]
    assert ppo.run(whole)
    start = time.monotonic()
    if way == "Ctrl-C":
        DOWN[:] = [-1003]
        with pytest.raises(Stopped):
            ppo.run(parts)
    elif way == "raises":
        DOWN[:] = [0]
        with pytest.raises(ZooError, match=r"service raised ConnectionError: the service is down .* Step 2 is saved"):
            ppo.run(parts)
    else:
        DOWN[:] = [0]
        limited = replace(make_context(folder, **keys, reward_timeout="0.5"), directory=parts.directory)
        with pytest.raises(ZooError, match=r"slow_service did not return within .* Step 2 is saved: run the same"):
            ppo.run(limited)
    assert time.monotonic() - start < 60
    record = parts.record("ppo")
    assert [path.name for path in record.checkpoints()] == ["checkpoint-2"] and record.read()["status"] == "interrupted"
    assert ppo.run(parts), "reward_timeout may be changed on the way"
    ends = [context.record("ppo").checkpoint_path(4) / "model.safetensors" for context in (whole, parts)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def leaving(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Ends the process in the third update, where DOWN says so: like a kill, nothing records the end."""
    DOWN[0] += 1
    if DOWN[0] == 3:
        raise SystemExit("killed")
    return _right(completions, answer)


def test_the_time_before_a_kill_is_counted(folder: Path) -> None:
    keys = {"reward_funcs": "test_ppo_stage:leaving", "reward_weights": "1,1", "max_steps": "4", "save_steps": "1"}
    context = make_context(folder, **keys)
    DOWN[:] = [0]
    with pytest.raises(SystemExit):
        ppo.run(context)
    record = context.record("ppo")
    killed = record.read()
    assert killed["status"] == "running" and killed["seconds"] > 0
    record.write(seconds=1000.0)  # as if its two updates had taken so long
    assert ppo.run(context)
    assert record.read()["status"] == "finished" and record.read()["seconds"] > 1000


def test_a_reward_that_is_the_same_for_all_is_said(folder: Path) -> None:
    with pytest.warns(GuardWarning, match="All 4 completions of the first update score 1, so"):
        assert ppo.run(make_context(folder, reward_model_path="none", reward_funcs="test_ppo_stage:alike"))


def alike(completions: Sequence[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def test_a_stage_may_have_another_precision_than_the_one_before(folder: Path) -> None:
    context = make_context(folder, bf16="true")
    assert context.settings("ppo").trainer.bf16
    Accelerator(cpu=True, mixed_precision="no")
    assert ppo.run(context)


def test_columns_keep_step_with_the_batches_of_an_evaluation() -> None:
    """`complete` samples 128 prompts at a time."""
    answers = [LETTERS[row % 7] for row in range(130)]
    tools = Evaluator(
        reference=make_policy(), tokenizer=make_tokenizer(), rewards=Rewards([asked]), panel=Panel([]),
        max_new_tokens=1, temperature=1.0,
    )  # fmt: skip
    ASKED.clear()
    result = measure(
        make_policy(), tools, ["ab"] * 130, keys=[(row,) for row in range(130)], seed=1, desc="",
        columns={"answer": answers, "row": list(range(130))},
    )  # fmt: skip
    assert [(answer, row) for _, answer, row, _ in ASKED] == list(zip(answers, range(130), strict=True))
    assert [text for *_, text in ASKED] == result.completions


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/ppo/metrics.jsonl").read_text().splitlines()]


def test_demonstrations_are_modelled_with_ptx_coef(folder: Path) -> None:
    assert ppo.run(make_context(folder, ptx_coef="0.5"))
    losses = [row["loss/ptx"] for row in metrics(folder) if "loss/ptx" in row]
    # The policy has learned these very lines; a uniform guess would cost log 17 = 2.8 nats a token.
    assert len(losses) == 2 and all(0 < loss < 1 for loss in losses)


def test_without_ptx_coef_its_data_set_is_not_read(folder: Path) -> None:
    assert ppo.run(make_context(folder, ptx_dataset_config="lnes"))
    assert not any("loss/ptx" in row for row in metrics(folder))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ptx_dataset_split": "trian"}, "has no split 'trian', only 'train': set ptx_dataset_split"),
        ({"ptx_dataset_config": "lnes"}, "set ptx_dataset_config"),
    ],
)
def test_texts_that_cannot_be_modelled(folder: Path, flags: dict[str, str], message: str) -> None:
    with pytest.raises(ZooError) as caught:
        ppo.run(make_context(folder, ptx_coef="0.5", **flags))
    assert message in str(caught.value)
    assert not (folder / "run/ppo/run.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"reward_funcs": "toy_run:answred"}, "did you mean 'answered'?"),
        ({"reward_weights": "1,2"}, "reward_weights has 2 numbers for 1 rewards: set one per reward."),
        ({"reward_model_path": "none"}, "The stage ppo has no reward: set reward_model_path or reward_funcs."),
        (
            {"reward_model_path": "none", "reward_funcs": "toy_run:answered", "reward_label": "GOOD"},
            "reward_label of the stage ppo is 'GOOD', but there is no reward model: set reward_model_path.",
        ),
        ({"reward_model_loader": "toy_run:lader"}, "There is no 'lader' in the module 'toy_run'"),
    ],
)
def test_rewards_are_looked_at_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(ppo, "stage_source", lambda *_: pytest.fail("data were looked at first"))
    with pytest.raises(ZooError) as caught:
        ppo.run(make_context(folder, **flags))
    assert message in str(caught.value)


def test_ppo_straight_on_a_model_is_evaluated_against_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of PPO alone: what stands in the place of SFT is the model that it names."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, model in (("base", make_policy()), ("paid", make_reward_model())):
        model.save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    models = {"model_name_or_path": str(tmp_path / "base"), "reward_model_path": str(tmp_path / "paid")}
    recipe = make_recipe(tmp_path, ppo={"max_steps": 1, **models}, shared={"evaluation": EVALUATION})
    for stage in ("sft", "reward"):
        (recipe / f"{stage}.yaml").unlink()
    context = make_context(tmp_path)
    pipeline.check(context)
    assert ppo.run(context) and evaluate.run(context)
    document, parents = (json.loads((tmp_path / "run/eval" / name).read_text()) for name in FILES)
    assert document["ppo"]["kl"]["n"] == 12 and document["control"]["n"] == 12
    assert parents["parents"]["sft"]["path"] == str(tmp_path / "base")
