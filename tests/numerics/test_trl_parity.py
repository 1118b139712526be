"""Parity with the PPOTrainer of TRL 1.12.0, the last release that has one.

`trl_parity/generate.py` ran it and saved its tensors. On responses of full length everything agrees: models, formulas,
and the weights after each update of a run. If a response ends early, two conventions differ on purpose (L is the number
of its tokens, the last of which is EOS):
    TRL puts the score at position L, one after EOS; we put it on EOS, at position L − 1.
    TRL's returns and value loss use the critic's value at L, the state after EOS; ours treat that value as 0.
With a mask of one more position, which restates both, our formulas also give TRL's tensors on such responses.

Not compared: TRL logs ½ log²ρ as approximate KL, we log ρ − 1 − log ρ. TRL divides logits by τ + 1e-7, so our runs use
τ + 1e-7. Our critic's head has a bias, unlike TRL's, so it is frozen here. The cases avoid TRL's bugs (no bf16, no
clipping of gradients, no last batch of a pass over the prompts, no PAD among the sampled tokens), except for
minibatches under gradient accumulation, which one case shows.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor, nn
from trainer_fixture import DEVICE, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from rlhf_zoo import functional as F
from rlhf_zoo.modeling.critic import critic_from, response_values
from rlhf_zoo.modeling.logprobs import response_logits, token_logprobs
from rlhf_zoo.modeling.prompts import PROMPT_TOKENS
from rlhf_zoo.modeling.sampling.sampler import Samples
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.rollout import Advantages, Rollout
from rlhf_zoo.ppo.trainer import PPOTrainer
from rlhf_zoo.rewards import RewardModel

HERE = Path(__file__).with_name("trl_parity")
FACTS = json.loads((HERE / "cases.json").read_text())
CASES = FACTS["cases"]
PAD, EOS = FACTS["architecture"]["pad_token_id"], FACTS["architecture"]["eos_token_id"]
EARLY_ENDING = ("early_eos", "early_eos_whitened")
FULL = tuple(case for case in CASES if case not in EARLY_ENDING)
REPLAYED = tuple(case for case in FULL if case != "minibatches_ignored")

# In units of a tensor's largest entry (at least 1); float32, whose epsilon is 1.2e-7. Sums have different orders: TRL
# samples and scores left-padded rows with a cache, we run whole rows and score them padded on the right. Largest error:
# 5.4e-7 (values of the second update; 7.1e-7 with AVX2, as the fixture is from a machine with AVX-512), 2.2e-7 for the
# formulas alone, and 1.8e-7 for a weight after an update. On a GPU, 3.8e-6 for a change of the weights.
TOLERANCE = 1e-6 if DEVICE == "cpu" else 1e-5
# Far above either tolerance: the least change of an update, or of a planted difference.
MIN_CHANGE = 1e-3


def assert_close(
    actual: Any, expected: Any, label: str, mask: Tensor | None = None, *, within: float = TOLERANCE
) -> None:
    """Asserts that both agree, but only where `mask` is True, if there is a mask."""
    actual, expected = (x.double() if isinstance(x, Tensor) else torch.tensor(x).double() for x in (actual, expected))
    assert actual.shape == expected.shape, label
    actual, expected = (x if mask is None else x[mask] for x in (actual, expected))
    assert expected.numel(), label
    error = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))
    assert error <= within, f"{label}: {error:.3g}"


@cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(HERE / f"{name}.safetensors", device=DEVICE)


def build(name: str, weights: Tensor) -> Any:
    """Builds the model `name` of generate.py from its flattened weights."""
    layout = FACTS["layout"][name]
    causal = name in ("policy", "reference")
    kind = LlamaForCausalLM if causal else LlamaForSequenceClassification
    model = kind(LlamaConfig(**FACTS["architecture"], **({} if causal else {"num_labels": 1})))
    sizes = [int(torch.tensor(shape).prod()) for shape in layout.values()]
    parts = zip(layout.items(), weights.split(sizes), strict=True)
    model.load_state_dict({key: part.reshape(shape) for (key, shape), part in parts})
    return model.eval()


def flatten(model: nn.Module, layout: Mapping[str, Any]) -> Tensor:
    """Flattens the model's weights in the fixture's order, without the bias of a critic."""
    weights = model.state_dict()
    assert set(weights) - set(layout) <= {"score.bias"}
    return torch.cat([weights[name].flatten() for name in layout])


@dataclass(frozen=True)
class Update:
    """TRL's results of one update of one case."""

    case: str
    index: int

    @property
    def settings(self) -> dict[str, Any]:
        return CASES[self.case]["settings"]

    @property
    def logged(self) -> dict[str, float]:
        return CASES[self.case]["logs"][self.index]

    @property
    def temperature(self) -> float:
        return self.settings["temperature"] + 1e-7

    def __getitem__(self, name: str) -> Tensor:
        return tensors(self.case)[f"{self.index}.{name}"]

    @property
    def mask(self) -> Tensor:
        """The mask of TRL's policy terms, (B, T)."""
        return ~self["padding_mask"]

    @property
    def value_mask(self) -> Tensor:
        """The mask of TRL's value terms, (B, T): one position more than `mask` if a response ended early."""
        return ~self["padding_mask_p1"]

    @property
    def samples(self) -> Samples:
        queries, responses = self["queries"], self["responses"]
        mask = self.mask
        return Samples(
            prompt_ids=queries,
            prompt_mask=queries != PAD,
            completion_ids=responses,
            mask=mask,
            logprobs=self["logprobs"].masked_fill(~mask, 0),
            ended=(responses == EOS).any(1),
        )

    @property
    def early(self) -> Tensor:
        """Which responses end before the last position, (B,)."""
        return ~self.mask.all(1)

    @property
    def has_weights(self) -> bool:
        """Whether the fixture has the weights that this update began with."""
        return self.index == 0 or f"{self.index - 1}.policy" in tensors(self.case)

    def model(self, name: str) -> Any:
        """Returns a model with its weights at the start of the update."""
        trained = self.index and name in ("policy", "value_model")
        weights = tensors(self.case)[f"{self.index - 1}.{name}"] if trained else tensors("models")[name]
        model = build(name, weights)
        if self.settings["stop_token"] == "eos" and name in ("policy", "reference"):
            with torch.no_grad():
                model.lm_head.weight[EOS, 0] = FACTS["ending_bias"]
        return model


def parametrize_updates(updates: Sequence[Update]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("update", updates, ids=[f"{update.case}-{update.index}" for update in updates])


ALL_UPDATES = [Update(case, index) for case in CASES for index in (0, 1)]


def test_fixture_matches_generating_script() -> None:
    spec = importlib.util.spec_from_file_location("generate", HERE / "generate.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert {case: facts["settings"] for case, facts in CASES.items()} == script.CASES
    assert FACTS["architecture"] == script.ARCHITECTURE and FACTS["ending_bias"] == script.OFTEN
    assert FACTS["versions"]["trl"] == "1.12.0" and len(script.CASES) == 7
    files = [path for path in HERE.iterdir() if path.is_file() and path.suffix != ".py"]
    assert {path.stem for path in files} == {"cases", "models", *CASES}
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert sum(path.stat().st_size for path in files) < 400_000
    assert make_tokenizer().convert_ids_to_tokens(range(len(FACTS["tokens"]))) == FACTS["tokens"]


def test_cases_cover_clips_kl_and_early_ends() -> None:
    """Prompts of several lengths, active clips, a KL, full and early-ending responses."""
    for update in ALL_UPDATES:
        lengths = (update["queries"] != PAD).sum(1)
        assert len(lengths.unique()) > 2 and (update["queries"][:, -1] != PAD).all()
        assert update["kl"].abs().max() > 0.05
        if update.index == 0:
            assert update.logged["policy/clipfrac_avg"] > 0.1 and update.logged["val/clipfrac_avg"] > 0.1
        if update.case in EARLY_ENDING:
            assert update.early.any() and not update.samples.ended.all() and len(update.mask.sum(1).unique()) > 2
            assert (update.value_mask.sum(1) - update.mask.sum(1)).tolist() == update.early.long().tolist()
        else:
            assert update.mask.all() and update.value_mask.all() and not update.samples.ended.any()


@parametrize_updates([update for update in ALL_UPDATES if update.has_weights])
def test_models_reproduce_trls_logprobs_values_and_scores(update: Update) -> None:
    """TRL computed its log-probabilities in `generate`, while sampling."""
    samples, tokenizer = update.samples, make_tokenizer()
    for model, name in (("policy", "logprobs"), ("reference", "ref_logprobs")):
        ours = token_logprobs(update.model(model), samples, temperature=update.temperature, batch_size=3)
        assert_close(ours, update[name], name, samples.mask)
    # The value of the state after EOS is the critic's output at EOS.
    critic, extended = critic_from(update.model("value_model")).eval(), replace(samples, mask=update.value_mask)
    with torch.no_grad():
        assert_close(response_values(critic, extended), update["values"], "values", update.value_mask)
        rows = update["micro_rows"][0]
        first = samples.select(rows)
        logits = response_logits(update.model("policy"), first, temperature=update.temperature)
        logprobs = F.selected_logprobs(logits, first.completion_ids)
        width = first.mask.shape[1]
        assert_close(logprobs, update["micro_logprobs"][0][:, :width], "first micro-batch", first.mask)
    scorer = RewardModel(update.model("reward_model"), tokenizer, tokenizer, batch_size=3)
    assert_close(scorer.score_samples(samples, [""] * len(samples)), update["raw_scores"], "scores")


@parametrize_updates(ALL_UPDATES)
def test_formulas_reproduce_trls_tensors(update: Update) -> None:
    """On full-length responses both masks are True everywhere; on others `value_mask` restates TRL's convention."""
    settings, mask, value_mask = update.settings, update.mask, update.value_mask
    kl = F.kl_penalty(update["logprobs"], update["ref_logprobs"], estimator=settings["kl_estimator"])
    assert_close(kl.masked_fill(~mask, 0), update["kl"], "kl")
    scores = F.missing_eos_penalty(update["raw_scores"], update.samples.ended, penalty=settings["missing_eos_penalty"])
    assert_close(scores, update["scores"], "scores")
    rewards = F.token_rewards(scores, kl.masked_fill(~mask, 0), value_mask, kl_coef=settings["kl_coef"])
    if settings["whiten_rewards"]:
        assert_close(rewards, update["raw_rewards"], "rewards before whitening")
        rewards = F.whiten(rewards, value_mask, F.masked_moments(rewards, value_mask), shift_mean=False)
    assert_close(rewards, update["rewards"], "rewards")
    advantages, returns = F.gae(rewards, update["values"], value_mask, gamma=settings["gamma"], lam=settings["lam"])
    assert_close(advantages, update["raw_advantages"], "advantages before whitening")
    assert_close(returns, update["returns"], "returns")
    assert_close(F.whiten(advantages, mask, F.masked_moments(advantages, mask)), update["advantages"], "advantages")

    policy_clipped, value_clipped = [], []
    for i, rows in enumerate(update["micro_rows"]):
        tokens, states = mask[rows], value_mask[rows]
        losses, clipped = F.clipped_policy_loss(
            update["micro_logprobs"][i], update["logprobs"][rows], update["advantages"][rows],
            cliprange=settings["cliprange"],
        )  # fmt: skip
        assert_close(
            F.aggregate(losses, tokens, token_count=tokens.sum()), update["micro_policy_loss"][i], "policy loss"
        )
        policy_clipped.append(F.masked_mean(clipped.float(), tokens))
        losses, clipped = F.clipped_value_loss(
            update["micro_values"][i], update["values"][rows], update["returns"][rows],
            cliprange=settings["cliprange_value"],
        )  # fmt: skip
        assert_close(F.aggregate(losses, states, token_count=states.sum()), update["micro_value_loss"][i], "value loss")
        value_clipped.append(F.masked_mean(clipped.float(), states))
    if update.case != "minibatches_ignored":
        assert_close(torch.stack(policy_clipped).mean(), update.logged["policy/clipfrac_avg"], "policy clips")
        assert_close(torch.stack(value_clipped).mean(), update.logged["val/clipfrac_avg"], "value clips")


@parametrize_updates([update for update in ALL_UPDATES if update.case in EARLY_ENDING])
def test_early_ends_differ_from_trl_in_two_known_places(update: Update) -> None:
    """The position of the score, and TRL's value of the state after EOS with all its consequences."""
    settings, mask, after_eos = update.settings, update.mask, update.value_mask & ~update.mask
    early, last, scores = update.early, F.last_token(mask), update["scores"]
    assert torch.equal(after_eos.nonzero(), torch.stack([early.nonzero()[:, 0], last[early] + 1], 1))
    on_eos = torch.zeros_like(mask)
    on_eos[early, last[early]] = True
    ours = F.token_rewards(scores, update["kl"], mask, kl_coef=settings["kl_coef"])
    theirs = update["raw_rewards"] if settings["whiten_rewards"] else update["rewards"]
    assert_close(ours, theirs, "all other rewards", ~(on_eos | after_eos))
    assert_close(ours[on_eos] - theirs[on_eos], scores[early], "rewards on EOS")
    assert_close(theirs[after_eos], scores[early], "rewards after EOS")
    assert (update["values"][after_eos].abs() > 1e-2).all()
    if settings["whiten_rewards"]:
        return
    # In TRL δ at L is score − V(L) and δ on EOS has γV(L); here δ on EOS has the score, and nothing follows.
    advantages, _ = F.gae(ours, update["values"], mask, gamma=settings["gamma"], lam=settings["lam"])
    assert_close(advantages[~early], update["raw_advantages"][~early], "advantages of full-length responses")
    gamma, decay = settings["gamma"], settings["gamma"] * settings["lam"]
    value_after = (update["values"] * after_eos).sum(1)
    shift_on_eos = gamma * value_after + decay * (scores - value_after) - scores
    steps = (last.unsqueeze(1) - torch.arange(mask.shape[1])).clamp(min=0)
    shifted = advantages + decay**steps * shift_on_eos.unsqueeze(1)
    assert_close(shifted, update["raw_advantages"], "advantages of early-ending responses", mask & early.unsqueeze(1))


class Replay(PPOTrainer):
    """A PPOTrainer that uses TRL's sampled tokens, and records its own results."""

    def __init__(self, *args: Any, case: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.case = case
        self.results: list[tuple[Rollout, Advantages, dict[str, Tensor], dict[str, Tensor]]] = []
        self.rates: list[list[float]] = [[], []]
        self.updating = False
        self.create_optimizer().register_step_post_hook(self._record_rate)

    def _record_rate(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.updating:
            return  # Trainer's own step after `training_step`, which finds no gradients
        [rate] = {group["lr"] for group in optimizer.param_groups}
        self.rates[self.state.global_step].append(float(rate))

    def rollout(self, rows: Sequence[Mapping], *, stream: int) -> Rollout:
        update = Update(self.case, self.state.global_step)
        samples = update.samples
        prompts = [ids[keep].tolist() for ids, keep in zip(samples.prompt_ids, samples.prompt_mask, strict=True)]
        assert [row[PROMPT_TOKENS] for row in rows] == prompts
        return self.make_rollout(samples, recompute_logprobs=True)

    def run_epochs(self, model: nn.Module, rollout: Rollout, advantages: Advantages) -> dict[str, Tensor]:
        self.updating = True
        progress = super().run_epochs(model, rollout, advantages)
        self.updating = False
        layout = FACTS["layout"]
        models = {"policy": self.policy, "value_model": self.value_model}
        weights = {name: flatten(part, layout[name]) for name, part in models.items()}
        self.results.append((rollout, advantages, progress, weights))
        return progress


def replay_run(directory: Path, monkeypatch: pytest.MonkeyPatch, case: str, **overrides: Any) -> Replay:
    """Runs our trainer for two updates on TRL's prompts, completions and order of rows."""
    first, second = Update(case, 0), Update(case, 1)
    settings = first.settings | {"temperature": first.temperature} | overrides
    args = PPOConfig(
        output_dir=str(directory), max_steps=2, max_grad_norm=0.0, train_sampling_strategy="sequential",
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=DEVICE == "cpu", **settings,
    )  # fmt: skip
    critic: PreTrainedModel = critic_from(first.model("value_model"))
    critic.score.bias.requires_grad_(False)
    queries = [ids[ids != PAD].tolist() for update in (first, second) for ids in update["queries"]]
    trainer = Replay(
        args=args, processing_class=make_tokenizer(), model=first.model("policy"), ref_model=first.model("reference"),
        reward_model=first.model("reward_model"), value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": queries}), case=case,
    )  # fmt: skip
    orders = [order for update in (first, second) for order in update["permutations"]]

    def recorded_order(size: int, **_: Any) -> Tensor:
        order = orders.pop(0)
        assert len(order) == size
        return order

    with monkeypatch.context() as patched:
        patched.setattr(torch, "randperm", recorded_order)
        trainer.train()
    assert not orders and len(trainer.results) == 2
    return trainer


@pytest.mark.filterwarnings("ignore:kl_estimator 'k3'")
@pytest.mark.parametrize("options", [{}, {"max_tokens_per_micro_batch": 40}], ids=["rows", "tokens"])
@pytest.mark.parametrize("case", REPLAYED)
def test_trainer_reproduces_trls_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, options: dict[str, int]
) -> None:
    """Estimates, losses and weights after each of two updates, from the initial weights."""
    # Batches of other shapes round differently.
    assert_near = partial(assert_close, within=1e-5 if options else TOLERANCE)
    trainer = replay_run(tmp_path, monkeypatch, case, **options)
    ours = [row for row in trainer.state.log_history if "loss" in row]
    changes = []
    for index, (rollout, advantages, progress, weights) in enumerate(trainer.results):
        update = Update(case, index)
        for name in ("logprobs", "ref_logprobs", "values"):
            assert_near(getattr(rollout, name), update[name], name)
        assert_near(advantages.shaped_scores, update["scores"], "scores")
        for name in ("rewards", "advantages", "returns"):
            assert_near(getattr(advantages, name), update[name], name)
        logged = progress | ours[index]
        for name, trls in {
            "loss/policy": "loss/policy_avg", "loss/value": "loss/value_avg", "policy/clipfrac": "policy/clipfrac_avg",
            "value/clipfrac": "val/clipfrac_avg", "policy/ratio": "val/ratio",
            "objective/entropy": "policy/entropy_avg",
            "objective/shaped_score": "objective/scores", "objective/non_score_reward": "objective/non_score_reward",
            "objective/rlhf_reward": "objective/rlhf_reward", "learning_rate": "lr", "episodes": "episode",
        }.items():  # fmt: skip
            assert_near(logged[name], update.logged[trls], name)
        if update.settings["kl_estimator"] == "k1":
            assert_near(logged["objective/kl"], update.logged["objective/kl"], "objective/kl")
        assert len(trainer.rates[index]) == CASES[case]["optimizer_steps"][index]
        assert sorted(set(trainer.rates[index])) == CASES[case]["learning_rates"][index]
        for name, flattened in weights.items():
            trl_weights = tensors(case).get(f"{index}.{name}")
            if trl_weights is not None:
                before = tensors("models")[name]
                assert_near(flattened - before, trl_weights - before, f"{name} after update {index}")
                changes.append(float((trl_weights - before).abs().max()))
    assert changes and min(changes) > MIN_CHANGE


def test_trl_ignores_minibatches_under_accumulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two minibatches of one micro-batch each, TRL makes a single step, like our run with one minibatch."""
    case = "minibatches_ignored"
    settings, steps = Update(case, 0).settings, CASES[case]["optimizer_steps"][0]
    assert settings["num_mini_batches"] * settings["num_ppo_epochs"] == 2 * steps
    one_minibatch = replay_run(tmp_path / "one", monkeypatch, case, num_mini_batches=1)
    two_minibatches = replay_run(tmp_path / "two", monkeypatch, case)
    for name in ("policy", "value_model"):
        trl_weights, before = Update(case, 0)[name], tensors("models")[name]
        assert_close(one_minibatch.results[0][3][name] - before, trl_weights - before, name)
        assert (two_minibatches.results[0][3][name] - trl_weights).abs().max() > MIN_CHANGE
    assert len(two_minibatches.rates[0]) == 2 * len(one_minibatch.rates[0]) == 2 * steps
    # TRL's averages count the slots of minibatches that it never filled.
    assert Update(case, 0).logged["val/ratio"] == pytest.approx(
        float(one_minibatch.results[0][2]["policy/ratio"]) / 2, abs=TOLERANCE
    )
