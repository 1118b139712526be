"""Makes trl's trainers compute the same batches, losses and metrics in several processes as in a single process.

transformers' Trainer pads the last batch of an epoch with rows of the first batch, and trl averages within each
process. Here the rows of each batch are distributed evenly, without repetition, and a loss is the mean over the tokens
(SFT) or pairs (reward) of all processes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor, nn
from transformers import Trainer
from trl import RewardConfig

from ...modeling import distributed


class _EvenShards(BatchSamplerShard):
    """Yields this process's share of each global batch, including an incomplete last batch.

    A process without a row in the last batch takes the batch's first row, which `GlobalBatchMixin` does not count.
    """

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[list[int]] = []
        for batch in self.batch_sampler:
            batches.append(batch)
            if sum(map(len, batches)) == self.num_processes * self.batch_size:
                yield batches[self.process_index]
                batches = []
        remaining = [row for batch in batches for row in batch]
        if remaining and not self.drop_last:
            yield remaining[self.process_index :: self.num_processes] or remaining[:1]

    def __len__(self) -> int:
        full_count, remainder = divmod(len(self.batch_sampler), self.num_processes)
        return full_count + (remainder > 0 and not self.drop_last)


class GlobalBatchMixin(Trainer):
    """A mixin for trl's trainers, such as SFTTrainer. List it before the trainer among the base classes."""

    def _shard_evenly(self, loader: Any) -> Any:
        # accelerate constructs the sampler and has no option for its class.
        loader.batch_sampler.__class__ = _EvenShards
        return loader

    def get_train_dataloader(self) -> Any:
        return self._shard_evenly(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._shard_evenly(super().get_eval_dataloader(eval_dataset))

    def count_rows(self, local_count: int) -> tuple[int, int]:
        """Counts the rows of the current batch, without rows that only pad it.

        Args:
            local_count: Number of rows in this process, padding included.

        Returns:
            (rows that count in this process, rows that count in all processes).
        """
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return local_count, local_count * self.args.world_size
        share, remainder = divmod(state.remainder, self.args.world_size)
        return share + (self.args.process_index < remainder), state.remainder

    def _mask_padding(self, inputs: Any) -> Any:
        """Masks the labels if this process has only a row that does not count."""
        if "labels" in inputs and self.count_rows(len(inputs["labels"]))[0] == 0:
            inputs["labels"] = torch.full_like(inputs["labels"], -100)
        return inputs

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        return super().get_batch_samples(map(self._mask_padding, epoch_iterator), num_batches, device)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if num_items_in_batch is None:  # in evaluation, where trl's loss would be a mean over this process only
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, *outputs = super().prediction_step(model, self._mask_padding(inputs), *args, **kwargs)
        return (self.accelerator.reduce(loss, "mean"), *outputs)


class GlobalRewardMixin(GlobalBatchMixin):
    """A mixin for trl's RewardTrainer. List it before the trainer among the base classes."""

    args: RewardConfig
    _metrics: Any
    _total_train_tokens: float

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns −log σ(chosen − rejected − margin) plus the centering penalty, averaged over all processes' pairs."""
        mode, coefficient = "train" if model.training else "eval", self.args.center_rewards_coefficient
        outputs = model(**inputs, use_cache=False)
        chosen, rejected = torch.chunk(outputs.logits.squeeze(-1), chunks=2)
        losses = -nn.functional.logsigmoid(chosen - rejected - inputs.get("margin", 0))
        if coefficient is not None:
            losses = losses + coefficient * (chosen + rejected) ** 2
        count, total = self.count_rows(len(losses))
        weights = (torch.arange(len(losses), device=losses.device) < count).to(losses)
        # The gradients are averaged over the processes, so world_size turns the mean back into a sum.
        loss = (losses * weights).sum() * self.args.world_size / total
        self._log_metrics(mode, chosen[:count].detach(), rejected[:count].detach(), inputs["attention_mask"].sum())
        return (loss, outputs) if return_outputs else loss

    def _log_metrics(self, mode: str, chosen: Tensor, rejected: Tensor, token_count: Tensor) -> None:
        """Computes trl's metrics over the pairs of all processes."""
        process_results = distributed.gather((chosen.tolist(), rejected.tolist(), int(token_count)))
        all_chosen, all_rejected = (
            torch.tensor([score for result in process_results for score in result[side]]) for side in (0, 1)
        )
        scores = torch.cat([all_chosen, all_rejected])
        if mode == "train":
            self._total_train_tokens += sum(result[2] for result in process_results)
        metrics = self._metrics[mode]
        metrics["num_tokens"] = [self._total_train_tokens]
        for name, value in (
            ("min_reward", scores.min()),
            ("mean_reward", scores.mean()),
            ("max_reward", scores.max()),
            ("accuracy", (all_chosen > all_rejected).float().mean()),
            ("margin", (all_chosen - all_rejected).mean()),
        ):
            metrics[name].append(float(value))
