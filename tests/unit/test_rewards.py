"""Rewards: functions in TRL's convention, models by ids or by text, one weighted sum."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from trainer_fixture import EOS, LETTERS, PAD, make_policy, make_reward_model, make_tokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rlhf_zoo.errors import ZooError
from rlhf_zoo.rewards import RewardModel, Rewards
from rlhf_zoo.rewards.model import same_tokenizer
from rlhf_zoo.sampling import Samples, sample

PROMPTS = ["abc", "d", "fg"]


@pytest.fixture(scope="module")
def samples() -> Samples:
    """Three completions of different lengths, one of them ended."""
    tokenizer = make_tokenizer()
    made = sample(
        make_policy(tokenizer), [tokenizer(p)["input_ids"] for p in PROMPTS], keys=[(i,) for i in range(3)], seed=1,
        max_new_tokens=8, stop_ids=[EOS], pad_id=PAD,
    )  # fmt: skip
    assert made.ended.any() and not made.ended.all()
    return made


def call(rewards: Rewards, samples: Samples, **columns: Any) -> Any:
    tokenizer = make_tokenizer()
    completions = tokenizer.batch_decode(samples.token_lists(), skip_special_tokens=True)
    texts = [p + c for p, c in zip(PROMPTS, completions, strict=True)]
    return rewards(samples, PROMPTS, completions, texts, columns)


def one(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def some(completions: list[str], **_: Any) -> list[float | None]:
    return [None, 2.0, -4.0]


# Functions


def test_the_total_is_a_weighted_sum_over_what_applies(samples: Samples) -> None:
    scored = call(Rewards([one, some], weights=[0.5, 3.0]), samples)
    assert scored.total.tolist() == [0.5, 6.5, -11.5]
    assert scored.each[:, 0].tolist() == [1, 1, 1] and scored.each[1:, 1].tolist() == [2, -4]
    assert math.isnan(scored.each[0, 1])
    assert call(Rewards([one, some]), samples).total.tolist() == [1, 3, -3]


def test_a_reward_of_weight_zero_is_watched_and_not_paid(samples: Samples) -> None:
    scored = call(Rewards([one, some], weights=[1.0, 0.0]), samples)
    assert scored.total.tolist() == [1, 1, 1] and scored.each[2, 1] == -4


def test_names_are_unique(samples: Samples) -> None:
    class Judge:
        def __call__(self, **_: Any) -> list[float]:
            return [0.0] * 3

    model = RewardModel(make_reward_model(), make_tokenizer(), make_tokenizer())
    assert Rewards([one, some]).names == ["one", "some"]
    assert Rewards([one, one, model, Judge()]).names == ["one_0", "one_1", "reward_model", "Judge"]
    assert call(Rewards([one, Judge(), model]), samples).each.shape == (3, 3)


def test_numbers_of_numpy_and_torch_are_numbers(samples: Samples) -> None:
    for values in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]).numpy(), (1, 2, 3), [True, 2, 3.0]):
        assert call(Rewards([lambda values=values, **_: values]), samples).total.tolist() == [1, 2, 3]


def test_columns_reach_the_function(samples: Samples) -> None:
    seen: dict[str, Any] = {}

    def keep(**given: Any) -> list[float]:
        seen.update(given)
        return [0.0] * 3

    call(Rewards([keep]), samples, topic=["x", "y", "z"])
    assert seen.keys() == {"prompts", "completions", "completion_ids", "topic"}
    assert seen["prompts"] == PROMPTS and seen["completion_ids"] == samples.token_lists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "wrong returned 2 rewards for 3 completions"),
        ([1.0, 2.0, math.nan], "wrong returned nan for row 2, prompt 'fg'"),
        ([1.0, -math.inf, 2.0], "wrong returned -inf for row 1, prompt 'd'"),
        (None, "wrong returned no list of numbers"),
        (1.0, "wrong returned no list of numbers"),
        (["high", "low", "low"], "wrong returned no list of numbers"),
        ([[1.0], [2.0], [3.0]], "wrong returned no list of numbers"),
        ([1.0, None, 2.0], "No reward applies to the prompt 'd'"),
        (ValueError("no"), "wrong raised ValueError: no; its first prompt was 'abc'"),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_the_function(samples: Samples, values: Any, message: str) -> None:
    def wrong(**_: Any) -> Any:
        if isinstance(values, Exception):
            raise values
        return values

    with pytest.raises(ZooError, match=message):
        call(Rewards([wrong]), samples)


def test_no_reward_or_another_count_of_weights_is_refused() -> None:
    with pytest.raises(ZooError, match="PPO has no reward"):
        Rewards([])
    with pytest.raises(ZooError, match="holds 1 numbers for 2 rewards"):
        Rewards([one, some], weights=[1.0])


# Models


def alone(model: PreTrainedModel, ids: list[int]) -> float:
    """The raw score of one unpadded sequence."""
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_a_model_scores_ids_as_it_scores_each_row_alone(samples: Samples, batch_size: int) -> None:
    tokenizer, model = make_tokenizer(), make_reward_model()
    scorer = RewardModel(model, make_tokenizer(), tokenizer, batch_size=batch_size)
    rows = [tokenizer(p)["input_ids"] + c for p, c in zip(PROMPTS, samples.token_lists(), strict=True)]
    got = scorer.score_samples(samples, ["not read"] * 3)
    assert got.tolist() == pytest.approx([(alone(model, row) - 0.3) / 0.5 for row in rows], abs=1e-5)


def test_a_score_is_read_at_eos_where_the_text_ended() -> None:
    model, tokenizer = make_reward_model(statistics=None), make_tokenizer()
    scorer = RewardModel(model, tokenizer, make_tokenizer(LETTERS[::-1]))
    ids = tokenizer("abc")["input_ids"]
    ended, open_ = scorer.score_texts(["abc", "abc"], ended=[True, False]).tolist()
    assert ended == pytest.approx(alone(model, [*ids, EOS]), abs=1e-5)
    assert open_ == pytest.approx(alone(model, ids), abs=1e-5) and abs(ended - open_) > 1e-3


def test_tokenizers_are_the_same_by_what_their_ids_mean() -> None:
    assert same_tokenizer(make_tokenizer(), make_tokenizer())
    assert not same_tokenizer(make_tokenizer(), make_tokenizer(LETTERS[::-1]))
    other = make_tokenizer()
    other.eos_token = ";"
    assert not same_tokenizer(make_tokenizer(), other)


def _encoder(kind: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "num_labels": 1, "max_position_embeddings": 40, "initializer_range": 0.5,
        "pad_token_id": PAD,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "bert":
        return BertForSequenceClassification(BertConfig(**fields)).eval()
    return RobertaForSequenceClassification(RobertaConfig(**fields)).eval()


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("shared", [True, False])
def test_an_encoder_scores_each_row_as_it_does_alone(samples: Samples, kind: str, shared: bool) -> None:
    """It pools its first token, and RoBERTa counts positions from PAD + 1: padding on the left would break both."""
    policy = make_tokenizer()
    tokenizer = make_tokenizer() if shared else make_tokenizer(LETTERS[::-1])
    if not shared:
        tokenizer.eos_token = None  # BERT's tokenizers have none
    model = _encoder(kind, tokenizer)
    scorer = RewardModel(model, tokenizer, policy)
    completions = policy.batch_decode(samples.token_lists(), skip_special_tokens=True)
    texts = [p + c for p, c in zip(PROMPTS, completions, strict=True)]
    rows = [
        policy(p)["input_ids"] + ids if shared else tokenizer(text)["input_ids"]
        for p, ids, text in zip(PROMPTS, samples.token_lists(), texts, strict=True)
    ]
    wanted = [alone(model, row) for row in rows]
    assert scorer.score_samples(samples, texts).tolist() == pytest.approx(wanted, abs=1e-5)
    assert max(wanted) - min(wanted) > 1e-3


def test_a_model_that_would_be_misread_is_refused() -> None:
    policy, as_eos, without = make_tokenizer(), make_tokenizer(), make_tokenizer()
    as_eos.pad_token, without.pad_token = "<eos>", None
    for tokenizer in (as_eos, without):
        with pytest.raises(ZooError, match="pads with its end-of-sequence token"):
            RewardModel(make_reward_model(), tokenizer, policy)
    with pytest.raises(ZooError, match="has 2 outputs"):
        RewardModel(make_policy(), policy, policy)
    with pytest.raises(ZooError, match="10 embedding rows and its tokenizer 17 tokens"):
        RewardModel(make_reward_model(vocab_size=10), policy, policy)


def test_a_reward_model_is_frozen_and_without_dropout() -> None:
    model = make_reward_model(attention_dropout=0.5)
    scorer = RewardModel(model, make_tokenizer(), make_tokenizer())
    model.train()
    twice = [scorer.score_texts(["abcdef"], ended=[True]) for _ in range(2)]
    assert torch.equal(*twice) and not any(p.requires_grad for p in model.parameters())
