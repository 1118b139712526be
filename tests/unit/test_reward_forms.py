"""What a reward may be besides one number a completion, and which completions it is of."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from families import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trainer_fixture import (
    EOS,
    PAD,
    SAVED,
    Spy,
    assert_resumes_exactly,
    good,
    make_policy,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    snapshot,
    trained,
    updates_of,
)
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.named import check_judges_available
from rlhf_zoo.modeling.alignment import TokenText
from rlhf_zoo.modeling.sampling.random import uniforms
from rlhf_zoo.modeling.sampling.sampler import Samples
from rlhf_zoo.modeling.sampling.truncation import Truncation, cut, draw_lengths, find_text_end
from rlhf_zoo.rewards import RewardModel, Rewards
from rlhf_zoo.rewards.loading import load_reward_model
from rlhf_zoo.runs.settings.evaluation import LLMConfig

PLAIN: dict[str, Any] = {"kl_coef": 0.0, "max_steps": 1, "whiten_advantages": False}


def bytes_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte, so that "é" has two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(["<eos>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def completions_of(texts: Sequence[str], *, ended: Sequence[bool]) -> Samples:
    """Completions of letters, one a token, EOS behind those that ended; the prompts are "a"."""
    ids = [make_tokenizer()(text)["input_ids"] + [EOS] * end for text, end in zip(texts, ended, strict=True)]
    width = max(map(len, ids))
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in ids])
    padded = torch.tensor([row + [PAD] * (width - len(row)) for row in ids])
    one = torch.ones(len(ids), 1)
    return Samples(one.long() * 3, one.bool(), padded, mask, mask * -0.5, torch.tensor(ended))


# One a token, or spans


def test_token_text_maps_characters_to_completing_tokens() -> None:
    tokenizer = bytes_tokenizer()
    ids = [*tokenizer("né né.")["input_ids"], 0]
    result = TokenText(tokenizer, ids)
    assert (result.text, len(ids)) == ("né né.", 9)
    # n, é's two bytes, space, n, é's two bytes, the dot.
    assert [result.completing_token(end) for end in range(1, 7)] == [0, 2, 3, 4, 6, 7]


def test_per_token_and_span_rewards_are_aligned_and_weighted() -> None:
    samples = completions_of(["abcd", "ef", "ghi"], ended=[True, False, True])

    def numbers(completion_ids: list[list[int]], **_: Any) -> list[Any]:
        return [[1.0, 2.0, 3.0, 4.0, -10.0], 7.0, None]

    def spans(**_: Any) -> list[Any]:
        return [[(0, 2, 1.0), (1, 2, 0.5)], [], [(0, 3, 5.0)]]

    rewards = Rewards([numbers, spans], weights=[0.5, 2.0], tokenizer=make_tokenizer())
    reward_scores = rewards(samples, ["a"] * 3, ["abcd", "ef", "ghi"], ["aabcd", "aef", "aghi"], {})
    assert reward_scores.per_reward.nan_to_num(9.0).tolist() == [[0.0, 1.5], [7.0, 0.0], [9.0, 5.0]]
    assert reward_scores.total.tolist() == [3.0, 3.5, 10.0]
    assert reward_scores.by_token is not None
    assert reward_scores.by_token.tolist() == [[0.5, 4.0, 1.5, 2.0, -5.0], [0.0] * 5, [0.0, 0.0, 10.0, 0.0, 0.0]]
    # Spans count in what the function read, such as the content of a message, without what was taken off before it.
    message = [{"role": "assistant", "content": "hi"}]
    one = Rewards([lambda **_: [[], [], [(1, 2, 3.0)]]], tokenizer=make_tokenizer())
    assert one(samples, ["a"] * 3, ["abcd", "ef", message], [""] * 3, {}).by_token.tolist()[2] == [0, 0, 3, 0, 0]
    with pytest.raises(ZooError, match=r"row 2, prompt .* \(its text is not in the text of its decoded tokens\)"):
        one(samples, ["a"] * 3, ["abcd", "ef", "other"], [""] * 3, {})


def test_per_token_rewards_reach_returns(tmp_path: Path) -> None:
    """r_t = d_t/σ + (s − Σd/σ)·1[last], with β = 0; the score in the log is the whole sum."""

    def each(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
        return [[0.25 * (place + 1) for place in range(len(ids))] for ids in completion_ids]

    trainer = trained(
        tmp_path, reward_funcs=[each, good], reward_weights=[2.0, 1.0], missing_eos_penalty=3.0,
        score_centering="running", score_scaling="running", response_length=6, **PLAIN,
    )  # fmt: skip
    [(rollout, advantages, _)] = trainer.updates
    [metrics] = updates_of(trainer)
    totals, std = advantages.reward_scores.total, float(advantages.reward_scores.total.std())
    assert not rollout.samples.ended.all()
    for row, tokens in enumerate(rollout.samples.completion_id_lists()):
        dense = torch.tensor([0.5 * (place + 1) / std for place in range(len(tokens))])
        shaped = float((totals[row] - totals.mean()) / std) - 3.0 * (not rollout.samples.ended[row])
        expected = dense.clone()
        expected[-1] += shaped - dense.sum()
        torch.testing.assert_close(advantages.rewards[row, : len(tokens)], expected, atol=1e-5, rtol=1e-5)
    assert metrics["objective/score"] == pytest.approx(float(totals.mean()), rel=1e-6)
    assert metrics["rewards/each"] == pytest.approx(float(advantages.reward_scores.per_reward[:, 0].mean()), rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_reward_on_last_token_gives_same_update_as_scalar_reward(tmp_path: Path, level: str) -> None:
    def last(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
        return [[0.0] * (len(i) - 1) + [s] for i, s in zip(completion_ids, good(completions), strict=True)]

    def named(function: Any) -> Any:
        return lambda **options: function(**options)

    runs = [trained(tmp_path, reward_funcs=named(f), action_level=level, max_steps=2) for f in (good, last)]
    for one, other in zip(*(snapshot(run).values() for run in runs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_missing_eos_score_replaces_per_token_rewards(tmp_path: Path) -> None:
    def each(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
        return [[1.0] * len(ids) for ids in completion_ids]

    trainer = trained(tmp_path, reward_funcs=each, missing_eos_score=-1.0, response_length=5, **PLAIN)
    [(rollout, advantages, _)] = trainer.updates
    for row, (ids, ended) in enumerate(zip(rollout.samples.completion_id_lists(), rollout.samples.ended, strict=True)):
        expected = [1.0] * len(ids) if ended else [0.0] * (len(ids) - 1) + [-1.0]
        assert advantages.rewards[row, : len(ids)].tolist() == expected


# One label of a classifier


def classifier(labels: dict[int, str], **fields: Any) -> PreTrainedModel:
    ids = {name: index for index, name in labels.items()}
    return tiny_model(AutoModelForSequenceClassification, "bert", id2label=labels, label2id=ids, **fields)


LABELS = {0: "NEGATIVE", 1: "NEUTRAL", 2: "POSITIVE"}


def test_classifier_label_is_a_reward() -> None:
    tokenizer, texts = make_tokenizer(), ["abc", "defghi"]
    model = classifier(LABELS)
    raw = torch.stack([model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0] for text in texts])

    def scores(label: str, output: str = "logit", which: Any = model) -> torch.Tensor:
        read = RewardModel(which, tokenizer, tokenizer, label=label, output=output)
        return read.score_texts(texts, ended=[False, False])

    torch.testing.assert_close(scores("POSITIVE"), raw[:, 2])
    torch.testing.assert_close(scores("0"), raw[:, 0])
    torch.testing.assert_close(scores("NEUTRAL", "logprob"), raw.log_softmax(1)[:, 1])
    several = classifier(LABELS, problem_type="multi_label_classification")
    torch.testing.assert_close(scores("NEUTRAL", "logprob", several), torch.nn.functional.logsigmoid(raw[:, 1]))
    for label, message in (
        ("POSITIV", "has no label 'POSITIV', did you mean 'POSITIVE'"),
        ("3", "has no label '3': choose one of NEGATIVE, NEUTRAL, POSITIVE"),
        (None, "has 3 outputs, but a reward model needs one: set reward_label"),
    ):
        with pytest.raises(ZooError, match=message):
            scores(label)  # type: ignore[arg-type]
    with pytest.raises(ZooError, match="has a single output, so the label 'POSITIVE'"):
        RewardModel(make_reward_model(), tokenizer, tokenizer, label="POSITIVE")


@pytest.mark.parametrize(
    ("labels", "label2id"),
    [({0: "GOOD", 1: "BAD"}, {"GOOD": 1, "BAD": 0}), ({0: "GOOD", 1: "GOOD"}, {"GOOD": 1})],
    ids=["contradictory", "equal names"],
)
def test_ambiguous_classifier_label_is_rejected(
    tmp_path: Path, labels: dict[int, str], label2id: dict[str, int]
) -> None:
    model, tokenizer = classifier(labels), make_tokenizer()
    model.config.label2id = label2id
    with pytest.raises(ZooError, match="'GOOD' to the outputs 0 and 1: correct its id2label and label2id"):
        RewardModel(model, tokenizer, tokenizer, label="GOOD")
    assert RewardModel(model, tokenizer, tokenizer, label="1").label == 1
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ZooError, match="'GOOD' to the outputs 0 and 1"):
        load_reward_model(tmp_path, label="GOOD")
    with pytest.raises(ZooError, match="'GOOD' to the outputs 0 and 1"):
        check_judges_available([f"reward:{tmp_path}#GOOD"], LLMConfig())


def test_reward_label_setting_applies_to_reward_model(tmp_path: Path) -> None:
    path = tmp_path / "sentiment"
    classifier(LABELS).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    trainer = make_trainer(
        tmp_path, reward_model=str(path), reward_funcs=good, reward_label="NEGATIVE", reward_output="logprob"
    )
    [model] = trainer.rewards.models
    assert (model.label, model.output) == (0, "logprob")
    # No critic begins at one label of several: it begins at the policy, with a head of 0.
    assert not trainer.value_model.score.weight.any()
    with pytest.raises(ZooError, match="one of NEGATIVE, NEUTRAL, POSITIVE"):
        load_reward_model(path)
    with pytest.raises(ZooError, match="no reward model has one output and the policy's tokenizer"):
        make_trainer(tmp_path, reward_model=str(path), reward_label="NEGATIVE", critic="reward")
    with pytest.raises(ZooError, match="there is no reward_model"):
        make_trainer(tmp_path, reward_label="NEGATIVE")


# A reward model of one's own


class ScalarModel(PreTrainedModel):
    """A head under its own name on a trunk, one number a token, as that of the N+ repository."""

    config_class = LlamaConfig
    base_model_prefix = "trunk"
    _supports_sdpa = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.trunk = LlamaModel(config)
        self.scalar_head = torch.nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        hidden = self.trunk(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        return type("Output", (), {"logits": self.scalar_head(hidden)})()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved ScalarModel, and a module `own_rewards` that loads it."""
    torch.manual_seed(0)
    model = ScalarModel(make_policy().config)
    model.save_pretrained(tmp_path / "own")
    make_tokenizer().save_pretrained(tmp_path / "own")
    module = ModuleType("own_rewards")
    vars(module).update(
        ScalarModel=ScalarModel, factory=lambda path: ScalarModel.from_pretrained(path), nothing=lambda path: None,
        broken=lambda path: 1 / 0, number=3,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "own_rewards", module)
    return tmp_path / "own"


@pytest.mark.parametrize("loader", ["own_rewards:ScalarModel", "own_rewards:factory"])
def test_custom_loader_gives_working_reward_model(own: Path, tmp_path: Path, loader: str) -> None:
    model, tokenizer = load_reward_model(own, loader=loader), make_tokenizer()
    scorer = RewardModel(model, tokenizer, tokenizer)
    rows = [tokenizer(text)["input_ids"] for text in ("abc", "defghi")]
    expected = [model(torch.tensor([row])).logits[0, -1, 0] for row in rows]
    torch.testing.assert_close(scorer.score_texts(["abc", "defghi"], ended=[False] * 2), torch.stack(expected))
    trainer = make_trainer(tmp_path / "run", reward_model=model, max_steps=1)
    trainer.train()
    assert math.isfinite(updates_of(trainer)[0]["objective/score"])


def test_bad_reward_model_loaders_are_rejected(own: Path) -> None:
    for name, message in (
        ("number", "is an object of the class int: name a class with from_pretrained, or a function"),
        ("nothing", "returned a NoneType for .*: return a PreTrainedModel"),
        ("broken", "raised ZeroDivisionError"),
        ("scalar", "There is no 'scalar' in the module 'own_rewards'"),
    ):
        with pytest.raises(ZooError, match=message):
            load_reward_model(own, loader=f"own_rewards:{name}")
    wide = load_reward_model(own, loader="own_rewards:factory")
    wide.forward = lambda input_ids, **_: type("Output", (), {"logits": torch.zeros(len(input_ids), 17)})()
    scorer = RewardModel(wide, make_tokenizer(), make_tokenizer())
    with pytest.raises(ZooError, match=r"returns logits of the shape \(1, 17\) for a batch of 1"):
        scorer.score_texts(["a"], ended=[True])


# Which completions


def test_find_text_end_finds_text_after_position() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("a:bc:d:c:")["input_ids"]
    for text, after, expected in (
        (":", 0, 2), (":", 1, 2), (":", 2, 5), (":", 5, 7), ("c:", 0, 5), ("c:", 5, 9), (":", 8, 9), (":", 9, None),
        ("x", 0, None),
    ):  # fmt: skip
        assert find_text_end(tokenizer, ids, text=text, after=after) == expected, (text, after)
    twice = bytes_tokenizer()
    assert find_text_end(twice, twice("né.")["input_ids"], text="é", after=0) == 3


def test_truncation_removes_tokens_everywhere() -> None:
    samples = completions_of(["abcdef", "abc:f", "ab"], ended=[True, True, False])
    truncation = Truncation(6, text=":", after=1)
    done = truncation(samples, make_tokenizer(), seed=1, keys=[(0,), (1,), (2,)])
    assert done.mask.sum(1).tolist() == [7, 4, 2] and done.ended.tolist() == [True, True, False]
    assert done.completion_id_lists()[1] == make_tokenizer()("abc:")["input_ids"]
    shorter = cut(samples, torch.tensor([2, 3, 9]), at_text=torch.tensor([False, True, False]))
    assert shorter.ended.tolist() == [False, True, False]
    assert shorter.mask.tolist() == [[True, True, False], [True, True, True], [True, True, False]]
    assert (shorter.logprobs == torch.where(shorter.mask, -0.5, 0.0)).all()
    # A reward model reads its end-of-sequence token behind what ended, though it was not sampled there.
    scorer = RewardModel(make_reward_model(), make_tokenizer(), make_tokenizer())
    texts = ["a" + make_tokenizer().decode(row, skip_special_tokens=True) for row in done.completion_id_lists()]
    torch.testing.assert_close(scorer.score_samples(done, texts), scorer.score_texts(texts, ended=done.ended.tolist()))
    untouched = Truncation(6)
    assert not untouched and untouched(samples, make_tokenizer(), seed=1, keys=[]) is samples


def test_draw_lengths_uses_stream_of_each_row() -> None:
    keys = [(0, step, row, 0) for step in range(50) for row in range(20)]
    drawn = draw_lengths(3, keys, shortest=4, longest=7)
    assert sorted(set(drawn.tolist())) == [4, 5, 6, 7]
    assert all(200 < int((drawn == length).sum()) < 300 for length in (4, 5, 6, 7))
    assert draw_lengths(3, keys[5:9][::-1], shortest=4, longest=7).tolist() == drawn[5:9].tolist()[::-1]
    assert draw_lengths(4, keys, shortest=4, longest=7).tolist() != drawn.tolist()
    # Not the numbers that the tokens are drawn by: a short completion would begin with a token of the lowest ids.
    of_tokens, many = uniforms(3, keys, 7).numpy(), draw_lengths(3, keys, shortest=1, longest=10_000)
    for place in range(7):
        assert abs(np.corrcoef(of_tokens[:, place], many)[0, 1]) < 0.12, place


CUT: dict[str, Any] = {"response_length_min": 3, "truncate_text": "g", "truncate_after": 2, "num_generations": 2}


def test_truncated_completions_are_prefixes_of_untruncated_ones(tmp_path: Path) -> None:
    """Of the tokens that it would have sampled anyway, a completion keeps those up to its length or to the text."""
    runs = [trained(tmp_path, kl_coef=0.1, max_steps=1, **given) for given in ({"num_generations": 2}, CUT)]
    (whole, _, _), (short, _, _) = (run.updates[0] for run in runs)
    tokenizer, lengths = make_tokenizer(), []
    for row, (before, after) in enumerate(
        zip(whole.samples.completion_id_lists(), short.samples.completion_id_lists(), strict=True)
    ):  # fmt: skip
        assert after == before[: len(after)]
        lengths.append(len(after))
        text = tokenizer.decode(after)
        cut_there = "g" in text[2:]
        assert bool(short.samples.ended[row]) == (cut_there or after[-1] == EOS)
        assert not cut_there or text.index("g", 2) == len(text) - 1
        torch.testing.assert_close(short.logprobs[row, : len(after)], whole.logprobs[row, : len(after)])
    assert len(set(lengths)) > 2 and not short.samples.ended.all() and short.samples.ended.any()
    assert short.mask.shape[1] == max(lengths)


def test_truncated_completions_resume_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(lambda path: make_trainer(path, kind=Spy, **CUT, **SAVED), tmp_path)


# Prompts whose completions all score the same


def vowels(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The same for every completion of a prompt that begins with "a"."""
    scores = good(completions)
    return [
        0.5 if prompt.startswith("a") else score + 0.01 * row
        for row, (prompt, score) in enumerate(zip(prompts, scores, strict=True))
    ]


GROUPS: dict[str, Any] = {
    "num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "kl_coef": 0.0,
    "max_steps": 1, "reward_funcs": vowels, "num_mini_batches": 1, "num_ppo_epochs": 1,
}  # fmt: skip


def test_prompts_with_equal_scores_are_counted_and_skipped(tmp_path: Path) -> None:
    prompts = Dataset.from_dict({"prompt": ["ab", "cd", "ae", "fg"]})
    with_all = trained(tmp_path, train_dataset=prompts, **GROUPS)
    without = trained(tmp_path, train_dataset=prompts, skip_equal_scores=True, **GROUPS)
    logs = [updates_of(run)[0] for run in (with_all, without)]
    assert [log["objective/equal_scores"] for log in logs] == [0.5, 0.5]
    assert logs[0]["objective/score"] == logs[1]["objective/score"] and logs[0]["episodes"] == logs[1]["episodes"] == 8
    (rollout, advantages, _), (whole, _, _) = without.updates[0], with_all.updates[0]
    assert len(rollout.samples) == len(advantages.shaped_scores) == 4 and len(whole.samples) == 8
    assert advantages.advantages[advantages.mask].mean().abs() < 1e-5, "whitened over what is left"
    assert snapshot(with_all)["policy.lm_head.weight"].ne(snapshot(without)["policy.lm_head.weight"]).any()


def test_update_is_skipped_when_all_scores_are_equal(tmp_path: Path) -> None:
    def alike(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    trainer = trained(tmp_path, skip_equal_scores=True, **{**GROUPS, "reward_funcs": alike})
    [log] = updates_of(trainer)
    assert log["objective/equal_scores"] == 1.0 and log["loss"] == 0.0 and log["policy/epochs"] == 0.0
    assert not trainer.updates
    assert all(torch.equal(before, trainer.before[name]) for name, before in snapshot(trainer).items())
