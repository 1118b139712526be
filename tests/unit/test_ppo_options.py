"""Each option of PPOConfig as it acts in the trainer, against a second computation."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trainer_fixture import (
    CHAT,
    DEVICE,
    EOS,
    SAVED,
    Spy,
    digests,
    distance,
    good,
    make_policy,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    prompt_rows,
    read_table,
    resumed_alike,
    rows_of,
    snapshot,
    timeless,
    trained,
    updates_of,
)
from transformers import DataCollatorWithPadding, TrainerCallback

from rlhf_zoo import functional as F
from rlhf_zoo.actor_critic import Said
from rlhf_zoo.errors import ZooError
from rlhf_zoo.models import critic_from
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.control import FixedKL, RunningScores
from rlhf_zoo.ppo.loss import micro_batch_loss
from rlhf_zoo.ppo.metrics import Progress
from rlhf_zoo.ppo.rollout import Advantages, MinibatchSize, Rollout
from rlhf_zoo.ppo.trainer import PPO_STATE, TRAIN_STREAM, PPOTrainer
from rlhf_zoo.rewards import Scored
from rlhf_zoo.sampling import Samples
from rlhf_zoo.value_head import (
    VALUE_HEAD_FILE,
    AutoModelForCausalLMWithValueHead,
    ValueHead,
)

# One step of plain gradient descent, of the whole rollout; a norm of 0 clips nothing.
ONE_STEP: dict[str, Any] = {
    "max_steps": 1, "num_ppo_epochs": 1, "num_mini_batches": 1, "optim": "sgd", "learning_rate": 0.2,
    "max_grad_norm": 0.0,
}  # fmt: skip


def nothing(completions: Sequence[str], **_: Any) -> list[float]:
    """With it and a critic that says 0, every advantage is 0: the policy is moved by the other terms alone."""
    return [0.0] * len(completions)


def count(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


# The loss

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no value clip": {"cliprange_value": None},
    "clip higher": {"cliprange_high": 0.6},
    "dual clip": {"dual_clip": 1.3},
    "entropy": {"entropy_coef": 0.4},
    "k2": {"kl_in": "loss", "kl_estimator": "k2"},
    "k3": {"kl_in": "loss", "kl_estimator": "k3"},
    "full": {"kl_in": "loss", "kl_estimator": "full"},
    "seq-mean-token-mean": {"loss_aggregation": "seq-mean-token-mean"},
    "seq-mean-token-sum": {"loss_aggregation": "seq-mean-token-sum"},
    "seq-sum-norm": {"loss_aggregation": "seq-sum-norm"},
    "sequence": {"action_level": "sequence", "cliprange_sequence": 0.5, "entropy_coef": 0.4, "kl_in": "loss",
                 "kl_estimator": "k2"},
    "warm-up": {"entropy_coef": 0.4, "kl_in": "loss", "kl_estimator": "k3"},
}  # fmt: skip
LENGTHS, ACTIONS, SEQUENCES, LONGEST, BETA = [4, 2, 3], 18, 6, 10, 0.7  # the minibatch is twice what is here


@pytest.mark.parametrize("name", SETTINGS)
def test_a_loss_and_its_gradient_are_those_of_each_row_by_the_formulas(name: str) -> None:
    """Of random numbers in float64: three completions of at most 4 tokens, 5 of which there are."""
    args = PPOConfig(output_dir="unused", use_cpu=True, report_to="none", cliprange=0.1, vf_coef=0.3, **SETTINGS[name])
    sequence, random = args.action_level == "sequence", torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    logits, ref_logits = normal(3, 4, 5).requires_grad_(), normal(3, 4, 5)
    ids = torch.randint(5, (3, 4), generator=random)
    mask = torch.arange(4) < torch.tensor(LENGTHS).unsqueeze(1)
    now = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    old, ref = (now.detach() + 0.3 * normal(3, 4) for _ in range(2))
    width = 1 if sequence else 4
    acts = mask[:, :width]
    values = normal(3, 4).requires_grad_()
    old_values, returns, gains = values.detach()[:, :width] + 0.3 * normal(3, width), normal(3, width), normal(3, width)
    ones = torch.ones(3, 1)
    samples = Samples(ones.long(), ones.bool(), ids, mask, old.masked_fill(~mask, 0), ones[:, 0].bool())
    scored = Scored(total=ones[:, 0], each=ones)
    # As the models say it: 0 outside the mask, and an entropy that is only logged has no gradient.
    chosen = F.selected_logprobs(logits, ids).masked_fill(~mask, 0)
    entropy = F.entropy(logits if args.entropy_coef else logits.detach())
    kl = F.exact_kl(logits, ref_logits) if name == "full" else None
    loss, seen = micro_batch_loss(
        args, Said(chosen, entropy, values, kl), Rollout(samples, ref.masked_fill(~mask, 0), values.detach()),
        Advantages(scored, scored.total, scored.total, returns, old_values, gains, returns, acts),
        MinibatchSize(torch.tensor(SEQUENCES if sequence else ACTIONS), torch.tensor(SEQUENCES), LONGEST),
        kl_coef=BETA, critic_only=name == "warm-up",
    )  # fmt: skip

    rows = []
    low = args.cliprange_sequence if sequence else args.cliprange
    high = args.cliprange_high or low
    for row, length in enumerate(LENGTHS):
        here = slice(0, 1 if sequence else length)

        def by_action(x: Tensor, length: int = length) -> Tensor:
            return x[:length].sum().unsqueeze(0) if sequence else x[:length]

        gain, value, target, before = (x[row, here] for x in (gains, values, returns, old_values))
        new, to_ref = by_action(now[row] - old[row]), by_action(now[row] - ref[row])
        ratio = new.exp()
        policy = -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
        if args.dual_clip is not None:
            policy = torch.where(gain < 0, torch.minimum(policy, -args.dual_clip * gain), policy)
        error = (value - target).square()
        if args.cliprange_value is not None:
            error = torch.maximum(error, (before + (value - before).clamp(-0.2, 0.2) - target).square())
        p, q = logits[row].log_softmax(-1), ref_logits[row].log_softmax(-1)
        entropy, exact = by_action(-(p.exp() * p).sum(-1)), by_action((p.exp() * (p - q)).sum(-1))
        kl = {
            "k2": ratio.detach() * 0.5 * to_ref.square(), "k3": ratio * (torch.exp(-to_ref) - 1 + to_ref),
            "full": exact,
        }.get(args.kl_estimator, 0 * policy)  # fmt: skip
        others = policy + BETA * kl - args.entropy_coef * entropy
        rows.append(args.vf_coef * 0.5 * error + (0 if name == "warm-up" else others))
    total = sum(each.sum() for each in rows)
    wanted = {
        "token-mean": total / (SEQUENCES if sequence else ACTIONS),
        "seq-mean-token-mean": sum(each.mean() for each in rows) / SEQUENCES,
        "seq-mean-token-sum": total / SEQUENCES,
        "seq-sum-norm": total / (SEQUENCES * LONGEST),
    }[args.loss_aggregation]
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    found, right = (torch.autograd.grad(x, [logits, values], allow_unused=True) for x in (loss, wanted))
    for one, other in zip(found, right, strict=True):
        assert (one is None) == (other is None or not other.any())
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert not any(each.requires_grad for each in seen.values())


@pytest.mark.parametrize("estimator", ["k3", "full"])
def test_kl_in_the_loss_is_weighed_by_beta_and_in_no_reward(tmp_path: Path, estimator: str) -> None:
    trainer = make_trainer(
        tmp_path, kind=Spy, reward_funcs=nothing, ref_model=make_policy(seed=5), kl_in="loss", kl_estimator=estimator,
        **ONE_STEP,
    )  # fmt: skip
    trainer.controller = FixedKL(0.6)
    trainer.train()
    (rollout, estimates, _), [metrics] = trainer.updates[0], updates_of(trainer)
    assert metrics["loss"] == pytest.approx(0.6 * metrics["loss/kl"], rel=1e-5)
    assert distance(snapshot(trainer), trainer.before, "policy") > 1e-3
    k1 = (rollout.logprobs - rollout.ref_logprobs)[rollout.mask]
    assert metrics["objective/kl"] == pytest.approx(float(k1.sum()) / 8, rel=1e-5)
    if estimator == "k3":
        assert metrics["loss/kl"] == pytest.approx(float((torch.exp(-k1) - 1 + k1).mean()), rel=1e-4)
    assert not estimates.rewards.any() and metrics["objective/non_score_reward"] == 0


# Shaping of the score


@pytest.mark.parametrize(("centering", "scaling"), [("running", "running"), ("running", "none"), ("none", "running")])
def test_running_statistics_are_of_all_scores_so_far(tmp_path: Path, centering: str, scaling: str) -> None:
    trainer = trained(
        tmp_path, max_steps=2, reward_funcs=count, score_centering=centering, score_scaling=scaling,
        train_dataset=prompt_rows(13),
    )  # fmt: skip
    so_far: list[float] = []
    for (rollout, estimates, _), metrics in zip(trainer.updates, updates_of(trainer), strict=True):
        lengths = count(rollout.samples.token_lists())
        so_far += lengths
        mean, std = statistics.fmean(so_far), statistics.stdev(so_far)
        shift, scale = mean if centering == "running" else 0.0, std if scaling == "running" else 1.0
        assert estimates.scores.tolist() == pytest.approx([(n - shift) / scale for n in lengths], rel=1e-5, abs=1e-6)
        assert metrics["objective/score"] == statistics.fmean(lengths)
        assert metrics["objective/score_mean_so_far"] == pytest.approx(mean, rel=1e-12)
        assert metrics["objective/score_std_so_far"] == pytest.approx(std, rel=1e-12)
    assert len(so_far) == 8 + 5


def test_scores_that_do_not_vary_are_not_divided_by_zero() -> None:
    assert RunningScores().update([8.0, 40.0, 200.0]).std == RunningScores().update([1.0, 5.0, 25.0]).std == 1.0


# The completion as one action


def test_a_whole_completion_as_one_action(tmp_path: Path) -> None:
    """R = score − βΣk1 and A = R − V(prompt), whitened over completions."""
    trainer = trained(
        tmp_path, action_level="sequence", reward_model=make_reward_model(), ref_model=make_policy(seed=5),
        kl_coef=0.2, max_steps=1,
    )  # fmt: skip
    rollout, estimates, _ = trainer.updates[0]
    returns, first = estimates.scores - 0.2 * rollout.kl, rollout.values[:, 0]
    gains = returns - first
    assert estimates.returns.shape == estimates.advantages.shape == (8, 1)
    torch.testing.assert_close(estimates.returns[:, 0], returns)
    torch.testing.assert_close(estimates.advantages[:, 0], (gains - gains.mean()) / gains.std(), atol=1e-5, rtol=1e-5)
    [metrics] = updates_of(trainer)
    assert metrics["critic/value"] == pytest.approx(float(first.mean()), abs=1e-5)
    assert metrics["objective/rlhf_reward"] == pytest.approx(float(returns.mean()), abs=1e-5)
    assert not [name for name in metrics if "quarter" in name]


# The early stop


def test_epochs_stop_by_the_kl_to_the_sampling_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just below the drift of the second pass, and not just above. Their mean over passes is policy/approxkl."""
    drifts: list[float] = []
    end_epoch = Progress.end_epoch

    def told(self: Progress, reduce: Any) -> float:
        drifts.append(end_epoch(self, reduce))
        return drifts[-1]

    monkeypatch.setattr(Progress, "end_epoch", told)

    def run(limit: float | None) -> dict[str, float]:
        settings = {"num_mini_batches": 2, "learning_rate": 0.5, "num_ppo_epochs": 4, "early_stop_kl": limit}
        return updates_of(trained(tmp_path, reward_funcs=count, **ONE_STEP | settings))[0]

    whole = run(None)
    first, second, *_ = drifts
    assert whole["policy/epochs"] == len(drifts) == 4 and 1e-4 < first < second
    assert whole["policy/approxkl"] == pytest.approx(statistics.fmean(drifts), rel=1e-6)
    assert run(second / 1.5 * 0.999)["policy/epochs"] == 2
    assert run(second / 1.5 * 1.001)["policy/epochs"] > 2


# Pretraining text in the mix

TEXTS: dict[str, tuple[dict[str, list[Any]], dict[tuple[int, ...], int]]] = {
    # the data set, and each row's tokens with the first that is modelled
    "text": ({"text": ["abc", "gg", "kkkkl"]}, {(3, 4, 5, EOS): 1, (9, 9, EOS): 1, (13, 13, 13, 13, 14, EOS): 1}),
    "prompt and completion": (
        {"prompt": ["ab", "g", ""], "completion": ["c", "ghi", "kl"]},
        {(3, 4, 5, EOS): 2, (9, 9, 10, 11, EOS): 1, (13, 14, EOS): 1},
    ),
    "input_ids": ({"input_ids": [[3, 4, 5], [9, 9, 10, 1], [13]]}, {(3, 4, 5): 1, (9, 9, 10, 1): 1}),
}


@pytest.mark.parametrize("columns", TEXTS)
def test_pretraining_text_adds_its_language_model_loss(
    tmp_path: Path, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In micro-batches of 2, and at a sampling temperature of 0.5: text is modelled at 1."""
    data, starts = TEXTS[columns]
    trainer = make_trainer(
        tmp_path, kind=Spy, reward_funcs=nothing, kl_coef=0.0, temperature=0.5, ptx_coef=0.7,
        ptx_dataset=Dataset.from_dict(data), per_device_train_batch_size=2, gradient_accumulation_steps=4, **ONE_STEP,
    )  # fmt: skip
    assert trainer.texts is not None
    kept, draw, policy = [], trainer.texts.draw, make_policy()

    def drawn(*args: Any) -> Any:
        kept.append(draw(*args))
        return kept[-1]

    monkeypatch.setattr(trainer.texts, "draw", drawn)
    trainer.train()
    [batch] = kept
    texts = [tuple(ids[real].tolist()) for ids, real in zip(batch.ids, batch.attention, strict=True)]
    assert len(texts) == 8 and set(texts) == set(starts)
    terms = []
    for ids in texts:
        with torch.no_grad():
            logps = policy(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        terms += [-float(logps[place - 1, ids[place]]) for place in range(starts[ids], len(ids))]
    [metrics] = updates_of(trainer)
    assert metrics["loss/ptx"] == pytest.approx(statistics.fmean(terms), rel=1e-5)
    assert metrics["loss"] == pytest.approx(0.7 * metrics["loss/ptx"], rel=1e-5)
    assert distance(snapshot(trainer), trainer.before, "policy") > 1e-3


def test_a_completion_gets_no_second_beginning(tmp_path: Path) -> None:
    """A tokenizer that puts <unk> before each text puts it before the prompt alone."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    trainer = make_trainer(
        tmp_path, processing_class=tokenizer, ptx_coef=1.0,
        ptx_dataset=Dataset.from_dict({"prompt": ["ab"], "completion": ["c"]}),
    )  # fmt: skip
    assert trainer.texts is not None
    batch = trainer.texts.draw(1, torch.Generator(), torch.device("cpu"))
    assert batch.ids.tolist() == [[2, 3, 4, 5, EOS]] and batch.mask.tolist() == [[False, False, True, True]]


# The critic


def test_where_the_critic_begins(tmp_path: Path) -> None:
    """'auto' takes the reward model where there is one that reads the policy's tokens, else the policy."""
    reward_model = make_reward_model()
    policy_trunk, reward_trunk = (digests(model.model) for model in (make_policy(), reward_model))
    for critic, given, trunk in (
        ("auto", {"reward_model": reward_model}, reward_trunk),
        ("auto", {"reward_funcs": good}, policy_trunk),
        ("reward", {"reward_model": reward_model}, reward_trunk),
        ("policy", {"reward_model": reward_model}, policy_trunk),
    ):
        made = make_trainer(tmp_path, critic=critic, **given).value_model
        assert digests(made.model) == trunk, critic
        assert bool(made.score.weight.any()) == (trunk is reward_trunk), critic
    shared = make_trainer(tmp_path, critic="shared", reward_model=reward_model)
    assert isinstance(shared.value_model, ValueHead)
    assert [tuple(weight.shape) for weight in shared.value_model.parameters()] == [(1, 32), (1,)]
    groups = shared.create_optimizer().param_groups
    assert sorted({group["lr"] for group in groups}) == [1e-3, 2e-3]


def test_a_value_model_is_taken_as_it_is(tmp_path: Path) -> None:
    """A token classifier itself; a reward model's trunk and shaped head; the same from a path."""
    critic = critic_from(make_reward_model(seed=3))
    assert make_trainer(tmp_path, value_model=critic).value_model is critic
    source = make_reward_model(seed=4)
    source.save_pretrained(tmp_path / "saved")
    for given in (source, str(tmp_path / "saved"), tmp_path / "saved"):
        made = make_trainer(tmp_path, value_model=given).value_model
        assert digests(made.model) == digests(source.model)
        assert torch.equal(made.score.weight, source.score.weight / 0.5)


def with_head(seed: int = 6) -> AutoModelForCausalLMWithValueHead:
    """A policy with a value head that says something."""
    model = AutoModelForCausalLMWithValueHead(make_policy())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.v_head.summary.weight, std=0.3)
        torch.nn.init.constant_(model.v_head.summary.bias, 0.4)
    return model


def test_a_shared_critic_reads_the_trunk_and_its_loss_moves_it(tmp_path: Path) -> None:
    model = with_head()
    trainer = make_trainer(tmp_path, model=model)
    assert trainer.value_model is model.v_head and trainer.policy is model.pretrained_model
    rollout = trainer.rollout(list(trainer.train_dataset)[:8], stream=TRAIN_STREAM)
    head = model.v_head.summary
    for row, (prompt, completion) in enumerate(rows_of(rollout)):
        hidden = trainer.policy.model(input_ids=torch.tensor([prompt + completion])).last_hidden_state[0]
        said = (hidden @ head.weight[0] + head.bias)[len(prompt) - 1 : -1]
        assert (rollout.values[row, : len(said)] - said).abs().max() < 1e-5
    trainer.actor(rollout.samples).values.sum().backward()
    assert all(weight.grad is not None for weight in trainer.policy.model.parameters())


def test_a_run_with_all_that_has_a_state_resumes_exactly_and_loads_with_its_head(tmp_path: Path) -> None:
    """Running statistics, texts, a warm-up, several completions of a prompt, evaluation and a critic on the trunk."""

    def build(directory: Path) -> Spy:
        return make_trainer(
            directory, kind=Spy, model=with_head(), reward_funcs=count, score_centering="running",
            score_scaling="running", ptx_coef=0.5, ptx_dataset=Dataset.from_dict({"text": ["abc", "gg", "kkkkl"]}),
            critic_warmup_updates=2, num_generations=2, per_device_train_batch_size=2, eval_dataset=prompt_rows(8),
            eval_strategy="steps", eval_steps=1, **SAVED,
        )  # fmt: skip

    whole = resumed_alike(build, tmp_path)
    state = json.loads((tmp_path / "again" / "checkpoint-3" / PPO_STATE).read_text())
    lengths = [float(len(ids)) for rollout, _, _ in whole.updates for ids in rollout.samples.token_lists()]
    assert state["scores_seen"] == [24.0, sum(lengths), sum(n * n for n in lengths)], "of training alone"
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert VALUE_HEAD_FILE == "critic/value_head.safetensors"
    assert sorted(path.name for path in (checkpoint / "critic").iterdir()) == ["value_head.safetensors"]
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(checkpoint).eval()
    assert digests(make_trainer(tmp_path / "more", model=loaded)) == digests(whole)


class Steps(TrainerCallback):
    """Digests after each update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen.append(digests(model.state_dict()))


@pytest.mark.parametrize("critic", ["policy", "shared"])
def test_while_the_critic_warms_up_the_policy_stands_still(tmp_path: Path, critic: str) -> None:
    """To the last bit, with weight decay and every other term of the loss on; the loss is the critic's alone."""
    steps = Steps()
    trainer = make_trainer(
        tmp_path, critic=critic, critic_warmup_updates=1, weight_decay=0.1, entropy_coef=0.1, kl_in="loss",
        kl_estimator="k2", ref_model=make_policy(seed=5), ptx_coef=0.5, vf_coef=0.3, num_mini_batches=1,
        ptx_dataset=Dataset.from_dict({"text": ["abc"]}), callbacks=[steps], reward_funcs=count,
    )  # fmt: skip
    start = digests(trainer.model.state_dict())
    trainer.train()
    for part, moves in (("policy", [False, True]), ("value_model", [True, True])):
        held = [{k: v for k, v in each.items() if k.startswith(part)} for each in (start, *steps.seen)]
        assert [one != other for one, other in pairwise(held)] == moves, part
    first, second = updates_of(trainer)
    assert first["grad_norm/policy"] == 0 < second["grad_norm/policy"]
    assert first["loss"] == pytest.approx(0.3 * first["loss/value"], rel=1e-5)
    assert second["loss"] != pytest.approx(0.3 * second["loss/value"], rel=1e-2)


# Several completions of a prompt


def test_several_completions_of_a_prompt(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def keep(prompts: list[str], completions: list[str], topic: list[int], **columns: Any) -> list[float]:
        calls.append({"prompts": prompts, "topic": topic, "columns": columns.keys()})
        return good(completions)

    few: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "reward_funcs": keep,
        "train_dataset": prompt_rows(16, topic=list(range(16))),
    }  # fmt: skip
    several = trained(tmp_path, num_generations=3, num_mini_batches=3, total_episodes=24, **few)
    assert several.args.max_steps == several.state.global_step == 2
    assert [row["episodes"] for row in updates_of(several)] == [12, 24]
    rows = [(tuple(p), tuple(c)) for p, c in rows_of(several.updates[0][0])]
    assert set(Counter(prompt for prompt, _ in rows).values()) == {3} and len(set(rows)) == len(rows) == 12
    topics = dict(zip(prompt_rows(16)["prompt"], range(16), strict=True))
    for call in calls:
        assert call["topic"] == [topics[prompt] for prompt in call["prompts"]]
        assert "generation_index" not in call["columns"]
    # The first of each prompt's completions is what it has alone.
    single = trained(tmp_path, max_steps=1, **few)
    assert rows[::3] == [(tuple(p), tuple(c)) for p, c in rows_of(single.updates[0][0])]
    # Their order is irrelevant: a completion's stream is keyed by prompt and its place among that prompt's own.
    fresh = make_trainer(tmp_path, num_generations=3, **few)
    prompts = {tuple(row["input_ids"]): row for row in fresh.train_dataset}
    given = [prompts[prompt] | {"generation_index": place % 3} for place, (prompt, _) in enumerate(rows)]
    turned = fresh.rollout(given[::-1], stream=TRAIN_STREAM)
    assert [(tuple(p), tuple(c)) for p, c in rows_of(turned)] == rows[::-1]


# The reference in 8 bit


def test_a_reference_in_eight_bits_is_near_the_policy(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    trainer = trained(tmp_path, ref_load_in_8bit=True)
    own = trainer.reference.own
    assert own is not None and own.model.layers[0].self_attn.q_proj.weight.dtype == torch.int8
    assert not any(weight.requires_grad for weight in own.parameters())
    # A few hundredths of a nat a completion: far from 0 in float32, and far from a model that differs.
    assert 1e-4 < abs(updates_of(trainer)[0]["objective/kl"]) < 0.1


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_eight_bits_need_bitsandbytes(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"^ref_load_in_8bit needs bitsandbytes, which is not installed: pip install"):
        make_trainer(tmp_path, ref_load_in_8bit=True)


# Prompts as batches and data sets of another form


class Collated(Spy):
    """With a collator, which `make_trainer` does not know."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pad = DataCollatorWithPadding(kwargs["processing_class"])

        def bare(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
            """As TRL's PPO was given it: without an attention mask, as TRL read none."""
            with torch.device("cpu"):  # a batch in pinned memory
                batch = pad(rows)
            return {"input_ids": batch["input_ids"], "prompt_index": batch["prompt_index"]}

        super().__init__(*args, data_collator=bare, **kwargs)


def test_a_collator_that_pads(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    ids = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in prompt_rows(16)["prompt"]]})
    given: dict[str, Any] = {
        "train_dataset": ids, "eval_dataset": ids, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1,
    }  # fmt: skip
    plain, padded = trained(tmp_path, **given), trained(tmp_path, kind=Collated, **given)
    assert digests(padded) == digests(plain)
    assert timeless(padded.state.log_history) == timeless(plain.state.log_history)
    # A mask is heeded, also where a prompt holds PAD; rows without a number get one each.
    batch = {"input_ids": torch.tensor([[0, 0, 5], [4, 0, 3]]), "attention_mask": torch.tensor([[0, 0, 1], [1, 1, 1]])}
    assert plain.as_rows(batch) == [
        {"input_ids": [5], "prompt_index": 0},
        {"input_ids": [4, 0, 3], "prompt_index": 1},
    ]


def test_several_data_sets_to_evaluate_on(tmp_path: Path) -> None:
    sets = {"some": prompt_rows(8), "others": prompt_rows(12).select(range(8, 12))}
    trainer = trained(tmp_path, eval_dataset=sets, eval_strategy="steps", eval_steps=1, max_steps=1)
    logged = {
        name: value for row in trainer.state.log_history for name, value in row.items() if name.startswith("eval_")
    }
    alone: dict[str, float] = {}
    for name, dataset in sets.items():
        alone |= trainer.evaluate(dataset, metric_key_prefix=f"eval_{name}")
    assert alone == trainer.evaluate() and logged == {name: alone[name] for name in alone if name != "epoch"}
    assert logged["eval_some_objective/score"] != logged["eval_others_objective/score"]
    table = trainer.generate_completions()
    assert table["prompt"] == [*sets["some"]["prompt"], *sets["others"]["prompt"]]


# Samples to look at


def texts_of(directory: Path) -> dict[str, dict[int, str]]:
    """The texts that tensorboard was given, by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = {path.parent for path in directory.rglob("events.out.tfevents.*")}
    read = EventAccumulator(str(events)).Reload()
    return {
        tag: {event.step: event.tensor_proto.string_val[0].decode() for event in read.Tensors(tag)}
        for tag in read.Tags()["tensors"]
    }


def test_completions_of_each_log_line_are_shown_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Conversations, which pass through the chat template and reach the rewards as such, as they are read."""
    heard: list[str] = []

    def explained(prompts: list[Any], completions: list[Any], log_extra: Any = None, **_: Any) -> list[float]:
        heard.extend(prompt[0]["content"] for prompt in prompts)
        log_extra("first", [completion[0]["content"][:1] for completion in completions])
        return good(completions)

    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in prompt_rows()["prompt"]]})
    trainer = trained(
        tmp_path, log_completions=True, num_completions_to_print=3, reward_funcs=explained, processing_class=tokenizer,
        report_to=["tensorboard"], ref_model=make_policy(seed=5), train_dataset=chats,
    )  # fmt: skip
    folder = tmp_path / "completions" / "completions"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]
    for step, (rollout, estimates, _) in enumerate(trainer.updates, start=1):
        said = trainer.processing_class.batch_decode(rollout.samples.token_lists(), skip_special_tokens=True)
        asked = [trainer.processing_class.decode(prompt) for prompt, _ in rows_of(rollout)]
        assert asked == [f"{prompt};:" for prompt in heard[8 * step - 8 : 8 * step]]
        wanted = [
            {
                "prompt": f"user: {asked[row].removesuffix(';:')}", "completion": f"assistant: {said[row]}",
                "score": estimates.scored.total[row].item(), "kl": rollout.kl[row].item(),
                "ended": rollout.samples.ended[row].item(), "first": said[row][:1],
            }
            for row in range(3)
        ]  # fmt: skip
        assert read_table(folder / f"step-{step:06d}.jsonl") == wanted
    shown = texts_of(tmp_path)["completions/text_summary"]
    assert shown.keys() == {1, 2}
    head, line, *cells = shown[2].split("\n")
    assert head == "| prompt | completion | score | kl | ended | first |" and line.count("---") == 6
    assert [row.split(" | ")[1] for row in cells] == [row["completion"] for row in wanted]
    assert said[0] in capsys.readouterr().err


def test_samples_are_of_the_update_that_they_are_named_after(tmp_path: Path) -> None:
    """Twice in four updates, and nothing of the run changes for it."""
    settings: dict[str, Any] = {
        "max_steps": 4, "train_dataset": prompt_rows(8), "eval_dataset": prompt_rows(12), "missing_eos_penalty": 1.0,
    }  # fmt: skip
    sampled = trained(tmp_path, num_sample_generations=2, report_to=["tensorboard"], **settings)
    plain = trained(tmp_path / "without", **settings)
    assert digests(sampled) == digests(plain) and not (tmp_path / "without" / "completions").exists()
    folder = tmp_path / "completions" / "samples"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002.jsonl", "step-000004.jsonl"]
    assert texts_of(tmp_path)["samples/text_summary"].keys() == {2, 4}
    now = plain.generate_completions(sampling=True)
    rows = [dict(zip(now, cells, strict=True)) for cells in zip(*now.values(), strict=True)]
    assert read_table(folder / "step-000004.jsonl") == rows != read_table(folder / "step-000002.jsonl")
    assert len(now["prompt"]) == 8  # one batch
    table = sampled.generate_completions()
    assert table["prompt"] == prompt_rows(12)["prompt"]
    assert table["score"] == pytest.approx(good(table["completion"]), abs=1e-7)


def test_trackio_gets_metrics_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # It reads TRACKIO_DIR when it is imported, and trl's other trainers, which other tests use, import it.
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    import sqlite3

    trainer = trained(
        tmp_path, report_to=["trackio"], project="toys", run_name="toy", log_completions=True, max_steps=1
    )
    with sqlite3.connect(tmp_path / "trackio" / "toys.db") as database:
        logged = [json.loads(text) for (text,) in database.execute("SELECT metrics FROM metrics ORDER BY id")]
    scores = [row["train/objective/score"] for row in logged if "train/objective/score" in row]
    assert scores == pytest.approx([row["objective/score"] for row in updates_of(trainer)])
    [table] = [row["completions"]["_value"] for row in logged if "completions" in row]
    assert table == read_table(tmp_path / "completions" / "completions" / "step-000001.jsonl")


# A loop of one's own


def replayed(directory: Path, run: Spy, **given: Any) -> tuple[PPOTrainer, list[dict[str, float]], list[float]]:
    """The completions and scores of a run of `train`, given to `step`: the trainer, its metrics, its learning rates."""
    trainer = make_trainer(directory, **given)
    metrics, rates = [], []
    for rollout, estimates, _ in run.updates:
        prompts, responses = zip(*rows_of(rollout), strict=True)
        trainer.prepare_loop()
        assert trainer.optimizer is not None
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        metrics.append(trainer.step(prompts, [torch.tensor(ids) for ids in responses], estimates.scored.total))
    return trainer, metrics, rates


def test_steps_of_ones_own_are_those_of_train(tmp_path: Path) -> None:
    """Bit for bit, where train takes log π_old from a forward pass too; with β adapting and the rate falling."""
    settings: dict[str, Any] = {
        "max_steps": 3, "kl_target": 0.3, "kl_horizon": 32, "missing_eos_penalty": 0.5, "score_scaling": "running",
        "early_stop_kl": 10.0, "critic_warmup_updates": 1,
    }  # fmt: skip
    whole = trained(tmp_path, recompute_logprobs=True, **settings)
    steps, metrics, rates = replayed(tmp_path, whole, **settings)
    assert digests(steps) == digests(whole) != digests(whole.before)
    assert steps.controller == whole.controller and steps.scores_seen == whole.scores_seen
    assert steps.state.global_step == 3
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    for one, other in zip(metrics, updates_of(whole), strict=True):
        shared = {name: value for name, value in other.items() if name in one}
        assert {name: one[name] for name in shared} == shared
        assert other.keys() - one.keys() == {"learning_rate", "episodes", "epoch", "step", "rewards/good"}
        assert one["rewards/given"] == one["objective/score"]
    _, _, rates = replayed(tmp_path, whole, max_steps=-1)
    assert rates == [1e-3, 1e-3, 1e-3], "nobody knows the end of the loop"


def test_a_loop_needs_neither_rewards_nor_prompts_nor_a_length(tmp_path: Path) -> None:
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
        (trainer.train, "PPO has no prompts: give train_dataset, or use generate"),
        (lambda: trainer.evaluate(prompt_rows(8)), "PPO has no reward: give reward_model or reward_funcs, or use step"),
        (trainer.evaluate, "nothing to evaluate on: give eval_dataset"),
        (trainer.generate_completions, "samples held-out prompts: give eval_dataset"),
    ):
        with pytest.raises(ZooError, match=message):
            wrong()


def test_prompts_of_a_loop_may_have_any_form(tmp_path: Path) -> None:
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
        (("ab", [[3], [4]], [1.0, 2.0]), r"step\(\) got one text"),
        ((["a", "b"], ["b", "c"], [1.0]), "got 1 scores for 2 responses"),
        ((["a", "b"], ["b", "c"], [1.0, math.nan]), "Score 1 is nan: give a finite number"),
        ((["a"], ["b"], ["good"]), "Score 0 is 'good', which is not a number"),
        ((["a", ""], ["b", "c"], [1.0, 1.0]), "Query 1 or its response is empty"),
        ((["a"], [[]], [1.0]), "Query 0 or its response is empty"),
        ((["a"], ["b" * 32], [1.0]), "have 33 tokens together, past the context of 32"),
        ((["a"], [[17]], [1.0]), "the token id 17, and the policy has 17 embedding rows"),
        ((["a"], [[4, EOS, 5]], [1.0]), "Response 0 goes on after its end token"),
        ((["a"], [None], [1.0]), "Response 0 is None"),
        ((["a"], [torch.tensor([[4, 5]])], [1.0]), "give a text or a 1-D tensor"),
        (([5], ["b"], [1.0]), "The prompt 5 is neither a text nor a conversation"),
        (("ab",), r"generate\(\) got one text"),
        (([],), "got 0 prompts"),
        ((["a", ""],), "Prompt 1 is empty"),
        ((["a", "b" * 23],), "Prompt 1 has 23 tokens.*context of 32"),
        (([[17]],), "holds the token id 17"),
        (([None],), "neither a text nor a conversation"),
        (([[{"role": "user", "content": "a"}]],), "no chat template"),
    ],
)
def test_a_loop_that_cannot_be_is_refused_and_changes_nothing(loop: PPOTrainer, given: Any, message: str) -> None:
    """Given to `step`, or to `generate` where it is prompts alone."""
    before = digests(loop)
    with pytest.raises(ZooError, match=message) as caught:
        loop.step(*given) if len(given) == 3 else loop.generate(*given)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert loop.state.global_step == 0 and digests(loop) == before
