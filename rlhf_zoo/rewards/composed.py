"""A weighted list of rewards: models and functions, scored together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ZooError
from ..sampling import Samples
from .model import RewardModel

__all__ = ["RewardFunction", "Rewards", "Scored"]

RewardFunction = Callable[..., Sequence[float | None]]


@dataclass(frozen=True)
class Scored:
    """total (B,): the weighted sum; each (B, F): one column a reward, NaN where it does not apply."""

    total: Tensor
    each: Tensor


class Rewards:
    """Σ_f w_f · reward_f over the rewards that apply to a row.

    A function is called as TRL's GRPO calls it, `f(prompts=…, completions=…, completion_ids=…, trainer_state=…,
    **columns)`, and returns one number a row, or None where it does not apply.
    """

    def __init__(
        self, rewards: Sequence[RewardModel | RewardFunction], *, weights: Sequence[float] | None = None
    ) -> None:
        if not rewards:
            raise ZooError("PPO has no reward: give reward_model or reward_funcs.")
        if weights is not None and len(weights) != len(rewards):
            raise ZooError(
                f"reward_weights holds {len(weights)} numbers for {len(rewards)} rewards: give one a reward."
            )
        self.rewards = list(rewards)
        self.weights = [1.0] * len(rewards) if weights is None else [float(w) for w in weights]
        self.names = _unique([_name(reward) for reward in rewards])

    @property
    def models(self) -> list[RewardModel]:
        return [reward for reward in self.rewards if isinstance(reward, RewardModel)]

    def __call__(
        self,
        samples: Samples,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        texts: Sequence[str],
        columns: Mapping[str, Any],
    ) -> Scored:
        """Scores B completions. texts: prompt + completion as one string a row.

        Raises ZooError when a function raises, returns another count, returns a number that is not finite, or when
        none applies to a row.
        """
        device = samples.logprobs.device
        rows = []
        for name, reward in zip(self.names, self.rewards, strict=True):
            if isinstance(reward, RewardModel):
                rows.append(reward.score_samples(samples, texts).to(device))
                continue
            try:
                values = reward(
                    prompts=list(prompts),
                    completions=list(completions),
                    completion_ids=samples.token_lists(),
                    **columns,
                )
            except Exception as error:
                raise ZooError(
                    f"The reward function {name} raised {type(error).__name__}: {error}; its first prompt was "
                    f"{prompts[0]!r}."
                ) from error
            rows.append(_checked(name, values, len(samples), prompts).to(device))
        each = torch.stack(rows, dim=1)
        nowhere = each.isnan().all(1)
        if nowhere.any():
            row = int(nowhere.nonzero()[0])
            raise ZooError(f"No reward applies to the prompt {prompts[row]!r}: every function returned None for it.")
        weights = torch.tensor(self.weights, device=device)
        return Scored(total=(each.nan_to_num(0.0) * weights).sum(1), each=each)


def _checked(name: str, values: Sequence[float | None], count: int, prompts: Sequence[Any]) -> Tensor:
    try:
        numbers = [None if value is None else float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise ZooError(
            f"The reward function {name} returned no list of numbers ({error}): return a float or None a completion."
        ) from error
    if len(numbers) != count:
        raise ZooError(f"The reward function {name} returned {len(numbers)} rewards for {count} completions.")
    for row, number in enumerate(numbers):
        if number is not None and not math.isfinite(number):
            raise ZooError(f"The reward function {name} returned {number} for row {row}, prompt {prompts[row]!r}.")
    return torch.tensor([math.nan if number is None else number for number in numbers])


def _name(reward: RewardModel | RewardFunction) -> str:
    if isinstance(reward, RewardModel):
        return "reward_model"
    return getattr(reward, "__name__", type(reward).__name__)


def _unique(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]
