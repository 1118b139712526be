"""TRL's side: `../.venv-trl/bin/python -m speed.peer POINT` in benchmarks/.

It runs the PPOTrainer of TRL 1.12.0, the last release that has one, with the settings of this trainer's side. In that
release the arguments `bf16` and `gradient_checkpointing` have no effect, and policy and critic share no trunk.
"""

import contextlib
import io
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import trl.experimental.ppo.ppo_trainer as ppo
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PrinterCallback, StoppingCriteria, StoppingCriteriaList, TrainerCallback

from . import side
from .points import EOS, EPOCHS, LEARNING_RATE, POINTS, TEMPERATURE, build_models, word_tokenizer


class StopAtLengths(StoppingCriteria):
    """Ends each row of a batch at its own length."""

    def __init__(self, prompt_length: int, lengths: Sequence[int]) -> None:
        self.ends = prompt_length + torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends.to(input_ids.device)


class ProgressCallback(TrainerCallback):
    """Times each update from the end of the previous one, as TRL has no event for its start."""

    def __init__(self, clock: side.Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.end(other_phase="update")
        self.clock.begin()


def main(arguments: Sequence[str] | None = None) -> None:
    options = side.parse_options(arguments)
    point, clock = POINTS[options.point], side.Clock()
    count = point.batch * (options.updates + 1)
    lengths = point.lengths(count)
    models = build_models(point, "cuda" if torch.cuda.is_available() else "cpu")
    trainer = ppo.PPOTrainer(
        args=ppo.PPOConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=point.rows,
            gradient_accumulation_steps=point.batch // point.rows, num_mini_batches=1, num_ppo_epochs=EPOCHS,
            total_episodes=count, response_length=point.response, temperature=TEMPERATURE,
            stop_token="eos" if point.ends else None, missing_eos_penalty=1.0 if point.ends else None,
            learning_rate=LEARNING_RATE, num_sample_generations=0, report_to=[], save_strategy="no", logging_steps=1,
            bf16=False, gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(), disable_tqdm=True, seed=0,
        ),
        processing_class=word_tokenizer(point.vocab), model=models.policy, ref_model=models.reference,
        reward_model=models.reward, value_model=models.value,
        train_dataset=Dataset.from_dict({"input_ids": point.prompts(count)}), callbacks=[ProgressCallback(clock)],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    loader = DataLoader(trainer.train_dataset, point.batch, collate_fn=trainer.data_collator, drop_last=True)
    trainer.dataloader = trainer.accelerator.prepare(loader)

    generate, done = models.policy.generate, 0

    def generate_at_lengths(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        rows = lengths[done : done + len(kwargs["input_ids"])]
        done += len(kwargs["input_ids"])
        prompt_length = kwargs["input_ids"].shape[1]
        criteria = StoppingCriteriaList([StopAtLengths(prompt_length, rows)]) if point.ends else None
        out = generate(*args, **kwargs, stopping_criteria=criteria)
        for row, length in enumerate(rows):
            if length <= point.response:
                out.sequences[row, prompt_length + length - 1] = EOS
        clock.tokens += sum(min(length, point.response) for length in rows)
        longest = max(min(length, point.response) for length in rows)
        if out.sequences.shape[1] != prompt_length + longest:
            raise SystemExit(f"TRL sampled {out.sequences.shape[1] - prompt_length} tokens instead of {longest}.")
        return out

    models.policy.generate = generate_at_lengths
    forward, reward = ppo.forward, ppo.get_reward

    def timed_forward(*args: Any) -> Any:
        return forward(*args) if torch.is_grad_enabled() else clock.timed("reference", forward)(*args)

    def timed_reward(model: Any, *args: Any) -> Any:
        return clock.timed("reward" if model is trainer.reward_model else "values", reward)(model, *args)

    ppo.batch_generation = clock.timed("rollout", ppo.batch_generation)
    ppo.forward, ppo.get_reward = timed_forward, timed_reward
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    clock.print_report()


if __name__ == "__main__":
    main()
