"""The training loop of TRL 0.x's tutorials, with `rlhf_zoo.ppo.trl_compat.classic`: a model learns to sound pleased.

    python examples/classic_loop.py --output_dir runs/classic

Without `--model` it makes a tiny GPT-2 with random weights and a vocabulary of a few dozen words, which needs no
download and trains in seconds on a CPU. The reward counts pleased words minus displeased ones, in place of a sentiment
classifier. `curves.png` and `curves.json` in the output directory contain mean reward and KL to the reference by step;
the model is saved beside them. `--model` names a model to train instead, by path or Hub id.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# A script for TRL 0.x has `from trl import` and `from trl.core import LengthSampler` here.
from rlhf_zoo.ppo.trl_compat.classic import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    set_seed,
)

PLEASED = ("good", "great", "lovely", "funny", "warm", "bright", "clever", "superb")
DISPLEASED = ("bad", "dull", "awful", "cold", "slow", "weak", "silly", "loud")
SUBJECTS = ("film", "story", "cast", "music", "plot")
NEUTRAL = (*SUBJECTS, "the", "this", "that", "a", "is", "was", "and", "but", "so", "very", "quite", "it", "felt")
OPENINGS = [f"{determiner} {subject}" for determiner in ("the", "this", "that") for subject in SUBJECTS]

log = logging.getLogger("classic_loop")


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Makes a tokenizer with a token for each word, and one special token for start, end and unknown words."""
    words = ["<|endoftext|>", *PLEASED, *DISPLEASED, *NEUTRAL]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=words[0], unk_token=words[0])


def tiny_model(tokenizer: PreTrainedTokenizerBase) -> GPT2LMHeadModel:
    eos = tokenizer.eos_token_id
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=eos, eos_token_id=eos, **sizes))


def reward(text: str) -> float:
    """Returns pleased words minus displeased ones, as a share of all words."""
    words = re.findall(r"\w+", text.lower())
    return sum((word in PLEASED) - (word in DISPLEASED) for word in words) / max(len(words), 1)


def collate(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def draw(curves: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    labels = {"reward": "mean reward", "kl": "KL to the reference, nats per completion"}
    for axes, (name, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        axes.plot(range(1, len(curves[name]) + 1), curves[name])
        axes.set(xlabel="step", title=label)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a causal language model, by path or Hub id")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/classic"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="1.4e-5 suits a trained model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log_with", choices=["tensorboard", "wandb"])
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    config = PPOConfig(
        seed=options.seed,
        learning_rate=options.learning_rate,
        batch_size=32,
        mini_batch_size=16,
        init_kl_coef=0.05,
        target=4.0,
        log_with=options.log_with,
        project_kwargs={"logging_dir": str(options.output_dir / "logs")},
        output_dir=str(options.output_dir),
    )
    set_seed(config.seed)
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLMWithValueHead.from_pretrained(options.model)
    else:
        tokenizer = tiny_tokenizer()
        model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_model(tokenizer))
    tokenizer.pad_token = tokenizer.eos_token
    ref_model = create_reference_model(model)

    queries = OPENINGS * -(-config.batch_size * 4 // len(OPENINGS))
    dataset = Dataset.from_dict({"query": queries, "input_ids": tokenizer(queries)["input_ids"]}).with_format("torch")
    trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=dataset, data_collator=collate)

    # Temperature 1 without truncation samples from the policy itself. Otherwise the estimated KL may be negative.
    sampling = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": tokenizer.eos_token_id}
    lengths = LengthSampler(4, 12)
    curves: dict[str, list[float]] = {"reward": [], "kl": [], "kl_coef": []}
    while len(curves["reward"]) < options.steps:
        for batch in trainer.dataloader:
            responses = trainer.generate(
                batch["input_ids"], return_prompt=False, length_sampler=lengths, batch_size=16, **sampling
            )
            batch["response"] = tokenizer.batch_decode(responses, skip_special_tokens=True)
            rewards = [torch.tensor(reward(text)) for text in batch["response"]]
            stats = trainer.step(batch["input_ids"], responses, rewards)
            trainer.log_stats(stats, batch, rewards)
            for name, value in (
                ("reward", stats["ppo/mean_scores"]),
                ("kl", stats["objective/kl"]),
                ("kl_coef", stats["objective/kl_coef"]),
            ):
                curves[name].append(value)
            step = len(curves["reward"])
            if step % 10 == 0 or step == 1:
                log.info("step %3d  reward %.3f  KL %.2f", step, curves["reward"][-1], curves["kl"][-1])
            if step == options.steps:
                break

    trainer.save_pretrained(options.output_dir)
    (options.output_dir / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
    draw(curves, options.output_dir / "curves.png")


if __name__ == "__main__":
    main()
