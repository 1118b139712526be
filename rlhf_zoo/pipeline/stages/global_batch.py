"""trl's trainers in several processes: the batches, losses and metrics of one process.

Trainer fills the last batch of a pass up with rows of its first, and trl averages by process what one process averages
over a batch. Here the rows of each batch are dealt out evenly, once each, and a loss is the mean over all of them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor, nn
from transformers import Trainer
from trl import RewardConfig, RewardTrainer

from ...modeling import distributed


class _Dealt(BatchSamplerShard):
    """Every process's share of each batch of all; the last one's rows are dealt out one by one.

    A process that gets none of them has the first row, which is not to count.
    """

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[list[int]] = []
        for batch in self.batch_sampler:
            batches.append(batch)
            if sum(map(len, batches)) == self.num_processes * self.batch_size:
                yield batches[self.process_index]
                batches = []
        left = [row for batch in batches for row in batch]
        if left and not self.drop_last:
            yield left[self.process_index :: self.num_processes] or left[:1]

    def __len__(self) -> int:
        whole, left = divmod(len(self.batch_sampler), self.num_processes)
        return whole + (left > 0 and not self.drop_last)


class GlobalBatch(Trainer):
    """Stands before a trainer of trl's."""

    def _dealt(self, loader: Any) -> Any:
        loader.batch_sampler.__class__ = _Dealt
        return loader

    def get_train_dataloader(self) -> Any:
        return self._dealt(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._dealt(super().get_eval_dataloader(eval_dataset))

    def rows(self, here: int) -> tuple[int, int]:
        """Of a batch of `here` rows: how many count, and how many do in all processes."""
        reading = self.accelerator.gradient_state
        if not reading.end_of_dataloader or reading.remainder <= 0:
            return here, here * self.args.world_size
        each, left = divmod(reading.remainder, self.args.world_size)
        return each + (self.args.process_index < left), reading.remainder

    def _counting(self, inputs: Any) -> Any:
        """Leaves out the targets of a row that is not to count."""
        if "labels" in inputs and self.rows(len(inputs["labels"]))[0] == 0:
            inputs["labels"] = torch.full_like(inputs["labels"], -100)
        return inputs

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        return super().get_batch_samples(map(self._counting, epoch_iterator), num_batches, device)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if num_items_in_batch is None:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, *rest = super().prediction_step(model, self._counting(inputs), *args, **kwargs)
        return (self.accelerator.reduce(loss, "mean"), *rest)


class GlobalReward(GlobalBatch):
    """Stands before trl's RewardTrainer."""

    args: RewardConfig
    _metrics: Any
    _total_train_tokens: float

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """−log σ(chosen − rejected − margin), and the centering, averaged over the pairs of all processes."""
        mode, coefficient = "train" if model.training else "eval", self.args.center_rewards_coefficient
        outputs = model(**inputs, use_cache=False)
        chosen, rejected = torch.chunk(outputs.logits.squeeze(-1), chunks=2)
        each = -nn.functional.logsigmoid(chosen - rejected - inputs.get("margin", 0))
        if coefficient is not None:
            each = each + coefficient * (chosen + rejected) ** 2
        count, of_all = self.rows(len(each))
        weight = (torch.arange(len(each), device=each.device) < count).to(each)
        # Gradients are averaged over the processes.
        loss = (each * weight).sum() * self.args.world_size / of_all
        self._note(mode, chosen[:count].detach(), rejected[:count].detach(), inputs["attention_mask"].sum())
        return (loss, outputs) if return_outputs else loss

    def _note(self, mode: str, chosen: Tensor, rejected: Tensor, tokens: Tensor) -> None:
        """trl's metrics, over the pairs of all processes."""
        gathered = distributed.gathered((chosen.tolist(), rejected.tolist(), int(tokens)))
        wins, losses = (
            torch.tensor([score for scores_of_process in gathered for score in scores_of_process[side]])
            for side in (0, 1)
        )
        scores = torch.cat([wins, losses])
        if mode == "train":
            self._total_train_tokens += sum(scores_of_process[2] for scores_of_process in gathered)
        metrics = self._metrics[mode]
        metrics["num_tokens"] = [self._total_train_tokens]
        for name, value in (
            ("min_reward", scores.min()),
            ("mean_reward", scores.mean()),
            ("max_reward", scores.max()),
            ("accuracy", (wins > losses).float().mean()),
            ("margin", (wins - losses).mean()),
        ):
            metrics[name].append(float(value))


def in_processes(kind: Any) -> Any:
    """This trainer of trl's as several processes train it; itself in one."""
    if distributed.count() == 1:
        return kind
    return type(kind.__name__, (GlobalReward if issubclass(kind, RewardTrainer) else GlobalBatch, kind), {})
