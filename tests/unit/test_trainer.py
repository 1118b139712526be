"""PPOTrainer on a toy world: what one update computes, what it refuses, what it leaves on the disk."""

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_fixture import (
    EOS,
    LETTERS,
    Spy,
    digests,
    distance,
    make_policy,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    prompt_rows,
    rows_of,
    snapshot,
    token_logps,
    trained,
    updates_of,
    values_of,
    vocabulary_logps,
)

from rlhf_zoo import functional as F
from rlhf_zoo.ppo.metrics import critic_metrics


def advantages_of(
    scores: list[float], kls: list[list[float]], values: list[list[float]], *, beta: float, gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Whitened advantages, and returns, of each row. The formulas have tests of their own in numerics."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    lengths = [len(row) for row in kls]
    kl, value = (pad([torch.tensor(row).double() for row in rows]) for rows in (kls, values))
    mask = torch.arange(kl.shape[1]) < torch.tensor(lengths).unsqueeze(1)
    rewards = F.token_rewards(torch.tensor(scores).double(), kl, mask, kl_coef=beta)
    advantages, returns = F.gae(rewards, value, mask, gamma=gamma, lam=lam)
    white = F.whiten(advantages, mask, F.masked_moments(advantages, mask))
    each = [[x[row, :length].tolist() for row, length in enumerate(lengths)] for x in (white, returns)]
    return each[0], each[1]


def sgd_pass(
    actor: Any, rows: list[Any], old_logps: list[Any], values: list[Any], advantages: list[Any], returns: list[Any]
) -> dict[str, float]:
    """Makes a pass over all rows, with one step of SGD for policy and critic. Returns the metrics of the pass."""
    n = sum(map(len, advantages))
    figures: dict[str, float] = dict.fromkeys(
        ["policy/ratio", "policy/clipfrac", "policy/approxkl", "value/clipfrac", "objective/entropy"], 0.0
    )
    policy_loss, value_loss = torch.zeros(()), torch.zeros(())
    all_logps = vocabulary_logps(actor.policy, rows)
    for i, (logps, every_logp, value) in enumerate(
        zip(token_logps(all_logps, rows), all_logps, values_of(actor.value_model, rows), strict=True)
    ):
        entropy = -(every_logp.exp() * every_logp).sum(-1)
        ratio = (logps - torch.tensor(old_logps[i])).exp()
        gain, target = torch.tensor(advantages[i]), torch.tensor(returns[i])
        losses, clipped = F.clipped_policy_loss(logps, torch.tensor(old_logps[i]), gain, cliprange=0.05)
        errors, held = F.clipped_value_loss(value, torch.tensor(values[i]), target, cliprange=0.02)
        policy_loss, value_loss = policy_loss + losses.sum() / n, value_loss + errors.sum() / n
        terms = (ratio, clipped.float(), ratio - 1 - ratio.log(), held.float(), entropy)
        for name, number in zip(list(figures), terms, strict=True):
            figures[name] += float(number.detach().sum()) / n
    (policy_loss + 0.5 * value_loss).backward()
    figures |= {"loss/policy": float(policy_loss.detach()), "loss/value": float(value_loss.detach())}
    for name, part, rate in (("policy", actor.policy, 0.3), ("critic", actor.value_model, 0.05)):
        weights = [weight for weight in part.parameters() if weight.grad is not None]
        norm = math.sqrt(sum(float(weight.grad.double().square().sum()) for weight in weights))
        figures[f"grad_norm/{name}"] = norm
        with torch.no_grad():
            for weight in weights:
                weight -= rate * min(1.0, 1.5 / norm) * weight.grad
                weight.grad = None
    return figures


def test_update_equals_formulas_computed_row_by_row(tmp_path: Path) -> None:
    """Two passes over one rollout by SGD: weights and every metric, from the formulas row by row, without a cache."""
    settings: dict[str, Any] = {
        "num_mini_batches": 1, "num_ppo_epochs": 2, "learning_rate": 0.3, "critic_learning_rate": 0.05,
        "kl_coef": 0.2, "gamma": 0.97, "lam": 0.9, "vf_coef": 0.5, "cliprange": 0.05, "cliprange_value": 0.02,
        "missing_eos_penalty": 0.3, "max_grad_norm": 1.5, "optim": "sgd", "lr_scheduler_type": "constant",
        "max_steps": 1, "weight_decay": 0.0,
    }  # fmt: skip
    trainer = make_trainer(
        tmp_path, kind=Spy, ref_model=make_policy(seed=5), reward_model=make_reward_model(), **settings
    )
    plain, reference = copy.deepcopy(trainer.actor), make_policy(seed=5)
    trainer.train()
    rollout, _, _ = trainer.updates[0]
    rows, [metrics] = rows_of(rollout), updates_of(trainer)

    model, head = trainer.rewards.models[0].model, []
    with torch.no_grad():
        for prompt, completion in rows:
            hidden = model.model(input_ids=torch.tensor([prompt + completion])).last_hidden_state[0, -1]
            head.append((float(model.score(hidden)) - 0.3) / 0.5)
        old_logps = [each.tolist() for each in token_logps(vocabulary_logps(plain.policy, rows), rows)]
        ref_logps = [each.tolist() for each in token_logps(vocabulary_logps(reference, rows), rows)]
        values = [each.tolist() for each in values_of(plain.value_model, rows)]
    ended = [completion[-1] == EOS for _, completion in rows]
    assert any(ended) and not all(ended)
    scores = [s if end else s - 0.3 for s, end in zip(head, ended, strict=True)]
    kls = [[a - b for a, b in zip(p, q, strict=True)] for p, q in zip(old_logps, ref_logps, strict=True)]
    advantages, returns = advantages_of(scores, kls, values, beta=0.2, gamma=0.97, lam=0.9)

    n = sum(map(len, advantages))
    passes = [sgd_pass(plain, rows, old_logps, values, advantages, returns) for _ in range(2)]
    seen = {name: sum(figures[name] for figures in passes) / 2 for name in passes[0]}

    expected = seen | {
        "loss": seen["loss/policy"] + 0.5 * seen["loss/value"],
        "objective/score": sum(head) / 8,
        "objective/shaped_score": sum(scores) / 8,
        "rewards/reward_model": sum(head) / 8,
        "objective/kl": sum(map(sum, kls)) / 8,
        "objective/non_score_reward": -0.2 * sum(map(sum, kls)) / 8,
        "objective/rlhf_reward": sum(scores) / 8 - 0.2 * sum(map(sum, kls)) / 8,
        "completions/length": n / 8,
        "completions/eos_rate": sum(ended) / 8,
        "critic/value": sum(map(sum, values)) / n,
        "critic/return": sum(map(sum, returns)) / n,
        "kl_coef": 0.2,
        "episodes": 8,
        "learning_rate": 0.3,
    }
    assert seen["policy/clipfrac"] > 0 and seen["value/clipfrac"] > 0 and seen["grad_norm/policy"] > 0.1
    for name, number in expected.items():
        assert metrics[name] == pytest.approx(number, rel=2e-5, abs=2e-6), name
    flat = [torch.tensor([x for row in rows for x in row]) for rows in (values, returns)]
    explained = 1 - float((flat[1] - flat[0]).var() / flat[1].var())
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-5)
    gain = 1 - float((flat[1] - flat[0]).square().mean() / flat[1].var(correction=0))
    assert metrics["critic/gain_over_constant"] == pytest.approx(gain, abs=1e-5)
    assert metrics["policy/epochs"] == 2 and metrics["policy/logprob_mismatch"] < 1e-5
    after, here = snapshot(trainer), snapshot(plain)
    for part in ("policy", "critic"):
        assert distance(after, trainer.before, part) > 1e-3
        assert distance(after, here, part) < 2e-6


def test_explained_variance_quarters_split_response_length() -> None:
    values, returns = torch.tensor([[0.0, 1, 2, 3, 5], [4.0, 4, 1, 2, 2]]), torch.tensor([[1.0, 1, 2, 4, 4], [3.0] * 5])
    mask = torch.tensor([[True] * 5, [True] * 4 + [False]])
    result = critic_metrics(values, returns, mask, max_actions=10)
    quarters = [result[f"critic/explained_variance/quarter_{part}"] for part in (1, 2, 3, 4)]
    parts = [[x[:, at] for x in (values, returns, mask)] for at in (slice(3), slice(3, 6))]
    expected = [float(F.explained_variance(*part)) for part in parts]
    assert quarters[:2] == expected and all(math.isnan(each) for each in quarters[2:])


def test_reward_functions_get_grpo_arguments_and_weights(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def length(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list:
        calls.append({"prompts": prompts, "completions": completions, "ids": completion_ids} | columns)
        return [len(ids) for ids in completion_ids]

    def sometimes(completions: list[str], topic: list[int], **_: Any) -> list[float | None]:
        return [None if t % 2 else 10.0 for t in topic]

    trainer = trained(
        tmp_path, reward_funcs=[length, sometimes], reward_weights=[0.5, 2.0], max_steps=1,
        train_dataset=prompt_rows(8, topic=list(range(8))),
    )  # fmt: skip
    [call], (rollout, advantages, _) = calls, trainer.updates[0]
    assert call.keys() == {
        "prompts", "completions", "ids", "topic", "trainer_state", "log_extra", "log_metric",
    }  # fmt: skip
    assert call["ids"] == rollout.samples.completion_id_lists() and call["trainer_state"] is trainer.state
    assert call["completions"] == trainer.processing_class.batch_decode(call["ids"], skip_special_tokens=True)
    expected = [
        0.5 * len(ids) + (0.0 if t % 2 else 20.0) for ids, t in zip(call["ids"], call["topic"], strict=True)
    ]  # fmt: skip
    assert advantages.reward_scores.total.tolist() == pytest.approx(expected)
    [metrics] = updates_of(trainer)
    assert metrics["rewards/sometimes"] == 10 and metrics["rewards/length"] == metrics["completions/length"]


def test_reward_model_of_another_tokenizer_scores_text_without_critic(tmp_path: Path) -> None:
    """Its vocabulary is smaller and in another order: ids of the policy would be out of range or mean other letters."""
    other = make_tokenizer(LETTERS[::-1])
    model = make_reward_model(other, hidden_size=16)
    trainer = trained(tmp_path, reward_model=model, reward_processing_class=other, max_steps=1)
    rollout, advantages, _ = trainer.updates[0]
    assert not trainer.rewards.models[0].shares_ids and rollout.samples.ended.any()
    raw = []
    for (prompt, completion), ended in zip(rows_of(rollout), rollout.samples.ended.tolist(), strict=True):
        text = trainer.processing_class.decode(prompt + completion, skip_special_tokens=True)
        ids = other(text)["input_ids"] + ([EOS] if ended else [])
        with torch.no_grad():
            raw.append(float(model(input_ids=torch.tensor([ids])).logits[0, 0]))
    assert advantages.reward_scores.total.tolist() == pytest.approx([(s - 0.3) / 0.5 for s in raw], abs=1e-5)
    assert trainer.value_model.config.hidden_size == 32
    embedding = trainer.before["critic.model.embed_tokens.weight"]
    assert torch.equal(embedding, trainer.before["policy.model.embed_tokens.weight"])


CENTRED_AND_SCALED = [("stored", "stored"), ("stored", "none"), ("none", "stored"), ("running", "running")]


@pytest.mark.parametrize(("centering", "scaling"), CENTRED_AND_SCALED)
def test_critic_starts_as_normalized_reward_model(tmp_path: Path, centering: str, scaling: str) -> None:
    """Read after the last token it is the score, less 0.3 and over 0.5 as stored; head W/σ and bias −μ/σ."""
    trainer = make_trainer(tmp_path, reward_model=make_reward_model(), score_centering=centering, score_scaling=scaling)
    mean, std = (0.3 if centering == "stored" else 0.0), (0.5 if scaling == "stored" else 1.0)
    scorer, critic, texts, ends = trainer.rewards.models[0], trainer.value_model, ["abc", "ddefg"], [False, True]
    assert scorer.shares_ids and torch.equal(critic.score.weight, make_reward_model().score.weight / std)
    for text, ended, score in zip(texts, ends, scorer.score_texts(texts, ended=ends).tolist(), strict=True):
        ids = torch.tensor([trainer.processing_class(text)["input_ids"] + ([EOS] if ended else [])])
        with torch.no_grad():
            raw = float(make_reward_model()(input_ids=ids).logits[0, 0])
            assert score == pytest.approx((raw - mean) / std, abs=1e-5)
            assert float(critic(input_ids=ids).logits[0, -1, 0]) == pytest.approx(score, abs=1e-5)


def test_whitening_keeps_reward_mean_and_k3_is_charged_but_k1_reported(tmp_path: Path) -> None:
    plain, white = (
        trained(
            tmp_path, max_steps=1, whiten_rewards=white, kl_coef=0.3, kl_estimator="k3", ref_model=make_policy(seed=4)
        )
        for white in (False, True)
    )
    rollout, advantages, _ = plain.updates[0]
    one, two = updates_of(plain)[0], updates_of(white)[0]
    k1 = (rollout.logprobs - rollout.ref_logprobs).masked_fill(~rollout.mask, 0).double()
    k3 = (torch.exp(-k1) - 1 + k1).sum(1)
    assert one["objective/kl"] == pytest.approx(float(k1.sum(1).mean()), rel=1e-5)
    assert one["objective/non_score_reward"] == pytest.approx(float(-0.3 * k3.mean()), rel=1e-5)
    assert (advantages.rewards.sum(1).double() - advantages.shaped_scores + 0.3 * k3).abs().max() < 1e-5
    raw, scaled = (t.updates[0][1].rewards[rollout.mask].double() for t in (plain, white))
    expected = (raw - raw.mean()) / raw.std() + raw.mean()
    assert (scaled - expected).abs().max() < 1e-5 and scaled.std() == pytest.approx(1, abs=1e-4)
    # What is reported stays in the units of the reward.
    for name in ("objective/non_score_reward", "objective/rlhf_reward", "objective/score", "objective/kl"):
        assert one[name] == two[name], name


def completions_of(trainer: Spy) -> list[list[int]]:
    return [row for rollout, _, _ in trainer.updates for row in rollout.samples.completion_id_lists()]


def test_stop_token_settings_end_completions(tmp_path: Path) -> None:
    """`eos` ends at EOS, a stop_token_id at that id alone, None nowhere; each row's stream is the same in all three."""
    eos = completions_of(trained(tmp_path, max_steps=1))
    trainer = trained(tmp_path, max_steps=1, stop_token=None)
    endless = completions_of(trainer)
    letter = endless[0][3]
    other = completions_of(trained(tmp_path, max_steps=1, stop_token_id=letter))
    assert all(len(row) == 10 for row in endless) and not trainer.updates[0][0].samples.ended.any()
    for stop, rows in ((EOS, eos), (letter, other)):
        cut = [row[: row.index(stop) + 1] if stop in row else row for row in endless]
        assert rows == cut and cut != endless
    assert trainer.policy.generation_config.eos_token_id == EOS


def test_adaptive_beta_follows_reported_kl(tmp_path: Path) -> None:
    """Inside ±0.2 the step is proportional to the mean Σ k1, in which completions of negative k1 count as such."""
    still: dict[str, Any] = {"learning_rate": 0.0, "ref_model": make_policy(seed=4), "max_steps": 3}
    fixed = trained(tmp_path, **still)
    seen = [row["objective/kl"] for row in updates_of(fixed)]
    assert any((rollout.kl < 0).any() for rollout, _, _ in fixed.updates[:2])
    target = sum(seen[:2]) / 2
    moved = trained(tmp_path, kl_target=target, kl_horizon=16, **still)
    first, second, _ = (min(max(kl / target - 1, -0.2), 0.2) for kl in seen)
    assert 0.001 < abs(first) < 0.2
    betas = [0.05, 0.05 * (1 + first / 2), 0.05 * (1 + first / 2) * (1 + second / 2)]
    assert [row["kl_coef"] for row in updates_of(moved)] == pytest.approx(betas)
    for (rollout, advantages, _), beta in zip(moved.updates, betas, strict=True):
        charged = (advantages.rewards.sum(1) - advantages.shaped_scores) / rollout.kl
        assert charged.tolist() == pytest.approx([-beta] * 8, rel=1e-3)


def test_critic_gradient_norm_does_not_shrink_policy_step(tmp_path: Path) -> None:
    """A critic a thousand times steeper is clipped by its own norm: a joint norm would shrink the policy's step."""
    one, two = (
        trained(tmp_path, max_steps=1, num_ppo_epochs=1, num_mini_batches=1, vf_coef=c, max_grad_norm=0.5, optim="sgd",
                learning_rate=0.1, reward_model=make_reward_model())
        for c in (0.1, 100.0)
    )  # fmt: skip
    norms = [updates_of(t)[0] for t in (one, two)]
    assert norms[1]["grad_norm/critic"] == pytest.approx(1000 * norms[0]["grad_norm/critic"], rel=1e-3)
    assert norms[1]["grad_norm/critic"] > 50 and norms[0]["grad_norm/policy"] > 0.5
    moved = {k: v for k, v in digests(one).items() if k.startswith("policy")}
    assert moved == {k: v for k, v in digests(two).items() if k.startswith("policy")}
    # Clipped to 0.5 and stepped at 0.1: the policy moves by 0.05 in all.
    change = [snapshot(one)[k] - one.before[k] for k in moved]
    assert math.sqrt(sum(float(c.double().square().sum()) for c in change)) == pytest.approx(0.05, rel=1e-3)


def test_policy_and_critic_have_separate_learning_rates(tmp_path: Path) -> None:
    still = trained(tmp_path, max_steps=1, learning_rate=0.0, critic_learning_rate=1e-3)
    assert distance(snapshot(still), still.before, "policy") == 0 < distance(snapshot(still), still.before, "critic")
    same = make_trainer(tmp_path, critic_learning_rate=None, learning_rate=0.25, weight_decay=0.1)
    groups = same.create_optimizer().param_groups
    assert [g["lr"] for g in groups] == [0.25] * 4 and sorted(g["weight_decay"] for g in groups) == [0, 0, 0.1, 0.1]
    counted = sum(len(g["params"]) for g in groups)
    assert counted == len(list(same.policy.parameters())) + len(list(same.value_model.parameters()))
    rates = [g["lr"] for g in make_trainer(tmp_path).create_optimizer().param_groups]
    assert rates == [1e-3, 1e-3, 2e-3, 2e-3]


def test_reference_model_never_changes(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kind=Spy)
    with trainer.reference.model() as reference:
        before = digests(reference)
        assert not any(p.requires_grad for p in reference.parameters())
    trainer.train()
    with trainer.reference.model() as reference:
        assert digests(reference) == before
    assert digests(trainer) != digests(trainer.before)


def test_dropout_is_off_in_all_models(tmp_path: Path) -> None:
    """With dropout on, no two passes would agree."""
    trainer = trained(
        tmp_path, model=make_policy(attention_dropout=0.5), max_steps=1, num_ppo_epochs=1, num_mini_batches=1,
        reward_model=make_reward_model(attention_dropout=0.5),
    )  # fmt: skip
    [metrics] = updates_of(trainer)
    assert abs(metrics["objective/kl"]) < 1e-5
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5) and metrics["policy/approxkl"] < 1e-9
    with torch.no_grad():
        ids = torch.tensor([[3, 4, 5, 6]])
        trainer.value_model.train()
        assert torch.equal(trainer.value_model(input_ids=ids).logits, trainer.value_model(input_ids=ids).logits)


def test_sampling_temperature_applies_to_all_logprobs(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=1, num_ppo_epochs=1, num_mini_batches=1, temperature=0.5)
    [metrics] = updates_of(trainer)
    assert abs(metrics["objective/kl"]) < 1e-5 and metrics["policy/ratio"] == pytest.approx(1, abs=1e-6)
    rollout = trainer.updates[0][0]
    [(prompt, completion), *_] = rows_of(rollout)
    with torch.no_grad():
        logits = make_policy()(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.5
    expected = logits.log_softmax(-1)[range(len(completion)), completion]
    assert rollout.logprobs[0, : len(completion)].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
