"""Toy models and data with which a PPO update takes milliseconds: each letter is a token, Llamas have two layers."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    PrinterCallback,
)

from rlhf_zoo.modeling.fsdp import gather_tensor
from rlhf_zoo.modeling.models import set_score_statistics
from rlhf_zoo.ppo.base import PPO_STATE
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.rollout import Advantages, Rollout
from rlhf_zoo.ppo.trainer import PPOTrainer
from rlhf_zoo.runs import metrics_file

PAD, EOS = 0, 1
# The device of the trainer's tests; `pytest --device` sets it, for child processes too.
DEVICE = os.environ.get("RLHF_ZOO_TEST_DEVICE", "cpu")
LETTERS = "abcdefghijkl"
GOOD = "g"
CONTEXT = 32
CHAT = "{% for m in messages %}{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}:{% endif %}"
SAVED: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
Rows = list[tuple[list[int], list[int]]]


def make_tokenizer(letters: str = LETTERS + ":;") -> PreTrainedTokenizerBase:
    """Makes a tokenizer with one token per letter, so that text may be split anywhere; <pad> is 0, <eos> is 1."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *letters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def llama_config(tokenizer: PreTrainedTokenizerBase, **fields: Any) -> LlamaConfig:
    defaults: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**defaults | fields)


def make_policy(tokenizer: PreTrainedTokenizerBase | None = None, *, seed: int = 0, **fields: Any) -> LlamaForCausalLM:
    """Makes a causal model whose random weights depend on the seed, but not on the device."""
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(seed)
        return LlamaForCausalLM(llama_config(tokenizer or make_tokenizer(), **fields)).to(DEVICE).eval()


def make_reward_model(
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    seed: int = 1,
    statistics: tuple[float, float] | None = (0.3, 0.5),
    **fields: Any,
) -> LlamaForSequenceClassification:
    """Makes a random reward model; `statistics` are the (μ, σ) in its config."""
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(seed)
        config = llama_config(tokenizer or make_tokenizer(), **{"num_labels": 1} | fields)
        model = LlamaForSequenceClassification(config).to(DEVICE).eval()
    if statistics is not None:
        set_score_statistics(model, mean=statistics[0], std=statistics[1], measured_on="nothing: a toy")
    return model


def prompt_rows(count: int = 16, **columns: Sequence[Any]) -> Dataset:
    """Returns a data set of `count` different prompts of one to four letters in the column `prompt`."""
    texts = [
        "".join(LETTERS[(row * 5 + place * (row // 3 + 1)) % len(LETTERS)] for place in range(row % 4 + 1))
        for row in range(count)
    ]
    return Dataset.from_dict({"prompt": texts, **columns})


def good(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward function with TRL's signature: the share of GOOD among a completion's letters."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [text.count(GOOD) / max(len(text), 1) for text in texts]


def make_trainer(directory: Path, *, kind: type[PPOTrainer] = PPOTrainer, **options: Any) -> PPOTrainer:
    """Makes a toy PPOTrainer. Options are keywords of its constructor or fields of PPOConfig.

    By default an update has 8 completions of at most 10 tokens, in micro-batches of 4, and the reward is `good`.
    """
    tokenizer = options.pop("processing_class", None) or make_tokenizer()
    parts: dict[str, Any] = {"model": None, "train_dataset": None}
    for name in (
        "model", "ref_model", "reward_model", "train_dataset", "eval_dataset", "value_model", "callbacks",
        "peft_config", "reward_funcs", "reward_processing_class", "optimizers", "ptx_dataset",
    ):  # fmt: skip
        if name in options:
            parts[name] = options.pop(name)
    if parts["model"] is None:
        parts["model"] = make_policy(tokenizer)
    if parts["train_dataset"] is None:
        parts["train_dataset"] = prompt_rows()
    if "reward_model" not in parts and "reward_funcs" not in parts:
        parts["reward_funcs"] = good
    fields: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 8,
        "max_steps": 2,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "response_length": 10,
        "temperature": 1.0,
        "learning_rate": 1e-3,
        "critic_learning_rate": 2e-3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": DEVICE == "cpu",
        "seed": 8,
    }
    if os.environ.get("RLHF_ZOO_TEST_LEVERS"):
        fields |= {"max_tokens_per_micro_batch": 30, "max_rollout_batch_tokens": 90, "gradient_checkpointing": True}
        fields["padding_free"] = options.get("rollout_engine") != "transformers"
    if "total_episodes" in options or "num_train_epochs" in options:
        fields.pop("max_steps")
    trainer = kind(args=PPOConfig(**fields | options), processing_class=tokenizer, **parts)
    trainer.remove_callback(PrinterCallback)
    return trainer


class Spy(PPOTrainer):
    """A PPOTrainer that records its initial weights, and the rollout, advantages and statistics of each update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before = snapshot(self)
        self.updates: list[tuple[Rollout, Advantages, dict[str, torch.Tensor]]] = []

    def run_epochs(self, model: nn.Module, rollout: Rollout, advantages: Advantages) -> dict[str, torch.Tensor]:
        statistics = super().run_epochs(model, rollout, advantages)
        self.updates.append((rollout, advantages, statistics))
        return statistics


def snapshot(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    """Copies every weight of policy and critic."""
    parts = {"policy": trainer.policy, "critic": trainer.value_model}
    return {
        f"{name}.{key}": gather_tensor(value.detach()).clone()
        for name, part in parts.items()
        for key, value in part.state_dict().items()
    }


def digests(source: PPOTrainer | PreTrainedModel | Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns the SHA-256 of each weight's bytes."""
    if isinstance(source, PPOTrainer):
        source = snapshot(source)
    elif isinstance(source, nn.Module):
        source = source.state_dict()
    arrays = {name: weight.cpu().flatten().view(torch.uint8).numpy() for name, weight in source.items()}
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}


def distance(first: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], prefix: str = "") -> float:
    """Returns the largest absolute difference of the weights whose names start with `prefix`."""
    names = [name for name in first if name.startswith(prefix)]
    assert names and first.keys() == other.keys()
    return max(float((first[name].double() - other[name].double()).abs().max()) for name in names)


def timeless(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the log lines without times, and without the summary of a `train()` call."""
    rows = [metrics_file.without_times(row) for row in history if "train_loss" not in row]
    # NaN does not equal itself, but its repr does.
    return [{name: repr(value) for name, value in row.items()} for row in rows]


def trained(directory: Path, **options: Any) -> Any:
    trainer = make_trainer(directory, **{"kind": Spy} | options)
    trainer.train()
    return trainer


def updates_of(trainer: Any) -> list[dict[str, float]]:
    """Returns the log line of each update, without times."""
    return [metrics_file.without_times(row) for row in trainer.state.log_history if "loss" in row]


def read_table(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_resumes_exactly(build: Callable[[Path], Any], directory: Path, *, at: int = 1) -> Any:
    """Checks that training resumed after update `at` equals uninterrupted training of 3 updates bit for bit.

    Returns the trainer that was not interrupted.
    """
    straight, resumed = build(directory / "straight"), build(directory / "resumed")
    straight.train()
    resumed.train(resume_from_checkpoint=str(directory / "straight" / f"checkpoint-{at}"))
    assert digests(resumed) == digests(straight) != digests(straight.before)
    assert timeless(resumed.state.log_history) == timeless(straight.state.log_history)
    states = [(directory / run / "checkpoint-3" / PPO_STATE).read_bytes() for run in ("straight", "resumed")]
    assert states[0] == states[1]
    return straight


# Independent computations: row by row, without padding or cache


def rows_of(rollout: Rollout) -> Rows:
    prompts = [ids[m].tolist() for ids, m in zip(rollout.samples.prompt_ids, rollout.samples.prompt_mask, strict=True)]
    return list(zip(prompts, rollout.samples.completion_id_lists(), strict=True))


def vocabulary_logps(model: Any, rows: Rows) -> list[torch.Tensor]:
    """Returns log π of the whole vocabulary at each response token: (T, V) per row."""
    logps = []
    for prompt, completion in rows:
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logps.append(logits.log_softmax(-1))
    return logps


def token_logps(logps: list[torch.Tensor], rows: Rows) -> list[torch.Tensor]:
    """Picks the response's tokens from `vocabulary_logps`: (T,) per row."""
    return [each[range(len(ids)), ids] for each, (_, ids) in zip(logps, rows, strict=True)]


def values_of(critic: Any, rows: Rows) -> list[torch.Tensor]:
    return [critic(input_ids=torch.tensor([p + c])).logits[0, len(p) - 1 : -1, 0] for p, c in rows]
