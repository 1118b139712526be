"""A completion token by token: figures against a computation by hand in float64, and where a run keeps its parts."""

import io
import json
import math
import re
import shutil
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch import nn
from toy_run import answered, make_context, make_recipe, save_start
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

from rlhf_zoo.cli.main import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client import refs
from rlhf_zoo.hub.client.pull import PulledRevision
from rlhf_zoo.hub.client.refs import Checkpoint
from rlhf_zoo.modeling.critic import critic_from
from rlhf_zoo.modeling.logprobs import token_logprobs
from rlhf_zoo.modeling.models import load_causal, load_classifier
from rlhf_zoo.modeling.sampling.sampler import sample
from rlhf_zoo.pipeline.inspect import trace as tracing
from rlhf_zoo.pipeline.inspect.trace import find_traced_policy, trace_checkpoint
from rlhf_zoo.pipeline.inspect.trace_view import show, to_document
from rlhf_zoo.pipeline.stages import ppo
from rlhf_zoo.ppo.actor_critic import shared_value_head
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.custom_loop import samples_from_user
from rlhf_zoo.ppo.kl_controller import KLController, RunningScores
from rlhf_zoo.ppo.trace import TRACE_STREAM, Trace, trace
from rlhf_zoo.rewards import RewardModel, Rewards
from rlhf_zoo.runs.data.turns import parse_prompt
from rlhf_zoo.runs.record import StageRecord

TOKENIZER = make_tokenizer()
PROMPT = "abc"
CLOSE = {"rel": 2e-5, "abs": 2e-5}
FIELDS: dict[str, Any] = {"temperature": 1.3, "response_length": 12, "gamma": 0.9, "lam": 0.8, "kl_coef": 0.2}
COLUMNS = {"answer": "e"}


def begins(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [2.0 if one.startswith(expected) else -1.0 for one, expected in zip(completions, answer, strict=True)]


def args(**fields: Any) -> PPOConfig:
    return PPOConfig(output_dir="unused", report_to="none", use_cpu=DEVICE == "cpu", **FIELDS | fields)


def models() -> dict[str, PreTrainedModel]:
    return {name: make_policy(seed=seed) for name, seed in (("policy", 0), ("reference", 5), ("old", 6))}


def traced(config: PPOConfig, *, seed: int = 1, **options: Any) -> Trace:
    """Of three different policies, a critic from the reward model, and two rewards that weigh 1 and 0.5."""
    rewards = Rewards([RewardModel(make_reward_model(), TOKENIZER, TOKENIZER), begins], weights=[1.0, 0.5])
    parts: dict[str, Any] = {"critic": critic_from(make_reward_model()), "rewards": rewards, "columns": COLUMNS}
    return trace(PROMPT, tokenizer=TOKENIZER, args=config, seed=seed, **models() | parts | options)


CASES: dict[str, dict[str, Any]] = {
    "k1": {},
    "k3": {"kl_estimator": "k3"},
    "loss": {"kl_in": "loss", "kl_estimator": "k2"},
    "sequence": {"action_level": "sequence"},
    "cut": {"response_length": 3, "missing_eos_penalty": 2.0, "gamma": 1.0, "lam": 1.0},
    "clips": {"cliprange": 0.05, "cliprange_high": 0.6, "dual_clip": 3.0, "lam": 0.0},
    "higher": {"cliprange_high": 4.0},
    "running": {"score_centering": "running", "score_scaling": "running", "score_clip": 0.9},
}


@pytest.mark.parametrize("name", CASES)
def test_trace_equals_trainer_and_definitions(tmp_path: Path, name: str) -> None:
    """Trainer and trace each put the formulas together: they must do it alike. δ, ρ and the clip are trace's own."""
    trainer = make_trainer(
        tmp_path, ref_model=make_policy(seed=5), reward_model=make_reward_model(), reward_funcs=[begins],
        reward_weights=[1.0, 0.5], train_dataset=prompt_rows(8), whiten_advantages=False, **FIELDS | CASES[name],
    )  # fmt: skip
    config, old = trainer.args, make_policy(seed=6)
    trainer.controller, trainer.running_scores = KLController(0.7), RunningScores(4, 2.0, 9.0)
    signs: set[tuple[bool, bool]] = set()
    for seed in (1, 2, 3):
        result = traced(
            config, seed=seed, kl_coef=0.7, old=old, critic=trainer.value_model, rewards=trainer.rewards,
            running_scores=trainer.running_scores,
        )  # fmt: skip
        ids = [token.token_id for token in result.tokens]
        rollout = trainer.make_rollout(samples_from_user([PROMPT], [ids], trainer), recompute_logprobs=True)
        advantages = trainer.compute_advantages(
            rollout, trainer.score(rollout, [{"prompt": PROMPT, "input_ids": [0], "answer": "e"}])
        )
        ratios = (rollout.logprobs - token_logprobs(old, rollout.samples, temperature=1.3)).exp()
        k1 = rollout.logprobs - rollout.ref_logprobs
        for figure, tensor in (
            ("logprob", rollout.logprobs), ("ref_logprob", rollout.ref_logprobs), ("kl", k1), ("ratio", ratios),
            ("reward", advantages.rewards), ("value", advantages.values), ("advantage", advantages.advantages),
        ):  # fmt: skip
            told, width = [getattr(token, figure) for token in result.tokens], tensor.shape[1]
            assert told[:-width] == [None] * (len(told) - width)
            assert told[-width:] == pytest.approx(tensor[0].tolist(), **CLOSE), figure
        assert result.shaped_score == pytest.approx(float(advantages.shaped_scores[0]), **CLOSE)
        assert result.score == pytest.approx(float(advantages.reward_scores.total[0]), **CLOSE)
        assert result.score == pytest.approx(result.scores["reward_model"] + 0.5 * result.scores["begins"], **CLOSE)
        assert result.kl == pytest.approx(float(k1.sum()), **CLOSE)
        assert result.ratio == pytest.approx(float(ratios.prod()), **CLOSE)
        assert (result.kl_coef, result.seed, result.length) == (0.7, seed, len(ids))
        assert result.ended == (ids[-1] == EOS) == bool(rollout.samples.ended)
        assert "".join(token.token for token in result.tokens if not token.token.startswith("<")) == result.completion
        low = high = config.cliprange_sequence if name == "sequence" else config.cliprange
        high = high if config.cliprange_high is None else config.cliprange_high
        assert result.cliprange == (1 - low, 1 + high)
        acts = result.tokens[-1:] if name == "sequence" else result.tokens
        for action, following in zip_longest(acts, acts[1:]):
            after = config.gamma * following.value if following else 0.0
            assert action.delta == pytest.approx(action.reward + after - action.value, **CLOSE)
            ratio = result.ratio if name == "sequence" else action.ratio
            signs.add((action.advantage > 0, ratio > 1))
            bad = ratio < 1 - low or ratio > (config.dual_clip or math.inf)
            assert action.clipped == (ratio > 1 + high if action.advantage > 0 else bad)
    assert len(signs) == 4 or name != "clips", "the clip is met from every side"


def test_trace_samples_from_its_keyed_stream() -> None:
    config = args()
    drawn = sample(
        make_policy(), [TOKENIZER(PROMPT)["input_ids"]], keys=[(TRACE_STREAM,)], seed=4, max_new_tokens=12,
        stop_ids=[EOS], pad_id=0, temperature=1.3,
    )  # fmt: skip
    result = traced(config, seed=4)
    assert [token.token_id for token in result.tokens] == drawn.completion_id_lists()[0]
    assert result == traced(config, seed=4)
    assert len({traced(config, seed=seed).completion for seed in range(6)}) > 1


def test_equal_models_have_zero_kl_and_ratio_one() -> None:
    result = traced(args(), reference=make_policy(), old=make_policy())
    assert {(token.kl, token.ratio) for token in result.tokens} == {(0.0, 1.0)} and result.kl == 0 and result.ratio == 1
    against = traced(args(), old=None)
    ratios = [math.exp(token.logprob - token.ref_logprob) for token in against.tokens]
    assert [token.ratio for token in against.tokens] == pytest.approx(ratios, rel=1e-5), "the reference is π_old"


def test_trace_reads_critic_on_shared_trunk() -> None:
    policy = make_policy()
    head = shared_value_head(policy)
    nn.init.constant_(head.summary.bias, 0.25)
    assert {token.value for token in traced(args(), policy=policy, critic=head).tokens} == {0.25}


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("  ", {}, "The prompt is empty: enter a text."),
        ("a\ud800", {}, "half a character"),
        ("a" * (CONTEXT - 11), {}, f"has {CONTEXT - 11} tokens, and with 12 new tokens it exceeds the context of"),
        ("a", {"temperature": math.inf}, "temperature is inf: completions are sampled, so give a finite number."),
        ("a", {"temperature": math.nan}, "temperature is nan: completions are sampled, so give a finite number."),
        ([{"role": "user", "content": "a"}], {}, "the tokenizer has no chat template"),
    ],
)
def test_trace_rejects_bad_requests(prompt: Any, fields: dict[str, Any], message: str) -> None:
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


def test_find_locates_all_models_of_a_run(run: Path) -> None:
    result = find_traced_policy(str(run))
    paths = [part.path for part in (result.policy, result.reference, result.old, *result.reward_models)]
    folders = ("ppo/checkpoint-3", "sft/checkpoint-4", "ppo/checkpoint-2", "reward/checkpoint-4")
    assert paths == [run / folder for folder in folders]
    assert (result.step, result.is_initial, result.is_trusted) == (3, False, True)
    assert find_traced_policy(str(run / "ppo")) == result == find_traced_policy(str(run / "ppo" / "checkpoint-3"))
    assert find_traced_policy(str(run), step=1).old is None, "before the first checkpoint there is the reference"
    assert find_traced_policy(str(run), old="1").old.path == run / "ppo/checkpoint-1"
    assert find_traced_policy(str(run), old=str(run / "ppo/checkpoint-1")).old.path == run / "ppo/checkpoint-1"
    assert find_traced_policy(str(run), old="0").old is None
    first = find_traced_policy(str(run), step=0)
    assert (first.policy, first.step, first.is_initial) == (first.reference, 0, True)


def test_trace_checkpoint_equals_trace_of_its_models(run: Path) -> None:
    state = json.loads((run / "ppo/checkpoint-3/ppo_state.json").read_text())
    assert state["kl_coef"] != 0.05, "β has adapted"
    reward = RewardModel(load_classifier(run / "reward/checkpoint-4"), TOKENIZER, TOKENIZER)
    folders = {"policy": "ppo/checkpoint-3", "old": "ppo/checkpoint-2", "reference": "sft/checkpoint-4"}
    parts: dict[str, Any] = {name: load_causal(run / folder) for name, folder in folders.items()}
    for seed in (1, 2):
        result = trace_checkpoint(find_traced_policy(str(run)), "cd", columns=COLUMNS, seed=seed)
        assert result == trace(
            "cd", **parts, critic=critic_from(run / "ppo/checkpoint-3/critic"), tokenizer=TOKENIZER, seed=seed,
            rewards=Rewards([reward, answered], weights=[1.0, 0.5]), columns=COLUMNS,
            args=args(temperature=2.0, response_length=10, gamma=1.0, lam=0.95, cliprange=0.02),
            kl_coef=state["kl_coef"],
        )  # fmt: skip
    subject = find_traced_policy(str(run))
    asked = trace_checkpoint(subject, "cd", columns=COLUMNS, seed=7, temperature=0.5, max_new_tokens=2)
    assert (asked.seed, asked.temperature, asked.max_new_tokens) == (7, 0.5, 2) and asked.length <= 2


def test_trace_at_step_zero_has_no_kl_and_initial_beta(run: Path) -> None:
    result = trace_checkpoint(find_traced_policy(str(run), step=0), "cd", columns=COLUMNS)
    assert result.kl == 0 and result.ratio == 1 and result.kl_coef == 0.05
    assert any(token.value for token in result.tokens), "the critic is what PPO makes of the reward model"


def test_initial_critic_from_elsewhere_needs_a_known_commit(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    record = StageRecord(copy / "ppo")
    resolved = {**record.read()["resolved"], "value_model_name_or_path": "reward"}
    record.write(resolved=resolved)
    with pytest.raises(ZooError, match=r"The critic of .* started from reward at an unknown commit"):
        trace_checkpoint(find_traced_policy(str(copy), step=0), "cd", columns=COLUMNS)
    record.write(parents={**record.read()["parents"], "value": record.read()["parents"]["reward"]})
    result = find_traced_policy(str(copy), step=0)
    assert result.value_model is not None and result.value_model.path == copy / "reward/checkpoint-4"
    assert trace_checkpoint(result, "cd", columns=COLUMNS).kl == 0
    StageRecord(copy / "reward").write(fingerprint="another")
    with pytest.raises(ZooError, match=r"The value model that .* nor published: trace a later step\."):
        find_traced_policy(str(copy), step=0, reward=str(run / "reward/checkpoint-4"))


def test_trace_rejects_missing_reward_column(run: Path) -> None:
    with pytest.raises(ZooError, match=r"answered cannot be called with .*'?answer'?.*add the columns"):
        trace_checkpoint(find_traced_policy(str(run)), "cd")


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        (".", {"step": 9}, "run/ppo has no checkpoint of step 9: choose 0 (the start of PPO) or one of 1, 2, 3."),
        (".", {"old": "9"}, "has no checkpoint of step 9"),
        (".", {"revision": "best"}, "is a run directory, which has no revisions: pass --step instead."),
        ("sft", {}, "is the folder of the stage sft: pass the folder of the PPO stage."),
        ("ppo/checkpoint-2", {"step": 1}, "is already the checkpoint of a step: remove --step"),
        ("..", {}, "has neither a PPO run nor a PPO checkpoint: pass runs/RECIPE, or train PPO first."),
    ],
)
def test_find_rejects_checkpoints_missing_from_run_directory(
    run: Path, where: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ZooError, match=re.escape(message)):
        find_traced_policy(str(run / where), **options)


def test_find_rejects_parents_that_were_retrained(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    StageRecord(tmp_path / "run" / "reward").write(fingerprint="another")
    with pytest.raises(ZooError, match=r"The reward model .* neither in its run directory nor published"):
        find_traced_policy(str(tmp_path / "run"))
    result = find_traced_policy(str(tmp_path / "run"), reward=str(run / "reward/checkpoint-4"))
    assert [model.path for model in result.reward_models] == [run / "reward/checkpoint-4"]


def test_trace_rejects_different_tokenizer_and_missing_critic(run: Path, tmp_path: Path) -> None:
    result = find_traced_policy(str(run))
    shutil.copytree(run / "ppo/checkpoint-2", tmp_path / "old")
    (tmp_path / "old" / "COMPLETE").unlink()  # it says what training saved, and this is to be another
    make_tokenizer("lkjihgfedcba:;").save_pretrained(tmp_path / "old")
    other = Checkpoint("other", tmp_path / "old")
    with pytest.raises(ZooError, match=r"other has a different tokenizer from .*checkpoint-3, so their log-probab"):
        trace_checkpoint(replace(result, old=other), "cd", columns=COLUMNS)
    shutil.rmtree(tmp_path / "old" / "critic")
    lost = replace(result, policy=other, reference=other, old=None)
    with pytest.raises(ZooError, match=r"other has no critic in critic/, .* train with `push_critic: true`"):
        trace_checkpoint(lost, "cd", columns=COLUMNS)


# A repository


@pytest.fixture
def hub(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Folders for what a Hub gives: the run's checkpoints as they are published, at tags. The real one: test_readme."""
    known = {"local/toy-sft@c": run / "sft/checkpoint-4", "local/toy-reward@d": run / "reward/checkpoint-4"}
    resolved = json.loads((run / "ppo/run.json").read_text())["resolved"]
    for step in (1, 2, 3):
        folder = tmp_path / f"step-{step}"
        shutil.copytree(run / "ppo" / f"checkpoint-{step}", folder)
        (folder / "COMPLETE").unlink()  # is not published
        commits = {"sft": "c", "reward": "d"}
        parents = {stage: {"repo": f"local/toy-{stage}", "commit": commit} for stage, commit in commits.items()}
        (folder / "rlhf_card.json").write_text(json.dumps({"stage": "ppo", "step": step, "parents": parents}))
        (folder / "recipe.json").write_text(json.dumps(resolved))
        known[f"local/toy-ppo@step-{step:06d}"] = folder
    known["local/toy-ppo"] = known["local/toy-ppo@step-000003"]
    known["local/toy-sft"] = known["local/toy-sft@c"]

    def pull(name: str) -> Path:
        if name not in known:
            raise ZooError(f"{name} has no such revision.")
        return known[name]

    def fetch(name: str, **_: Any) -> PulledRevision:
        repo, _at, revision = name.partition("@")
        return PulledRevision(repo, revision or "main", "c", pull(name), [])

    monkeypatch.setattr(refs, "fetch", fetch)
    monkeypatch.setattr(tracing, "_read_tags", lambda *_: {step: f"step-{step:06d}" for step in (1, 2, 3)})
    return known


def test_trace_of_repository_equals_trace_of_its_run(run: Path, hub: dict[str, Path]) -> None:
    result = find_traced_policy("local/toy-ppo")
    assert (result.step, result.is_trusted, result.old.name) == (3, False, "local/toy-ppo@step-000002")
    ours = trace_checkpoint(result, "cd", columns=COLUMNS, reward_funcs=["toy_run:answered"])
    assert ours == trace_checkpoint(find_traced_policy(str(run)), "cd", columns=COLUMNS)
    second = find_traced_policy("local/toy-ppo", step=2)
    assert second == find_traced_policy("local/toy-ppo@step-000002")
    assert second == find_traced_policy("local/toy-ppo", revision="step-000002")
    assert second.old.name == "local/toy-ppo@step-000001" and find_traced_policy("local/toy-ppo", step=1).old is None
    pulled = find_traced_policy(str(hub["local/toy-ppo"]))
    assert (pulled.step, pulled.old, pulled.is_trusted) == (3, None, False)
    assert find_traced_policy("local/toy-ppo", step=0).is_initial


def test_trace_imports_no_code_named_by_download_unless_asked(hub: dict[str, Path]) -> None:
    result = find_traced_policy("local/toy-ppo")
    with pytest.raises(ZooError, match="also rewarded by toy_run:answered, but code that a download names"):
        trace_checkpoint(result, "cd")
    unweighted = {"reward_funcs": ["no_such_module:f"], "reward_weights": [1.0, 0.0]}
    evil = replace(result, settings={**result.settings, **unweighted})
    assert set(trace_checkpoint(evil, "cd").scores) == {"reward_model"}, "a reward with weight 0 is left out"
    with pytest.raises(ZooError, match=r"--reward_funcs names os:system, but the reward functions of .* are toy_run:"):
        trace_checkpoint(result, "cd", reward_funcs=["os:system"])


def test_find_accepts_working_directory(run: Path, hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "ppo/checkpoint-2")
    assert find_traced_policy(".").step == 2
    pulled = hub["local/toy-ppo"]
    monkeypatch.chdir(pulled)
    assert (find_traced_policy(".").step, find_traced_policy(".").is_trusted) == (3, False)
    (pulled / "run.json").write_text("{}")
    with pytest.raises(ZooError, match="has schema None"):
        find_traced_policy(".")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("local/toy-sft", {}, "local/toy-sft is not a PPO policy of rlhf-zoo (it has no ppo_state.json)"),
        ("local/toy-ppo", {"step": 9}, "local/toy-ppo@step-000009 has no such revision."),
        ("local/toy-ppo@best", {"step": 1}, "has more than one revision"),
        ("local/none", {}, "local/none has no such revision."),
    ],
)
def test_find_rejects_repositories_without_ppo_run(
    hub: dict[str, Path], name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ZooError, match=re.escape(message)):
        find_traced_policy(name, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cliprange": "wide"}, "cliprange in .*recipe.json is 'wide', but it takes a number."),
        ({"reward_weights": [1.0]}, "has 1 reward_weights for 2 rewards"),
        ({"reward_model_path": None, "reward_weights": [1.0]}, "was trained without a reward model: remove --reward"),
    ],
)
def test_trace_validates_settings_of_downloads(hub: dict[str, Path], change: dict[str, Any], message: str) -> None:
    result = find_traced_policy("local/toy-ppo")
    with pytest.raises(ZooError, match=message):
        trace_checkpoint(replace(result, settings={**result.settings, **change}), "cd")


def test_trace_rejects_malformed_ppo_state(hub: dict[str, Path]) -> None:
    state = hub["local/toy-ppo"] / "ppo_state.json"
    for content in ('{"kl_coef": "x"}', '{"kl_coef": 1, "scores_seen": ["x"]}', "[]"):
        state.write_text(content)
        with pytest.raises(ZooError, match="was not written by PPO"):
            trace_checkpoint(find_traced_policy("local/toy-ppo"), "cd", reward_funcs=["toy_run:answered"])


# What is printed


def printed(found: Trace, width: int = 140) -> str:
    named = SimpleNamespace(name="[red]local/x[/]", path=Path())
    traced_policy: Any = SimpleNamespace(name=named.name, policy=named, reference=named, old=None, rewards=(), step=3)
    console = Console(file=io.StringIO(), width=width)
    show(found, traced_policy, console)
    return console.file.getvalue()


def test_trace_table_shows_every_token_without_markup() -> None:
    result = traced(args())
    first = replace(result.tokens[0], token="[bold]x[/bold]\x1b[2J")
    shown = printed(replace(result, prompt="[link]", completion="[/nonsense]", tokens=(first, *result.tokens[1:])))
    assert "'[bold]x[/bold]\\x1b[2J'" in shown and "\x1b[2J" not in shown
    assert "'[link]' → '[/nonsense]'" in shown and "[red]local/x[/], step 3" in shown
    lines = [line for line in shown.splitlines() if line.rstrip().endswith((" yes", " no"))]
    assert len(lines) == result.length
    for line, token in zip(lines[1:], result.tokens[1:], strict=True):
        assert line.split()[:3] == [repr(token.token), f"{token.logprob:.3f}", f"{token.ref_logprob:.3f}"]
        assert line.split()[-1] == ("yes" if token.clipped else "no")
    assert f"ΣKL {result.kl:.3f} nats, β 0.2" in shown and f"score {result.score:.3f} (" in shown
    assert "Training whitens advantages over a batch" in shown
    bandit = printed(traced(args(action_level="sequence")))
    assert "the completion is one action" in bandit
    assert sum(line.rstrip().endswith((" yes", " no")) for line in bandit.splitlines()) == 1


def test_trace_json_is_strict_and_complete(run: Path) -> None:
    subject = find_traced_policy(str(run))
    result = trace_checkpoint(subject, "cd", columns=COLUMNS)
    document = json.loads(json.dumps(to_document(result, subject), allow_nan=False))
    assert document.keys() == {"prompt", "completion", "tokens", "totals", "models"}
    assert [one["logprob"] for one in document["tokens"]] == [token.logprob for token in result.tokens]
    assert document["totals"]["kl"] == result.kl and document["models"]["old"].endswith("checkpoint-2")
    nowhere = replace(result, scores={"answered": None})
    assert "answered does not apply" in printed(nowhere) and nowhere.to_json()["totals"]["scores"] == {"answered": None}


# The command


def test_trace_reads_conversation_through_chat_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for turn in messages %}{{ {'system': 'a', 'user': 'b'}[turn.role] }}{{ turn.content }}{% endfor %}"
        "{% if add_generation_prompt %}c{% endif %}"
    )
    turns = parse_prompt('[{"role": "system", "content": "d"}, {"role": "user", "content": "e"}]')
    parts = {**models(), "critic": make_policy(), "rewards": Rewards([good]), "args": args()}
    result = trace(turns, tokenizer=tokenizer, **parts)
    expected = trace("adbec", tokenizer=TOKENIZER, **parts)
    assert result.tokens == expected.tokens and result.completion == expected.completion
    assert result.to_json()["prompt"] == turns


def test_trace_command_prints_json_and_reports_bad_input(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*given: str) -> None:
        cli.main(["trace", str(run), "--prompt", "cd", *given], standalone_mode=False)

    command("--json", "--columns", '{"answer": "e"}')
    document = json.loads(capsys.readouterr().out)
    assert document["totals"]["kl"] == pytest.approx(sum(token["kl"] for token in document["tokens"]), abs=1e-12)
    for given, message in (
        (("--columns", "{x"), "--columns is '{x', which is not JSON"),
        (("--columns", "[1]"), "--columns is '[1]', which is not a JSON object"),
        (("--prompt", '[{"role": "user"'), "--prompt begins like a conversation, but is not JSON"),
        (("--prompt", '[{"role": "user"}]'), "--prompt is not a conversation: write [{"),
        (("--prompt", '[{"content": "hi"}]'), "--prompt is not a conversation: write [{"),
        (("--prompt", '[{"role": "user", "content": "hi"}]'), "the tokenizer has no chat template"),
        (("--stage", "sft", "--step", "2"), "--stage sft is step 0, so it does not go with --step 2: pass only one"),
    ):
        with pytest.raises(ZooError, match=re.escape(message)):
            command(*given)
    process = zoo("trace", "runs/none", "--prompt", "cd", home=tmp_path, cwd=tmp_path)
    assert process.returncode == 2 and process.stdout == ""
    (output,) = errors(process.stderr)
    assert output.startswith("Error: runs/none is not a run directory, and the embedded Hub has no repository of")
    assert output.endswith(": pass runs/RECIPE or NAMESPACE/NAME.")
