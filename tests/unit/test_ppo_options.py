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
from test_trainer import rows_of, trained, updates_of
from torch import Tensor
from trainer_fixture import (
    CHAT,
    DEVICE,
    EOS,
    PAD,
    Spy,
    digests,
    distance,
    good,
    make_policy,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    prompt_rows,
    snapshot,
    timeless,
)
from transformers import AutoModelForTokenClassification, DataCollatorWithPadding, PreTrainedModel, TrainerCallback

from rlhf_zoo.errors import ZooError
from rlhf_zoo.models import critic_from
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.guards import GuardWarning
from rlhf_zoo.ppo.trainer import PPO_STATE, TRAIN_STREAM, PPOTrainer
from rlhf_zoo.value_head import VALUE_HEAD_FILE, AutoModelForCausalLMWithValueHead, ValueHead

RATE = 0.2
# One step of plain gradient descent: the change of a weight is the gradient.
ONE_STEP: dict[str, Any] = {
    "max_steps": 1, "num_ppo_epochs": 1, "num_mini_batches": 1, "optim": "sgd", "lr_scheduler_type": "constant",
    "weight_decay": 0.0, "max_grad_norm": 0.0, "learning_rate": RATE, "critic_learning_rate": RATE,
}  # fmt: skip
Rows = list[tuple[list[int], list[int]]]


def nothing(completions: Sequence[str], **_: Any) -> list[float]:
    """With it and a critic that says 0, every advantage is 0: the policy is moved by the other terms alone."""
    return [0.0] * len(completions)


def count(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


class Twin:
    """Policy and critic of a trainer, copied before it trains."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self.policy: PreTrainedModel = copy.deepcopy(trainer.policy)
        self.critic: Any = copy.deepcopy(trainer.value_model)

    def descend(self, loss: Callable[[], Tensor], *, times: int = 1) -> list[float]:
        """Steps of gradient descent at RATE on both models; the loss before each."""
        seen = []
        for _ in range(times):
            value = loss()
            value.backward()
            seen.append(float(value.detach()))
            with torch.no_grad():
                for weight in [*self.policy.parameters(), *self.critic.parameters()]:
                    if weight.grad is not None:
                        weight -= RATE * weight.grad
                        weight.grad = None
        return seen

    def weights(self) -> dict[str, Tensor]:
        parts = {"policy": self.policy, "critic": self.critic}
        return {f"{name}.{key}": weight for name, part in parts.items() for key, weight in part.state_dict().items()}


def every(model: Any, rows: Rows) -> list[Tensor]:
    """log π of every token before each response token: (T, V) a row."""
    found = []
    for prompt, completion in rows:
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1))
    return found


def taken(logps: list[Tensor], rows: Rows) -> list[Tensor]:
    return [each[range(len(ids)), ids] for each, (_, ids) in zip(logps, rows, strict=True)]


def values_of(critic: Any, rows: Rows) -> list[Tensor]:
    return [critic(input_ids=torch.tensor([p + c])).logits[0, len(p) - 1 : -1, 0] for p, c in rows]


def begun(directory: Path, **given: Any) -> tuple[Spy, Twin]:
    trainer = make_trainer(directory, kind=Spy, **ONE_STEP | given)
    assert isinstance(trainer, Spy)
    return trainer, Twin(trainer)


def same_weights(trainer: Spy, twin: Twin, part: str = "", *, within: float = 2e-6) -> None:
    """That the trainer's weights are the twin's, and moved by far more than rounding."""
    after = snapshot(trainer)
    assert distance(after, twin.weights(), part) < within
    assert distance(after, trainer.before, part) > 100 * within


def resumed_alike(build: Callable[[Path], Spy], directory: Path, *, at: int = 1) -> Spy:
    """Trains 3 updates, and again from the checkpoint after update `at`: the same to the last bit. Gives the first."""
    whole, again = build(directory / "whole"), build(directory / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(directory / "whole" / f"checkpoint-{at}"))
    assert digests(again) == digests(whole) != digests(whole.before)
    assert timeless(again.state.log_history) == timeless(whole.state.log_history)
    states = [(directory / run / "checkpoint-3" / PPO_STATE).read_bytes() for run in ("whole", "again")]
    assert states[0] == states[1]
    return whole


SAVED: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}


# The KL in the loss

KL_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    # of log π (T, V) now, log π_ref (T, V), log π and log π_old of the sampled tokens, log π_ref of them in the last
    "k2": lambda new, old, ref, _: (new - old).exp().detach() * 0.5 * (new - ref) ** 2,
    "k3": lambda new, old, ref, _: (new - old).exp() * ((ref - new).exp() - 1 - (ref - new)),
    "k3_reverse": lambda new, old, ref, _: (new - old).exp().detach() * ((ref - new).exp() - 1 - (ref - new)),
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
        exact = [sum_over_vocabulary(p, q) for p, q in zip(now, ref_every, strict=True)]
        terms = zip(taken(now, rows), old, ref, exact, strict=True)
        return torch.cat([KL_LOSSES[estimator](*term) for term in terms]).mean()

    seen = twin.descend(lambda: 0.3 * kl(), times=2)
    same_weights(trainer, twin, "policy")
    [metrics] = updates_of(trainer)
    assert metrics["loss/kl"] == pytest.approx(sum(seen) / 2 / 0.3, rel=1e-5)
    assert metrics["loss"] == pytest.approx(sum(seen) / 2, rel=1e-5)
    # The reward holds no KL, which is reported all the same.
    assert not estimates.rewards.any() and metrics["objective/non_score_reward"] == 0
    k1 = [float((p - q).sum()) for p, q in zip(old, ref, strict=True)]
    assert metrics["objective/kl"] == pytest.approx(statistics.fmean(k1), rel=1e-5)


def sum_over_vocabulary(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """KL(π‖ref) at each position, token by token: (T, V) twice -> (T,)."""
    return torch.stack([(p.exp() * (p - q)).sum() for p, q in zip(logps, ref_logps, strict=True)])


def test_the_gradient_of_the_kl_scales_with_kl_coef_and_the_rewards_stay_the_scores(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kl_in": "loss", "kl_estimator": "k2"}
    norms = []
    for beta in (0.1, 0.4):
        trainer, _ = begun(tmp_path, reward_funcs=nothing, ref_model=make_policy(seed=5), kl_coef=beta, **settings)
        trainer.train()
        norms.append(updates_of(trainer)[0]["grad_norm/policy"])
    assert norms[1] == pytest.approx(4 * norms[0], rel=1e-5) and norms[0] > 0.1
    trainer, _ = begun(tmp_path, reward_funcs=count, ref_model=make_policy(seed=5), kl_coef=0.4, **settings)
    trainer.train()
    rollout, estimates, _ = trainer.updates[0]
    for row, tokens in zip(estimates.rewards.tolist(), rollout.samples.token_lists(), strict=True):
        assert [reward for reward in row if reward] == [float(len(tokens))] == [row[len(tokens) - 1]]


@pytest.mark.parametrize(
    ("where", "estimator", "reason"),
    [
        ("reward", "k2", "biased"),
        ("reward", "full", "no property of the sampled token"),
        ("reward", "k3_reverse", "a gradient for the loss"),
        ("loss", "k1", "nothing would hold the policy"),
        ("loss", "k9", "there is no such estimator"),
    ],
)
def test_a_kl_that_would_not_be_one_is_refused(tmp_path: Path, where: str, estimator: str, reason: str) -> None:
    with pytest.raises(ZooError, match=f"'{estimator}' does not work in the {where}, as .*{reason}") as caught:
        make_trainer(tmp_path, kl_in=where, kl_estimator=estimator)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_k3_in_the_reward_is_warned_of_and_k1_is_not(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    make_trainer(tmp_path)
    make_trainer(tmp_path, kl_in="loss", kl_estimator="k3")
    assert not [warning for warning in recwarn if warning.category is GuardWarning]
    with pytest.warns(GuardWarning, match=r"not the gradient of a KL.*k1 is right"):
        make_trainer(tmp_path, kl_estimator="k3")


# Shaping of the score


@pytest.mark.parametrize("scaling", ["stored", "none"])
@pytest.mark.parametrize("centering", ["stored", "none"])
def test_stored_statistics_are_applied_where_asked_and_the_critics_head_follows(
    tmp_path: Path, centering: str, scaling: str
) -> None:
    """The fixture's reward model says μ = 0.3 and σ = 0.5."""
    mean, std = (0.3 if centering == "stored" else 0.0), (0.5 if scaling == "stored" else 1.0)
    trainer, twin = begun(tmp_path, reward_model=make_reward_model(), score_centering=centering, score_scaling=scaling)
    head = make_reward_model().score.weight
    bias = twin.critic.score.bias
    assert torch.equal(twin.critic.score.weight, head / std)
    assert bias.tolist() == pytest.approx([-mean / std], rel=1e-6)
    trainer.train()
    rollout, estimates, _ = trainer.updates[0]
    with torch.no_grad():
        raw = [float(make_reward_model()(input_ids=torch.tensor([p + c])).logits[0, 0]) for p, c in rows_of(rollout)]
    wanted = [(score - mean) / std for score in raw]
    assert estimates.scored.total.tolist() == pytest.approx(wanted, abs=1e-5)
    assert torch.equal(estimates.scores, estimates.scored.total)


def test_running_statistics_are_of_all_scores_so_far(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path, max_steps=3, reward_funcs=count, score_centering="running", score_scaling="running",
        train_dataset=prompt_rows(13),
    )  # fmt: skip
    so_far: list[float] = []
    for (rollout, estimates, _), metrics in zip(trainer.updates, updates_of(trainer), strict=True):
        lengths = [float(len(ids)) for ids in rollout.samples.token_lists()]
        so_far += lengths
        mean, std = statistics.fmean(so_far), statistics.stdev(so_far)
        assert estimates.scores.tolist() == pytest.approx([(n - mean) / std for n in lengths], rel=1e-5, abs=1e-6)
        assert metrics["objective/score"] == statistics.fmean(lengths)
        assert metrics["objective/score_mean_so_far"] == pytest.approx(mean, rel=1e-12)
        assert metrics["objective/score_std_so_far"] == pytest.approx(std, rel=1e-12)
    assert len(so_far) == 8 + 5 + 8 and len({len(r.samples) for r, _, _ in trainer.updates}) == 2


@pytest.mark.parametrize(("centering", "scaling"), [("running", "none"), ("none", "running")])
def test_running_centring_and_scaling_are_apart(tmp_path: Path, centering: str, scaling: str) -> None:
    trainer = trained(tmp_path, max_steps=1, reward_funcs=count, score_centering=centering, score_scaling=scaling)
    rollout, estimates, _ = trainer.updates[0]
    lengths = [float(len(ids)) for ids in rollout.samples.token_lists()]
    mean = statistics.fmean(lengths) if centering == "running" else 0.0
    std = statistics.stdev(lengths) if scaling == "running" else 1.0
    assert estimates.scores.tolist() == pytest.approx([(n - mean) / std for n in lengths], rel=1e-5, abs=1e-6)


def test_with_running_statistics_the_critic_begins_at_the_raw_score(tmp_path: Path) -> None:
    _, twin = begun(tmp_path, reward_model=make_reward_model(), score_centering="running", score_scaling="running")
    assert torch.equal(twin.critic.score.weight, make_reward_model().score.weight) and not twin.critic.score.bias.any()


def test_scores_that_do_not_vary_are_not_divided_by_zero(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path, max_steps=1, reward_funcs=lambda completions, **_: [5.0] * len(completions),
        score_centering="running", score_scaling="running",
    )  # fmt: skip
    assert trainer.updates[0][1].scores.tolist() == [0.0] * 8


def test_running_statistics_survive_a_resume_and_evaluation_leaves_them_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"score_centering": "running", "score_scaling": "running", "reward_funcs": count}

    def build(directory: Path) -> Spy:
        return make_trainer(
            directory, kind=Spy, eval_dataset=prompt_rows(8), eval_strategy="steps", eval_steps=1, **SAVED | settings
        )

    whole = resumed_alike(build, tmp_path, at=2)
    state = json.loads((tmp_path / "again" / "checkpoint-3" / PPO_STATE).read_text())
    lengths = [float(len(ids)) for rollout, _, _ in whole.updates for ids in rollout.samples.token_lists()]
    assert len(lengths) == 24
    assert state["scores_seen"] == [24.0, sum(lengths), sum(n * n for n in lengths)]
    before = whole.scores_seen
    whole.evaluate()
    assert whole.scores_seen == before


@pytest.mark.parametrize("eos", [{"missing_eos_penalty": 0.75}, {"missing_eos_score": -1.0}], ids=["penalty", "score"])
def test_scores_are_centred_scaled_clipped_and_then_see_their_end(tmp_path: Path, eos: dict[str, float]) -> None:
    """In any other order the numbers would be others: the clip bites, and a completion without an end meets both."""
    trainer = trained(
        tmp_path, max_steps=1, reward_funcs=count, score_centering="running", score_scaling="running", score_clip=0.5,
        train_dataset=prompt_rows(8), **eos,
    )  # fmt: skip
    rollout, estimates, _ = trainer.updates[0]
    ends, lengths = rollout.samples.ended.tolist(), [float(len(ids)) for ids in rollout.samples.token_lists()]
    mean, std = statistics.fmean(lengths), statistics.stdev(lengths)
    wanted = []
    for n, ended in zip(lengths, ends, strict=True):
        score = min(max((n - mean) / std, -0.5), 0.5)
        if not ended:
            score = score - 0.75 if "missing_eos_penalty" in eos else -1.0
        wanted.append(score)
    assert estimates.scores.tolist() == pytest.approx(wanted, rel=1e-5)
    assert any(not ended and (n - mean) / std > 0.5 for n, ended in zip(lengths, ends, strict=True))
    assert any(ended and abs((n - mean) / std) > 0.5 for n, ended in zip(lengths, ends, strict=True))


def test_penalty_and_score_of_a_missing_end_are_not_both_taken(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"penalty subtracts and missing_eos_score replaces: give one of them\.$"):
        make_trainer(tmp_path, missing_eos_penalty=1.0, missing_eos_score=-1.0)


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

    seen = twin.descend(loss, times=2)
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


def by_hand(trainer: Spy, twin: Twin, *, low: float, high: float, dual: float, mode: str, passes: int) -> list[float]:
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
            each = -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
            policy.append(torch.where(gain < 0, torch.minimum(each, -dual * gain), each))
        for now, target in zip(values_of(twin.critic, rows), targets, strict=True):
            value.append(0.5 * (now - target) ** 2)
        return shares(policy, mode) + 0.5 * shares(value, mode)

    return twin.descend(loss, times=passes)


@pytest.mark.parametrize("size", [8, 1], ids=["1x8", "8x1"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-sum-norm"])
def test_losses_are_averaged_as_asked_however_the_minibatch_is_split(tmp_path: Path, mode: str, size: int) -> None:
    trainer, twin = begun(
        tmp_path, loss_aggregation=mode, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
        reward_funcs=count, cliprange_value=None, vf_coef=0.5, learning_rate=RATE, num_ppo_epochs=1,
        train_dataset=prompt_rows(8),
    )  # fmt: skip
    trainer.train()
    assert len({len(ids) for ids in trainer.updates[0][0].samples.token_lists()}) > 2
    [loss] = by_hand(trainer, twin, low=0.2, high=0.2, dual=math.inf, mode=mode, passes=1)
    # Where a whole completion's losses are added up, steps are ten times as long, and rounding with them.
    within = 2e-5 if mode == "seq-mean-token-sum" else 2e-6
    same_weights(trainer, twin, "policy", within=within)
    same_weights(trainer, twin, "critic", within=within)
    assert updates_of(trainer)[0]["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)


CLIPS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "plain": ({"cliprange": 0.05}, {"low": 0.05, "high": 0.05, "dual": math.inf}),
    "high": ({"cliprange": 0.05, "cliprange_high": 0.4}, {"low": 0.05, "high": 0.4, "dual": math.inf}),
    "dual": ({"cliprange": 0.05, "dual_clip": 1.1}, {"low": 0.05, "high": 0.05, "dual": 1.1}),
}


def test_the_ratio_is_clipped_above_and_below_and_for_bad_actions_as_asked(tmp_path: Path) -> None:
    """Each of the three settings bites: none ends with the weights of another."""
    ends = []
    for name, (settings, wanted) in CLIPS.items():
        trainer, twin = begun(
            tmp_path, reward_funcs=count, num_ppo_epochs=3, cliprange_value=None, vf_coef=0.5, **settings
        )
        trainer.train()
        seen = by_hand(trainer, twin, mode="token-mean", passes=3, **wanted)
        same_weights(trainer, twin, within=5e-6)
        [metrics] = updates_of(trainer)
        assert metrics["loss"] == pytest.approx(sum(seen) / 3, rel=1e-4), name
        ends.append((snapshot(trainer), metrics["policy/clipfrac"]))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert distance(ends[one][0], ends[other][0], "policy") > 1e-4
    assert ends[1][1] < ends[0][1] < ends[2][1]  # a wider range clips less, a second bound more


def test_an_entropy_bonus_alone_makes_the_policy_less_certain(tmp_path: Path) -> None:
    trainer, twin = begun(tmp_path, reward_funcs=nothing, kl_coef=0.0, entropy_coef=0.5)
    start = copy.deepcopy(twin.policy)
    trainer.train()
    rows = rows_of(trainer.updates[0][0])

    def entropy(model: Any) -> Tensor:
        return torch.cat([-(logps.exp() * logps).sum(-1) for logps in every(model, rows)]).mean()

    twin.descend(lambda: -0.5 * entropy(twin.policy))
    same_weights(trainer, twin, "policy")
    with torch.no_grad():
        before, after = float(entropy(start)), float(entropy(trainer.policy))
    assert updates_of(trainer)[0]["objective/entropy"] == pytest.approx(before, rel=1e-5)
    assert after > before + 1e-3


def test_no_bonus_no_change(tmp_path: Path) -> None:
    """The same run without the bonus leaves the policy where it was: nothing else moves it."""
    trainer, _ = begun(tmp_path, reward_funcs=nothing, kl_coef=0.0)
    trainer.train()
    assert distance(snapshot(trainer), trainer.before, "policy") == 0


# The early stop


def test_epochs_stop_by_the_kl_to_the_sampling_policy(tmp_path: Path) -> None:
    """Fires just below the drift of the second pass and not just above; the mean of log ρ would not have."""
    settings: dict[str, Any] = {"reward_funcs": count, "num_mini_batches": 2, "learning_rate": 0.5}
    first, twin = begun(tmp_path, **settings)
    first.train()
    rows = rows_of(first.updates[0][0])

    class Passes(Spy):
        """Keeps log ρ of each token, pass by pass."""

        def minibatch(self, model: Any, rollout: Any, estimates: Any, chosen: Tensor, *rest: Any) -> None:
            some = [rows[row] for row in chosen.tolist()]
            with torch.no_grad():
                old, new = (taken(every(m, some), some) for m in (twin.policy, self.policy))
            drifts.append(torch.cat(new) - torch.cat(old))
            super().minibatch(model, rollout, estimates, chosen, *rest)

    def run(limit: float | None) -> float:
        trainer = make_trainer(
            tmp_path, kind=Passes, **ONE_STEP | settings | {"num_ppo_epochs": 4, "early_stop_kl": limit}
        )
        drifts.clear()
        trainer.train()
        epochs = updates_of(trainer)[0]["policy/epochs"]
        assert len(drifts) == 2 * epochs
        return epochs

    drifts: list[Tensor] = []
    assert run(None) == 4
    passes = [torch.cat(drifts[at : at + 2]).double() for at in (0, 2)]
    seen = [float((logs.exp() - 1 - logs).mean()) for logs in passes]
    assert 1e-4 < seen[0] < seen[1]
    assert run(seen[1] / 1.5 * 0.999) == 2
    assert run(seen[1] / 1.5 * 1.001) > 2
    assert run(seen[0] / 1.5 * 0.999) == 1
    naive = [float(logs.mean()) for logs in passes]
    assert naive[1] < seen[1] / 1.5  # below the threshold that fired, on the wrong side of 0


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


def keep_texts(trainer: Spy) -> list[Any]:
    """A list that gets each batch of texts which the trainer draws."""
    kept: list[Any] = []
    assert trainer.texts is not None
    draw = trainer.texts.draw

    def drawn(*args: Any) -> Any:
        kept.append(draw(*args))
        return kept[-1]

    trainer.texts.draw = drawn  # type: ignore[method-assign]
    return kept


@pytest.mark.parametrize("columns", TEXTS)
def test_pretraining_text_adds_the_gradient_of_its_language_model_loss(tmp_path: Path, columns: str) -> None:
    """Also at a sampling temperature of 0.5: text is modelled at 1."""
    data, starts = TEXTS[columns]
    trainer, twin = begun(
        tmp_path, reward_funcs=nothing, kl_coef=0.0, temperature=0.5, ptx_coef=0.7, ptx_dataset=Dataset.from_dict(data)
    )
    kept = keep_texts(trainer)
    trainer.train()
    [batch] = kept
    drawn = [tuple(ids[real].tolist()) for ids, real in zip(batch.ids, batch.attention, strict=True)]
    assert len(drawn) == 8 and set(drawn) == set(starts)

    def nll() -> Tensor:
        terms = []
        for ids in drawn:
            logps = twin.policy(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            terms += [-logps[place - 1, ids[place]] for place in range(starts[ids], len(ids))]
        return torch.stack(terms).mean()

    [loss] = twin.descend(lambda: 0.7 * nll())
    same_weights(trainer, twin, "policy")
    assert updates_of(trainer)[0]["loss/ptx"] == pytest.approx(loss / 0.7, rel=1e-5)


def test_texts_do_not_depend_on_the_micro_batches_and_resume_exactly(tmp_path: Path) -> None:
    texts = Dataset.from_dict({"text": ["abc", "gg", "kkkkl", "hihih"]})
    runs = []
    for size in (8, 1):
        trainer, _ = begun(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size, ptx_coef=0.7,
            ptx_dataset=texts, num_ppo_epochs=2, num_mini_batches=2,
        )  # fmt: skip
        kept = keep_texts(trainer)
        trainer.train()
        assert len(kept) == 4 and len({str(batch.ids.tolist()) for batch in kept}) > 1
        runs.append((snapshot(trainer), updates_of(trainer)[0]))
    assert distance(runs[0][0], runs[1][0]) < 2e-6
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-4, abs=1e-6)
    resumed_alike(
        lambda directory: make_trainer(directory, kind=Spy, ptx_coef=0.7, ptx_dataset=texts, **SAVED), tmp_path
    )


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


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "ptx_coef is 1.0 and there is no text to model"),
        (["abc"], "has the type list"),
        (Dataset.from_dict({"text": []}), "ptx_dataset is empty"),
        (Dataset.from_dict({"words": ["a"]}), "has the columns 'words'"),
        (Dataset.from_dict({"text": [1, 2]}), "Row 0 of ptx_dataset has 1 as its 'text'"),
        (Dataset.from_dict({"input_ids": [[3]]}), "has a token to model"),
        (Dataset.from_dict({"prompt": ["a" * 32], "completion": ["b"]}), "has a token to model"),
        (Dataset.from_dict({"input_ids": [[3, 17]]}), "the token id 17, and the policy has 17 embedding rows"),
    ],
    ids=["none", "list", "empty", "columns", "numbers", "short", "prompt fills the context", "ids"],
)
def test_text_that_cannot_be_modelled_is_refused(tmp_path: Path, dataset: Any, message: str) -> None:
    with pytest.raises(ZooError, match=message) as caught:
        make_trainer(tmp_path, ptx_coef=1.0, ptx_dataset=dataset)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"critic": "shared", "value_model": make_reward_model()}, "critic is 'shared' and value_model is given too"),
        ({"critic": "reward", "value_model": make_reward_model()}, "critic is 'reward' and value_model is given too"),
        ({"critic": "reward"}, "no reward is a model with the policy's tokenizer"),
        ({"critic": "mine"}, "critic is 'mine': give one of 'auto'"),
        ({"value_model": make_reward_model(num_labels=3)}, "needs one output"),
        ({"value_model": make_reward_model(vocab_size=10)}, "10 embedding rows and the policy 17"),
        ({"value_model": 5}, "value_model has the type int"),
        ({"model": "head", "value_model": make_reward_model()}, "has a value head and value_model is given too"),
        ({"model": "head", "critic": "policy"}, "has a value head and critic is 'policy'"),
    ],
)
def test_a_critic_that_cannot_be_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    if "model" in given:
        given = given | {"model": AutoModelForCausalLMWithValueHead(make_policy())}
    with pytest.raises(ZooError, match=message) as caught:
        make_trainer(tmp_path, **given)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def with_head(seed: int = 6) -> AutoModelForCausalLMWithValueHead:
    """A policy with a value head that says something."""
    model = AutoModelForCausalLMWithValueHead(make_policy())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.v_head.summary.weight, std=0.3)
        torch.nn.init.constant_(model.v_head.summary.bias, 0.4)
    return model


def test_a_shared_critic_reads_the_trunk_and_its_loss_moves_it(tmp_path: Path) -> None:
    """The policy's step is of L_π + c_v·L_V, both through the trunk; the head is the given model's own."""
    model = with_head()
    trainer, twin = begun(
        tmp_path, model=model, reward_funcs=count, num_ppo_epochs=2, vf_coef=0.5, cliprange_value=None,
        learning_rate=RATE / 4, critic_learning_rate=RATE / 4,
    )  # fmt: skip
    assert trainer.value_model is model.v_head and trainer.policy is model.pretrained_model
    trainer.train()
    rollout, estimates, _ = trainer.updates[0]
    rows = rows_of(rollout)

    def values() -> list[Tensor]:
        found = []
        for prompt, completion in rows:
            hidden = twin.policy.model(input_ids=torch.tensor([prompt + completion])).last_hidden_state[0]
            head = twin.critic.summary
            found.append((hidden @ head.weight[0] + head.bias)[len(prompt) - 1 : -1])
        return found

    with torch.no_grad():
        old, was = taken(every(twin.policy, rows), rows), values()
    for row, each in enumerate(was):
        assert (rollout.values[row, : len(each)] - each).abs().max() < 1e-5

    def loss() -> Tensor:
        policy, value = [], []
        for row, (new, before, now) in enumerate(
            zip(taken(every(twin.policy, rows), rows), old, values(), strict=True)
        ):
            ratio, gain = (new - before).exp(), estimates.advantages[row, : len(new)]
            policy.append(-torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain))
            value.append(0.5 * (now - estimates.returns[row, : len(new)]) ** 2)
        return (torch.cat(policy).mean() + 0.5 * torch.cat(value).mean()) / 4  # a quarter of RATE

    twin.descend(loss, times=2)
    same_weights(trainer, twin, "policy", within=5e-6)
    same_weights(trainer, twin, "critic", within=5e-6)


@pytest.mark.parametrize("start", ["shared", "value head"])
def test_a_shared_critic_is_saved_resumed_and_loaded_with_its_policy(tmp_path: Path, start: str) -> None:
    def build(directory: Path) -> Spy:
        given: dict[str, Any] = {"critic": "shared"} if start == "shared" else {"model": with_head()}
        return make_trainer(directory, kind=Spy, **given, **SAVED)

    whole = resumed_alike(build, tmp_path)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert VALUE_HEAD_FILE == "critic/value_head.safetensors"
    assert sorted(path.name for path in (checkpoint / "critic").iterdir()) == ["value_head.safetensors"]
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(checkpoint).eval()
    assert digests(loaded.pretrained_model) == digests(whole.policy)
    assert digests(loaded.v_head) == digests(whole.value_model)
    assert whole.value_model.summary.weight.any()
    rollout = whole.updates[0][0]
    with torch.no_grad():
        wanted = whole.actor.values(rollout.samples)
        for row, (prompt, completion) in enumerate(rows_of(rollout)):
            _, _, values = loaded(input_ids=torch.tensor([prompt + completion]))
            assert (values[0, len(prompt) - 1 : -1] - wanted[row, : len(completion)]).abs().max() < 1e-5
    again = make_trainer(tmp_path / "more", model=loaded)
    assert digests(again) == digests(whole)


def test_a_checkpoint_of_the_other_kind_of_critic_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    with pytest.raises(ZooError, match=r"holds no critic/value_head\.safetensors"):
        make_trainer(tmp_path, critic="shared").train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


class Steps(TrainerCallback):
    """Digests after each update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen.append(digests(model.state_dict()))


@pytest.mark.parametrize("critic", ["policy", "shared"])
def test_while_the_critic_warms_up_the_policy_stands_still(tmp_path: Path, critic: str) -> None:
    """To the last bit, with weight decay and every other term of the loss on."""
    steps = Steps()

    def build(directory: Path, callbacks: list[TrainerCallback] | None = None) -> Spy:
        return make_trainer(
            directory, kind=Spy, critic=critic, critic_warmup_updates=2, weight_decay=0.1, entropy_coef=0.1,
            kl_in="loss", kl_estimator="k2", ptx_coef=0.5, ptx_dataset=Dataset.from_dict({"text": ["abc"]}),
            callbacks=callbacks, reward_funcs=count, **SAVED,
        )  # fmt: skip

    trainer = build(tmp_path / "steps", [steps])
    start = digests(trainer.model.state_dict())
    trainer.train()
    for part, moves in (("policy", [False, False, True]), ("value_model", [True, True, True])):
        held = [{k: v for k, v in each.items() if k.startswith(part)} for each in (start, *steps.seen)]
        assert [one != other for one, other in pairwise(held)] == moves, part
    norms = [row["grad_norm/policy"] for row in updates_of(trainer)]
    assert norms[:2] == [0, 0] and norms[2] > 0
    resumed_alike(build, tmp_path, at=1)


def test_the_warm_up_is_of_the_value_loss_alone(tmp_path: Path) -> None:
    trainer, twin = begun(
        tmp_path, critic_warmup_updates=1, reward_funcs=count, cliprange_value=None, vf_coef=0.5, entropy_coef=0.3,
        kl_in="loss", kl_estimator="k2", ref_model=make_policy(seed=5), ptx_coef=0.5,
        ptx_dataset=Dataset.from_dict({"text": ["abc"]}),
    )  # fmt: skip
    trainer.train()
    rollout, estimates, _ = trainer.updates[0]
    rows = rows_of(rollout)

    def loss() -> Tensor:
        errors = [
            now - estimates.returns[row, : len(now)] for row, now in enumerate(values_of(twin.critic, rows))
        ]  # fmt: skip
        return 0.25 * torch.cat(errors).square().mean()

    [wanted] = twin.descend(loss)
    same_weights(trainer, twin, "critic")
    assert updates_of(trainer)[0]["loss"] == pytest.approx(wanted, rel=1e-5)


# Several completions of a prompt


def test_several_completions_of_a_prompt(tmp_path: Path) -> None:
    few: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    several = trained(tmp_path, num_generations=3, num_mini_batches=3, total_episodes=24, **few)
    single = trained(tmp_path, max_steps=1, **few)
    assert several.args.max_steps == several.state.global_step == 2
    assert [row["episodes"] for row in updates_of(several)] == [12, 24]
    rows = [(tuple(p), tuple(c)) for p, c in rows_of(several.updates[0][0])]
    assert set(Counter(prompt for prompt, _ in rows).values()) == {3} and len(rows) == 12
    assert len(set(rows)) == 12
    # The first of each prompt's completions is what it has alone.
    assert rows[::3] == [(tuple(p), tuple(c)) for p, c in rows_of(single.updates[0][0])]
    # Their order is irrelevant: a completion's stream is keyed by prompt and its place among that prompt's own.
    fresh = make_trainer(tmp_path, num_generations=3, **few)
    prompts = {tuple(row["input_ids"]): row for row in fresh.train_dataset}
    given = [prompts[prompt] | {"generation_index": place % 3} for place, (prompt, _) in enumerate(rows)]
    turned = fresh.rollout(given[::-1], stream=TRAIN_STREAM)
    assert [(tuple(p), tuple(c)) for p, c in rows_of(turned)] == rows[::-1]


def test_several_completions_are_scored_row_by_row_and_resume_exactly(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def keep(prompts: list[str], completions: list[str], topic: list[int], **columns: Any) -> list[float]:
        calls.append({"prompts": prompts, "topic": topic, "columns": columns.keys()})
        return good(completions)

    def build(directory: Path) -> Spy:
        return make_trainer(
            directory, kind=Spy, num_generations=2, per_device_train_batch_size=2, reward_funcs=keep,
            train_dataset=prompt_rows(8, topic=list(range(8))), **SAVED,
        )  # fmt: skip

    resumed_alike(build, tmp_path)
    topics = dict(zip(prompt_rows(8)["prompt"], range(8), strict=True))
    for call in calls:
        assert call["prompts"][::2] == call["prompts"][1::2] and len(set(call["prompts"])) == 4
        assert call["topic"] == [topics[prompt] for prompt in call["prompts"]]
        assert "generation_index" not in call["columns"]


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


def test_a_collator_that_pads(tmp_path: Path) -> None:
    """TRL's PPO was given DataCollatorWithPadding over `input_ids`; it may say no attention mask, as TRL read none."""
    tokenizer = make_tokenizer()
    texts = prompt_rows(16)["prompt"]
    ids = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in texts]})
    pad = DataCollatorWithPadding(tokenizer)

    def padding(rows: list[dict[str, Any]]) -> Any:
        with torch.device("cpu"):  # a batch in pinned memory
            return pad(rows)

    def bare(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = padding(rows)
        return {"input_ids": batch["input_ids"], "prompt_index": batch["prompt_index"]}

    def unnumbered(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = padding(rows)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    held_out = {"eval_dataset": prompt_rows(8), "eval_strategy": "steps", "eval_steps": 1}
    plain = trained(tmp_path, train_dataset=ids, **held_out | {"eval_dataset": ids})
    assert any(PAD in row for row in padding([{"input_ids": ids[row]["input_ids"]} for row in (0, 3)])["input_ids"])
    for collator in (padding, bare):
        padded = make_collated(tmp_path, collator, ids)
        padded.train()
        assert digests(padded) == digests(plain)
        assert timeless(padded.state.log_history) == timeless(plain.state.log_history)
    other = make_collated(tmp_path, unnumbered, ids)
    other.train()
    for rollout, _, _ in other.updates:
        prompts = [tuple(prompt) for prompt, _ in rows_of(rollout)]
        # One of the 16 is there twice.
        assert len(set(prompts)) >= 7 and set(prompts) <= {tuple(row) for row in ids["input_ids"]}


def make_collated(directory: Path, collator: Any, ids: Dataset) -> Spy:
    """`make_trainer` knows no collators: as a script would give one."""

    class Collated(Spy):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, data_collator=collator, **kwargs)

    return make_trainer(
        directory, kind=Collated, train_dataset=ids, eval_dataset=ids, eval_strategy="steps", eval_steps=1
    )


def test_several_data_sets_to_evaluate_on(tmp_path: Path) -> None:
    sets = {"some": prompt_rows(8), "others": prompt_rows(12).select(range(8, 12))}
    trainer = trained(tmp_path, eval_dataset=sets, eval_strategy="steps", eval_steps=1)
    logged = {
        name: value for row in trainer.state.log_history if row["step"] == 2 for name, value in row.items()
        if name.startswith("eval_")
    }  # fmt: skip
    alone: dict[str, float] = {}
    for name, dataset in sets.items():
        alone |= trainer.evaluate(dataset, metric_key_prefix=f"eval_{name}")
    assert alone == trainer.evaluate() and logged == {name: alone[name] for name in alone if name != "epoch"}
    assert {"eval_some_objective/score", "eval_others_objective/kl"} <= logged.keys()
    assert logged["eval_some_objective/score"] != logged["eval_others_objective/score"]
    table = trainer.generate_completions()
    assert table["prompt"] == [*sets["some"]["prompt"], *sets["others"]["prompt"]]


# Samples to look at


def read_table(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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
        tmp_path, max_steps=2, log_completions=True, num_completions_to_print=3, reward_funcs=explained,
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
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    sampled = trained(tmp_path, num_sample_generations=2, report_to=["tensorboard"], **settings)
    assert digests(sampled) == digests(trained(tmp_path / "without", **settings))
    folder = tmp_path / "completions" / "samples"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002.jsonl", "step-000004.jsonl"]
    assert texts_of(tmp_path)["samples/text_summary"].keys() == {2, 4}
    for step in (2, 4):
        after = trained(tmp_path / f"until-{step}", **settings | {"max_steps": step})
        now = after.generate_completions(sampling=True)
        assert read_table(folder / f"step-{step:06d}.jsonl") == [
            dict(zip(now, cells, strict=True)) for cells in zip(*now.values(), strict=True)
        ]
        assert len(now["prompt"]) == 8  # one batch
    table = sampled.generate_completions()
    assert table["prompt"] == prompt_rows(12)["prompt"]
    assert table["score"] == pytest.approx(good(table["completion"]), abs=1e-7)
    score = sampled.evaluate()["eval_objective/score"]
    assert statistics.fmean(table["score"]) == pytest.approx(score, abs=1e-6)


def test_samples_need_prompts_and_a_run_without_them_goes_on(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=1, num_sample_generations=2)
    assert not (tmp_path / "completions").exists()
    with pytest.raises(ZooError, match=r"samples held-out prompts: give eval_dataset\.$"):
        trainer.generate_completions()


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

    trainer = trained(tmp_path, report_to=["trackio"], project="toys", run_name="toy", log_completions=True)
    with sqlite3.connect(tmp_path / "trackio" / "toys.db") as database:
        logged = [json.loads(text) for (text,) in database.execute("SELECT metrics FROM metrics ORDER BY id")]
    scores = [row["train/objective/score"] for row in logged if "train/objective/score" in row]
    assert scores == pytest.approx([row["objective/score"] for row in updates_of(trainer)])
    tables = [row["completions"]["_value"] for row in logged if "completions" in row]
    for step, table in enumerate(tables, start=1):
        assert table == read_table(tmp_path / "completions" / "completions" / f"step-{step:06d}.jsonl")
    assert len(scores) == len(tables) == 2


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


def test_scores_of_ones_own_are_not_named_after_the_trainers_rewards(tmp_path: Path) -> None:
    """Also where it has several: it is asked for none."""
    trainer = make_trainer(tmp_path, reward_funcs=[good, count])
    metrics = trainer.step(["a", "b"], ["c", "d"], [1.0, 3.0])
    assert {name: value for name, value in metrics.items() if name.startswith("rewards/")} == {"rewards/given": 2.0}


def test_without_max_steps_the_rate_of_a_loop_stays(tmp_path: Path) -> None:
    whole = trained(tmp_path, max_steps=2)
    _, _, rates = replayed(tmp_path, whole, max_steps=-1)
    assert rates == [1e-3, 1e-3]


def test_a_loop_of_generate_and_step(tmp_path: Path) -> None:
    """Without rewards and prompts of its own: what it samples is drawn anew each time, and the first step has no KL."""
    tokenizer = make_tokenizer()
    trainer = make_trainer(tmp_path, reward_model=None)
    before = digests(trainer)
    texts = ["abc", "d", "ab"]
    drawn = trainer.generate(texts, num_generations=2)
    assert [ids.dim() for ids in drawn] == [1] * 6
    assert all(0 < len(ids) <= 10 and EOS not in ids[:-1] and (ids[-1] == EOS or len(ids) == 10) for ids in drawn)
    again = trainer.generate(texts, num_generations=2)
    assert len({tuple(ids.tolist()) for ids in [*drawn, *again]}) == 12
    queries = [text for text in texts for _ in range(2)]
    said = [tokenizer.decode(ids) for ids in drawn]
    metrics = trainer.step(queries, drawn, [text.count("g") for text in said])
    assert abs(metrics["objective/kl"]) < 1e-5 and metrics["policy/logprob_mismatch"] < 1e-5
    assert metrics["completions/length"] == statistics.fmean(map(len, drawn))
    assert metrics["completions/eos_rate"] == statistics.fmean(float(ids[-1] == EOS) for ids in drawn)
    assert digests(trainer) != before and trainer.state.global_step == 1
    trainer.save_model(str(tmp_path / "saved"))
    loaded = make_trainer(tmp_path, model=str(tmp_path / "saved"), value_model=str(tmp_path / "saved" / "critic"))
    assert digests(loaded) == digests(trainer)
    with pytest.raises(ZooError, match="PPO has no reward: give reward_model or reward_funcs, or use step"):
        trainer.train()


def test_a_loop_needs_neither_rewards_nor_prompts_nor_a_length(tmp_path: Path) -> None:
    args = PPOConfig(output_dir=str(tmp_path), use_cpu=DEVICE == "cpu", report_to="none", response_length=8)
    trainer = PPOTrainer(args=args, processing_class=make_tokenizer(), model=make_policy())
    for update in (1, 2):
        drawn = trainer.generate(["a", "bc"])
        metrics = trainer.step(["a", "bc"], drawn, [1.0, 0.0])
        trainer.log(metrics)
        assert trainer.state.global_step == update == trainer.state.log_history[-1]["step"]
        assert trainer.state.log_history[-1]["loss"] == metrics["loss"]
    for wrong, message in (
        (trainer.train, "PPO has no prompts: give train_dataset, or use generate"),
        (lambda: trainer.evaluate(prompt_rows(8)), "PPO has no reward"),
    ):
        with pytest.raises(ZooError, match=message):
            wrong()


def test_prompts_of_a_loop_may_have_any_form(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    chats = [[{"role": "user", "content": text}] for text in ("abc", "d")]
    texts = ["abc;:", "d;:"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    forms: list[Any] = [texts, ids, [torch.tensor(each) for each in ids], chats]
    drawn, ends = [], []
    for form in forms:
        trainer = make_trainer(tmp_path, processing_class=tokenizer)
        drawn.append([each.tolist() for each in trainer.generate(form)])
        trainer.step(form, ["gh", torch.tensor([9, EOS])], torch.tensor([1.0, 0.0]))
        ends.append(digests(trainer))
    assert all(each == drawn[0] for each in drawn) and all(each == ends[0] for each in ends)
    stacked = make_trainer(tmp_path, processing_class=tokenizer)
    stacked.step(torch.tensor([[3, 4], [5, 6]]), [[9, EOS], [10]], [1.0, 0.0])
    assert stacked.state.global_step == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((["a"], ["b", "c"], [1.0]), "got 1 queries and 2 responses"),
        (([], [], []), "got 0 queries and 0 responses"),
        ((["a", "b"], ["b", "c"], [1.0]), "got 1 scores for 2 responses"),
        ((["a", "b"], ["b", "c"], [1.0, math.nan]), "Score 1 is nan: give a finite number"),
        ((["a"], ["b"], [math.inf]), "Score 0 is inf"),
        ((["a"], ["b"], ["good"]), "Score 0 is 'good', which is no number"),
        ((["a", ""], ["b", "c"], [1.0, 1.0]), "Query 1 or its response is empty"),
        ((["a"], [[]], [1.0]), "Query 0 or its response is empty"),
        ((["a"], ["b" * 32], [1.0]), "have 33 tokens together, past the context of 32"),
        ((["a"], [[17]], [1.0]), "the token id 17, and the policy has 17 embedding rows"),
        ((["a"], [None], [1.0]), "Response 0 is None"),
        ((["a"], [torch.tensor([[4, 5]])], [1.0]), "give a text or a 1-D tensor"),
        (([5], ["b"], [1.0]), "The prompt 5 is neither a text nor a conversation"),
    ],
)
def test_a_step_that_cannot_be_is_refused_and_changes_nothing(tmp_path: Path, given: Any, message: str) -> None:
    trainer = make_trainer(tmp_path)
    before = digests(trainer)
    with pytest.raises(ZooError, match=message) as caught:
        trainer.step(*given)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert trainer.state.global_step == 0 and digests(trainer) == before


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "got 0 prompts"),
        (["a", ""], "Prompt 1 is empty"),
        (["a", "b" * 23], "Prompt 1 has 23 tokens.*context of 32"),
        ([[17]], "holds the token id 17"),
        ([None], "neither a text nor a conversation"),
        ([[{"role": "user", "content": "a"}]], "no chat template"),
    ],
)
def test_prompts_that_nothing_can_be_sampled_from_are_refused(tmp_path: Path, prompts: Any, message: str) -> None:
    trainer = make_trainer(tmp_path)
    trainer.generate(["a"])
    with pytest.raises(ZooError, match=message) as caught:
        trainer.generate(prompts)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_critic_files_load_as_what_they_are(tmp_path: Path) -> None:
    """A critic of its own is a token classifier, as any release of transformers loads it."""
    trainer = trained(tmp_path, max_steps=1, critic="policy", save_strategy="steps", save_steps=1)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "checkpoint-1" / "critic")
    assert digests(loaded) == digests(trainer.value_model)
