"""Which judge the evaluation goes by, settled before anything is trained."""

from __future__ import annotations

from dataclasses import replace

from ..plugins import REWARDS, load_object
from ..rewards.verifiable import Verifiable
from .context import RunContext
from .settings import EvaluationConfig, StageSettings

__all__ = ["evaluation_of", "with_judge"]


def evaluation_of(context: RunContext) -> EvaluationConfig:
    """The run's evaluation, with its judge: see `with_judge`."""
    return with_judge(context.shared.evaluation, context.settings("ppo"))


def with_judge(config: EvaluationConfig, ppo: StageSettings) -> EvaluationConfig:
    """The evaluation with its judge: the one that it names, else PPO's verifiable reward, else `classifier`.

    Raises ZooError for a reward function that cannot be loaded.
    """
    if config.judge is not None:
        return config
    for name in ppo.data.reward_funcs or []:
        if isinstance(load_object(name, group=REWARDS), Verifiable):
            return replace(config, judge=f"rule:{name}")
    return replace(config, judge="classifier")
