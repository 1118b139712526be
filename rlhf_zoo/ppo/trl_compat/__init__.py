"""The names of TRL 1.12's PPO. A script that was written for it needs to change only its import line.

docs/from-trl.md maps old names to new names, and lists intended differences. `trl_compat.classic` has the names of TRL
0.x's step-wise loop.
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
