"""What is not a number does not train, in PPO and in trl's trainers: skipped, counted, stopped by name, never saved."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from toy_run import make_context, make_recipe
from trainer_fixture import (
    Spy,
    digests,
    make_policy,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    prompt_rows,
    timeless,
)
from transformers import PrinterCallback
from trl import RewardConfig, RewardTrainer, SFTTrainer

from rlhf_zoo.errors import NotFinite, ZooError
from rlhf_zoo.modeling.sampling.random import draw_tokens
from rlhf_zoo.pipeline.stages import sft
from rlhf_zoo.ppo.guards import GuardWarning
from rlhf_zoo.ppo.step_guard import FiniteStepsTrainer
from rlhf_zoo.runs.record import StageRecord

pytestmark = pytest.mark.attack


def state_of(trainer: Any) -> dict[str, str]:
    """Weights, and the optimizer's moments and counters, as digests."""
    result = {f"{n}": p.detach() for n, p in trainer.model.named_parameters()}
    for number, kept in enumerate(trainer.optimizer.state_dict()["state"].values()):
        result |= {f"{number}.{name}": torch.as_tensor(value) for name, value in kept.items()}
    return digests(result)


class Faulty(Spy):
    """Breaks, in the optimizer steps `at` of the run (8 of them: 4 an update), one of loss and gradient norms."""

    at: tuple[int, ...] = ()
    what = "loss"
    weight_at: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made: list[bool] = []

    @property
    def number(self) -> int:
        return 4 * self.state.global_step + len(self.made) % 4

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().loss(*args, **kwargs)
        # Its gradients are finite: the loss alone says that it failed.
        return loss + math.nan if self.what == "loss" and self.number in self.at else loss

    def optimizer_step(self, model: Any) -> Any:
        part = {"policy": self.policy, "critic": self.value_model}.get(self.what)
        if part is not None and self.number in self.at:
            weight = next(p for p in part.parameters() if p.grad is not None)
            weight.grad[0] = math.inf
        before = state_of(self)
        norms = super().optimizer_step(model)
        if self.number == self.weight_at:
            next(self.policy.parameters()).data[0] = math.inf
        self.made.append(state_of(self) != before)
        return norms


def faulty(directory: Path, at: tuple[int, ...], *, what: str = "loss", weight_at: int | None = None, **options: Any):
    kind = type("Faulty", (Faulty,), {"at": at, "what": what, "weight_at": weight_at})
    return make_trainer(directory, kind=kind, **options)


@pytest.mark.parametrize("what", ["loss", "critic"])
def test_ppo_skips_a_step_that_is_not_finite_and_counts_it(tmp_path: Path, what: str) -> None:
    trainer = faulty(tmp_path, (1, 6), what=what)
    trainer.train()
    assert trainer.made == [True, False, True, True, True, True, False, True]
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == [1, 2]
    failed = {name for row in rows for name, value in row.items() if not math.isfinite(value)}
    assert failed == ({"loss"} if what == "loss" else {f"grad_norm/{what}"})
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_attention_whose_gradients_may_be_no_numbers_is_off(tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    make_trainer(tmp_path)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_resumed_ppo_run_skips_and_counts_as_one_left_alone(tmp_path: Path) -> None:
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "logging_steps": 3}
    whole = faulty(tmp_path, (2, 3, 5), **settings)
    whole.train()
    again = faulty(tmp_path / "again", (2, 3, 5), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(again.made) == 8 and state_of(whole) == state_of(again)
    [row], [other] = (
        [line for line in timeless(t.state.log_history) if "skipped_steps" in line] for t in (whole, again)
    )
    assert row == other and row["loss"] == "nan" and row["skipped_steps"] == "3"


def test_three_running_end_a_ppo_run_by_name_also_across_a_checkpoint(tmp_path: Path) -> None:
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    expected = r"loss of step 2 is not finite, and 3 optimizer steps in a row.*learning_rate.* is \S*checkpoint-1\.$"
    whole = faulty(tmp_path, (2, 3, 4), **settings)
    with pytest.raises(NotFinite, match=expected) as stopped:
        whole.train()
    assert isinstance(stopped.value, ZooError)  # a sentence, and exit code 2
    assert whole.made == [True, True, False, False]
    again = faulty(tmp_path / "again", (2, 3, 4), **settings)
    with pytest.raises(NotFinite, match="3 optimizer steps in a row"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(t.isfinite().all() for t in load_file(tmp_path / "checkpoint-1/model.safetensors").values())


@pytest.mark.parametrize(("at", "says"), [(4, "log-prob|weight tensors"), (7, "After step 1 1 of")])
def test_ppo_stops_at_once_at_weights_that_are_not_finite(tmp_path: Path, at: int, says: str) -> None:
    trainer = faulty(tmp_path, (), weight_at=at, max_steps=3, save_strategy="steps", save_steps=1)
    with pytest.raises(NotFinite, match=says) as stopped:
        trainer.train()
    assert "checkpoint-1." in str(stopped.value)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    with pytest.raises(NotFinite, match="not finite"):
        trainer.save_model(str(tmp_path / "final"))
    assert not (tmp_path / "final").exists()


def test_a_rollout_of_what_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    broken = make_policy()
    with torch.no_grad():
        broken.lm_head.weight[3] = math.nan
    with pytest.raises(NotFinite, match="no token can be drawn"):
        make_trainer(tmp_path, model=broken).generate(["ab"])
    with pytest.raises(NotFinite, match="reference returned NaN or infinite log-probabilities"):
        make_trainer(tmp_path, ref_model=broken).train()
    for wrong in (math.nan, math.inf):
        with pytest.raises(NotFinite):
            draw_tokens(torch.tensor([[0.0, wrong, 0.0]]), torch.tensor([0.5]))
    assert draw_tokens(torch.tensor([[-math.inf, 0.0, -math.inf]]), torch.tensor([0.5])).tolist() == [1]


def test_what_does_not_apply_is_absent_and_what_failed_is_null(tmp_path: Path) -> None:
    """Every score equal and no value: returns do not vary. The reward logs two numbers of its own."""

    def flat(completions: list[str], log_metric: Callable[[str, float], None], **_: Any) -> list[float]:
        log_metric("broken", math.nan)
        log_metric("sound", 2.0)
        return [0.0] * len(completions)

    trainer = make_trainer(tmp_path, reward_funcs=flat, kl_coef=0.0, learning_rate=0.0, max_steps=1)
    trainer.train()
    row = next(row for row in trainer.state.log_history if "loss" in row)
    record = StageRecord(tmp_path)
    record.append_metrics({**row, "step": 1})
    [kept] = record.metrics()
    assert kept["broken"] is None and kept["sound"] == 2.0
    assert "critic/explained_variance" not in kept


# trl's trainers


def poisoned(kind: type, at: dict[int, float]) -> type:
    """This trainer, whose loss is lost in the steps `at`: times NaN, or times so much that the norm overflows."""

    class Poisoned(kind):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            return result * at.get(self.state.global_step, 1.0)

    return Poisoned


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make_recipe(tmp_path)
    make_policy().save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path


def sft_stage(folder: Path, monkeypatch: pytest.MonkeyPatch, at: dict[int, float], **flags: Any) -> None:
    """Runs the stage over the toy's lines."""
    context = make_context(folder)
    settings = {
        "model_name_or_path": str(folder / "base"), "dataset_config": "lines", "max_steps": 9, "save_steps": 1,
        "logging_steps": 1, "eval_strategy": "no", "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "dataset_test_split": None, "use_cpu": True, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    context.flags["sft"] = {name: "null" if value is None else str(value) for name, value in (settings | flags).items()}
    monkeypatch.setattr("trl.SFTTrainer", poisoned(SFTTrainer, at))
    sft.run(context)


def test_sft_skips_counts_logs_null_and_stops_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the third step running, with the last good checkpoint; a run that goes on from there knows of two."""
    at = {1: math.nan, 3: 1e30, 5: math.nan, 6: math.nan, 7: math.nan}
    for _ in range(2):
        expected = r"loss and the gradient norm of step 8 are not finite, and 3.*sft/checkpoint-7"
        with pytest.raises(NotFinite, match=expected):
            sft_stage(folder, monkeypatch, at)
    record = StageRecord(folder / "run/sft")
    assert record.read()["status"] == "interrupted"
    assert [path.name for path in record.checkpoints()] == [f"checkpoint-{n}" for n in range(1, 8)]
    rows = [row for row in record.metrics() if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 2, 2, 3, 4]
    assert [row["step"] for row in rows if row["loss"] is None] == [2, 6, 7]
    assert [row["step"] for row in rows if row["grad_norm"] is None] == [2, 4, 6, 7]
    states = [torch.load(record.checkpoint_path(n) / "optimizer.pt", weights_only=True)["state"] for n in range(1, 8)]
    assert [int(state[0]["step"]) for state in states] == [1, 1, 2, 2, 3, 3, 3]
    weights = [(record.checkpoint_path(n) / "model.safetensors").read_bytes() for n in range(1, 8)]
    assert [weights[n] == weights[n + 1] for n in range(6)] == [True, False, True, False, True, True]


def test_an_absurd_learning_rate_ends_sft_and_saves_no_nan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFinite, match="not finite"):
        sft_stage(folder, monkeypatch, {}, learning_rate=1e38, lr_scheduler_type="constant", warmup_steps=0)
    record = StageRecord(folder / "run/sft")
    assert record.checkpoints() == [] and not list(record.path.glob("checkpoint-*"))


def reward_trainer(directory: Path, at: dict[int, float]) -> Any:
    pairs = Dataset.from_dict({"prompt": ["ab"] * 8, "chosen": ["gg"] * 8, "rejected": ["cd"] * 8})
    args = RewardConfig(
        str(directory), max_steps=20, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        bf16=False, per_device_train_batch_size=2, disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    trainer_class: Any = type("RewardTrainer", (FiniteStepsTrainer, poisoned(RewardTrainer, at)), {})
    trainer = trainer_class(
        model=make_reward_model(), args=args, train_dataset=pairs, processing_class=make_tokenizer()
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def scaling(trainer: Any, scale: float) -> Any:
    """With the scaler that accelerate has for fp16 on a GPU, whose gradients it unscales before they are clipped."""
    accelerator, clip = trainer.accelerator, trainer.accelerator.clip_grad_norm_
    accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def unscaled(parameters: Any, limit: float) -> Any:
        scaler.unscale_(trainer.optimizer.optimizer)
        return clip(parameters, limit)

    accelerator.clip_grad_norm_ = unscaled
    return trainer


def test_a_gradient_scaler_may_search_its_scale_but_a_loss_that_is_lost_ends_the_run(tmp_path: Path) -> None:
    """In fp16 the first steps overflow until the scale is halved often enough: that is no failure, and is counted."""
    trainer = scaling(reward_trainer(tmp_path, dict.fromkeys(range(20), 1e4)), 2.0**127)
    before = digests(trainer.model)
    trainer.train()
    skipped = [row["skipped_steps"] for row in trainer.state.log_history if "loss" in row]
    assert skipped[3] == 4 and 4 < skipped[-1] < 20 and digests(trainer.model) != before
    assert trainer.accelerator.scaler.get_scale() == 2.0 ** (127 - skipped[-1])
    lost = scaling(reward_trainer(tmp_path, dict.fromkeys(range(20), math.nan)), 2.0**16)
    before = digests(lost.model)
    with pytest.raises(NotFinite, match=r"of step 3 are not finite.*no checkpoint was saved before"):
        lost.train()
    assert digests(lost.model) == before


# Weights too coarse for the learning rate


def test_bfloat16_weights_at_a_small_learning_rate_are_warned_of(tmp_path: Path) -> None:
    prompts = prompt_rows(8)
    with pytest.warns(GuardWarning, match=r"3e-06 changes \d\.\d% of the weights of the policy .* bfloat16.*float32"):
        make_trainer(tmp_path, model=make_policy().bfloat16(), learning_rate=3e-6, train_dataset=prompts)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardWarning)
        make_trainer(tmp_path, learning_rate=3e-6, train_dataset=prompts)
        make_trainer(tmp_path, model=make_policy().bfloat16(), learning_rate=1.0, train_dataset=prompts)
