"""A completion token by token: figures against a computation by hand in float64, and where a run keeps its parts."""

from __future__ import annotations

import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from toy_run import make_context, make_recipe, save_start
from trainer_fixture import (
    CONTEXT,
    DEVICE,
    EOS,
    good,
    make_policy,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    prompt_rows,
)
from transformers import PreTrainedModel
from zoo_process import errors, zoo

from rlhf_zoo.actor_critic import shared_value_head
from rlhf_zoo.cli import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub import lineage
from rlhf_zoo.models import critic_from
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.control import RunningScores
from rlhf_zoo.ppo.stepwise import given_samples
from rlhf_zoo.ppo.trace import TRACE_STREAM, Trace, trace
from rlhf_zoo.record import StageRecord
from rlhf_zoo.rewards import RewardModel, Rewards
from rlhf_zoo.sampling import sample
from rlhf_zoo.stages import ppo
from rlhf_zoo.stages import trace as tracing
from rlhf_zoo.stages.trace import Named, document, find, show, trace_checkpoint

TOKENIZER = make_tokenizer()
MEAN, STD = 0.3, 0.5  # of make_reward_model's scores
PROMPT = "abc"
# Log-probabilities and values are float32 here and float64 by hand, and a dozen of them add up in an advantage.
CLOSE = {"rel": 2e-5, "abs": 2e-5}


def begins(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [2.0 if one.startswith(wanted) else -1.0 for one, wanted in zip(completions, answer, strict=True)]


def args(**fields: Any) -> PPOConfig:
    given: dict[str, Any] = {"temperature": 1.3, "response_length": 12, "gamma": 0.9, "lam": 0.8, "kl_coef": 0.2}
    return PPOConfig(output_dir="unused", report_to="none", use_cpu=DEVICE == "cpu", **given | fields)


def models() -> dict[str, PreTrainedModel]:
    return {name: make_policy(seed=seed) for name, seed in (("policy", 0), ("reference", 5), ("old", 6))}


def traced(config: PPOConfig, *, seed: int = 1, **given: Any) -> Trace:
    """Of three different policies, a critic from the reward model, and two rewards that weigh 1 and 0.5."""
    reward = make_reward_model()
    rewards = Rewards([RewardModel(reward, TOKENIZER, TOKENIZER), begins], weights=[1.0, 0.5])
    parts: dict[str, Any] = {
        **models(), "critic": critic_from(make_reward_model()), "rewards": rewards, "columns": {"answer": "e"},
    }  # fmt: skip
    return trace(PROMPT, tokenizer=TOKENIZER, args=config, seed=seed, **parts | given)


@torch.no_grad()
def by_hand(found: Trace, config: PPOConfig, *, beta: float) -> dict[str, list]:
    """What a token's numbers are, by their definitions: one pass of each model over the whole text, in float64."""
    prompt = TOKENIZER(PROMPT)["input_ids"]
    ids = [token.token_id for token in found.tokens]
    text = torch.tensor([[*prompt, *ids]])
    before = slice(len(prompt) - 1, -1)

    def said(model: PreTrainedModel) -> list[float]:
        logps = (model.double()(input_ids=text).logits[0, before] / config.temperature).log_softmax(-1)
        return [float(logps[place, index]) for place, index in enumerate(ids)]

    logp, ref, old = (said(model) for model in models().values())
    values = critic_from(make_reward_model()).double().eval()(input_ids=text).logits[0, before, 0].tolist()
    raw = float(make_reward_model().double()(input_ids=text).logits[0, 0])
    score = (raw - MEAN) / STD + 0.5 * (2.0 if found.completion.startswith("e") else -1.0)
    if not found.ended and config.missing_eos_penalty is not None:
        score -= config.missing_eos_penalty
    k1 = [a - b for a, b in zip(logp, ref, strict=True)]
    charged = [math.exp(-k) - 1 + k for k in k1] if config.kl_estimator == "k3" else k1
    beta = beta if config.kl_in == "reward" else 0.0
    log_ratio = [a - b for a, b in zip(logp, old, strict=True)]
    low = high = config.cliprange
    if config.action_level == "sequence":
        charged, values, log_ratio = [math.fsum(charged)], values[:1], [math.fsum(log_ratio)]
        low = high = config.cliprange_sequence
    rewards = [-beta * kl for kl in charged]
    rewards[-1] += score
    last = len(rewards) - 1
    deltas = [
        reward + (config.gamma * values[t + 1] if t < last else 0.0) - values[t] for t, reward in enumerate(rewards)
    ]
    decay = config.gamma * config.lam
    advantages = [sum(decay**step * delta for step, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
    high = high if config.cliprange_high is None else config.cliprange_high
    stops = [
        ratio > 1 + high if a > 0 else ratio < 1 - low or ratio > (config.dual_clip or math.inf)
        for a, ratio in zip(advantages, map(math.exp, log_ratio), strict=True)
    ]
    ratios = [math.exp(a - b) for a, b in zip(logp, old, strict=True)]
    return {
        "logprob": logp, "ref_logprob": ref, "kl": k1, "ratio": ratios, "reward": rewards, "value": values,
        "delta": deltas, "advantage": advantages, "clipped": stops, "paid": [score],
        "cliprange": [1 - low, 1 + high],
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "k1": {},
    "k3": {"kl_estimator": "k3"},
    "loss": {"kl_in": "loss", "kl_estimator": "k2"},
    "sequence": {"action_level": "sequence"},
    "cut": {"response_length": 3, "missing_eos_penalty": 2.0, "gamma": 1.0, "lam": 1.0},
    "clips": {"cliprange": 0.05, "cliprange_high": 0.6, "dual_clip": 3.0, "lam": 0.0},
    "higher": {"cliprange_high": 4.0},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_figure_against_its_definition(name: str, seed: int) -> None:
    config = args(**CASES[name])
    found = traced(config, seed=seed, kl_coef=0.7)
    expected = by_hand(found, config, beta=0.7)
    for figure in ("logprob", "ref_logprob", "kl", "ratio"):
        assert [getattr(token, figure) for token in found.tokens] == pytest.approx(expected[figure], **CLOSE), figure
    count = len(expected["reward"])
    for figure in ("reward", "value", "delta", "advantage"):
        told = [getattr(token, figure) for token in found.tokens]
        assert told[:-count] == [None] * (len(told) - count)
        assert told[-count:] == pytest.approx(expected[figure], **CLOSE), figure
    assert [token.clipped for token in found.tokens][-count:] == expected["clipped"]
    assert list(found.cliprange) == expected["cliprange"]
    assert found.shaped_score == pytest.approx(expected["paid"][0], **CLOSE)
    assert found.kl == pytest.approx(math.fsum(expected["kl"]), **CLOSE)
    assert found.ratio == pytest.approx(math.prod(expected["ratio"]), **CLOSE)
    assert found.score == pytest.approx(found.scores["reward_model"] + 0.5 * found.scores["begins"], **CLOSE)
    assert (found.kl_coef, found.seed, found.length) == (0.7, seed, len(found.tokens))
    assert found.ended == (found.tokens[-1].token_id == EOS)
    assert "".join(token.token for token in found.tokens if not token.token.startswith("<")) == found.completion


def test_running_statistics_take_the_place_of_stored_ones() -> None:
    reward = RewardModel(make_reward_model(), TOKENIZER, TOKENIZER, center=False, scale=False)
    config = args(score_centering="running", score_scaling="running", score_clip=0.9)
    seen = RunningScores(4, 2.0, 9.0)  # mean 1/2, variance (9 − 4/4)/3
    for seed in range(4):
        found = traced(config, seed=seed, scores_seen=seen, rewards=Rewards([reward]))
        stored = by_hand(found, config, beta=0.2)["paid"][0] - (1.0 if found.completion.startswith("e") else -0.5)
        raw = stored * STD + MEAN
        assert found.score == pytest.approx(raw, **CLOSE)
        assert found.shaped_score == pytest.approx(min(max((raw - 0.5) / math.sqrt(8 / 3), -0.9), 0.9), **CLOSE)
        paid = sum(token.reward + 0.2 * token.kl for token in found.tokens)
        assert paid == pytest.approx(found.shaped_score, **CLOSE)


def test_the_cases_meet_every_branch() -> None:
    found = {name: [traced(args(**fields), seed=seed) for seed in (1, 2, 3)] for name, fields in CASES.items()}
    for name in ("k1", "clips"):
        assert {token.clipped for one in found[name] for token in one.tokens} == {True, False}
    assert any(one.ended for one in found["k1"]) and not all(one.ended for one in found["cut"])
    assert {one.scores["begins"] for each in found.values() for one in each} <= {2.0, -1.0}
    signs = {(token.advantage > 0, token.ratio > 1) for one in found["clips"] for token in one.tokens}
    assert len(signs) == 4
    raised = [token for one in found["higher"] for token in one.tokens if token.advantage > 0 and 1.2 < token.ratio < 5]
    assert raised and not any(token.clipped for token in raised)


def test_the_tokens_are_those_of_the_keyed_stream() -> None:
    config = args()
    drawn = sample(
        make_policy(), [TOKENIZER(PROMPT)["input_ids"]], keys=[(TRACE_STREAM,)], seed=4, max_new_tokens=12,
        stop_ids=[EOS], pad_id=0, temperature=1.3,
    )  # fmt: skip
    found = traced(config, seed=4)
    assert [token.token_id for token in found.tokens] == drawn.token_lists()[0]
    assert found == traced(config, seed=4)
    assert len({traced(config, seed=seed).completion for seed in range(6)}) > 1


def test_equal_models_have_no_kl_and_ratio_one() -> None:
    found = traced(args(), reference=make_policy(), old=make_policy())
    assert {(token.kl, token.ratio) for token in found.tokens} == {(0.0, 1.0)} and found.kl == 0 and found.ratio == 1
    against = traced(args(), old=None)
    ratios = [math.exp(token.logprob - token.ref_logprob) for token in against.tokens]
    assert [token.ratio for token in against.tokens] == pytest.approx(ratios, rel=1e-5), "the reference is π_old"


@pytest.mark.parametrize(
    "fields", [{}, {"missing_eos_penalty": 1.5, "response_length": 4}, {"action_level": "sequence"}]
)
def test_it_is_what_the_trainer_makes_of_the_same_completion(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Trainer and trace each put the formulas together: they must do it alike."""
    policy, reference, reward = make_policy(), make_policy(seed=5), make_reward_model()
    trainer = make_trainer(
        tmp_path, model=policy, ref_model=reference, reward_model=reward, train_dataset=prompt_rows(8), kl_coef=0.2,
        whiten_advantages=False, **fields,
    )  # fmt: skip
    rewards = Rewards([RewardModel(make_reward_model(), TOKENIZER, TOKENIZER)])
    found = trace(
        PROMPT, policy=make_policy(), reference=make_policy(seed=5), critic=critic_from(make_reward_model()),
        rewards=rewards, tokenizer=TOKENIZER, args=trainer.args,
    )  # fmt: skip
    ids = [token.token_id for token in found.tokens]
    rollout = trainer.evaluated(given_samples([PROMPT], [ids], trainer), recompute=True)
    estimates = trainer.estimate(rollout, trainer.score(rollout, [{"prompt": PROMPT, "input_ids": [0]}]))
    assert found.shaped_score == pytest.approx(float(estimates.scores[0]), rel=1e-6)
    count = estimates.rewards.shape[1]
    for figure, tensor in (
        ("reward", estimates.rewards),
        ("value", estimates.values),
        ("advantage", estimates.advantages),
    ):
        told = [getattr(token, figure) for token in found.tokens][-count:]
        assert told == pytest.approx(tensor[0].tolist(), rel=1e-5, abs=1e-6), figure


def test_a_critic_on_the_policys_trunk() -> None:
    policy = make_policy()
    head = shared_value_head(policy)
    nn.init.constant_(head.summary.bias, 0.25)
    assert {token.value for token in traced(args(), policy=policy, critic=head).tokens} == {0.25}


def test_whitening_is_named_where_training_does_it() -> None:
    assert "whitens advantages over a whole batch" in traced(args()).whitening
    assert "whitens rewards and advantages" in traced(args(whiten_rewards=True)).whitening
    assert traced(args(whiten_advantages=False)).whitening == ""


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("  ", {}, "The prompt is empty: write the beginning of a text."),
        ("a\ud800", {}, "half of a character"),
        (
            "a" * (CONTEXT - 11),
            {},
            f"has {CONTEXT - 11} tokens, and with 12 new ones it passes the context of {CONTEXT}",
        ),
        ("a", {"temperature": math.inf}, "temperature is inf: completions are sampled, so give a finite number."),
        ("a", {"temperature": math.nan}, "temperature is nan: completions are sampled, so give a finite number."),
        ([{"role": "user", "content": "a"}], {}, "the tokenizer has no chat template"),
    ],
)
def test_what_cannot_be_traced(prompt: Any, fields: dict[str, Any], message: str) -> None:
    rewards = Rewards([good])
    with pytest.raises(ZooError, match=message):
        trace(prompt, **models(), critic=make_policy(), rewards=rewards, tokenizer=TOKENIZER, args=args(**fields))


# A run directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three updates of PPO under an adaptive β, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("run")
    functions = {"reward_funcs": ["toy_run:answered"], "reward_weights": [1.0, 0.5]}
    make_recipe(folder, ppo={"kl_target": 0.01, "kl_horizon": 20, "cliprange": 0.02, **functions})
    save_start(folder)
    assert ppo.run(make_context(folder))
    return folder / "run"


def test_a_run_is_found_with_all_its_parts(run: Path) -> None:
    found = find(str(run))
    parts = {name: getattr(found, name).path for name in ("policy", "reference", "reward", "old")}
    assert parts == {
        "policy": run / "ppo/checkpoint-3",
        "reference": run / "sft/checkpoint-4",
        "reward": run / "reward/checkpoint-4",
        "old": run / "ppo/checkpoint-2",
    }
    assert (found.step, found.begins, found.trusted) == (3, False, True)
    assert find(str(run / "ppo")) == found == find(str(run / "ppo" / "checkpoint-3"))
    assert find(str(run), step=1).old is None, "before the first checkpoint there is the reference"
    assert find(str(run), old="1").old.path == run / "ppo/checkpoint-1"
    assert find(str(run), old=str(run / "ppo/checkpoint-1")).old.path == run / "ppo/checkpoint-1"
    assert find(str(run), old="0").old is None
    first = find(str(run), step=0)
    assert (first.policy, first.step, first.begins) == (first.reference, 0, True)


def test_figures_of_a_run_are_those_of_its_checkpoints(run: Path) -> None:
    state = json.loads((run / "ppo/checkpoint-3/ppo_state.json").read_text())
    assert state["kl_coef"] != 0.05, "β has adapted"
    folders = {"policy": "ppo/checkpoint-3", "old": "ppo/checkpoint-2", "reference": "sft/checkpoint-4"}
    policies = {name: type(make_policy()).from_pretrained(run / folder) for name, folder in folders.items()}
    critic = critic_from(run / "ppo/checkpoint-3/critic").double().eval()
    clipped = set()
    for seed in (1, 2, 3):
        found = trace_checkpoint(find(str(run)), "cd", columns={"answer": "e"}, seed=seed)
        assert (found.kl_coef, found.temperature, found.max_new_tokens) == (state["kl_coef"], 2.0, 10)
        assert found.cliprange == (1 - 0.02, 1 + 0.02) and found.scores["answered"] in (0.0, 1.0)
        text = torch.tensor([[*TOKENIZER("cd")["input_ids"], *(token.token_id for token in found.tokens)]])
        logps = {}
        with torch.no_grad():
            for name, policy in policies.items():
                logits = policy.double()(input_ids=text).logits[0, 1:-1] / 2.0
                logps[name] = logits.log_softmax(-1).gather(-1, text[0, 2:, None])[:, 0]
            values = critic(input_ids=text).logits[0, 1:-1, 0]
        ours = {name: [getattr(token, name) for token in found.tokens] for name in ("kl", "ratio", "value")}
        assert ours["kl"] == pytest.approx((logps["policy"] - logps["reference"]).tolist(), abs=1e-5)
        assert ours["ratio"] == pytest.approx((logps["policy"] - logps["old"]).exp().tolist(), abs=1e-5)
        assert ours["value"] == pytest.approx(values.tolist(), abs=1e-5)
        for token in found.tokens:
            assert token.clipped == (token.ratio > 1.02 if token.advantage > 0 else token.ratio < 0.98)
            clipped.add(token.clipped)
        paid = sum(token.reward + found.kl_coef * token.kl for token in found.tokens)
        assert paid == pytest.approx(found.scores["reward_model"] + 0.5 * found.scores["answered"], abs=1e-5)
    assert clipped == {True, False}


def test_the_beginning_of_a_run(run: Path) -> None:
    found = trace_checkpoint(find(str(run), step=0), "cd", columns={"answer": "e"})
    assert found.kl == 0 and found.ratio == 1 and found.kl_coef == 0.05
    assert any(token.value for token in found.tokens), "the critic is what PPO makes of the reward model"


def test_what_a_user_asks_for_goes_before_the_runs_settings(run: Path) -> None:
    found = trace_checkpoint(find(str(run)), "cd", columns={"answer": "e"}, seed=7, temperature=0.5, max_new_tokens=2)
    assert (found.seed, found.temperature, found.max_new_tokens) == (7, 0.5, 2) and found.length <= 2


def test_a_reward_function_that_misses_its_column_says_so(run: Path) -> None:
    with pytest.raises(ZooError, match=r"answered cannot be called with .*'?answer'?.*give the prompts each column"):
        trace_checkpoint(find(str(run)), "cd")


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        (".", {"step": 9}, "run/ppo has no checkpoint of step 9: it has 1, 2, 3, and 0 is where PPO began."),
        (".", {"old": "9"}, "has no checkpoint of step 9"),
        (".", {"revision": "best"}, "is a run directory, which has no revisions: give --step instead."),
        ("sft", {}, "holds a run of the stage sft, and PPO's is traced: give its own."),
        ("ppo/checkpoint-2", {"step": 1}, "is the checkpoint of one step, and --step is given too"),
        ("..", {}, "holds no run of PPO and no checkpoint of one: give runs/RECIPE, or train it first."),
    ],
)
def test_what_a_run_directory_does_not_hold(run: Path, where: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError) as caught:
        find(str(run / where) if where != "." else str(run), **options)
    assert message in str(caught.value)


def test_parents_trained_again_are_others(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    StageRecord(tmp_path / "run" / "reward").write(fingerprint="another")
    with pytest.raises(ZooError, match=r"The reward model .* neither beside it nor published: name it with --reward\."):
        find(str(tmp_path / "run"))
    found = find(str(tmp_path / "run"), reward=str(run / "reward/checkpoint-4"))
    assert found.reward.path == run / "reward/checkpoint-4"


def test_another_tokenizer_and_a_lost_critic(run: Path, tmp_path: Path) -> None:
    found = find(str(run))
    shutil.copytree(run / "ppo/checkpoint-2", tmp_path / "old")
    (tmp_path / "old" / "COMPLETE").unlink()  # it says what training saved, and this is to be another
    make_tokenizer("lkjihgfedcba:;").save_pretrained(tmp_path / "old")
    strange = replace(found, old=Named("strange", tmp_path / "old"))
    with pytest.raises(ZooError, match=r"strange has another tokenizer than .*checkpoint-3, so its log-probabilities"):
        trace_checkpoint(strange, "cd", columns={"answer": "e"})
    shutil.rmtree(tmp_path / "old" / "critic")
    lost = replace(found, policy=Named("lost", tmp_path / "old"), reference=Named("lost", tmp_path / "old"), old=None)
    with pytest.raises(ZooError, match="lost holds no critic/, so it has no values"):
        trace_checkpoint(lost, "cd", columns={"answer": "e"})


# A repository


@pytest.fixture
def hub(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Folders for what a Hub gives: the run's checkpoints as they are published, at tags. The real one: test_readme."""
    known = {"local/toy-sft@c": run / "sft/checkpoint-4", "local/toy-reward@d": run / "reward/checkpoint-4"}
    parents = {"sft": {"repo": "local/toy-sft", "commit": "c"}, "reward": {"repo": "local/toy-reward", "commit": "d"}}
    resolved = json.loads((run / "ppo/run.json").read_text())["resolved"]
    for step in (1, 2, 3):
        folder = tmp_path / f"step-{step}"
        shutil.copytree(run / "ppo" / f"checkpoint-{step}", folder)
        (folder / "COMPLETE").unlink()  # is not published
        parents = {
            "sft": {"repo": "local/toy-sft", "commit": "c"},
            "reward": {"repo": "local/toy-reward", "commit": "d"},
        }
        (folder / "rlhf_card.json").write_text(json.dumps({"stage": "ppo", "step": step, "parents": parents}))
        (folder / "recipe.json").write_text(json.dumps(resolved))
        known[f"local/toy-ppo@step-{step:06d}"] = folder
    known["local/toy-ppo"] = known["local/toy-ppo@step-000003"]
    known["local/toy-sft"] = known["local/toy-sft@c"]

    def pull(name: str) -> Path:
        if name not in known:
            raise ZooError(f"{name} has no such revision.")
        return known[name]

    for module in (tracing, lineage):
        monkeypatch.setattr(module, "pull", pull)
    monkeypatch.setattr(tracing, "_tags", lambda repo: {step: f"step-{step:06d}" for step in (1, 2, 3)})
    return known


def test_a_repository_gives_the_figures_of_its_run(run: Path, hub: dict[str, Path]) -> None:
    found = find("local/toy-ppo")
    assert (found.step, found.trusted, found.old.name) == (3, False, "local/toy-ppo@step-000002")
    ours = trace_checkpoint(found, "cd", columns={"answer": "e"}, reward_funcs=["toy_run:answered"])
    assert ours == trace_checkpoint(find(str(run)), "cd", columns={"answer": "e"})
    second = find("local/toy-ppo", step=2)
    assert second == find("local/toy-ppo@step-000002") == find("local/toy-ppo", revision="step-000002")
    assert second.old.name == "local/toy-ppo@step-000001" and find("local/toy-ppo", step=1).old is None
    pulled = find(str(hub["local/toy-ppo"]))
    assert (pulled.step, pulled.old, pulled.trusted) == (3, None, False)
    assert find("local/toy-ppo", step=0).begins


def test_no_code_that_a_download_names_is_imported_unasked(hub: dict[str, Path]) -> None:
    found = find("local/toy-ppo")
    with pytest.raises(ZooError, match="rewarded by toy_run:answered too, and no code that a download names"):
        trace_checkpoint(found, "cd")
    evil = replace(
        found, resolved={**found.resolved, "reward_funcs": ["no_such_module:f"], "reward_weights": [1.0, 0.0]}
    )
    assert set(trace_checkpoint(evil, "cd").scores) == {"reward_model"}, "what weighs nothing is left out"
    with pytest.raises(ZooError, match=r"--reward_funcs names os:system, and .* was rewarded by toy_run:answered"):
        trace_checkpoint(found, "cd", reward_funcs=["os:system"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("local/toy-sft", {}, "local/toy-sft is no PPO policy of rlhf-zoo (it holds no ppo_state.json)"),
        ("local/toy-ppo", {"step": 9}, "local/toy-ppo@step-000009 has no such revision."),
        ("local/toy-ppo@best", {"step": 1}, "is asked for at more than one revision"),
        ("local/none", {}, "local/none has no such revision."),
    ],
)
def test_what_a_repository_is_not(hub: dict[str, Path], name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError) as caught:
        find(name, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cliprange": "wide"}, "cliprange in .*recipe.json is 'wide', and it takes a number."),
        ({"reward_weights": [1.0]}, "gives 1 reward_weights for 2 rewards"),
        (
            {"reward_model_path": None, "reward_weights": [1.0]},
            "was trained without a reward model: leave --reward out",
        ),
    ],
)
def test_settings_of_a_download_are_checked(hub: dict[str, Path], change: dict[str, Any], message: str) -> None:
    found = find("local/toy-ppo")
    with pytest.raises(ZooError, match=message):
        trace_checkpoint(replace(found, resolved={**found.resolved, **change}), "cd")


def test_a_state_that_ppo_did_not_write(hub: dict[str, Path]) -> None:
    state = hub["local/toy-ppo"] / "ppo_state.json"
    for content in ('{"kl_coef": "x"}', '{"kl_coef": 1, "scores_seen": ["x"]}', "[]"):
        state.write_text(content)
        with pytest.raises(ZooError, match="is not what PPO writes there"):
            trace_checkpoint(find("local/toy-ppo"), "cd", reward_funcs=["toy_run:answered"])


# What is printed


def printed(found: Trace, width: int = 140) -> str:
    named = SimpleNamespace(name="[red]local/x[/]", path=Path())
    subject: Any = SimpleNamespace(policy=named, reference=named, old=None, reward=None, step=3)
    console = Console(file=io.StringIO(), width=width)
    show(found, subject, console)
    return console.file.getvalue()


def test_the_table_shows_every_token_and_reads_none_of_it_as_markup() -> None:
    found = traced(args())
    first = replace(found.tokens[0], token="[bold]x[/bold]\x1b[2J")
    shown = printed(replace(found, prompt="[link]", completion="[/nonsense]", tokens=(first, *found.tokens[1:])))
    assert "'[bold]x[/bold]\\x1b[2J'" in shown and "\x1b[2J" not in shown
    assert "'[link]' → '[/nonsense]'" in shown and "[red]local/x[/], step 3" in shown
    lines = [line for line in shown.splitlines() if line.rstrip().endswith((" yes", " no"))]
    assert len(lines) == found.length
    for line, token in zip(lines[1:], found.tokens[1:], strict=True):
        assert line.split()[:3] == [repr(token.token), f"{token.logprob:.3f}", f"{token.ref_logprob:.3f}"]
        assert line.split()[-1] == ("yes" if token.clipped else "no")
    assert f"ΣKL {found.kl:.3f} nats, β 0.2" in shown and f"score {found.score:.3f} (" in shown
    assert "Training whitens advantages over a whole batch" in shown


def test_a_bandits_action_stands_on_the_last_token() -> None:
    shown = printed(traced(args(action_level="sequence")))
    assert "the completion is one action" in shown
    assert sum(line.rstrip().endswith((" yes", " no")) for line in shown.splitlines()) == 1


def test_json_is_strict_and_whole(run: Path) -> None:
    subject = find(str(run))
    found = trace_checkpoint(subject, "cd", columns={"answer": "e"})
    told = json.loads(json.dumps(document(found, subject), allow_nan=False))
    assert told.keys() == {"prompt", "completion", "tokens", "totals", "models"}
    assert [one["logprob"] for one in told["tokens"]] == [token.logprob for token in found.tokens]
    assert told["totals"]["kl"] == found.kl and told["models"]["old"].endswith("checkpoint-2")
    nowhere = replace(found, scores={"answered": None})
    assert "answered does not apply" in printed(nowhere) and nowhere.to_json()["totals"]["scores"] == {"answered": None}


# The command


def test_the_command_and_its_mistakes(run: Path, tmp_path: Path) -> None:
    """One process; the other mistakes are refused before anything is imported."""
    path = str(Path(__file__).parents[1])
    columns = ("--columns", '{"answer": "e"}')
    done = zoo("trace", run, "--prompt", "cd", "--json", *columns, home=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["totals"]["kl"] == pytest.approx(sum(token["kl"] for token in told["tokens"]), abs=1e-12)
    for given, message in (
        (("--columns", "{x"), "--columns is '{x', which is not JSON"),
        (("--columns", "[1]"), "--columns is '[1]', which is no JSON object"),
        (("--stage", "sft", "--step", "2"), "--stage sft is step 0, and --step 2 is given too"),
    ):
        with pytest.raises(ZooError) as caught:
            cli.main(["trace", str(run), "--prompt", "cd", *given], standalone_mode=False)
        assert message in str(caught.value)
    done = zoo("trace", "runs/none", "--prompt", "cd", home=tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    (said,) = errors(done.stderr)
    assert said.startswith("Error: runs/none is no run directory, and the embedded Hub has no repository")
    assert said.endswith("has no repository of this name that this token may read: give runs/RECIPE or NAMESPACE/NAME.")
