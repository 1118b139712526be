"""Each option of PPOConfig as it acts in the trainer, against a second computation: row by row, without padding."""

from __future__ import annotations

import copy
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
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
    Twin,
    digests,
    distance,
    every,
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
    taken,
    timeless,
    trained,
    updates_of,
    values_of,
)
from transformers import DataCollatorWithPadding, TrainerCallback

from rlhf_zoo.errors import ZooError
from rlhf_zoo.models import critic_from
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.metrics import Progress
from rlhf_zoo.ppo.trainer import PPO_STATE, TRAIN_STREAM, PPOTrainer
from rlhf_zoo.value_head import VALUE_HEAD_FILE, AutoModelForCausalLMWithValueHead, ValueHead

RATE = 0.2
# One step of plain gradient descent: the change of a weight is the gradient.
ONE_STEP: dict[str, Any] = {
    "max_steps": 1, "num_ppo_epochs": 1, "num_mini_batches": 1, "optim": "sgd", "lr_scheduler_type": "constant",
    "weight_decay": 0.0, "max_grad_norm": 0.0, "learning_rate": RATE, "critic_learning_rate": RATE,
}  # fmt: skip


def nothing(completions: Sequence[str], **_: Any) -> list[float]:
    """With it and a critic that says 0, every advantage is 0: the policy is moved by the other terms alone."""
    return [0.0] * len(completions)


def count(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def begun(directory: Path, **given: Any) -> tuple[Spy, Twin]:
    trainer = make_trainer(directory, kind=Spy, **ONE_STEP | given)
    assert isinstance(trainer, Spy)
    return trainer, Twin(trainer)


def same_weights(trainer: Spy, twin: Twin, part: str = "", *, within: float = 2e-6) -> None:
    """That the trainer's weights are the twin's, and moved by far more than rounding."""
    after = snapshot(trainer)
    assert distance(after, twin.weights(), part) < within
    assert distance(after, trainer.before, part) > 100 * within


# The KL in the loss

KL_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    # of log π now, log π_old and log π_ref of the sampled tokens, and of the KL over the whole vocabulary
    "k3": lambda new, old, ref, _: (new - old).exp() * ((ref - new).exp() - 1 - (ref - new)),
    "full": lambda new, old, ref, exact: exact,
}


@pytest.mark.parametrize("estimator", KL_LOSSES)
def test_kl_in_the_loss_moves_the_policy_by_its_gradient(tmp_path: Path, estimator: str) -> None:
    """Two passes, so that the second has ρ ≠ 1; nothing but the KL moves the policy."""
    reference = make_policy(seed=5)
    trainer, twin = begun(
        tmp_path, reward_funcs=nothing, ref_model=make_policy(seed=5), kl_in="loss", kl_estimator=estimator,
        kl_coef=0.3, num_ppo_epochs=2,
    )  # fmt: skip
    trainer.train()
    rollout, estimates, _ = trainer.updates[0]
    rows = rows_of(rollout)
    with torch.no_grad():
        ref_every = every(reference, rows)
        old, ref = taken(every(twin.policy, rows), rows), taken(ref_every, rows)

    def kl() -> Tensor:
        now = every(twin.policy, rows)
        exact = [(p.exp() * (p - q)).sum(-1) for p, q in zip(now, ref_every, strict=True)]
        terms = zip(taken(now, rows), old, ref, exact, strict=True)
        return torch.cat([KL_LOSSES[estimator](*term) for term in terms]).mean()

    seen = twin.descend(lambda: 0.3 * kl(), rate=RATE, times=2)
    same_weights(trainer, twin, "policy")
    [metrics] = updates_of(trainer)
    assert metrics["loss/kl"] == pytest.approx(sum(seen) / 2 / 0.3, rel=1e-5)
    assert metrics["loss"] == pytest.approx(sum(seen) / 2, rel=1e-5)
    # The reward holds no KL, which is reported all the same.
    assert not estimates.rewards.any() and metrics["objective/non_score_reward"] == 0
    k1 = [float((p - q).sum()) for p, q in zip(old, ref, strict=True)]
    assert metrics["objective/kl"] == pytest.approx(statistics.fmean(k1), rel=1e-5)


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


def test_scores_that_do_not_vary_are_not_divided_by_zero(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, score_centering="running", score_scaling="running")
    trainer.scores_seen = trainer.scores_seen.update([8.0, 40.0, 200.0])
    assert trainer.scores_seen.std == 1.0


# The completion as one action


def test_a_whole_completion_as_one_action(tmp_path: Path) -> None:
    """R = score − βΣk1, A = R − V(prompt); one ratio, with a clip range of its own, for each of the completions."""
    beta, clip = 0.2, 0.15
    trainer, twin = begun(
        tmp_path, action_level="sequence", reward_model=make_reward_model(), ref_model=make_policy(seed=5),
        kl_coef=beta, num_ppo_epochs=2, cliprange_sequence=clip, cliprange=1e-6, cliprange_value=None, vf_coef=0.5,
    )  # fmt: skip
    trainer.train()
    rollout, estimates, _ = trainer.updates[0]
    rows, scores = rows_of(rollout), estimates.scores.tolist()
    with torch.no_grad():
        old = [float(logps.sum()) for logps in taken(every(twin.policy, rows), rows)]
        ref = [float(logps.sum()) for logps in taken(every(make_policy(seed=5), rows), rows)]
        first = [float(values[0]) for values in values_of(twin.critic, rows)]
    returns = [s - beta * (p - q) for s, p, q in zip(scores, old, ref, strict=True)]
    raw = [r - v for r, v in zip(returns, first, strict=True)]
    mean, std = statistics.fmean(raw), statistics.stdev(raw)
    gains = [(a - mean) / std for a in raw]
    assert estimates.advantages.shape == (8, 1)
    assert estimates.returns[:, 0].tolist() == pytest.approx(returns, abs=2e-5)
    assert estimates.advantages[:, 0].tolist() == pytest.approx(gains, abs=2e-5)

    def loss() -> Tensor:
        new = torch.stack([logps.sum() for logps in taken(every(twin.policy, rows), rows)])
        ratio, gain = (new - torch.tensor(old)).exp(), torch.tensor(gains)
        policy = -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean()
        value = torch.stack([each[0] for each in values_of(twin.critic, rows)])
        return policy + 0.5 * (0.5 * (value - torch.tensor(returns)) ** 2).mean()

    seen = twin.descend(loss, rate=RATE, times=2)
    # A ratio is a product of ten: rounding counts ten times.
    same_weights(trainer, twin, "policy", within=1e-5)
    same_weights(trainer, twin, "critic", within=1e-5)
    [metrics] = updates_of(trainer)
    assert metrics["loss"] == pytest.approx(sum(seen) / 2, rel=1e-4)
    assert metrics["policy/clipfrac"] > 0
    assert metrics["critic/value"] == pytest.approx(statistics.fmean(first), abs=1e-5)
    assert metrics["objective/rlhf_reward"] == pytest.approx(statistics.fmean(returns), abs=1e-5)
    assert not [name for name in metrics if "quarter" in name]


# The loss of the policy, and how it is averaged


def shares(losses: list[Tensor], mode: str) -> Tensor:
    """The losses of each completion's tokens as one number, at most 10 tokens a completion."""
    if mode == "token-mean":
        return torch.cat(losses).mean()
    if mode == "seq-mean-token-mean":
        return torch.stack([each.mean() for each in losses]).mean()
    total = torch.stack([each.sum() for each in losses])
    return total.mean() if mode == "seq-mean-token-sum" else total.sum() / (len(losses) * 10)


def by_hand(
    trainer: Spy,
    twin: Twin,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    dual: float = math.inf,
    mode: str = "token-mean",
    passes: int = 1,
    rate: float = RATE,
    values: Callable[[Any, Any], list[Tensor]] = lambda twin, rows: values_of(twin.critic, rows),
) -> list[float]:
    """Descends on L_π + 0.5·L_V, with the advantages and returns that the trainer had."""
    rollout, estimates, _ = trainer.updates[0]
    rows = rows_of(rollout)
    gains = [estimates.advantages[row, : len(ids)] for row, (_, ids) in enumerate(rows)]
    targets = [estimates.returns[row, : len(ids)] for row, (_, ids) in enumerate(rows)]
    with torch.no_grad():
        old = taken(every(twin.policy, rows), rows)

    def loss() -> Tensor:
        policy, value = [], []
        for new, was, gain in zip(taken(every(twin.policy, rows), rows), old, gains, strict=True):
            ratio = (new - was).exp()
            each = -torch.minimum(ratio * gain, ratio.clamp(1 - clip[0], 1 + clip[1]) * gain)
            policy.append(torch.where(gain < 0, torch.minimum(each, -dual * gain), each))
        for now, target in zip(values(twin, rows), targets, strict=True):
            value.append(0.5 * (now - target) ** 2)
        return shares(policy, mode) + 0.5 * shares(value, mode)

    return twin.descend(loss, rate=rate, times=passes)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-sum-norm"])
def test_losses_are_averaged_as_asked_however_the_minibatch_is_split(tmp_path: Path, mode: str) -> None:
    trainer, twin = begun(
        tmp_path, loss_aggregation=mode, per_device_train_batch_size=2, gradient_accumulation_steps=4,
        reward_funcs=count, cliprange_value=None, vf_coef=0.5, train_dataset=prompt_rows(8),
    )  # fmt: skip
    trainer.train()
    assert len({len(ids) for ids in trainer.updates[0][0].samples.token_lists()}) > 2
    [loss] = by_hand(trainer, twin, mode=mode)
    # Where a whole completion's losses are added up, steps are ten times as long, and rounding with them.
    within = 2e-5 if mode == "seq-mean-token-sum" else 2e-6
    same_weights(trainer, twin, "policy", within=within)
    same_weights(trainer, twin, "critic", within=within)
    assert updates_of(trainer)[0]["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("given", "clip", "dual"),
    [({"cliprange_high": 0.4}, (0.05, 0.4), math.inf), ({"dual_clip": 1.1}, (0.05, 0.05), 1.1)],
    ids=["high", "dual"],
)
def test_the_ratio_is_clipped_above_and_for_bad_actions_as_asked(
    tmp_path: Path, given: dict[str, float], clip: tuple[float, float], dual: float
) -> None:
    """The setting bites: without it the weights would be others."""
    trainer, twin = begun(
        tmp_path, reward_funcs=count, num_ppo_epochs=3, cliprange=0.05, cliprange_value=None, vf_coef=0.5, **given
    )
    plain = copy.deepcopy(twin)
    trainer.train()
    seen = by_hand(trainer, twin, passes=3, clip=clip, dual=dual)
    same_weights(trainer, twin, within=5e-6)
    assert updates_of(trainer)[0]["loss"] == pytest.approx(sum(seen) / 3, rel=1e-4)
    by_hand(trainer, plain, passes=3, clip=(0.05, 0.05))
    assert distance(plain.weights(), twin.weights(), "policy") > 1e-4


def test_an_entropy_bonus_alone_makes_the_policy_less_certain(tmp_path: Path) -> None:
    trainer, twin = begun(tmp_path, reward_funcs=nothing, kl_coef=0.0, entropy_coef=0.5)
    trainer.train()
    rows = rows_of(trainer.updates[0][0])

    def entropy(model: Any) -> Tensor:
        return torch.cat([-(logps.exp() * logps).sum(-1) for logps in every(model, rows)]).mean()

    [loss] = twin.descend(lambda: -0.5 * entropy(twin.policy), rate=RATE)
    same_weights(trainer, twin, "policy")
    assert updates_of(trainer)[0]["objective/entropy"] == pytest.approx(-2 * loss, rel=1e-5)
    with torch.no_grad():
        assert float(entropy(trainer.policy)) > -2 * loss + 1e-3


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
        trainer, _ = begun(
            tmp_path, reward_funcs=count, num_mini_batches=2, learning_rate=0.5, num_ppo_epochs=4, early_stop_kl=limit
        )
        trainer.train()
        return updates_of(trainer)[0]

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
def test_pretraining_text_adds_the_gradient_of_its_language_model_loss(
    tmp_path: Path, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In micro-batches of 2, and at a sampling temperature of 0.5: text is modelled at 1."""
    data, starts = TEXTS[columns]
    trainer, twin = begun(
        tmp_path, reward_funcs=nothing, kl_coef=0.0, temperature=0.5, ptx_coef=0.7,
        ptx_dataset=Dataset.from_dict(data), per_device_train_batch_size=2, gradient_accumulation_steps=4,
    )  # fmt: skip
    assert trainer.texts is not None
    kept, draw = [], trainer.texts.draw

    def drawn(*args: Any) -> Any:
        kept.append(draw(*args))
        return kept[-1]

    monkeypatch.setattr(trainer.texts, "draw", drawn)
    trainer.train()
    [batch] = kept
    texts = [tuple(ids[real].tolist()) for ids, real in zip(batch.ids, batch.attention, strict=True)]
    assert len(texts) == 8 and set(texts) == set(starts)

    def nll() -> Tensor:
        terms = []
        for ids in texts:
            logps = twin.policy(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            terms += [-logps[place - 1, ids[place]] for place in range(starts[ids], len(ids))]
        return torch.stack(terms).mean()

    [loss] = twin.descend(lambda: 0.7 * nll(), rate=RATE)
    same_weights(trainer, twin, "policy")
    assert updates_of(trainer)[0]["loss/ptx"] == pytest.approx(loss / 0.7, rel=1e-5)


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


def on_the_trunk(twin: Twin, rows: Any) -> list[Tensor]:
    """What the twin's value head says of the hidden states of its policy."""
    found = []
    for prompt, completion in rows:
        hidden = twin.policy.model(input_ids=torch.tensor([prompt + completion])).last_hidden_state[0]
        head = twin.critic.summary
        found.append((hidden @ head.weight[0] + head.bias)[len(prompt) - 1 : -1])
    return found


def test_a_shared_critic_reads_the_trunk_and_its_loss_moves_it(tmp_path: Path) -> None:
    """The policy's step is of L_π + c_v·L_V, both through the trunk; the head is the given model's own."""
    model, rate = with_head(), RATE / 4
    trainer, twin = begun(
        tmp_path, model=model, reward_funcs=count, num_ppo_epochs=2, vf_coef=0.5, cliprange_value=None,
        learning_rate=rate, critic_learning_rate=rate,
    )  # fmt: skip
    assert trainer.value_model is model.v_head and trainer.policy is model.pretrained_model
    trainer.train()
    rollout = trainer.updates[0][0]
    with torch.no_grad():
        for row, each in enumerate(on_the_trunk(twin, rows_of(rollout))):
            assert (rollout.values[row, : len(each)] - each).abs().max() < 1e-5
    by_hand(trainer, twin, passes=2, rate=rate, values=on_the_trunk)
    same_weights(trainer, twin, "policy", within=5e-6)
    same_weights(trainer, twin, "critic", within=5e-6)


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
    def explained(completions: list[str], log_extra: Any = None, **_: Any) -> list[float]:
        log_extra("first", [completion[:1] for completion in completions])
        return good(completions)

    trainer = trained(
        tmp_path, log_completions=True, num_completions_to_print=3, reward_funcs=explained,
        report_to=["tensorboard"], ref_model=make_policy(seed=5),
    )  # fmt: skip
    folder = tmp_path / "completions" / "completions"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]
    for step, (rollout, estimates, _) in enumerate(trainer.updates, start=1):
        said = trainer.processing_class.batch_decode(rollout.samples.token_lists(), skip_special_tokens=True)
        asked = [trainer.processing_class.decode(prompt) for prompt, _ in rows_of(rollout)]
        wanted = [
            {
                "prompt": asked[row], "completion": said[row], "score": estimates.scored.total[row].item(),
                "kl": rollout.kl[row].item(), "ended": rollout.samples.ended[row].item(), "first": said[row][:1],
            }
            for row in range(3)
        ]  # fmt: skip
        assert read_table(folder / f"step-{step:06d}.jsonl") == wanted
    shown = texts_of(tmp_path)["completions/text_summary"]
    assert shown.keys() == {1, 2}
    head, line, *cells = shown[2].split("\n")
    assert head == "| prompt | completion | score | kl | ended | first |" and line.count("---") == 6
    assert [row.split(" | ")[1] for row in cells] == [row["completion"] for row in wanted]
    assert wanted[0]["completion"] in capsys.readouterr().err


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


def test_conversations_are_shown_as_they_are_read(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in prompt_rows(8)["prompt"]]})
    trainer = trained(
        tmp_path, processing_class=tokenizer, train_dataset=chats, eval_dataset=chats, max_steps=1,
        log_completions=True, num_sample_generations=1,
    )  # fmt: skip
    [asked, *_] = [tokenizer.decode(prompt) for prompt, _ in rows_of(trainer.updates[0][0])]
    [said, *_] = tokenizer.batch_decode(trainer.updates[0][0].samples.token_lists(), skip_special_tokens=True)
    [row, *_] = read_table(tmp_path / "completions" / "completions" / "step-000001.jsonl")
    assert row["prompt"] == f"user: {asked.removesuffix(';:')}" and row["completion"] == f"assistant: {said}"
    [row, *_] = read_table(tmp_path / "completions" / "samples" / "step-000001.jsonl")
    assert row["prompt"] == "user: a" and row["completion"].startswith("assistant: ")


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
        ((["a"], ["b"], ["good"]), "Score 0 is 'good', which is no number"),
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
