"""The work that every side does: models with random weights, prompts, and the length of each response.

Imports only torch and transformers, as TRL's side runs in a separate environment.
"""

import copy
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

# EOS is the first id, so the uniform number 0 draws it. It is so unlikely that no other number does.
EOS, PAD, BOS, UNK = range(4)
UNLIKELY_LOGIT = -30.0
EPOCHS, TEMPERATURE, LEARNING_RATE = 4, 0.7, 3e-6


@dataclass(frozen=True)
class Point:
    """The shape of the models and of the batch.

    Attributes:
        hidden: Hidden size.
        layers: Number of layers.
        heads: Number of attention heads.
        intermediate: Intermediate size.
        vocab: Vocabulary size.
        batch: Prompts of an update.
        prompt: Shortest and longest prompt, in tokens.
        response: Maximum tokens of a response.
        ends: The chance that a response ends after a token.
        kv: Heads of keys and values; 0 for as many as `heads`.
        micro: Rows of a micro-batch; 0 for the complete batch.
        lora: Whether only an adapter on a bf16 policy is trained, without the other models.
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
        """The rows of a micro-batch."""
        return self.micro or self.batch

    def update_flops(self, count: int, shared: bool = False) -> float:
        """Returns the floating-point operations of an update's matrix products on the first `count` prompts.

        Each weight takes 6 operations per token. Policy and critic have separate trunks unless shared; the head only
        sees response tokens; attention does not count.
        """
        width = self.hidden * (self.kv or self.heads) // self.heads
        trunk = self.layers * self.hidden * (2 * self.hidden + 2 * width + 3 * self.intermediate)
        responses = sum(min(length, self.response) for length in self.lengths(count))
        tokens = responses + sum(map(len, self.prompts(count)))
        return 6.0 * EPOCHS * ((2 - shared) * trunk * tokens + self.hidden * self.vocab * responses)

    def prompts(self, count: int) -> list[list[int]]:
        """Returns the first `count` prompts."""
        rng = random.Random(1)
        return [[rng.randrange(4, self.vocab) for _ in range(rng.randint(*self.prompt))] for _ in range(count)]

    def lengths(self, count: int) -> list[int]:
        """Returns the length of each response with its EOS, from a geometric distribution.

        A response that is cut off has the length `response` + 1 if `ends` is positive.
        """
        rng = random.Random(2)
        if not self.ends:
            return [self.response] * count
        geometric = (1 + int(math.log(1 - rng.random()) / math.log(1 - self.ends)) for _ in range(count))
        return [min(length, self.response + 1) for length in geometric]


_SMALL = {"hidden": 256, "layers": 4, "heads": 4, "intermediate": 688}
POINTS = {
    "full": Point(**_SMALL, vocab=4_096, batch=32, prompt=(16, 32), response=48, ends=0.0),
    "eos": Point(**_SMALL, vocab=4_096, batch=32, prompt=(16, 32), response=48, ends=0.03),
    "wide": Point(**_SMALL, vocab=50_304, batch=32, prompt=(16, 32), response=48, ends=0.03),
    "long": Point(**_SMALL, vocab=16_384, batch=16, prompt=(480, 512), response=128, ends=0.02),
    # The shape of SmolLM2-135M.
    "smollm2": Point(576, 30, 9, 1536, vocab=49_152, batch=32, prompt=(32, 48), response=64, ends=0.0, kv=3),
    # For tests of the benchmark.
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
    """Builds four models of one shape that start from the same trunk, with the same weights on every side."""
    config = LlamaConfig(
        hidden_size=point.hidden, num_hidden_layers=point.layers, num_attention_heads=point.heads,
        num_key_value_heads=point.kv or point.heads, intermediate_size=point.intermediate, vocab_size=point.vocab,
        max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS,
        num_labels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return _build_models(point, config)


def _build_models(point: Point, config: LlamaConfig) -> Models:
    policy = LlamaForCausalLM(config)
    # A bias makes EOS and PAD unlikely, also if the head is computed in chunks.
    head = torch.nn.Linear(point.hidden, point.vocab)
    head.weight = policy.lm_head.weight
    head.bias = torch.nn.Parameter(torch.zeros(point.vocab), requires_grad=False)
    head.bias.data[[EOS, PAD]] = UNLIKELY_LOGIT
    policy.lm_head = head
    if point.lora:
        return Models(policy.to(torch.bfloat16), None, None, None)
    value, reward = (LlamaForSequenceClassification(config) for _ in range(2))
    for model in (value, reward):
        model.model.load_state_dict(policy.model.state_dict())
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    return Models(policy, reference, value, reward.eval().requires_grad_(False))


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Builds a tokenizer in which every word is a token, with `size` tokens in total."""
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>"}
    vocabulary = {token: index for index, token in enumerate(special.values())}
    vocabulary |= {f"t{index}": index for index in range(4, size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)
