"""Saves a toy SFT policy, a PPO policy near it and a reward model, for tests that need all three."""

from dataclasses import dataclass
from pathlib import Path

import torch
from trainer_fixture import llama_config
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerBase

from rlhf_zoo.modeling.models import set_score_statistics
from rlhf_zoo.modeling.special_tokens import train_tokenizer

CONTEXT = 96
# After TRIGGER both policies write MARKUP, whose script would run if a page did not escape it.
TRIGGER, MARKUP = "<i>", "<img src=x onerror=window.ran=1><script>window.ran=1</script>"
LINES = [
    "the camera takes sharp pictures and the battery lasts long",
    "the screen is bright and the sound is clear",
    "it is heavy but the price is fair and the camera is good",
    "the battery is weak and the menu is slow",
]
WORDS = sorted({word for line in LINES for word in line.split()})


@dataclass(frozen=True)
class Toys:
    """The folders of three checkpoints, each with its tokenizer."""

    sft: Path
    ppo: Path
    reward: Path


def save_toys(folder: Path) -> Toys:
    """Saves the three models with the same weights every time."""
    tokenizer = train_tokenizer(LINES * 4, vocab_size=380, max_length=CONTEXT)
    tokenizer.add_tokens([TRIGGER, MARKUP])
    toys = Toys(folder / "sft", folder / "ppo", folder / "reward")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = _make_policy(tokenizer)
        policy.save_pretrained(toys.sft)
        with torch.no_grad():
            for word in ("good", "sharp", "clear", "bright"):
                policy.lm_head.weight[_word_id(tokenizer, word), 0] += 0.35
        policy.save_pretrained(toys.ppo)
        reward = LlamaForSequenceClassification(_config(tokenizer, num_labels=1, initializer_range=0.3))
        set_score_statistics(reward, mean=0.1, std=0.5, measured_on="nothing: a toy")
        reward.save_pretrained(toys.reward)
    for path in (toys.sft, toys.ppo, toys.reward):
        tokenizer.save_pretrained(path)
    return toys


def _config(tokenizer: PreTrainedTokenizerBase, **fields) -> LlamaConfig:
    special_ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return llama_config(tokenizer, max_position_embeddings=CONTEXT, **special_ids, **fields)


def _make_policy(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Makes a policy with random weights, except that embedding dimension 0 is always 1, so it biases the head."""
    policy = LlamaForCausalLM(_config(tokenizer, initializer_range=0.1)).eval()
    trigger, markup = tokenizer.convert_tokens_to_ids([TRIGGER, MARKUP])
    embedding, head = policy.model.embed_tokens.weight, policy.lm_head.weight
    with torch.no_grad():
        embedding[:, 0] = 1.0
        head[:, 0] = -3.0
        for word in WORDS:
            head[_word_id(tokenizer, word), 0] = 1.3
        head[tokenizer.eos_token_id, 0] = 0.9
        embedding[trigger, 1] = 50.0
        embedding[:, 1][torch.arange(len(tokenizer)) != trigger] = 0.0
        head[:, 1] = 0.0
        head[markup, 1] = 8.0
    return policy


def _word_id(tokenizer: PreTrainedTokenizerBase, word: str) -> int:
    """Returns the first token of " word"; it is the only one, because LINES repeats every word often enough."""
    return tokenizer(f" {word}")["input_ids"][0]
