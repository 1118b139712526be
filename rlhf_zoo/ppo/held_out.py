"""Evaluates the policy on held-out prompts during training: metrics, and tables of completions."""

import math
from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from ..errors import ZooError
from ..modeling.reserved_columns import PROMPT_INDEX
from .assembly import prepare_prompt_data
from .base import EVAL_STREAM
from .metrics import completion_metrics
from .rollout_trainer import RolloutTrainer


class HeldOutTrainer(RolloutTrainer):
    """Adds evaluation. Each evaluation uses the same random streams, so only the policy changes the results."""

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Samples completions of held-out prompts, and reports score, KL, length and EOS rate.

        Args:
            eval_dataset: The prompts, or several data sets by name; None for the trainer's own.
            ignore_keys: As in Trainer; not used.
            metric_key_prefix: The prefix of the metrics' names.

        Returns:
            Means over all prompts and processes.

        Raises:
            ZooError: There are no prompts.
        """
        prompts = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(prompts, dict):
            results = [self.evaluate(prompts[name], ignore_keys, f"{metric_key_prefix}_{name}") for name in prompts]
            return {name: value for result in results for name, value in result.items()}
        if prompts is None:
            raise ZooError("There are no prompts to evaluate on: pass eval_dataset.")
        if not isinstance(prompts, Dataset) or PROMPT_INDEX not in prompts.column_names:
            prompts = prepare_prompt_data(
                prompts, self.args, self.processing_class, self.context_length, self.smallest_consumer
            )
        values_by_metric: dict[str, list[Tensor]] = defaultdict(list)
        # Evaluation replaces the table, but the next log line must show training's.
        training_table, self._completions_table = self._completions_table, {}
        self.callback_handler.eval_dataloader = self.get_eval_dataloader(prompts)
        for rows in self.numbered_batches(self.callback_handler.eval_dataloader):
            rollout = self.rollout(rows, stream=EVAL_STREAM)
            advantages = self.compute_advantages(rollout, self.score(rollout, rows))
            for name, values in completion_metrics(rollout, advantages, self.rewards.names).items():
                # `gather_for_metrics` drops the filler rows of the last batch.
                values_by_metric[name].append(self.accelerator.gather_for_metrics(values))
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self._completions_table = training_table
        metrics = {
            f"{metric_key_prefix}_{name}": float(torch.cat(parts).nanmean()) for name, parts in values_by_metric.items()
        }
        self.log({name: value for name, value in metrics.items() if not math.isnan(value)})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def generate_completions(self, sampling: bool = False, *, step: int | None = None) -> dict[str, list[Any]]:
        """Samples completions of the held-out prompts, and shows the first of them with their scores as a table.

        Args:
            sampling: Whether to stop after one batch, as in TRL.
            step: The update to which the table belongs; None for the current one.

        Returns:
            The columns prompt, completion and score, with all rows of this process.

        Raises:
            ZooError: There is no eval_dataset.
        """
        if self.eval_dataset is None:
            raise ZooError("generate_completions() samples held-out prompts: pass eval_dataset.")
        table: dict[str, list[Any]] = {"prompt": [], "completion": [], "score": []}
        datasets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        for rows in chain.from_iterable(map(self.numbered_batches, map(self.get_eval_dataloader, datasets.values()))):
            rollout = self.rollout(rows, stream=EVAL_STREAM)
            decoded, reward_scores = self.decode_and_score(rollout, rows)
            columns = decoded.prompts, decoded.completions, reward_scores.total.tolist()
            for name, column in zip(table, columns, strict=True):
                table[name] += list(column)
            if sampling:
                break
        first_rows = {name: column[: self.args.num_completions_to_print] for name, column in table.items()}
        self.show(first_rows, "samples", step=step)
        return table

    def log_eval_samples(self) -> None:
        """Shows completions of held-out prompts after an update, about num_sample_generations times in a run."""
        times = self.args.num_sample_generations
        step = self.state.global_step + 1  # Trainer counts the update only when training_step has returned
        if times and self.eval_dataset is not None and step % max(1, self.state.max_steps // times) == 0:
            self.generate_completions(sampling=True, step=step)
