"""Each option of PPOConfig as it acts in the trainer, against a second computation."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trainer_fixture import (
    EOS,
    Spy,
    digests,
    distance,
    good,
    make_policy,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    prompt_rows,
    rows_of,
    snapshot,
    timeless,
    trained,
    updates_of,
)
from transformers import DataCollatorWithPadding

from rlhf_zoo import functional as F
from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.reserved_columns import GENERATION_INDEX, PROMPT_INDEX
from rlhf_zoo.modeling.sampling.sampler import Samples
from rlhf_zoo.ppo.actor_critic import ActorCriticOutput
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.kl_controller import KLController, RunningScores
from rlhf_zoo.ppo.loss import LOGPROB_MISMATCH, PolicyLoss, micro_batch_loss
from rlhf_zoo.ppo.metrics import UpdateMetrics
from rlhf_zoo.ppo.minibatch import Minibatch, MinibatchSize
from rlhf_zoo.ppo.rollout import Advantages, Rollout
from rlhf_zoo.ppo.trainer import TRAIN_STREAM
from rlhf_zoo.rewards import RewardScores

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
    """Of random numbers in float64: three completions of at most 4 tokens, 5 of which there are. Formulas: numerics."""
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
    reward_scores = RewardScores(total=ones[:, 0], per_reward=ones)
    # As the models say it: 0 outside the mask, and an entropy that is only logged has no gradient.
    chosen = F.selected_logprobs(logits, ids).masked_fill(~mask, 0)
    entropy = F.entropy(logits if args.entropy_coef else logits.detach())
    kl = F.exact_kl(logits, ref_logits) if name == "full" else None
    batch = Minibatch(
        Rollout(samples, ref.masked_fill(~mask, 0), values.detach()),
        Advantages(reward_scores, reward_scores.total, reward_scores.total, returns, old_values, gains, returns, acts),
        torch.arange(3),
        MinibatchSize(torch.tensor(SEQUENCES if sequence else ACTIONS), torch.tensor(SEQUENCES), LONGEST),
    )
    loss, seen = micro_batch_loss(
        PolicyLoss(args, batch, BETA),
        ActorCriticOutput(chosen, entropy, values, kl),
        critic_only=name == "warm-up",
    )

    rows = []
    low = args.cliprange_sequence if sequence else args.cliprange
    for row, length in enumerate(LENGTHS):
        here = slice(0, 1 if sequence else length)

        def by_action(x: Tensor, length: int = length) -> Tensor:
            return x[:length].sum().unsqueeze(0) if sequence else x[:length]

        gain, value, target, before = (x[row, here] for x in (gains, values, returns, old_values))
        new, past, reference, entropy = (by_action(x) for x in (now[row], old[row], ref[row], F.entropy(logits[row])))
        clips = {"cliprange": low, "cliprange_high": args.cliprange_high, "dual_clip": args.dual_clip}
        policy, _ = F.clipped_policy_loss(new, past, gain, **clips)
        error, _ = F.clipped_value_loss(value, before, target, cliprange=args.cliprange_value)
        kl: Any = 0.0
        if args.kl_in == "loss":
            full = by_action(F.exact_kl(logits[row], ref_logits[row]))
            kl = full if name == "full" else F.kl_loss(new, past, reference, estimator=args.kl_estimator)
        others = policy + BETA * kl - args.entropy_coef * entropy
        rows.append(args.vf_coef * error + (0 if name == "warm-up" else others))
    total = sum(each.sum() for each in rows)
    expected = {
        "token-mean": total / (SEQUENCES if sequence else ACTIONS),
        "seq-mean-token-mean": sum(each.mean() for each in rows) / SEQUENCES,
        "seq-mean-token-sum": total / SEQUENCES,
        "seq-sum-norm": total / (SEQUENCES * LONGEST),
    }[args.loss_aggregation]
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    result, right = (torch.autograd.grad(x, [logits, values], allow_unused=True) for x in (loss, expected))
    for one, other in zip(result, right, strict=True):
        assert (one is None) == (other is None or not other.any())
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert not any(each.requires_grad for each in seen.values())


def test_kl_in_the_loss_is_weighed_by_beta_and_in_no_reward(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, kind=Spy, reward_funcs=nothing, ref_model=make_policy(seed=5), kl_in="loss", kl_estimator="k3",
        **ONE_STEP,
    )  # fmt: skip
    trainer.controller = KLController(0.6)
    trainer.train()
    (rollout, advantages, _), [metrics] = trainer.updates[0], updates_of(trainer)
    assert metrics["loss"] == pytest.approx(0.6 * metrics["loss/kl"], rel=1e-5)
    assert distance(snapshot(trainer), trainer.before, "policy") > 1e-3
    k1 = (rollout.logprobs - rollout.ref_logprobs)[rollout.mask]
    assert metrics["objective/kl"] == pytest.approx(float(k1.sum()) / 8, rel=1e-5)
    assert metrics["loss/kl"] == pytest.approx(float((torch.exp(-k1) - 1 + k1).mean()), rel=1e-4)
    assert not advantages.rewards.any() and metrics["objective/non_score_reward"] == 0


@pytest.mark.parametrize(("centering", "scaling"), [("running", "running"), ("running", "none"), ("none", "running")])
def test_running_statistics_are_of_all_scores_so_far(tmp_path: Path, centering: str, scaling: str) -> None:
    trainer = trained(
        tmp_path, max_steps=2, reward_funcs=count, score_centering=centering, score_scaling=scaling,
        train_dataset=prompt_rows(13),
    )  # fmt: skip
    so_far: list[float] = []
    for (rollout, advantages, _), metrics in zip(trainer.updates, updates_of(trainer), strict=True):
        lengths = count(rollout.samples.completion_id_lists())
        so_far += lengths
        mean, std = statistics.fmean(so_far), statistics.stdev(so_far)
        shift, scale = mean if centering == "running" else 0.0, std if scaling == "running" else 1.0
        assert advantages.shaped_scores.tolist() == pytest.approx(
            [(n - shift) / scale for n in lengths], rel=1e-5, abs=1e-6
        )
        assert metrics["objective/score"] == statistics.fmean(lengths)
        assert metrics["objective/score_mean_so_far"] == pytest.approx(mean, rel=1e-12)
        assert metrics["objective/score_std_so_far"] == pytest.approx(std, rel=1e-12)
    assert len(so_far) == 8 + 5


def test_centering_by_prompt_subtracts_the_mean_of_the_prompts_other_completions(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path, max_steps=1, reward_funcs=count, score_centering="prompt", num_generations=3, kl_coef=0.0,
        whiten_advantages=False, lam=1.0, gamma=1.0, eval_dataset=prompt_rows(4), per_device_eval_batch_size=4,
    )  # fmt: skip
    held_out = trainer.evaluate()
    assert held_out["eval_objective/score"] > 0, "a batch of one completion a prompt, of a size that 3 does not divide"
    (rollout, advantages, _), [metrics] = trainer.updates[0], updates_of(trainer)[:1]
    lengths = count(rollout.samples.completion_id_lists())
    assert len(set(lengths)) > 1 and advantages.shaped_scores.tolist() == lengths, "metrics keep the score itself"
    assert metrics["objective/score"] == metrics["objective/shaped_score"] == pytest.approx(statistics.fmean(lengths))
    baselines = [
        statistics.fmean(lengths[start:index] + lengths[index + 1 : start + 3])
        for index in range(len(lengths))
        for start in [index - index % 3]
    ]
    centered = [score - baseline for score, baseline in zip(lengths, baselines, strict=True)]
    assert advantages.rewards.sum(1).tolist() == pytest.approx(centered, abs=1e-5)
    returns = advantages.returns[:, 0].tolist()
    assert returns == pytest.approx(centered, abs=1e-4), "with γ = λ = 1 the first return is the whole reward"


def test_centering_by_prompt_needs_several_completions_of_known_prompts(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="score_centering 'prompt' compares"):
        make_trainer(tmp_path, reward_funcs=count, score_centering="prompt")
    trainer = make_trainer(tmp_path, reward_funcs=count, score_centering="prompt", num_generations=2)
    responses = trainer.generate(["ab", "cd"], num_generations=2)
    with pytest.raises(ZooError, match="which responses share a prompt"):
        trainer.step(["ab", "ab", "cd", "cd"], responses, [1.0, 2.0, 3.0, 4.0])


def test_scores_that_do_not_vary_are_not_divided_by_zero() -> None:
    assert RunningScores().update([8.0, 40.0, 200.0]).std == RunningScores().update([1.0, 5.0, 25.0]).std == 1.0


def test_a_completion_that_is_one_action_is_one_long(tmp_path: Path) -> None:
    """What the longest may have, seq-sum-norm's constant, is 1 then, and not tokens."""
    norm, mean = (
        trained(tmp_path, action_level="sequence", loss_aggregation=how, **ONE_STEP)
        for how in ("seq-sum-norm", "seq-mean-token-sum")
    )
    assert digests(norm) == digests(mean)
    assert [row["loss"] for row in updates_of(norm)] == [row["loss"] for row in updates_of(mean)]
    # Its only action is its only token: each mean divides by the number of completions.
    for how in ("token-mean", "seq-mean-token-mean"):
        assert digests(trained(tmp_path, action_level="sequence", loss_aggregation=how, **ONE_STEP)) == digests(mean)


def test_what_is_of_tokens_is_averaged_over_them_where_completions_are_actions(tmp_path: Path) -> None:
    """The entropy of a bandit's policy is per token, as is its drift, and both are those of the same rollout."""
    settings: dict[str, Any] = {"ref_model": make_policy(), "stop_token_id": 3, **ONE_STEP}
    levels = ("sequence", "token")
    bandit, plain = (updates_of(trained(tmp_path, action_level=level, **settings))[0] for level in levels)
    assert 0 < bandit["objective/entropy"] < math.log(17)
    for name in ("objective/entropy", "policy/logprob_mismatch"):
        assert bandit[name] == pytest.approx(plain[name], rel=1e-5), name
    progress = UpdateMetrics(torch.device("cpu"))
    tokens, actions = torch.tensor([[True, True, True], [True, False, False]]), torch.ones(2, 1, dtype=torch.bool)
    by_token = dict.fromkeys(("objective/entropy", "policy/approxkl", LOGPROB_MISMATCH), torch.ones(2, 3))
    by_action = dict.fromkeys(("loss/policy", "loss/value", "policy/ratio", "policy/clipfrac"), torch.ones(2, 1))
    progress.add_terms(by_token | by_action, tokens, actions)
    means = progress.means(lambda x: x)
    assert {name: means[name] for name in by_token | by_action} == dict.fromkeys(by_token | by_action, 1.0)
    assert progress.end_epoch(lambda x: x) == progress.first_pass_mismatch(lambda x: x) == 1.0


def test_an_evaluation_leaves_out_what_does_not_apply(tmp_path: Path) -> None:
    """The mean of a reward is over the prompts that it applies to, in one batch or several; of none it is not told."""

    def sometimes(completions: Sequence[str], topic: Sequence[int], **_: Any) -> list[float | None]:
        return [10.0 if each % 3 else None for each in topic]

    def never(completions: Sequence[str], **_: Any) -> list[float | None]:
        return [None] * len(completions)

    for size in (2, 7, 8):
        trainer = make_trainer(
            tmp_path, reward_funcs=[good, sometimes, never], per_device_eval_batch_size=size,
            eval_dataset=prompt_rows(7, topic=list(range(7))), train_dataset=prompt_rows(8, topic=[0] * 8),
        )  # fmt: skip
        metrics = trainer.evaluate()
        assert metrics["eval_rewards/sometimes"] == 10 and math.isnan(metrics["eval_rewards/never"])
        assert "eval_rewards/never" not in trainer.state.log_history[-1]
        assert metrics["eval_objective/score"] == pytest.approx(metrics["eval_rewards/good"] + 40 / 7, rel=1e-5)


def test_a_whole_completion_as_one_action(tmp_path: Path) -> None:
    """R = score − βΣk1 and A = R − V(prompt), whitened over completions."""
    trainer = trained(
        tmp_path, action_level="sequence", reward_model=make_reward_model(), ref_model=make_policy(seed=5),
        kl_coef=0.2, max_steps=1,
    )  # fmt: skip
    rollout, advantages, _ = trainer.updates[0]
    returns, first = advantages.shaped_scores - 0.2 * rollout.kl, rollout.values[:, 0]
    gains = returns - first
    assert advantages.returns.shape == advantages.advantages.shape == (8, 1)
    torch.testing.assert_close(advantages.returns[:, 0], returns)
    torch.testing.assert_close(advantages.advantages[:, 0], (gains - gains.mean()) / gains.std(), atol=1e-5, rtol=1e-5)
    [metrics] = updates_of(trainer)
    assert metrics["critic/value"] == pytest.approx(float(first.mean()), abs=1e-5)
    assert metrics["objective/rlhf_reward"] == pytest.approx(float(returns.mean()), abs=1e-5)
    assert not [name for name in metrics if "quarter" in name]


def test_epochs_stop_by_the_kl_to_the_sampling_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just below the drift of the second pass, and not just above. Their mean over passes is policy/approxkl."""
    drifts: list[float] = []
    end_epoch = UpdateMetrics.end_epoch

    def told(self: UpdateMetrics, reduce: Any) -> float:
        drifts.append(end_epoch(self, reduce))
        return drifts[-1]

    monkeypatch.setattr(UpdateMetrics, "end_epoch", told)

    def run(limit: float | None) -> dict[str, float]:
        settings = {"num_mini_batches": 2, "learning_rate": 0.5, "num_ppo_epochs": 4, "early_stop_kl": limit}
        return updates_of(trained(tmp_path, reward_funcs=count, **ONE_STEP | settings))[0]

    whole = run(None)
    first, second, *_ = drifts
    assert whole["policy/epochs"] == len(drifts) == 4 and 1e-4 < first < second
    assert whole["policy/approxkl"] == pytest.approx(statistics.fmean(drifts), rel=1e-6)
    assert run(second / 1.5 * 0.999)["policy/epochs"] == 2
    assert run(second / 1.5 * 1.001)["policy/epochs"] > 2


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
    assert trainer.text_source is not None
    kept, draw, policy = [], trainer.text_source.draw, make_policy()

    def drawn(*args: Any) -> Any:
        kept.append(draw(*args))
        return kept[-1]

    monkeypatch.setattr(trainer.text_source, "draw", drawn)
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
    assert trainer.text_source is not None
    batch = trainer.text_source.draw(1, torch.Generator(), torch.device("cpu"))
    assert batch.ids.tolist() == [[2, 3, 4, 5, EOS]] and batch.mask.tolist() == [[False, False, True, True]]


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
        assert GENERATION_INDEX not in call["columns"]
    # The first of each prompt's completions is what it has alone.
    single = trained(tmp_path, max_steps=1, **few)
    assert rows[::3] == [(tuple(p), tuple(c)) for p, c in rows_of(single.updates[0][0])]
    # Their order is irrelevant: a completion's stream is keyed by prompt and its place among that prompt's own.
    fresh = make_trainer(tmp_path, num_generations=3, **few)
    prompts = {tuple(row["input_ids"]): row for row in fresh.train_dataset}
    given = [prompts[prompt] | {GENERATION_INDEX: place % 3} for place, (prompt, _) in enumerate(rows)]
    turned = fresh.rollout(given[::-1], stream=TRAIN_STREAM)
    assert [(tuple(p), tuple(c)) for p, c in rows_of(turned)] == rows[::-1]


def test_a_reference_in_eight_bits_is_near_the_policy(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    trainer = trained(tmp_path, ref_load_in_8bit=True)
    own = trainer.reference.separate_model
    assert own is not None and own.model.layers[0].self_attn.q_proj.weight.dtype == torch.int8
    assert not any(weight.requires_grad for weight in own.parameters())
    # A few hundredths of a nat a completion: far from 0 in float32, and far from a model that differs.
    assert 1e-4 < abs(updates_of(trainer)[0]["objective/kl"]) < 0.1


def test_eight_bits_need_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.is_bitsandbytes_available", lambda: False)
    with pytest.raises(ZooError, match=r"^ref_load_in_8bit needs bitsandbytes, which is not installed"):
        make_trainer(tmp_path, ref_load_in_8bit=True)


class Collated(Spy):
    """With a collator, which `make_trainer` does not know."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pad = DataCollatorWithPadding(kwargs["processing_class"])

        def bare(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
            """As TRL's PPO was given it: without an attention mask, as TRL read none."""
            with torch.device("cpu"):  # a batch in pinned memory
                batch = pad(rows)
            return {"input_ids": batch["input_ids"], PROMPT_INDEX: batch[PROMPT_INDEX]}

        super().__init__(*args, data_collator=bare, **kwargs)


def test_a_collator_that_pads(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    ids = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in prompt_rows(16)["prompt"]]})
    settings: dict[str, Any] = {
        "train_dataset": ids, "eval_dataset": ids, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1,
    }  # fmt: skip
    plain, padded = trained(tmp_path, **settings), trained(tmp_path, kind=Collated, **settings)
    assert digests(padded) == digests(plain)
    assert timeless(padded.state.log_history) == timeless(plain.state.log_history)
    # A mask is heeded, also where a prompt holds PAD; rows without a number get one each.
    batch = {"input_ids": torch.tensor([[0, 0, 5], [4, 0, 3]]), "attention_mask": torch.tensor([[0, 0, 1], [1, 1, 1]])}
    assert plain.rows_from_batch(batch) == [
        {"input_ids": [5], PROMPT_INDEX: 0},
        {"input_ids": [4, 0, 3], PROMPT_INDEX: 1},
    ]


def test_each_held_out_prompt_has_a_stream_of_its_own_under_any_collator(tmp_path: Path) -> None:
    """One that leaves the numbers of the prompts out evaluates as one that keeps them; here with equal prompts."""

    class Bare(Spy):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pad = DataCollatorWithPadding(kwargs["processing_class"])
            super().__init__(
                *args, data_collator=lambda rows: dict(pad([{"input_ids": row["input_ids"]} for row in rows])), **kwargs
            )

    same = Dataset.from_dict({"input_ids": [make_tokenizer()("ab")["input_ids"]] * 12})
    settings: dict[str, Any] = {
        "train_dataset": same, "eval_dataset": {"one": same, "other": same}, "per_device_eval_batch_size": 4,
    }  # fmt: skip
    kept, bare = make_trainer(tmp_path, **settings), make_trainer(tmp_path, kind=Bare, **settings)
    completions = bare.generate_completions()["completion"]
    assert completions == kept.generate_completions()["completion"]
    assert completions[:12] == completions[12:] and len(set(completions)) == 12
    assert timeless([bare.evaluate()]) == timeless([kept.evaluate()])


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
