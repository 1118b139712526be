"""The names of TRL 1.12's PPO, for scripts written for it: change the import line and nothing else.

docs/from-trl.md maps old names to new ones, and lists intended differences. `trl_compat.classic` has the names of the
step-wise loop of TRL 0.x.
"""

from ...modeling.value_head_models import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from .config import PPOConfig
from .helpers import batch_generation, masked_mean, masked_var, masked_whiten
from .trainer import PPOTrainer

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "PPOConfig",
    "PPOTrainer",
    "batch_generation",
    "masked_mean",
    "masked_var",
    "masked_whiten",
]
