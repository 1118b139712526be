"""A loop of one's own over PPOTrainer: its steps are those of train, and what cannot be is refused."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ppo_options import count
from trainer_fixture import (
    CHAT,
    DEVICE,
    EOS,
    Spy,
    digests,
    good,
    make_policy,
    make_tokenizer,
    make_trainer,
    prompt_rows,
    rows_of,
    trained,
    updates_of,
)

from rlhf_zoo.errors import ZooError
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.trainer import PPOTrainer


def replayed(directory: Path, run: Spy, **options: Any) -> tuple[PPOTrainer, list[dict[str, float]], list[float]]:
    """The completions and scores of a run of `train`, given to `step`: the trainer, its metrics, its learning rates."""
    trainer = make_trainer(directory, **options)
    metrics, rates = [], []
    for rollout, advantages, _ in run.updates:
        prompts, responses = zip(*rows_of(rollout), strict=True)
        trainer.prepare_loop()
        assert trainer.optimizer is not None
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        metrics.append(trainer.step(prompts, [torch.tensor(ids) for ids in responses], advantages.reward_scores.total))
    return trainer, metrics, rates


def test_step_equals_train(tmp_path: Path) -> None:
    """Bit for bit, where train takes log π_old from a forward pass too; with β adapting and the rate falling."""
    settings: dict[str, Any] = {
        "max_steps": 3, "kl_target": 0.3, "kl_horizon": 32, "missing_eos_penalty": 0.5, "score_scaling": "running",
        "early_stop_kl": 10.0, "critic_warmup_updates": 1,
    }  # fmt: skip
    whole = trained(tmp_path, recompute_logprobs=True, **settings)
    steps, metrics, rates = replayed(tmp_path, whole, **settings)
    assert digests(steps) == digests(whole) != digests(whole.before)
    assert steps.controller == whole.controller and steps.running_scores == whole.running_scores
    assert steps.state.global_step == 3
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    for one, other in zip(metrics, updates_of(whole), strict=True):
        shared = {name: value for name, value in other.items() if name in one}
        assert {name: one[name] for name in shared} == shared
        assert other.keys() - one.keys() == {"learning_rate", "episodes", "epoch", "step", "rewards/good"}
        assert one["rewards/given"] == one["objective/score"]
    _, _, rates = replayed(tmp_path, whole, max_steps=-1)
    assert rates == [1e-3, 1e-3, 1e-3], "nobody knows the end of the loop"


@pytest.mark.parametrize("skip", [False, True])
def test_step_ignores_prompt_groups(tmp_path: Path, skip: bool) -> None:
    """Neighbors may be of any prompts: equal scores leave none of them out, and any number can be given."""
    queries, responses = prompt_rows(5)["prompt"], ["abc", "de", "f", "gh", "ijk"]
    ends = []
    for generations in (1, 2):
        trainer = make_trainer(tmp_path, num_generations=generations, skip_equal_scores=skip and generations > 1)
        metrics = trainer.step(queries, responses, [1.0, 1.0, 0.0, 0.0, 2.0])
        assert "objective/equal_scores" not in metrics and metrics["policy/epochs"] == 2
        ends.append(digests(trainer))
    assert ends[0] == ends[1]


def test_custom_loop_needs_no_rewards_prompts_or_length(tmp_path: Path) -> None:
    """What it samples is drawn anew each time, and the first step has no KL."""
    args = PPOConfig(output_dir=str(tmp_path), use_cpu=DEVICE == "cpu", report_to="none", response_length=8)
    trainer = PPOTrainer(args=args, processing_class=make_tokenizer(), model=make_policy())
    before = digests(trainer)
    texts = ["abc", "d", "ab"]
    drawn = trainer.generate(texts, num_generations=2)
    assert [ids.dim() for ids in drawn] == [1] * 6
    assert all(0 < len(ids) <= 8 and EOS not in ids[:-1] and (ids[-1] == EOS or len(ids) == 8) for ids in drawn)
    again = trainer.generate(texts, num_generations=2)
    assert len({tuple(ids.tolist()) for ids in [*drawn, *again]}) == 12
    queries = [text for text in texts for _ in range(2)]
    for update, responses in enumerate((drawn, again), start=1):
        metrics = trainer.step(queries, responses, list(range(6)))
        trainer.log(metrics)
        assert trainer.state.global_step == update == trainer.state.log_history[-1]["step"]
        assert trainer.state.log_history[-1]["loss"] == metrics["loss"]
        assert metrics["completions/length"] == statistics.fmean(map(len, responses))
        assert metrics["completions/eos_rate"] == statistics.fmean(float(ids[-1] == EOS) for ids in responses)
        if update == 1:
            assert abs(metrics["objective/kl"]) < 1e-5 and metrics["policy/logprob_mismatch"] < 1e-5
    assert digests(trainer) != before
    for wrong, message in (
        (trainer.train, "PPO has no prompts: pass train_dataset, or write your own training loop with generate"),
        (lambda: trainer.evaluate(prompt_rows(8)), "PPO has no reward: pass reward_model or reward_funcs, or use step"),
        (trainer.evaluate, "no prompts to evaluate on: pass eval_dataset"),
        (trainer.generate_completions, "samples held-out prompts: pass eval_dataset"),
    ):
        with pytest.raises(ZooError, match=message):
            wrong()


def test_custom_loop_accepts_prompts_in_any_form(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    chats = [[{"role": "user", "content": text}] for text in ("abc", "def")]
    texts = ["abc;:", "def;:"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    forms: list[Any] = [texts, ids, torch.tensor(ids), chats]
    drawn, ends = [], []
    for form in forms:
        trainer = make_trainer(tmp_path, processing_class=tokenizer, reward_funcs=[good, count])
        drawn.append([each.tolist() for each in trainer.generate(form)])
        metrics = trainer.step(form, ["gh", torch.tensor([9, EOS])], torch.tensor([1.0, 3.0]))
        # The trainer's own rewards are asked for nothing.
        assert [(name, value) for name, value in metrics.items() if "rewards/" in name] == [("rewards/given", 2.0)]
        ends.append(digests(trainer))
    assert all(each == drawn[0] for each in drawn) and all(each == ends[0] for each in ends)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> PPOTrainer:
    trainer = make_trainer(tmp_path_factory.mktemp("loop"))
    trainer.generate(["a"])
    return trainer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((["a"], ["b", "c"], [1.0]), "got 1 queries and 2 responses"),
        (([], [], []), "got 0 queries and 0 responses"),
        (("ab", [[3], [4]], [1.0, 2.0]), r"step\(\) got a single text"),
        ((["a", "b"], ["b", "c"], [1.0]), "got 1 scores for 2 responses"),
        ((["a", "b"], ["b", "c"], [1.0, math.nan]), "Score 1 is nan: pass a finite number"),
        ((["a"], ["b"], ["good"]), "Score 0 is 'good', which is not a number"),
        ((["a", ""], ["b", "c"], [1.0, 1.0]), "Query 1 or its response is empty"),
        ((["a"], [[]], [1.0]), "Query 0 or its response is empty"),
        ((["a"], ["b" * 32], [1.0]), "have 33 tokens together and exceed the context of 32"),
        ((["a"], [[17]], [1.0]), "the token id 17, but the policy has only 17 embedding rows"),
        ((["a"], [[4, EOS, 5]], [1.0]), "Response 0 continues after its end token"),
        ((["a"], [None], [1.0]), "Response 0 is None"),
        ((["a"], [torch.tensor([[4, 5]])], [1.0]), "pass a text or a 1-D tensor"),
        (([5], ["b"], [1.0]), "The prompt 5 is neither a text nor a conversation"),
        (("ab",), r"generate\(\) got a single text"),
        (([],), "got 0 prompts"),
        ((["a", ""],), "Prompt 1 is empty"),
        ((["a", "b" * 23],), "Prompt 1 has 23 tokens.*context of 32"),
        (([[17]],), "has the token id 17"),
        (([None],), "neither a text nor a conversation"),
        (([[{"role": "user", "content": "a"}]],), "no chat template"),
    ],
)
def test_step_rejects_bad_input_and_changes_nothing(loop: PPOTrainer, given: Any, message: str) -> None:
    """Given to `step`, or to `generate` where it is prompts alone."""
    before = digests(loop)
    with pytest.raises(ZooError, match=message) as caught:
        loop.step(*given) if len(given) == 3 else loop.generate(*given)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert loop.state.global_step == 0 and digests(loop) == before
