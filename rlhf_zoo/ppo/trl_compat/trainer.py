"""TRL 1.12's PPOTrainer, with its attributes and behavior, as a subclass of ours."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from ...errors import ZooError
from ...modeling.models import is_peft
from ...modeling.sampling.sampler import Samples
from ..rollout import Rollout
from ..trainer import PPOTrainer as ZooPPOTrainer
from .config import PPOConfig


class PPOTrainer(ZooPPOTrainer):
    """`rlhf_zoo.PPOTrainer`, whose constructor has TRL's keywords, with the additional attributes of TRL's trainer."""

    @wraps(ZooPPOTrainer.__init__, assigned=())  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Builds the trainer.

        Args:
            *args: As for `rlhf_zoo.PPOTrainer`, whose first parameters are TRL's, in TRL's order.
            **kwargs: As for `rlhf_zoo.PPOTrainer`.

        Raises:
            ZooError: As for `rlhf_zoo.PPOTrainer`, and for an optimizer without a weight of the policy or the critic.
        """
        super().__init__(*args, **kwargs)
        # Without optimizers= the optimizer is None here; Trainer makes one when training starts.
        if self.optimizer is not None:
            _check_optimizer(self)
        if isinstance(self.args, PPOConfig) and self.args.num_total_batches is None and self.train_dataset_len:
            updates = math.ceil(self.train_dataset_len / self.args.prompts_per_update)
            self.args.num_total_batches = math.ceil(self.args.num_train_epochs * updates)

    @property
    def policy_model(self) -> Any:
        return self.policy

    @property
    def is_peft_model(self) -> bool:
        return is_peft(self.policy)

    @property
    def reward_model(self) -> Any:
        """The first reward model; None if there is none."""
        models = self._rewards.models if self._rewards is not None else []
        return models[0].model if models else None

    @property
    def ref_model(self) -> Any:
        """The reference if it is a separate model; None if it is the policy with its adapter off, as in TRL."""
        return None if self.reference is None else self.reference.separate_model

    @property
    def stop_token_id(self) -> int | None:
        return self.stop_ids[0] if self.stop_ids else None

    @property
    def train_dataset_len(self) -> int:
        prompts: Any = self.train_dataset
        return 0 if prompts is None else len(prompts)

    def null_ref_context(self) -> AbstractContextManager:
        """Returns a context in which a policy with an adapter computes as the reference."""
        return nullcontext() if self.reference is None else self.reference.model()

    def make_rollout(self, samples: Samples, *, recompute_logprobs: bool) -> Rollout:
        """Counts a completion with EOS as ended, as in TRL, even if no stop token ended it.

        Args:
            samples: B completions.
            recompute_logprobs: Whether a forward pass computes log π_old.
        """
        rollout = super().make_rollout(samples, recompute_logprobs=recompute_logprobs)
        is_eos = (rollout.samples.completion_ids == self.processing_class.eos_token_id) & rollout.mask
        return replace(rollout, samples=replace(rollout.samples, ended=rollout.samples.ended | is_eos.any(1)))

    def generate_completions(self, sampling: bool = False, **kwargs: Any) -> dict[str, list[Any]]:
        """Does the same as in `rlhf_zoo.PPOTrainer`, but returns {} without eval_dataset, as in TRL.

        Args:
            sampling: Whether to stop after one batch.
            **kwargs: As for `rlhf_zoo.PPOTrainer`.
        """
        return super().generate_completions(sampling, **kwargs) if self.eval_dataset is not None else {}

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Makes Trainer's card, with TRL's keywords. `push_to_hub` passes its keywords on to this method.

        Args:
            model_name: The model's name on the card.
            dataset_name: The name of the data set or data sets.
            tags: The card's tags.
            **kwargs: More keywords of Trainer's method.
        """
        if dataset_name is not None:
            kwargs |= {"dataset": dataset_name, "dataset_tags": dataset_name}
        super().create_model_card(model_name=model_name, tags=tags, **kwargs)


def _check_optimizer(trainer: PPOTrainer) -> None:
    """Raises ZooError for an optimizer without a weight of the policy or the critic.

    A critic made from a value_model is a copy, so an optimizer of the value_model's weights would not train the critic.
    """
    optimizer: Any = trainer.optimizer
    # Compare identities, because == compares the elements of tensors.
    optimizer_weights = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    modules: dict[str, torch.nn.Module] = {"policy": trainer.policy, "critic": trainer.value_model}
    for name, module in modules.items():
        if not any(id(weight) in optimizer_weights for weight in module.parameters()):
            raise ZooError(
                f"The optimizer has no weight of the {name}, which would never be trained: remove optimizers and set "
                "critic_learning_rate, or pass a token classifier with one label as value_model, which is not copied."
            )
