"""A toy world in which one PPO update takes milliseconds: letters as tokens, random Llamas of two layers."""

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
# Where the trainer's tests compute: `pytest --device` sets it, for child processes too.
DEVICE = os.environ.get("RLHF_ZOO_TEST_DEVICE", "cpu")
LETTERS = "abcdefghijkl"
GOOD = "g"
CONTEXT = 32
CHAT = "{% for m in messages %}{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}:{% endif %}"
SAVED: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
Rows = list[tuple[list[int], list[int]]]


def make_tokenizer(letters: str = LETTERS + ":;") -> PreTrainedTokenizerBase:
    """One token a letter, so that any split of a text is a split of its tokens; <pad> is 0 and <eos> is 1."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *letters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def llama_config(tokenizer: PreTrainedTokenizerBase, **fields: Any) -> LlamaConfig:
    given: dict[str, Any] = {
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
    return LlamaConfig(**given | fields)


def make_policy(tokenizer: PreTrainedTokenizerBase | None = None, *, seed: int = 0, **fields: Any) -> LlamaForCausalLM:
    """A causal model with the same random weights for the same seed, whatever the device."""
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
    """A random reward model; `statistics` are the (μ, σ) kept in its config."""
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(seed)
        config = llama_config(tokenizer or make_tokenizer(), **{"num_labels": 1} | fields)
        model = LlamaForSequenceClassification(config).to(DEVICE).eval()
    if statistics is not None:
        set_score_statistics(model, mean=statistics[0], std=statistics[1], measured_on="nothing: a toy")
    return model


def prompt_rows(count: int = 16, **columns: Sequence[Any]) -> Dataset:
    """`count` different prompts of one to four letters in a column `prompt`."""
    texts = [
        "".join(LETTERS[(row * 5 + place * (row // 3 + 1)) % len(LETTERS)] for place in range(row % 4 + 1))
        for row in range(count)
    ]
    return Dataset.from_dict({"prompt": texts, **columns})


def good(completions: Sequence[Any], **_: Any) -> list[float]:
    """The share of GOOD among a completion's letters, in TRL's GRPO convention."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [text.count(GOOD) / max(len(text), 1) for text in texts]


def make_trainer(directory: Path, *, kind: type[PPOTrainer] = PPOTrainer, **given: Any) -> PPOTrainer:
    """A PPOTrainer over the toy world; names of its constructor's keywords go there, all others into PPOConfig.

    8 completions of at most 10 tokens an update, in micro-batches of 4; the reward is `good`.
    """
    tokenizer = given.pop("processing_class", None) or make_tokenizer()
    parts: dict[str, Any] = {"model": None, "train_dataset": None}
    for name in (
        "model", "ref_model", "reward_model", "train_dataset", "eval_dataset", "value_model", "callbacks",
        "peft_config", "reward_funcs", "reward_processing_class", "optimizers", "ptx_dataset",
    ):  # fmt: skip
        if name in given:
            parts[name] = given.pop(name)
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
        fields["padding_free"] = given.get("rollout_engine") != "transformers"
    if "total_episodes" in given or "num_train_epochs" in given:
        fields.pop("max_steps")
    trainer = kind(args=PPOConfig(**fields | given), processing_class=tokenizer, **parts)
    trainer.remove_callback(PrinterCallback)
    return trainer


class Spy(PPOTrainer):
    """A PPOTrainer that keeps each update's rollout, estimates and means, and the weights that it began with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before = snapshot(self)
        self.updates: list[tuple[Rollout, Advantages, dict[str, torch.Tensor]]] = []

    def run_epochs(self, model: nn.Module, rollout: Rollout, estimates: Advantages) -> dict[str, torch.Tensor]:
        progress = super().run_epochs(model, rollout, estimates)
        self.updates.append((rollout, estimates, progress))
        return progress


def snapshot(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    """Every weight of policy and critic, copied."""
    parts = {"policy": trainer.policy, "critic": trainer.value_model}
    return {
        f"{name}.{key}": gather_tensor(value.detach()).clone()
        for name, part in parts.items()
        for key, value in part.state_dict().items()
    }


def digests(source: PPOTrainer | PreTrainedModel | Mapping[str, torch.Tensor]) -> dict[str, str]:
    """sha256 of each weight's bytes."""
    if isinstance(source, PPOTrainer):
        source = snapshot(source)
    elif isinstance(source, nn.Module):
        source = source.state_dict()
    data = {name: value.cpu().flatten().view(torch.uint8).numpy() for name, value in source.items()}
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in data.items()}


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], part: str = "") -> float:
    """The largest difference of any weight whose name begins with `part`."""
    names = [name for name in one if name.startswith(part)]
    assert names and one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in names)


def timeless(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Log lines without what depends on the clock, nor the summary of a whole `train()` call."""
    kept = [metrics_file.without_times(row) for row in history if "train_loss" not in row]
    # NaN is not equal to itself; its name is.
    return [{name: repr(value) for name, value in row.items()} for row in kept]


def trained(directory: Path, **given: Any) -> Any:
    trainer = make_trainer(directory, **{"kind": Spy} | given)
    trainer.train()
    return trainer


def updates_of(trainer: Any) -> list[dict[str, float]]:
    """The log lines of a trained trainer, one an update, without times."""
    return [metrics_file.without_times(row) for row in trainer.state.log_history if "loss" in row]


def read_table(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def resumed_alike(build: Callable[[Path], Any], directory: Path, *, at: int = 1) -> Any:
    """Trains 3 updates, and again from the checkpoint after update `at`: the same to the last bit. Gives the first."""
    whole, again = build(directory / "whole"), build(directory / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(directory / "whole" / f"checkpoint-{at}"))
    assert digests(again) == digests(whole) != digests(whole.before)
    assert timeless(again.state.log_history) == timeless(whole.state.log_history)
    states = [(directory / run / "checkpoint-3" / PPO_STATE).read_bytes() for run in ("whole", "again")]
    assert states[0] == states[1]
    return whole


# A second computation: row by row, without padding or cache


def rows_of(rollout: Rollout) -> Rows:
    prompts = [ids[m].tolist() for ids, m in zip(rollout.samples.prompt_ids, rollout.samples.prompt_mask, strict=True)]
    return list(zip(prompts, rollout.samples.token_lists(), strict=True))


def every(model: Any, rows: Rows) -> list[torch.Tensor]:
    """log π of every token before each response token: (T, V) a row."""
    found = []
    for prompt, completion in rows:
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1))
    return found


def taken(logps: list[torch.Tensor], rows: Rows) -> list[torch.Tensor]:
    """Of these, those of the response's own tokens: (T,) a row."""
    return [each[range(len(ids)), ids] for each, (_, ids) in zip(logps, rows, strict=True)]


def values_of(critic: Any, rows: Rows) -> list[torch.Tensor]:
    return [critic(input_ids=torch.tensor([p + c])).logits[0, len(p) - 1 : -1, 0] for p, c in rows]
