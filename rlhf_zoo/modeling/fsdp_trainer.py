"""Trainers whose models are sharded (FSDP2). They write the same checkpoints as a single process."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME

from ..errors import ZooError
from .fsdp import gather_optimizer, gather_weights, return_freed_blocks, shard, shard_optimizer
from .models import is_peft


class ShardTrainer(Trainer):
    """A Trainer that saves and loads the optimizer of sharded models, once `shard` has been called."""

    _is_sharded = False

    def shard(self, *models: nn.Module, frozen: Sequence[nn.Module] = ()) -> None:
        """Shards models in place. Call it before the optimizer is created.

        Args:
            *models: The models in training.
            frozen: Models that are not trained.

        Raises:
            ZooError: A model in training has adapters, or any model is quantized.
        """
        all_models = (*models, *frozen)
        for is_used, feature_and_fix in (
            (any(map(is_peft, models)), "adapters: remove use_peft"),
            (
                any(getattr(model, "is_quantized", False) for model in all_models),
                "quantized models: load them unquantized",
            ),
        ):
            if is_used:
                raise ZooError(f"fsdp2 does not support {feature_and_fix}, or remove fsdp2.")
        for model in all_models:
            shard(model)
        if next(models[0].parameters()).device.type == "cpu":
            return_freed_blocks()
        # Prepare models as for evaluation. For training, accelerate would use DDP, which cannot handle sharded weights.
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self._is_sharded = True

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if not self._is_sharded:
            return
        # Overwrite the file that Trainer wrote, because it has only this process's shards.
        state = gather_optimizer(self.optimizer, keep=self.args.should_save)
        if state is not None:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._is_sharded:
            shard_optimizer(self.optimizer)


class ShardedModelMixin(ShardTrainer):
    """Mixin for a TRL trainer: shards the model when the optimizer is created, after the weights are loaded."""

    model: Any

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None:
            self.shard(self.model)
        return super().create_optimizer(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, gather_weights(self.model) if state_dict is None else state_dict)
