"""A script for TRL 1.12's PPOTrainer, run with `rlhf_zoo.ppo.trl_compat`: all models come from the Hub.

    python examples/trl_ppo.py \
        --dataset_name trl-lib/tldr --dataset_test_split validation \
        --model_name_or_path EleutherAI/pythia-1b-deduped \
        --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
        --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \
        --output_dir runs/pythia-tldr --per_device_train_batch_size 16 --gradient_accumulation_steps 4 \
        --total_episodes 30000 --stop_token eos --missing_eos_penalty 1.0 --push_to_hub

The data set has a column `prompt` of texts or conversations. The held-out prompts are the split
`--dataset_test_split` if it exists, else the last tenth of the training split. `--help` lists the other flags,
including those of PPOConfig. With LoRA: `--use_peft --lora_target_modules all-linear`. In several processes:
`torchrun --nproc_per_node 8` instead of `python`. To resume a run:
`--resume_from_checkpoint runs/pythia-tldr/checkpoint-500`.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedTokenizerBase,
)
from trl import ModelConfig, ScriptArguments, get_peft_config

from rlhf_zoo.hub.client.checked_data import open_checked

# A script for TRL 1.12 has `from trl.experimental.ppo import` here: only this line differs.
from rlhf_zoo.ppo.trl_compat import PPOConfig, PPOTrainer


def load_tokenizer(name: str, revision: str) -> PreTrainedTokenizerBase:
    """Loads the policy's tokenizer with a separate PAD token, for which the policy needs no embedding."""
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, padding_side="left")
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def load_prompts(script: ScriptArguments) -> tuple[Dataset, Dataset]:
    """Loads the prompts to train on and the held-out prompts."""
    with open_checked(script.dataset_name) as data:  # reads no file outside of the data set
        splits = data.load(script.dataset_config)
    prompts = splits[script.dataset_train_split]
    if script.dataset_test_split in splits:
        return prompts, splits[script.dataset_test_split]
    parts = prompts.train_test_split(test_size=0.1, shuffle=False)
    return parts["train"], parts["test"]


def tokenize(prompts: Dataset, tokenizer: PreTrainedTokenizerBase, processes: int | None) -> Dataset:
    """Tokenizes prompts into `input_ids`, as TRL's PPO needed. This trainer also accepts the column `prompt` itself."""

    def ids(row: dict[str, Any]) -> dict[str, list[int]]:
        if isinstance(row["prompt"], str):
            return {"input_ids": tokenizer(row["prompt"])["input_ids"]}
        chat = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
        return {"input_ids": chat["input_ids"]}

    with PartialState().local_main_process_first():
        return prompts.map(ids, remove_columns=prompts.column_names, num_proc=processes)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()

    tokenizer = load_tokenizer(model_args.model_name_or_path, model_args.model_revision)
    dtype = model_args.dtype if model_args.dtype in ("auto", None) else getattr(torch, model_args.dtype)
    model_options = {"dtype": dtype, "attn_implementation": model_args.attn_implementation}
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, **model_options)
    scorer_options = {"num_labels": 1, **model_options}
    value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, **scorer_options)
    reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, **scorer_options)
    # Under an adapter the reference is the policy with its adapter off.
    peft_config = get_peft_config(model_args)
    ref_policy = None
    if peft_config is None:
        ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, **model_options)

    train_prompts, held_out = load_prompts(script_args)
    trainer = PPOTrainer(
        args=training_args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=tokenize(train_prompts, tokenizer, training_args.dataset_num_proc),
        eval_dataset=tokenize(held_out, tokenizer, training_args.dataset_num_proc),
        peft_config=peft_config,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.generate_completions()


if __name__ == "__main__":
    main()
