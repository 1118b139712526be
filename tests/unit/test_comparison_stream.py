"""Comparison streams: figures against plain float64 passes, snapshots, concurrency, and errors."""

import gc
import json
import math
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_models import CONTEXT, Toys, save_toys
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from rlhf_zoo.app.engine import Comparison, PolicyCompletion, Snapshot, lockstep
from rlhf_zoo.app.engine.fair_lock import FairLock
from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.critic import critic_from
from rlhf_zoo.modeling.models import load_causal, load_classifier
from rlhf_zoo.modeling.special_tokens import train_tokenizer
from rlhf_zoo.ppo.actor_critic import ActorCritic, shared_value_head

PROMPT = "the camera"
# A cached pass in float32 against a plain one in float64: logits of this size differ by some 1e-6, and a KL by less.
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """With a critic of its own beside the PPO policy."""
    toys = save_toys(tmp_path_factory.mktemp("toys"))
    critic_from(load_classifier(toys.reward)).save_pretrained(toys.ppo / "critic")
    return toys


@pytest.fixture(scope="module")
def comparison(toys: Toys) -> Comparison:
    return Comparison.load(ppo=toys.ppo, sft=toys.sft, reward=toys.reward, device="cpu")


def last(comparison: Comparison, prompt: str = PROMPT, **settings) -> Snapshot:
    *_, end = comparison.stream(prompt, **settings)
    return end


def prompt_ids(toys: Toys) -> list[int]:
    return AutoTokenizer.from_pretrained(toys.ppo)(PROMPT)["input_ids"]


in_float64 = cache(partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float64))


def plain_logprobs(path: Path, prompt: list[int], completion: tuple[int, ...], temperature: float) -> torch.Tensor:
    """log π of every token of the vocabulary before each of the completion's: one pass in float64, no cache. (T, V)."""
    model = in_float64(path)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


# ---- the figures


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.4, 0.8)])
def test_comparison_figures_match_plain_float64_passes(
    comparison: Comparison, toys: Toys, temperature: float, top_p: float
) -> None:
    snapshot = last(comparison, seed=4, temperature=temperature, top_p=top_p, max_new_tokens=12, n=3)
    prompt = prompt_ids(toys)
    assert len(snapshot.sft) == len(snapshot.ppo) == 3
    for side in (*snapshot.sft, *snapshot.ppo):
        ppo, sft = (plain_logprobs(path, prompt, side.token_ids, temperature) for path in (toys.ppo, toys.sft))
        taken = range(side.length), list(side.token_ids)
        expected = {
            "token_logprob_ppo": ppo[taken],
            "token_logprob_sft": sft[taken],
            "token_log_ratio": ppo[taken] - sft[taken],
            "token_kl": (ppo.exp() * (ppo - sft)).sum(-1),
            "token_kl_reverse": (sft.exp() * (sft - ppo)).sum(-1),
            "token_entropy_ppo": -(ppo.exp() * ppo).sum(-1),
            "token_entropy_sft": -(sft.exp() * sft).sum(-1),
        }
        for name, figures in expected.items():
            assert getattr(side, name) == pytest.approx(figures.tolist(), abs=ROUNDING), name
        assert side.log_ratio == pytest.approx(expected["token_log_ratio"].sum().item(), abs=ROUNDING * side.length)
        assert side.kl == pytest.approx(expected["token_kl"].sum().item(), abs=ROUNDING * side.length)
        assert min(side.token_kl) > 1e-3 > 0, "these policies differ everywhere, so a constant 0 would show"
    assert snapshot.sft != snapshot.ppo


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.35])
@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_comparison_draws_tokens_by_inverse_nucleus_cdf(
    comparison: Comparison, toys: Toys, name: str, top_p: float
) -> None:
    """Row i draws with the stream of (seed, 7) for i = 0 and (seed, 7, i) after it, whichever policy it is."""
    seed, length, n = 11, 12, 4
    snapshot = last(comparison, seed=seed, temperature=0.9, top_p=top_p, max_new_tokens=length, n=n)
    prompt = prompt_ids(toys)
    for row, side in enumerate(getattr(snapshot, name)):
        key = [7, row] if row else [7]
        stream = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, len(key), *key]))).random(length)
        for logps, token, uniform in zip(
            plain_logprobs(getattr(toys, name), prompt, side.token_ids, 0.9).tolist(),
            side.token_ids,
            stream,
            strict=False,
        ):
            probabilities = np.exp(logps)
            likeliest = np.argsort(-probabilities, kind="stable")
            before = np.cumsum(probabilities[likeliest]) - probabilities[likeliest]
            nucleus = np.sort(likeliest[before < top_p])
            below = np.cumsum(probabilities[nucleus])
            assert token == nucleus[np.searchsorted(below, uniform * below[-1], side="right")]


def test_comparison_rewards_values_and_stop_reasons_match_transformers(comparison: Comparison, toys: Toys) -> None:
    """Each completion alone, by plain transformers."""
    snapshot = last(comparison, seed=3, max_new_tokens=6, n=6)
    prompt = prompt_ids(toys)
    scorer = AutoModelForSequenceClassification.from_pretrained(toys.reward)
    critic = AutoModelForTokenClassification.from_pretrained(toys.ppo / "critic")
    eos = critic.config.eos_token_id
    sides = (*snapshot.sft, *snapshot.ppo)
    for side in sides:
        ids = torch.tensor([[*prompt, *side.token_ids]])
        with torch.no_grad():
            score, values = scorer(ids).logits.item(), critic(ids).logits[0, len(prompt) - 1 : -1, 0]
        assert side.reward == pytest.approx((score - 0.1) / 0.5, abs=1e-4)
        assert side.token_values == pytest.approx(values.tolist(), abs=ROUNDING)
        assert side.stop == ("eos" if side.token_ids[-1] == eos else "length")
        assert side.ended == (side.stop == "eos") and (side.ended or side.length == 6)
        assert eos not in side.token_ids[:-1]
    assert {side.stop for side in sides} == {"eos", "length"}
    assert len({side.reward for side in sides}) > 1


def test_comparison_reward_model_with_other_tokenizer_reads_text(toys: Toys, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["the camera is good and the menu is slow"] * 4, vocab_size=300, max_length=CONTEXT)
    load_classifier(toys.reward).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    comparison = Comparison.load(ppo=toys.ppo, sft=toys.sft, reward=tmp_path, device="cpu")
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    snapshot = last(comparison, seed=3, max_new_tokens=6, n=6)
    for side in (*snapshot.sft, *snapshot.ppo):
        ids = tokenizer(PROMPT + side.completion)["input_ids"] + [tokenizer.eos_token_id] * side.ended
        with torch.no_grad():
            assert side.reward == pytest.approx((scorer(torch.tensor([ids])).logits.item() - 0.1) / 0.5, abs=1e-4)


def test_comparison_values_come_from_shared_value_head(toys: Toys, tmp_path: Path) -> None:
    policy = load_causal(toys.ppo)
    head = shared_value_head(policy)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        torch.nn.init.normal_(head.summary.weight)
        torch.nn.init.normal_(head.summary.bias)
    ActorCritic(policy, head).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(toys.ppo).save_pretrained(tmp_path)
    comparison = Comparison.load(ppo=tmp_path, sft=toys.sft, device="cpu")
    prompt = prompt_ids(toys)
    snapshot = last(comparison, seed=1, max_new_tokens=9, temperature=0.7, n=2)
    assert comparison.has_critic
    for side in (*snapshot.sft, *snapshot.ppo):
        with torch.no_grad():
            hidden = policy(torch.tensor([[*prompt, *side.token_ids]]), output_hidden_states=True).hidden_states[-1]
        expected = (hidden @ head.summary.weight.T + head.summary.bias)[0, len(prompt) - 1 : -1, 0]
        assert side.token_values == pytest.approx(expected.tolist(), abs=ROUNDING)


def test_comparison_without_critic_or_with_broken_one(toys: Toys, tmp_path: Path) -> None:
    comparison = Comparison.load(ppo=toys.sft, sft=toys.sft)
    assert not comparison.has_critic and not comparison.has_reward_model
    assert comparison.compare(PROMPT).ppo.token_values is None
    load_causal(toys.ppo).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(toys.ppo).save_pretrained(tmp_path)
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "value_head.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ZooError, match="critic"):
        Comparison.load(ppo=tmp_path, sft=toys.sft)


# ---- the stream


def test_snapshots_grow_by_one_token(comparison: Comparison) -> None:
    snapshots = list(comparison.stream(PROMPT, seed=3, max_new_tokens=40, n=3))
    end = snapshots[-1]
    assert [one.done for one in snapshots] == [False] * (len(snapshots) - 1) + [True]
    assert len(snapshots) == max(side.length for side in (*end.sft, *end.ppo))
    assert len({side.length for side in (*end.sft, *end.ppo)}) > 1, "none ended before the others"
    for step, snapshot in enumerate(snapshots, start=1):
        for side, whole in zip((*snapshot.sft, *snapshot.ppo), (*end.sft, *end.ppo), strict=True):
            finished = step >= whole.length
            assert side == whole if finished else side.length == step
            assert side.token_ids == whole.token_ids[:step] and side.tokens == whole.tokens[:step]
            assert side.token_kl == whole.token_kl[:step]
            assert whole.completion.startswith(side.completion)
            if not finished:
                assert side.stop is side.reward is side.token_values is None and not side.ended


def test_stream_pace_skips_only_middle_snapshots(comparison: Comparison) -> None:
    options = {"seed": 3, "max_new_tokens": 40, "top_p": 0.8}
    whole = list(comparison.stream(PROMPT, **options))
    assert whole[-1].pair() == comparison.compare(PROMPT, **options)
    first, end = comparison.stream(PROMPT, **options, every=3600.0)
    assert (first, end) == (whole[0], whole[-1])
    assert list(comparison.stream(PROMPT, **options, every=0.0)) == whole


def test_snapshot_serializes_to_strict_json(comparison: Comparison) -> None:
    snapshot = last(comparison, seed=1, n=2)
    back = json.loads(json.dumps(snapshot.to_json(), allow_nan=False))
    assert back["n"] == 2 and back["ppo"][1]["tokens"] == list(snapshot.ppo[1].tokens)
    assert back["sft"][0]["token_kl"] == list(snapshot.sft[0].token_kl)
    endless = PolicyCompletion("", math.nan, math.inf, (-math.inf,), ("a",), 1, True)
    shown = Snapshot(PROMPT, 1, 1.0, 1.0, 1, (endless,), (endless,), True).pair().to_json()
    assert shown["sft"]["reward"] is shown["sft"]["log_ratio"] is shown["sft"]["token_log_ratio"][0] is None


def test_equal_policies_write_same_text_with_zero_kl(toys: Toys) -> None:
    same = Comparison.load(ppo=toys.sft, sft=toys.sft, reward=toys.reward)
    snapshot = last(same, seed=5, n=4, max_new_tokens=20)
    assert snapshot.sft == snapshot.ppo
    assert len({side.token_ids for side in snapshot.sft}) == 4
    for side in snapshot.sft:
        assert set(side.token_log_ratio) == set(side.token_kl) == set(side.token_kl_reverse) == {0.0}


@contextmanager
def record_passes(comparison: Comparison) -> Iterator[dict[str, list[tuple[int, ...]]]]:
    """The shapes of every forward pass of both policies, as they happen."""
    shapes: dict[str, list[tuple[int, ...]]] = {"sft": [], "ppo": []}
    with ExitStack() as hooks:
        for name, policy in comparison._policies.items():

            def keep(_, args, kwargs, seen=shapes[name]) -> None:
                seen.append(tuple(kwargs["input_ids"].shape))

            hooks.enter_context(policy.register_forward_pre_hook(keep, with_kwargs=True))
        yield shapes


def test_stream_runs_one_pass_per_step_over_distinct_texts(comparison: Comparison) -> None:
    with record_passes(comparison) as shapes:
        snapshots = list(comparison.stream(PROMPT, seed=3, max_new_tokens=40, n=3))
    assert shapes["sft"] == shapes["ppo"] and len(shapes["ppo"]) == len(snapshots)
    end = snapshots[-1]
    prompt = shapes["ppo"][0][1]
    texts = [
        len({side.token_ids[:step] for side in (*end.sft, *end.ppo) if side.length > step})
        for step in range(len(snapshots))
    ]
    assert shapes["ppo"] == [(rows, prompt if step == 0 else 1) for step, rows in enumerate(texts)]
    assert texts[0] == 1 < max(texts) <= 6 and texts[-1] < max(texts), "the prompt is read once, and rows part later"


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """Every key-value cache that is made."""
    references: list[weakref.ref] = []

    class Watched(lockstep.DynamicCache):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            references.append(weakref.ref(self))

    monkeypatch.setattr(lockstep, "DynamicCache", Watched)
    return references


def count_alive(caches: list[weakref.ref]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in caches)


def test_closing_stream_stops_and_frees_caches(comparison: Comparison, caches: list[weakref.ref]) -> None:
    stream = comparison.stream(PROMPT, seed=1, max_new_tokens=40, n=4)
    assert not caches, "nothing runs before the first snapshot is asked for"
    for _ in range(3):
        next(stream)
    assert count_alive(caches) == 2
    with ThreadPoolExecutor(1) as other:
        assert other.submit(comparison.compare, PROMPT).result(timeout=60), "a reader that pauses keeps its turn"
    assert count_alive(caches) == 2
    with record_passes(comparison) as shapes:
        stream.close()
        assert shapes == {"sft": [], "ppo": []} and count_alive(caches) == 0
        with pytest.raises(StopIteration):
            next(stream)
    assert comparison.compare(PROMPT)


# ---- many at once


def test_concurrent_streams_equal_sequential_ones(comparison: Comparison, toys: Toys) -> None:
    jobs = [
        {"seed": seed, "n": 1 + seed % 3, "temperature": 0.7 + seed / 10, "top_p": 1 - seed % 2 / 4}
        for seed in range(4)
    ]
    expected = [last(comparison, **job) for job in jobs]
    inside, overlaps = [0], []
    start = threading.Barrier(len(jobs))

    def enter(*_) -> None:
        inside[0] += 1
        overlaps.append(inside[0])

    def leave(*_) -> None:
        inside[0] -= 1

    def go(job: dict) -> Snapshot:
        start.wait(30)
        return last(comparison, **job)

    with ExitStack() as hooks, ThreadPoolExecutor(len(jobs)) as pool:
        for model in (*comparison._policies.values(), comparison._reward.model):
            hooks.enter_context(model.register_forward_pre_hook(enter))
            hooks.enter_context(model.register_forward_hook(leave))
        assert list(pool.map(go, jobs)) == expected
    assert set(overlaps) == {1}, "two threads were in the models at the same time"


def test_fair_lock_serves_in_request_order() -> None:
    turns, order, threads = FairLock(), [], []

    def take(name: int) -> None:
        with turns:
            order.append(name)

    turns.__enter__()
    for name in range(6):
        threads.append(threading.Thread(target=take, args=(name,)))
        threads[-1].start()
        while len(turns._waiting) <= name:
            threading.Event().wait(0.001)
    turns.__exit__(None, None, None)
    with turns:
        order.append(-1)
    for thread in threads:
        thread.join(30)
    assert order == [0, 1, 2, 3, 4, 5, -1]
    assert not turns._is_taken and not turns._waiting


# ---- what fails


FULL = r"memory .* is full: request fewer completions"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (None, ZooError, FULL),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), ZooError, FULL),
        (MemoryError(), ZooError, FULL),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError, "cannot be multiplied"),
    ],
)
def test_out_of_memory_raises_readable_error_and_keeps_models_usable(
    comparison: Comparison, caches: list[weakref.ref], error: BaseException | None, kind: type, message: str
) -> None:
    expected = comparison.compare(PROMPT)
    steps = []

    def burst(*_) -> None:
        steps.append(1)
        if len(steps) == 4:
            if error is not None:
                raise error
            torch.empty(2**58, dtype=torch.uint8)

    with comparison._policies["ppo"].register_forward_pre_hook(burst), pytest.raises(kind, match=message) as caught:
        list(comparison.stream(PROMPT, n=4))
    if kind is ZooError:
        assert count_alive(caches) == 0 and caught.value, "the error holds on to what filled the memory"
    assert comparison.compare(PROMPT) == expected


def test_comparison_rejects_missing_or_different_tokenizers(toys: Toys, tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="no tokenizer that can be loaded"):
        Comparison.load(ppo=toys.ppo, sft=tmp_path)
    load_causal(toys.sft).save_pretrained(tmp_path)
    train_tokenizer(["some other text"], vocab_size=260, max_length=CONTEXT).save_pretrained(tmp_path)
    with pytest.raises(ZooError, match="different tokenizers"):
        Comparison.load(ppo=toys.ppo, sft=tmp_path)


def test_comparison_accepts_base_with_eos_as_pad(toys: Toys, tmp_path: Path) -> None:
    """PPO on a chat model chooses another PAD than the model's own, which is often EOS."""
    load_causal(toys.sft).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(toys.sft)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    compared = last(Comparison.load(ppo=toys.ppo, sft=tmp_path, device="cpu"), n=2)
    assert compared == last(Comparison.load(ppo=toys.ppo, sft=toys.sft, device="cpu"), n=2)


def test_comparison_rejects_nan_logits_and_narrow_embeddings(toys: Toys) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toys.sft)
    sft, wider, broken = (load_causal(toys.sft) for _ in range(3))
    wider.resize_token_embeddings(len(tokenizer) + 8)
    # Rows that no token names are no difference.
    as_wide = Comparison(ppo=wider, sft=sft, tokenizer=tokenizer).compare(PROMPT)
    same = Comparison(ppo=load_causal(toys.sft), sft=sft, tokenizer=tokenizer).compare(PROMPT)
    assert as_wide.ppo.token_ids == same.ppo.token_ids
    with torch.no_grad():
        broken.lm_head.weight[3] = math.nan
    with pytest.raises(ZooError, match="PPO policy's logits are NaN"):
        Comparison(ppo=broken, sft=sft, tokenizer=tokenizer).compare(PROMPT)
    narrow = load_causal(toys.sft)
    narrow.resize_token_embeddings(200)
    with pytest.raises(ZooError, match="200 embedding rows"):
        Comparison(ppo=narrow, sft=narrow, tokenizer=tokenizer).compare(PROMPT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "number of completions is 0; it must be an integer"),
        ({"n": 9}, "number of completions is 9; the limit is 8"),
        ({"max_new_tokens": 513}, "number of new tokens is 513; the limit is 95"),
        ({"max_new_tokens": CONTEXT - 1}, f"exceeds the context of {CONTEXT}: shorten it or ask for"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"top_p": 0}, "Top-p is 0"),
        ({"top_p": math.nan}, "Top-p is nan"),
        ({"top_p": None}, "Top-p is None"),
        ({"seed": -1}, "The seed is -1"),
        ({"seed": True}, "The seed is True"),
        ({"temperature": math.nan}, "from 0.01 to 100"),
        ({"temperature": 0.0099}, "from 0.01 to 100"),
        ({"temperature": "9" * 10**6}, "The temperature is '999"),
        ({"prompt": None}, "The prompt is None; it must be text"),
        ({"prompt": "\u200b\u2060 \ufeff"}, "The prompt is empty"),
        ({"prompt": "a\x00b"}, r"control character U\+0000"),
        ({"prompt": "half \udfff"}, "half of a character"),
        ({"prompt": "the camera " * CONTEXT}, f"exceeds the context of {CONTEXT}"),
        ({"prompt": "a" * 10_001}, "has 10001 characters; the limit is 10000"),
    ],
)
def test_comparison_rejects_invalid_requests_before_running(
    comparison: Comparison, changes: dict, message: str
) -> None:
    with record_passes(comparison) as shapes:
        with pytest.raises(ZooError, match=message) as caught:
            comparison.stream(**({"prompt": PROMPT} | changes))  # no snapshot is asked for
        assert shapes == {"sft": [], "ppo": []}
    assert len(str(caught.value)) < 300
