"""Reward models: each row's score is that of the row alone, by ids or by text, and what would be misread is refused."""

import math
from pathlib import Path

import pytest
import test_rewards
import torch
from families import tiny_model
from test_rewards import PROMPTS, call, one
from trainer_fixture import EOS, LETTERS, make_policy, make_reward_model, make_tokenizer
from transformers import AutoModelForSequenceClassification, PreTrainedModel, pipeline

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.sampling.sampler import Samples
from rlhf_zoo.modeling.text_ids import same_token_ids
from rlhf_zoo.rewards import RewardModel, Rewards

samples = test_rewards.samples


def alone(model: PreTrainedModel, ids: list[int]) -> float:
    """The raw score of one unpadded sequence."""
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def test_batched_id_scores_equal_single_row_scores(samples: Samples) -> None:
    tokenizer, model = make_tokenizer(), make_reward_model()
    scorer = RewardModel(model, make_tokenizer(), tokenizer, batch_size=2)
    rows = [tokenizer(p)["input_ids"] + c for p, c in zip(PROMPTS, samples.completion_id_lists(), strict=True)]
    got = scorer.score_samples(samples, ["not read"] * 3)
    assert got.tolist() == pytest.approx([(alone(model, row) - 0.3) / 0.5 for row in rows], abs=1e-5)


def test_score_is_read_at_eos_when_text_ended() -> None:
    model, tokenizer = make_reward_model(statistics=None), make_tokenizer()
    scorer = RewardModel(model, tokenizer, make_tokenizer(LETTERS[::-1]))
    ids = tokenizer("abc")["input_ids"]
    ended, open_ = scorer.score_texts(["abc", "abc"], ended=[True, False]).tolist()
    assert ended == pytest.approx(alone(model, [*ids, EOS]), abs=1e-5)
    assert open_ == pytest.approx(alone(model, ids), abs=1e-5) and abs(ended - open_) > 1e-3


@pytest.mark.parametrize("statistics", [(0.3, 0.0), (math.nan, 1.0), (0.0, math.inf)])
def test_reward_model_rejects_unusable_statistics(statistics: tuple[float, float]) -> None:
    with pytest.raises(ZooError, match=r"mean .* and standard deviation .*: train the model again"):
        RewardModel(make_reward_model(statistics=statistics), make_tokenizer(), make_tokenizer())
    RewardModel(make_reward_model(statistics=statistics), make_tokenizer(), make_tokenizer(), center=False, scale=False)


def test_nonfinite_score_names_its_row(samples: Samples) -> None:
    """NaN would else read as "does not apply" and be paid as 0."""
    model = make_reward_model()
    scorer = RewardModel(model, make_tokenizer(), make_tokenizer())
    unseen = next(iter({*make_tokenizer()("f")["input_ids"]} - {*make_tokenizer()("abcd")["input_ids"]}))
    model.get_input_embeddings().weight[unseen] = math.nan
    rows = [
        [*make_tokenizer()(p)["input_ids"], *c] for p, c in zip(PROMPTS, samples.completion_id_lists(), strict=True)
    ]
    row = next(i for i, ids in enumerate(rows) if unseen in ids)
    with pytest.raises(ZooError, match=f"reward_model scored nan for row {row}, prompt '{PROMPTS[row]}': check its"):
        call(Rewards([one, scorer]), samples)


def test_token_id_beyond_embeddings_is_rejected(samples: Samples) -> None:
    """A policy whose embeddings are padded to a round number samples ids that no tokenizer has."""
    scorer = RewardModel(make_reward_model(), make_tokenizer(), make_tokenizer())
    assert scorer.num_embeddings == 17
    beyond = samples.completion_ids.clone()
    beyond[1, 0] = scorer.num_embeddings
    with pytest.raises(ZooError, match=r"has the token id 17, but the reward model .* has only 17 embedding rows"):
        scorer.score_samples(Samples(**{**vars(samples), "completion_ids": beyond}), [""] * 3)


def test_same_token_ids_compares_meaning_of_ids() -> None:
    assert same_token_ids(make_tokenizer(), make_tokenizer())
    assert not same_token_ids(make_tokenizer(), make_tokenizer(LETTERS[::-1]))
    other = make_tokenizer()
    other.pad_token = ";"
    assert same_token_ids(make_tokenizer(), other), "a model never reads PAD"
    other.eos_token = ";"
    assert not same_token_ids(make_tokenizer(), other)


def _classifier(kind: str, vocabulary: int) -> PreTrainedModel:
    more = {"d_kv": 8, "d_ff": 16, "decoder_start_token_id": EOS} if kind == "t5" else {}
    return tiny_model(AutoModelForSequenceClassification, kind, vocab_size=vocabulary, num_labels=1, **more)


@pytest.mark.parametrize(("kind", "shared"), [("bert", False), ("roberta", True)])
def test_encoder_batch_scores_equal_single_row_scores(samples: Samples, kind: str, shared: bool) -> None:
    """It pools its first token, and RoBERTa counts positions from PAD + 1: padding on the left would break both."""
    policy = make_tokenizer()
    tokenizer = make_tokenizer() if shared else make_tokenizer(LETTERS[::-1])
    if not shared:
        tokenizer.eos_token = None  # BERT's tokenizers have none
    model = _classifier(kind, len(tokenizer))
    scorer = RewardModel(model, tokenizer, policy)
    completions = policy.batch_decode(samples.completion_id_lists(), skip_special_tokens=True)
    texts = [p + c for p, c in zip(PROMPTS, completions, strict=True)]
    rows = [
        policy(p)["input_ids"] + ids if shared else tokenizer(text)["input_ids"]
        for p, ids, text in zip(PROMPTS, samples.completion_id_lists(), texts, strict=True)
    ]
    expected = [alone(model, row) for row in rows]
    assert scorer.score_samples(samples, texts).tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 1e-3


@pytest.mark.attack
@pytest.mark.parametrize("batch_size", [2, 64])
def test_encoder_decoder_scores_ended_and_unended_rows(samples: Samples, batch_size: int) -> None:
    """transformers reads the score at the last end of sequence, and wants as many in each row of a batch."""
    tokenizer = make_tokenizer()
    model = _classifier("t5", len(tokenizer))
    scorer = RewardModel(model, tokenizer, tokenizer, batch_size=batch_size)
    rows = [
        [*tokenizer(p)["input_ids"], *ids, *([] if ids[-1] == EOS else [EOS])]
        for p, ids in zip(PROMPTS, samples.completion_id_lists(), strict=True)
    ]
    expected = [alone(model, row) for row in rows]
    assert scorer.score_samples(samples, [""] * 3).tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 1e-3
    # An end within a conversation: another number of them in one row.
    texts = ["ab<eos>cd", "ab", "fg", "abc"]
    expected = [alone(model, [*tokenizer(text)["input_ids"], EOS]) for text in texts]
    assert scorer.score_texts(texts, ended=[True, False, True, False]).tolist() == pytest.approx(expected, abs=1e-5)
    model.config.eos_token_id = None
    with pytest.raises(ZooError, match="has an encoder and no eos_token_id"):
        RewardModel(model, tokenizer, tokenizer)


def test_reward_model_rejects_ambiguous_pad_and_outputs() -> None:
    policy, as_eos, without = make_tokenizer(), make_tokenizer(), make_tokenizer()
    as_eos.pad_token, without.pad_token = "<eos>", None
    for tokenizer in (as_eos, without):
        with pytest.raises(ZooError, match=r"(pads with its EOS|has no PAD),.*: set reward_pad_token"):
            RewardModel(make_reward_model(), tokenizer, policy)
        named = RewardModel(model := make_reward_model(), tokenizer, policy, pad_token="<pad>")
        texts = {"texts": ["abc", "d"], "ended": [True, True]}
        assert named.score_texts(**texts).equal(RewardModel(model, policy, policy).score_texts(**texts))
    assert (as_eos.pad_token, without.pad_token) == ("<eos>", None), "they may be the policy's"
    with pytest.raises(ZooError, match="has 2 outputs"):
        RewardModel(make_policy(), policy, policy)
    with pytest.raises(ZooError, match="10 embedding rows, but the tokenizer has 17 tokens"):
        RewardModel(make_reward_model(vocab_size=10), policy, policy)


def test_reward_model_is_frozen_and_without_dropout() -> None:
    model = make_reward_model(attention_dropout=0.5)
    scorer = RewardModel(model, make_tokenizer(), make_tokenizer())
    model.train()
    twice = [scorer.score_texts(["abcdef"], ended=[True]) for _ in range(2)]
    assert torch.equal(*twice) and not any(p.requires_grad for p in model.parameters())
    assert model.training and model.config.attention_dropout == model.model.layers[0].self_attn.attention_dropout == 0.5


def test_transformers_pipeline_reproduces_reward_model_score(tmp_path: Path) -> None:
    model, tokenizer = make_reward_model(), make_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    score = RewardModel(model, tokenizer, tokenizer, center=False, scale=False).score_texts(["abcdef"], ended=[False])
    result = pipeline("text-classification", model=str(tmp_path), device="cpu")("abcdef")
    assert result[0]["score"] == pytest.approx(float(score[0]), abs=1e-6)
