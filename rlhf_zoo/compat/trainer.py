"""TRL 1.12's PPOTrainer: its attributes, on ours."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ..ppo.trainer import PPOTrainer as ZooPPOTrainer

__all__ = ["PPOTrainer"]


class PPOTrainer(ZooPPOTrainer):
    """`rlhf_zoo.PPOTrainer`, whose constructor has TRL's keywords, with the attributes that TRL's had besides."""

    @property
    def policy_model(self) -> Any:
        return self.policy

    @property
    def reward_model(self) -> Any:
        """The first reward that is a model, or None."""
        models = self.rewards.models
        return models[0].model if models else None

    @property
    def ref_model(self) -> Any:
        """The reference where it is a model of its own; None where it is the policy with its adapter off, as in TRL."""
        return self.reference.own

    @property
    def stop_token_id(self) -> int | None:
        return self.stop_ids[0] if self.stop_ids else None

    def null_ref_context(self) -> AbstractContextManager:
        """In it, a policy with an adapter is its own reference."""
        return self.reference.model()
