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
from .points import EPOCHS, POINTS, RATE, TEMPERATURE, build_models, word_tokenizer


def nothing(*_: Any, **__: Any) -> None:
    """What a fast path says where it does not fit."""


def in_order(samples: Any, rows: Any = None, *, max_rows: int, max_tokens: int | None = None, **_: Any) -> list[Any]:
    """`batches.split_batches`, of rows as they come."""
    batches: list[Any] = []
    for row in (torch.arange(len(samples)) if rows is None else rows.sort().values).split(1):
        longer = torch.cat([batches[-1], row]) if batches else row
        if batches and len(longer) <= max_rows and (max_tokens is None or count_tokens(samples, longer) <= max_tokens):
            batches[-1] = longer
        else:
            batches.append(row)
    return batches


def as_given(ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """`decoding.replace_padding`, of padding that stays the pad token."""
    return ids


#: What no key of the configuration switches off: the name of a lever -> the functions that it is, and what stands in.
LEVERS: dict[str, list[tuple[Any, str, Any]]] = {
    "logits in chunks": [(logprobs, "logit_transform", nothing)],
    "one pass of the head": [(PolicyLoss, "is_separable_per_token", False)],
    "rows alike in length": [
        (module, "split_batches", in_order) for module in (logprobs, rollout_trainer, distributed_update)
    ],
    "real tokens as padding": [(module, "replace_padding", as_given) for module in (decoding, logprobs)],
    "draw by blocks": [(draws, "_inverse_cdf_by_blocks", draws._inverse_cdf)],
}


class ProgressCallback(TrainerCallback):
    """An update's time is that between the beginning and the end of its step; phases are what the trainer logs.

    Only the native sampler can be told where responses end: with another engine they are as long as they may be.
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
                raise SystemExit(f"Update {done} sampled {update['tokens']} tokens instead of the {expected} given.")


def replayed(uniforms: Callable[..., torch.Tensor], lengths: Sequence[int]) -> Callable[..., torch.Tensor]:
    """`uniforms` with the number that draws EOS at the end of each prompt's response: it costs the sampler nothing."""

    def numbers(seed: int, keys: Sequence[tuple[int, ...]], length: int) -> torch.Tensor:
        drawn = uniforms(seed, keys, length)
        for row, (_, _, prompt, _) in enumerate(keys):
            if lengths[prompt] <= length:
                drawn[row, lengths[prompt] - 1] = 0.0
        return drawn

    return numbers


def length(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    """A reward for where a reward model as large as the policy has no room."""
    return [float(len(completion)) for completion in completions]


def adapter() -> Any:
    """LoRA of all linear layers."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def main(arguments: Sequence[str] | None = None) -> None:
    given = side.asked(arguments)
    point, clock = POINTS[given.point], side.Clock()
    if lever := given.set.pop("without", None):
        for replaced in LEVERS[lever]:
            setattr(*replaced)
    lora = given.set.pop("lora", point.lora)
    count = point.batch * (given.updates + 1)
    lengths = point.lengths(count)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = build_models(point, device)
    eager = given.bf16 and device == "cpu" and not given.set.get("padding_free")
    if attention := given.set.pop("attn_implementation", "eager" if eager else None):
        for model in filter(None, vars(models).values()):
            model.set_attn_implementation(attention)
    fields: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": point.rows,
        "gradient_accumulation_steps": point.batch // point.rows, "num_mini_batches": 1, "num_ppo_epochs": EPOCHS,
        "total_episodes": count, "response_length": point.response,
        "temperature": TEMPERATURE, "stop_token": "eos" if point.ends else None,
        "missing_eos_penalty": 1.0 if point.ends else None, "learning_rate": RATE, "bf16": given.bf16,
        "critic": "shared" if given.shared or point.lora else "auto", "train_sampling_strategy": "sequential",
        "report_to": [], "save_strategy": "no", "use_cpu": device == "cpu", "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    trainer = PPOTrainer(
        PPOConfig(**fields | given.set), word_tokenizer(point.vocab), models.policy,
        ref_model=None if lora else models.reference, reward_model=models.reward,
        value_model=None if given.shared else models.value, reward_funcs=length if point.lora else None,
        peft_config=adapter() if lora else None, train_dataset=Dataset.from_dict({"input_ids": point.prompts(count)}),
        callbacks=[ProgressCallback(clock, lengths)],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    del models
    sampling.uniforms = replayed(sampling.uniforms, lengths)
    trainer.train()
    clock.report()


if __name__ == "__main__":
    main()
