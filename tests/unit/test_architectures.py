"""Model families: which of them batched sampling supports, and a critic for each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from peft import LoraConfig
from trainer_fixture import digests, make_policy, make_reward_model, make_tokenizer, make_trainer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.critic import CRITIC_DIR, critic_from, response_values
from rlhf_zoo.modeling.logprobs import response_logits, token_logprobs
from rlhf_zoo.modeling.models import set_score_statistics
from rlhf_zoo.modeling.reserved_columns import PROMPT_INDEX
from rlhf_zoo.modeling.sampling.sampler import Samples, Vocabulary, sample
from rlhf_zoo.ppo.actor_critic import ActorCritic
from rlhf_zoo.ppo.token_checks import check_decoding

pytestmark = pytest.mark.attack

PROMPTS = [[5, 6, 7, 3, 4, 8, 9], [8], [3, 4, 2], [9, 9, 9, 10]]


def draw(model: Any, **options: Any) -> Samples:
    keys = [(row,) for row in range(len(PROMPTS))]
    arguments = {"seed": 3, "max_new_tokens": 10, "stop_ids": range(2, 7), "pad_id": 0} | options
    return sample(model, PROMPTS, keys=keys, **arguments)


# Sampling


# Zamba2 clamps its time step in decoding alone, which is worth some 1e-3 nats.
@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "qwen3_next", "lfm2", "falcon_h1", "bamba", "jamba", "granitemoehybrid", "zamba2"]
)
def test_sampler_drops_ended_rows_with_linear_attention(family: str) -> None:
    """With cache, left padding and rows that end early, log-probabilities equal those of each text alone."""
    model = tiny_model(AutoModelForCausalLM, family)
    samples = draw(model)
    assert len(set(samples.mask.sum(1).tolist())) > 1 and samples.ended.any()
    for row in range(len(PROMPTS)):
        alone = token_logprobs(model, samples.select(slice(row, row + 1)))[0]
        assert samples.logprobs[row, : len(alone)].tolist() == pytest.approx(alone.tolist(), abs=5e-3)
    check_decoding(model, Vocabulary(17))


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_ppo_trains_policy_with_linear_attention(tmp_path: Path, family: str) -> None:
    policy = tiny_model(AutoModelForCausalLM, family)
    before = digests(policy)
    trainer = make_trainer(tmp_path, model=policy, max_steps=1)
    trainer.train()
    assert digests(trainer.policy) != before


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("mamba", "MambaForCausalLM takes no past_key_values"),
        ("mamba2", "Mamba2ForCausalLM takes no past_key_values"),
        ("rwkv", "RwkvForCausalLM takes no past_key_values"),
        ("openai-gpt", "OpenAIGPTLMHeadModel takes no past_key_values"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM keeps the state of its recurrent layers in its modules"),
        ("bert", "With left padding or a KV cache, log-probabilities of BertLMHeadModel differ"),
    ],
)
def test_trainer_rejects_unsupported_architectures_by_name(tmp_path: Path, family: str, message: str) -> None:
    with pytest.raises(ZooError, match=message):
        make_trainer(tmp_path, model=tiny_model(AutoModelForCausalLM, family))
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.raises(ZooError, match=message):
        make_trainer(tmp_path, model=tiny_model(AutoModelForCausalLM, family), peft_config=adapter, merge_adapter=True)


# Embedding rows without a token


def test_sampler_never_draws_rows_without_token(tmp_path: Path) -> None:
    """Even where their logits are large; all log-probabilities, the reference's too, exclude them."""
    tokenizer, policy = make_tokenizer(), make_policy(vocab_size=64)
    reference = make_policy(vocab_size=64)
    with torch.no_grad():
        for model in (policy, reference):
            model.lm_head.weight[40:] *= 20
    trainer = make_trainer(
        tmp_path, model=policy, ref_model=reference, reward_model=make_reward_model(tokenizer), max_steps=2,
        kl_in="loss", kl_estimator="full",
    )  # fmt: skip
    rows = [{"input_ids": [5, 6 + i], PROMPT_INDEX: i} for i in range(8)]
    rollout = trainer.rollout(rows, stream=0)
    assert int(rollout.samples.completion_ids.max()) < len(tokenizer)
    logits = response_logits(reference, rollout.samples)
    assert logits.shape[-1] == len(tokenizer)
    assert rollout.kl.abs().max() < 1e-4
    trainer.train()
    torch.testing.assert_close(logits.exp().sum(-1).log() - logits.logsumexp(-1), torch.zeros(logits.shape[:2]))


def test_vocabulary_holes_have_zero_probability() -> None:
    policy = make_policy(vocab_size=17)
    holes = tuple(range(3, 12))
    samples = draw(policy, vocabulary=Vocabulary(15, holes), stop_ids=[], temperature=0.3)
    drawn = set(samples.completion_ids[samples.mask].tolist())
    assert drawn and not drawn & {*holes, 15, 16}
    whole = response_logits(policy, samples, temperature=0.3)
    named = [index for index in range(15) if index not in holes]
    ours = whole[..., named].log_softmax(-1)
    torch.testing.assert_close(whole.log_softmax(-1)[..., named], ours)
    torch.testing.assert_close(token_logprobs(policy, samples, temperature=0.3), samples.logprobs, atol=1e-5, rtol=0)


# Critics

ENCODERS = {"bart", "bigbird_pegasus", "mbart", "mvp", "plbart", "reformer"}
# Families whose reward model transformers has, and whose token classifier it has not.
WITHOUT = sorted(
    {*MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES}
    & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES} - ENCODERS
)
HEADED = {"modernbert-decoder"}
LARGE = {"gemma3", "cohere_compass_text"}  # their smallest is too large for a table
FAST = {"opt", "gemma3_text", "jamba"}
IDS = torch.tensor([[5, 6, 7, 8, 1], [9, 4, 3, 3, 12]])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in FAST else pytest.mark.full)
        for family in WITHOUT
        if family not in LARGE | HEADED
    ],
)
def test_critic_starts_at_reward_model_score(tmp_path: Path, family: str) -> None:
    reward = tiny_model(AutoModelForSequenceClassification, family, num_labels=1)
    set_score_statistics(reward, mean=0.7, std=0.25, measured_on="nothing: a toy")
    critic = critic_from(reward).eval()
    with torch.no_grad():
        scores, values = reward(input_ids=IDS).logits[:, 0], critic(input_ids=IDS, use_cache=False).logits[..., 0]
    assert values[:, -1].tolist() == pytest.approx(((scores - 0.7) / 0.25).tolist(), abs=1e-4)
    # Left padding counts for nothing.
    seen = torch.tensor([[False, True, True], [True, True, True]])
    samples = Samples(IDS[:, :3], seen, IDS[:, 3:], torch.ones(2, 2).bool(), torch.zeros(2, 2), torch.ones(2).bool())
    with torch.no_grad():
        alone = critic(input_ids=IDS[:1, 1:], use_cache=False).logits[0, 1:3, 0]
        assert response_values(critic, samples)[0].tolist() == pytest.approx(alone.tolist(), abs=1e-4)
    # Saved, loaded by its path, and resumed into the very modules.
    actor = ActorCritic(make_policy(), critic)
    actor.save_pretrained(tmp_path)
    expected = digests(critic)
    assert digests(critic_from(tmp_path / CRITIC_DIR)) == expected
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(1)
    actor.load_checkpoint(tmp_path)
    assert digests(critic) == expected


def test_ppo_resumes_critic_without_transformers_token_classifier(tmp_path: Path) -> None:
    reward = tiny_model(AutoModelForSequenceClassification, "opt", num_labels=1)
    trainer = make_trainer(tmp_path, reward_model=reward, max_steps=2, save_steps=1, save_strategy="steps")
    trainer.train()
    again = make_trainer(tmp_path / "again", reward_model=reward, max_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert digests(again.value_model) == digests(trainer.value_model)


@pytest.mark.parametrize(("family", "message"), [("modernbert-decoder", "head.dense"), ("bart", "has an encoder")])
def test_critic_rejects_models_beyond_trunk_and_linear_head(family: str, message: str) -> None:
    with pytest.raises(ZooError, match=message):
        critic_from(tiny_model(AutoModelForSequenceClassification, family, num_labels=1))
