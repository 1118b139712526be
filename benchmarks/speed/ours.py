"""This trainer's side: `python -m speed.ours POINT` in benchmarks/."""

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from rlhf_zoo import PPOConfig, PPOTrainer
from rlhf_zoo.modeling import logprobs
from rlhf_zoo.modeling.batches import count_tokens
from rlhf_zoo.modeling.sampling import decoder as decoding
from rlhf_zoo.modeling.sampling import random as draws
from rlhf_zoo.modeling.sampling import sampler as sampling
from rlhf_zoo.ppo import distributed_update, rollout_trainer
from rlhf_zoo.ppo.loss import PolicyLoss

from . import side
from .points import EPOCHS, LEARNING_RATE, POINTS, TEMPERATURE, build_models, word_tokenizer


def return_none(*_: Any, **__: Any) -> None:
    """Replaces a function that returns None when its fast path does not apply."""


def split_in_order(
    samples: Any, rows: Any = None, *, max_rows: int, max_tokens: int | None = None, **_: Any
) -> list[Any]:
    """Replaces `batches.split_batches`, without sorting rows by length."""
    batches: list[Any] = []
    for row in (torch.arange(len(samples)) if rows is None else rows.sort().values).split(1):
        longer = torch.cat([batches[-1], row]) if batches else row
        if batches and len(longer) <= max_rows and (max_tokens is None or count_tokens(samples, longer) <= max_tokens):
            batches[-1] = longer
        else:
            batches.append(row)
    return batches


def keep_padding(ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Replaces `decoding.replace_padding`, and keeps the pad tokens."""
    return ids


#: Optimizations without a key in the configuration: name -> (module, attribute, replacement) of each to switch off.
LEVERS: dict[str, list[tuple[Any, str, Any]]] = {
    "logits in chunks": [(logprobs, "logit_transform", return_none)],
    "one pass of the head": [(PolicyLoss, "is_separable_per_token", False)],
    "rows alike in length": [
        (module, "split_batches", split_in_order) for module in (logprobs, rollout_trainer, distributed_update)
    ],
    "real tokens as padding": [(module, "replace_padding", keep_padding) for module in (decoding, logprobs)],
    "draw by blocks": [(draws, "_inverse_cdf_by_blocks", draws._inverse_cdf)],
}


class ProgressCallback(TrainerCallback):
    """Times each update from the start to the end of its step. The phases are those that the trainer logs.

    Only the native sampler ends responses at these lengths; with another engine they have the maximum length.
    """

    def __init__(self, clock: side.Clock, lengths: Sequence[int]) -> None:
        self.clock, self.lengths = clock, lengths

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.clock.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "tokens_per_second" in logs:
            update, done = self.clock.updates[-1], len(self.clock.updates)
            update["phases"] = {name[5:]: value for name, value in logs.items() if name.startswith("time/")}
            update["tokens"] = round(logs["completions/length"] * args.episodes_per_update)
            rows = self.lengths[(done - 1) * args.episodes_per_update : done * args.episodes_per_update]
            expected = sum(min(length, args.response_length) for length in rows)
            if update["tokens"] != expected and args.rollout_engine == "native":
                raise SystemExit(f"Update {done} sampled {update['tokens']} tokens instead of {expected}.")


def force_lengths(uniforms: Callable[..., torch.Tensor], lengths: Sequence[int]) -> Callable[..., torch.Tensor]:
    """Wraps `uniforms` so that each response ends at its length, at no cost for the sampler: 0 draws EOS."""

    def forced_uniforms(seed: int, keys: Sequence[tuple[int, ...]], length: int) -> torch.Tensor:
        numbers = uniforms(seed, keys, length)
        for row, (_, _, prompt, _) in enumerate(keys):
            if lengths[prompt] <= length:
                numbers[row, lengths[prompt] - 1] = 0.0
        return numbers

    return forced_uniforms


def length_reward(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    """A reward for points where a reward model as large as the policy does not fit."""
    return [float(len(completion)) for completion in completions]


def lora_config() -> Any:
    """LoRA on all linear layers."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def main(arguments: Sequence[str] | None = None) -> None:
    options = side.parse_options(arguments)
    point, clock = POINTS[options.point], side.Clock()
    if lever := options.set.pop("without", None):
        for replaced in LEVERS[lever]:
            setattr(*replaced)
    peft_config = lora_config() if options.set.pop("lora", point.lora) else None
    count = point.batch * (options.updates + 1)
    lengths = point.lengths(count)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = build_models(point, device)
    eager = options.bf16 and device == "cpu" and not options.set.get("padding_free")
    if attention := options.set.pop("attn_implementation", "eager" if eager else None):
        for model in filter(None, vars(models).values()):
            model.set_attn_implementation(attention)
    fields: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": point.rows,
        "gradient_accumulation_steps": point.batch // point.rows, "num_mini_batches": 1, "num_ppo_epochs": EPOCHS,
        "total_episodes": count, "response_length": point.response,
        "temperature": TEMPERATURE, "stop_token": "eos" if point.ends else None,
        "missing_eos_penalty": 1.0 if point.ends else None, "learning_rate": LEARNING_RATE, "bf16": options.bf16,
        "critic": "shared" if options.shared or point.lora else "auto", "train_sampling_strategy": "sequential",
        "report_to": [], "save_strategy": "no", "use_cpu": device == "cpu", "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    trainer = PPOTrainer(
        PPOConfig(**fields | options.set), word_tokenizer(point.vocab), models.policy,
        ref_model=None if peft_config else models.reference, reward_model=models.reward,
        value_model=None if options.shared else models.value, reward_funcs=length_reward if point.lora else None,
        peft_config=peft_config, train_dataset=Dataset.from_dict({"input_ids": point.prompts(count)}),
        callbacks=[ProgressCallback(clock, lengths)],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    del models
    sampling.uniforms = force_lengths(sampling.uniforms, lengths)
    trainer.train()
    clock.print_report()


if __name__ == "__main__":
    main()
