"""The work that every side does: models with random weights, prompts, and how long each response is.

Imports torch and transformers alone, as TRL's side runs in an environment of its own.
"""

import copy
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

# EOS is the first id, so that the uniform number 0 draws it, and so unlikely that no other number does.
EOS, PAD, BOS, UNK = range(4)
UNLIKELY = -30.0
EPOCHS, TEMPERATURE, RATE = 4, 0.7, 3e-6


@dataclass(frozen=True)
class Point:
    """One shape of work: `batch` prompts of some lengths; a response ends after each token with chance `ends`.

    kv: heads of keys and values, 0 for as many as `heads`. micro: rows of a micro-batch, 0 for all. lora: the policy
    trains an adapter, in bf16 and without the other models.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    batch: int
    prompt: tuple[int, int]
    response: int
    ends: float
    kv: int = 0
    micro: int = 0
    lora: bool = False

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.micro or self.batch

    def update_flops(self, count: int, shared: bool = False) -> float:
        """Floating-point operations of the matrices in the update after `count` prompts: 6 a weight and token.

        Of policy and critic, each with a trunk of its own if not shared; the head on response tokens, no attention.
        """
        width = self.hidden * (self.kv or self.heads) // self.heads
        trunk = self.layers * self.hidden * (2 * self.hidden + 2 * width + 3 * self.intermediate)
        responses = sum(min(length, self.response) for length in self.lengths(count))
        tokens = responses + sum(map(len, self.prompts(count)))
        return 6.0 * EPOCHS * ((2 - shared) * trunk * tokens + self.hidden * self.vocab * responses)

    def prompts(self, count: int) -> list[list[int]]:
        """The first `count` prompts."""
        drawn = random.Random(1)
        return [[drawn.randrange(4, self.vocab) for _ in range(drawn.randint(*self.prompt))] for _ in range(count)]

    def lengths(self, count: int) -> list[int]:
        """Tokens of the response to each prompt, EOS included where it ends: geometric, cut at `response`."""
        drawn = random.Random(2)
        if not self.ends:
            return [self.response] * count
        geometric = (1 + int(math.log(1 - drawn.random()) / math.log(1 - self.ends)) for _ in range(count))
        # One more than fits is a response that was cut off.
        return [min(length, self.response + 1) for length in geometric]


_SMALL = {"hidden": 256, "layers": 4, "heads": 4, "intermediate": 688}
POINTS = {
    "full": Point(**_SMALL, vocab=4_096, batch=32, prompt=(16, 32), response=48, ends=0.0),
    "eos": Point(**_SMALL, vocab=4_096, batch=32, prompt=(16, 32), response=48, ends=0.03),
    "wide": Point(**_SMALL, vocab=50_304, batch=32, prompt=(16, 32), response=48, ends=0.03),
    "long": Point(**_SMALL, vocab=16_384, batch=16, prompt=(480, 512), response=128, ends=0.02),
    # The shape of SmolLM2-135M.
    "smollm2": Point(576, 30, 9, 1536, vocab=49_152, batch=32, prompt=(32, 48), response=64, ends=0.0, kv=3),
    # For tests of the benchmark itself.
    "tiny": Point(16, 2, 2, 24, vocab=48, batch=4, prompt=(3, 6), response=8, ends=0.2),
    "tiny-kv": Point(16, 2, 4, 24, vocab=48, batch=4, prompt=(3, 6), response=8, ends=0.2, kv=2),
    "tiny-lora": Point(16, 2, 2, 24, vocab=48, batch=4, prompt=(3, 6), response=8, ends=0.2, kv=1, micro=2, lora=True),
    # For a GPU. The shape of Qwen2.5-0.5B; responses have a mean of 314 tokens.
    "c": Point(896, 24, 14, 4864, 151_936, batch=256, prompt=(32, 128), response=512, ends=0.0021, kv=2, micro=16),
    "c64": Point(896, 24, 14, 4864, 151_936, batch=64, prompt=(32, 128), response=512, ends=0.0021, kv=2, micro=16),
    "1b": Point(2048, 16, 32, 8192, 128_256, batch=64, prompt=(32, 128), response=256, ends=0.004, kv=8, micro=8),
    "8b-lora": Point(
        4096, 32, 32, 14_336, 128_256, batch=32, prompt=(32, 128), response=128, ends=0.01, kv=8, micro=4, lora=True
    ),
}


@dataclass(frozen=True)
class Models:
    policy: Any
    reference: Any
    value: Any
    reward: Any


def build_models(point: Point, device: str = "cpu") -> Models:
    """Four models of one shape and the same first weights on every side; all start from the policy's trunk."""
    config = LlamaConfig(
        hidden_size=point.hidden, num_hidden_layers=point.layers, num_attention_heads=point.heads,
        num_key_value_heads=point.kv or point.heads, intermediate_size=point.intermediate, vocab_size=point.vocab,
        max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS,
        num_labels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return _built(point, config)


def _built(point: Point, config: LlamaConfig) -> Models:
    policy = LlamaForCausalLM(config)
    # In the head's bias: a head that is computed in chunks sees it too.
    head = torch.nn.Linear(point.hidden, point.vocab)
    head.weight = policy.lm_head.weight
    head.bias = torch.nn.Parameter(torch.zeros(point.vocab), requires_grad=False)
    head.bias.data[[EOS, PAD]] = UNLIKELY
    policy.lm_head = head
    if point.lora:
        return Models(policy.to(torch.bfloat16), None, None, None)
    value, reward = (LlamaForSequenceClassification(config) for _ in range(2))
    for model in (value, reward):
        model.model.load_state_dict(policy.model.state_dict())
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    return Models(policy, reference, value, reward.eval().requires_grad_(False))


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One token a word, `size` in all."""
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>"}
    vocabulary = {token: index for index, token in enumerate(special.values())}
    vocabulary |= {f"t{index}": index for index in range(4, size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)
