"""Devices: models without a trainer run on the accelerator, and batches shrink when its memory is full."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_run import EVALUATION, make_context, make_recipe, save_stage, save_start, trained_policy
from trainer_fixture import make_policy, make_reward_model, make_tokenizer
from transformers import PreTrainedModel

from rlhf_zoo.app.engine.compare import Comparison
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.panel import Panel
from rlhf_zoo.evaluation.judges.scalar import FunctionJudge
from rlhf_zoo.evaluation.measure import Evaluator, PolicyMeasurements, max_rows_in_memory, measure
from rlhf_zoo.evaluation.text_logprobs import compute_logprobs
from rlhf_zoo.fileio import read_json
from rlhf_zoo.modeling import devices
from rlhf_zoo.modeling.devices import MicroBatches, best_device
from rlhf_zoo.pipeline.inspect import doctor, trace
from rlhf_zoo.pipeline.stages import evaluate, ppo, reward
from rlhf_zoo.rewards import RewardModel, Rewards
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.data import generate
from rlhf_zoo.runs.data.generate import complete
from rlhf_zoo.runs.status_line import Progress

PROMPTS = ["a", "bcd", "ef", "ghij", "k", "ab", "cde", "f", "gh", "ijk", "b"]
KEYS = [(1, row) for row in range(len(PROMPTS))]


class Memory:
    """Simulates memory for at most `most` rows in a model. `seen` lists the batch sizes that were tried."""

    def __init__(self, model: PreTrainedModel, most: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self.seen: list[int] = []

        def check(_: Any, args: Any, kwargs: Any) -> None:
            rows = len(kwargs["input_ids"])
            self.seen.append(rows)
            if rows > most:
                raise error("CUDA out of memory. Tried to allocate 20.00 MiB.")

        model.register_forward_pre_hook(check, with_kwargs=True)


# Smaller batches


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_sampling_is_same_when_batches_are_halved(error: type[Exception]) -> None:
    tokenizer = make_tokenizer()

    def drawn(model: PreTrainedModel) -> Any:
        options = {"keys": KEYS, "seed": 3, "max_new_tokens": 8, "temperature": 1.0, "desc": "", "batch_size": 8}
        return complete(model, tokenizer, PROMPTS, **options)

    whole, narrow = drawn(make_policy()), make_policy()
    memory = Memory(narrow, 3, error)
    halved = drawn(narrow)
    assert [len(batch) for batch in halved.batches] == [len(batch) for batch in whole.batches] == [8, 3]
    assert halved.texts == whole.texts and halved.ended == whole.ended
    for ours, expected in zip(halved.batches, whole.batches, strict=True):
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "mask", "ended"):
            assert torch.equal(getattr(ours, name), getattr(expected, name)), name
        assert torch.allclose(ours.logprobs, expected.logprobs, atol=1e-5)
    assert memory.seen[:3] == [8, 4, 2] and max(memory.seen[3:]) == 2, "what did not fit is not tried again"


def test_progress_counts_finished_rows_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []

    class Recorded(Progress):
        def update(self, n: float | None = 1) -> bool | None:
            result = super().update(n)
            shown.append(self.n)
            return result

    monkeypatch.setattr(generate, "Progress", Recorded)
    options = {"keys": KEYS, "seed": 3, "max_new_tokens": 8, "temperature": 1.0, "desc": ""}
    lengths = complete(make_policy(), make_tokenizer(), PROMPTS, **options).lengths
    finished = [sum(length <= count for length in lengths) for count in range(1, max(lengths) + 1)]
    assert shown == [*finished, len(PROMPTS)] and 0 < finished[-2] < len(PROMPTS)
    shown.clear()
    policy, passes = make_policy(), iter(range(100))

    def fail_once(*_: Any) -> None:
        if next(passes) == len(finished) - 1:
            raise torch.OutOfMemoryError("full")

    policy.register_forward_pre_hook(fail_once)
    complete(policy, make_tokenizer(), PROMPTS, **options)
    assert shown[len(finished) - 2 :][:2] != sorted(shown[len(finished) - 2 :][:2]), "the batch is sampled again"
    assert max(shown) == shown[-1] == len(PROMPTS)


def test_rows_at_once_shrinks_with_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    rows = policy.get_input_embeddings().weight.shape[0]
    assert max_rows_in_memory(policy, 6) == 64
    monkeypatch.setattr("rlhf_zoo.evaluation.measure.MAX_LOGITS", 6 * rows * 3 + 1)
    assert max_rows_in_memory(policy, 6) == 3 and max_rows_in_memory(policy, 60) == 1


def test_measurements_are_same_when_batches_are_halved() -> None:
    tokenizer, sizes = make_tokenizer(), []

    def long(completions: Sequence[str], **_: Any) -> list[float]:
        sizes.append(len(completions))
        return [float(len(text)) for text in completions]

    def measured(most: int | None) -> PolicyMeasurements:
        policy, reference, scorer = make_policy(seed=5), make_policy(), make_reward_model()
        for model in (policy, reference, scorer) if most else ():
            Memory(model, most)
        rewards = Rewards([RewardModel(scorer, tokenizer, tokenizer), long], tokenizer=tokenizer)
        judge = FunctionJudge("toy_run:judge")
        tools = Evaluator(reference, tokenizer, rewards, Panel([judge]), max_new_tokens=6, temperature=1.0)
        return measure(policy, tools, PROMPTS, keys=KEYS, seed=3, desc="")

    whole, halved = measured(None), measured(2)
    assert sizes == [len(PROMPTS)] * 2
    assert (halved.completions, halved.tokens, halved.judge_scores) == (
        whole.completions,
        whole.tokens,
        whole.judge_scores,
    )
    for name in ("reward", "exact_kl", "kl", "ref_logprob_sums"):
        assert getattr(halved, name) == pytest.approx(getattr(whole, name), abs=1e-4), name
    tokens = [[5, 6, 7], [6, 7, 8, 9, 10, 11], [7], [8, 9, 10, 11]]
    policy, narrow = make_policy(), make_policy()
    Memory(narrow, 1)
    result, expected = (compute_logprobs(model, tokenizer, PROMPTS[:4], tokens, desc="") for model in (narrow, policy))
    assert [len(row) for row in result] == [3, 6, 1, 4] and result == [pytest.approx(row, abs=1e-4) for row in expected]


def test_micro_batches_report_single_row_that_does_not_fit() -> None:
    def full(rows: Sequence[int]) -> None:
        raise torch.OutOfMemoryError("full")

    def wrong(rows: Sequence[int]) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(ZooError, match=r"A single row does not fit into the memory of \w+: shorten"):
        list(MicroBatches(4).run(full, range(5)))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        list(MicroBatches(4).run(wrong, range(5)))


# Placement


def test_best_device_prefers_accelerator_unless_cpu_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr("accelerate.PartialState._shared_state", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert best_device() == torch.device("cpu"), "where there is no accelerator"
    for kind in ("cuda", "mps", "xpu"):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda kind=kind, **_: torch.device(kind))
        assert best_device() == torch.device(kind) and best_device(use_cpu=True) == torch.device("cpu")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert best_device() == torch.device("cpu")


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The models that ran, by their class; one that was not moved to a device before fails."""
    moved: set[int] = set()
    alive: list[Any] = []
    ran: list[str] = []
    move = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        where = [*args, *kwargs.values()]
        if any(isinstance(argument, torch.device) for argument in where):
            alive.append(self)  # so that no other gets its id
            moved.update(map(id, self.modules()))
        return move(self, *args, **kwargs)

    def check(module: torch.nn.Module, _: Any) -> None:
        if isinstance(module, PreTrainedModel):
            assert id(module) in moved, f"{type(module).__name__} runs where it was loaded"
            ran.append(type(module).__name__)

    monkeypatch.setattr(torch.nn.Module, "to", to)
    with torch.nn.modules.module.register_module_forward_pre_hook(check):
        yield ran


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    folder = tmp_path_factory.mktemp("trained")
    make_recipe(folder)
    save_start(folder)
    context = make_context(folder)
    ppo.run(context)
    return context


def test_evaluation_doctor_trace_and_page_use_device(trained: RunContext, placed: list[str]) -> None:
    folder = trained.directory.parent
    other = save_stage(folder / "other", "reward", make_reward_model(seed=7), make_tokenizer())
    judged = {"evaluation.judge": f"reward:{other}", **{f"evaluation.{key}": EVALUATION[key] for key in ("prompts",)}}
    evaluate.run(replace(trained, flags={**trained.flags, "recipe": judged}))
    assert {"LlamaForCausalLM", "LlamaForSequenceClassification"} <= set(placed)
    policy, sft = (trained.checkpoint(stage).path for stage in ("ppo", "sft"))
    for look in (
        lambda: doctor.examine(trained),
        lambda: trace.trace_checkpoint(trace.find_traced_policy(str(trained.directory)), "abc"),
        lambda: list(Comparison.load(ppo=policy, sft=sft).stream("abc", max_new_tokens=6)),
    ):
        placed.clear()
        result = look()
        assert "LlamaForCausalLM" in placed, result


@pytest.fixture
def with_sft(tmp_path: Path) -> RunContext:
    make_recipe(tmp_path)
    save_stage(tmp_path, "sft", trained_policy(), make_tokenizer())
    return make_context(tmp_path)


def test_reward_stage_samples_on_device(with_sft: RunContext, placed: list[str]) -> None:
    keys = {"use_cpu": True, "max_steps": 1, "score_samples": 4, "dataset_test_split": "none", "save_steps": 1}
    context = replace(with_sft, flags={**with_sft.flags, "reward": keys})
    assert reward.run(context) is True
    assert {"LlamaForCausalLM", "LlamaForSequenceClassification"} <= set(placed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_accelerator_figures_match_cpu(trained: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run whose recipe says use_cpu, and of the same without."""
    figures = []
    for no in ("true", "false"):
        context = replace(trained, restart=True, flags={**trained.flags, "ppo": {"use_cpu": no}})
        evaluate.run(context)
        figures.append(read_json(context.record("eval").path / "evaluation.json"))
    assert devices.best_device().type != "cpu"
    for name in ("exact_kl", "length"):
        assert figures[0]["ppo"][name]["value"] == pytest.approx(figures[1]["ppo"][name]["value"], rel=0.1)
