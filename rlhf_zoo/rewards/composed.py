"""A weighted list of rewards: models and functions that score completions together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import ZooError
from ..modeling.chat_template import Prompt
from ..modeling.reserved_columns import TABLE_COLUMNS
from ..modeling.sampling.sampler import Samples
from .ensemble import RewardEnsemble
from .functions import Batch, NamedReward, RewardFunction, call_functions, convert_rewards, join_names, unwrap_partials
from .model import RewardModel

#: The sample standard deviation (ddof=1) of the scores of an ensemble's models, for each completion.
DISAGREEMENT = "disagreement"


@dataclass(frozen=True)
class RewardScores:
    """The scores of B completions, and what the reward functions logged.

    Attributes:
        total: (B,) the weighted sum over the rewards that apply.
        per_reward: (B, number of `Rewards.names`), a column for each name; NaN where a reward does not apply.
        extra: {column: B values that functions logged with `log_extra`}, which are shown next to the completions.
        metrics: {name: mean of the values that functions logged with `log_metric`}.
        by_token: (B, T) the part of the total that belongs to each token; None if no function returned lists.
        group_size: The number of adjacent completions per prompt; 1 if it is unknown which completions share a prompt.
    """

    total: Tensor
    per_reward: Tensor
    extra: Mapping[str, list[Any]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    by_token: Tensor | None = None
    group_size: int = 1

    def select(self, indices: Tensor, *, width: int) -> RewardScores:
        """Selects rows. Leaves out what the functions logged.

        Args:
            indices: Indices of the rows. All rows of a group must be selected together.
            width: The number of tokens in the longest of these completions.
        """
        by_token = None if self.by_token is None else self.by_token[indices, :width]
        return RewardScores(
            self.total[indices], self.per_reward[indices], by_token=by_token, group_size=self.group_size
        )


class Rewards:
    """Σ_f w_f · reward_f over the rewards that apply to a row.

    A function is called as in TRL's GRPO, `f(prompts=…, completions=…, completion_ids=…, trainer_state=…, log_extra=…,
    log_metric=…, **columns)`, and returns one number per row, or None for rows to which it does not apply. For a row,
    it may also return a list: one number per token, or spans (start, end, value) in characters of the completion. A
    span's value goes to the token that completes the span, and the row's reward is the sum of the list. Coroutine
    functions run concurrently, on an event loop that lasts as long as the process.

    Args:
        rewards: Reward models, ensembles and functions.
        weights: The weight of each reward; None for a weight of 1 each.
        tokenizer: The policy's tokenizer, which finds the tokens of spans; None if no function returns spans.
        timeout: The limit in seconds for a function on a batch; None for no limit.

    Attributes:
        names: The names of the rewards, followed by the names of scores that are only logged: for each ensemble, its
            models' scores, NAME_0, NAME_1, …, and their disagreement.

    Raises:
        ZooError: There is no reward, a reward cannot score, or the numbers of weights and rewards differ.
    """

    def __init__(
        self,
        rewards: Sequence[RewardModel | RewardEnsemble | RewardFunction],
        *,
        weights: Sequence[float] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        timeout: float | None = None,
    ) -> None:
        if not rewards:
            raise ZooError("PPO has no reward: pass reward_model or reward_funcs.")
        if weights is not None and len(weights) != len(rewards):
            raise ZooError(f"reward_weights has {len(weights)} numbers for {len(rewards)} rewards: set one per reward.")
        for reward in rewards:
            _check_reward(reward)
        self.rewards = list(rewards)
        self.weights = [1.0] * len(rewards) if weights is None else [float(weight) for weight in weights]
        reward_names = _make_unique([_name_reward(reward) for reward in rewards])
        logged_names: list[str] = []
        for name, reward in zip(reward_names, rewards, strict=True):
            if isinstance(reward, RewardEnsemble):
                logged_names += [*(f"{name}_{index}" for index in range(len(reward.models))), DISAGREEMENT]
        self.names = _make_unique([*reward_names, *logged_names])
        self.tokenizer, self.timeout = tokenizer, timeout

    @property
    def model_rewards(self) -> list[RewardModel | RewardEnsemble]:
        """The rewards that are models. An ensemble counts as one reward."""
        return [reward for reward in self.rewards if isinstance(reward, RewardModel | RewardEnsemble)]

    @property
    def models(self) -> list[RewardModel]:
        """All reward models, including those of ensembles."""
        return [model for model, _ in self.weighted_models]

    @property
    def weighted_models(self) -> list[tuple[RewardModel, float]]:
        """All reward models with the weights of their scores. The models of an ensemble have its weight."""
        rewards_and_weights = zip(self.rewards, self.weights, strict=True)
        return [(model, weight) for reward, weight in rewards_and_weights for model in _models_of(reward)]

    def __call__(
        self,
        samples: Samples,
        prompts: Sequence[Prompt],
        completions: Sequence[Any],
        texts: Sequence[Any],
        columns: Mapping[str, Any],
        *,
        trainer_state: Any = None,
        model_context: Callable[..., AbstractContextManager] = nullcontext,
    ) -> RewardScores:
        """Scores B completions.

        Args:
            samples: The completions' token ids.
            prompts: B texts or conversations.
            completions: B texts, or lists of messages.
            texts: B complete texts (prompt + completion), or conversations.
            columns: Other columns of the data set, for functions. Names in `reserved_columns.RESERVED` are left out.
            trainer_state: The trainer's state, for functions; None outside training.
            model_context: Called with each model before it scores. The returned context is open while the model scores.

        Raises:
            ZooError: A function raises an exception, exceeds `timeout`, or does not return a finite number or None
                per row; a model's score is not finite; the sum of a row is too large; or no reward applies to a row.
                A ZooError of a function is raised unchanged.
        """
        device = samples.logprobs.device
        ids = samples.completion_id_lists()
        batch = Batch(list(prompts), list(completions), ids, columns, trainer_state, samples.prompt_id_lists())
        reward_names = self.names[: len(self.rewards)]
        named_rewards = list(zip(reward_names, self.rewards, strict=True))
        functions = [
            NamedReward(name, reward)
            for name, reward in named_rewards
            if not isinstance(reward, RewardModel | RewardEnsemble)
        ]
        results = call_functions(functions, batch, timeout=self.timeout)
        scores: list[Tensor] = []
        logged_scores: list[Tensor] = []
        by_token: Tensor | None = None
        for (name, reward), weight in zip(named_rewards, self.weights, strict=True):
            if isinstance(reward, RewardEnsemble):
                per_model = reward.score_each(samples, texts, model_context=model_context)
                for model, model_scores in zip(reward.models, per_model, strict=True):
                    _check_finite(f"{name} {model.name}", model_scores, batch)
                scores.append(reward.combine(per_model))
                logged_scores += [*per_model, per_model.std(0)]
                continue
            if isinstance(reward, RewardModel):
                with model_context(reward.model):
                    scores.append(_check_finite(name, reward.score_samples(samples, texts), batch).to(device))
                continue
            totals, token_rewards = convert_rewards(name, results[name], batch, self.tokenizer)
            scores.append(totals.to(device))
            if token_rewards is not None:
                padded_rewards = torch.zeros(samples.mask.shape, device=device)
                numbers = [number for row in token_rewards for number in row]
                padded_rewards[samples.mask] = torch.tensor(numbers, device=device)
                by_token = weight * padded_rewards + (0.0 if by_token is None else by_token)
        per_reward = torch.stack(scores, dim=1)
        has_no_score = per_reward.isnan().all(1)
        if has_no_score.any():
            row = int(has_no_score.nonzero()[0])
            raise ZooError(
                f"No reward applies to the prompt {batch.quoted_prompt(row)} of row {row}, because "
                f"{join_names(reward_names)} returned None: let one of them return a number."
            )
        weights = torch.tensor(self.weights, device=device)
        total = (per_reward.nan_to_num(0.0) * weights).sum(1)
        if not total.isfinite().all():
            row = int((~total.isfinite()).nonzero()[0])
            raise ZooError(
                f"The weighted rewards of row {row} add up to {float(total[row])}, which is too large for float32: "
                f"let {join_names(reward_names)} return smaller numbers, or lower reward_weights."
            )
        per_reward = torch.cat([per_reward, torch.stack(logged_scores, dim=1)], dim=1) if logged_scores else per_reward
        extra, metrics = _collect_logs(functions, len(batch))
        return RewardScores(total, per_reward, extra, metrics, by_token)


def _collect_logs(functions: Sequence[NamedReward], count: int) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Returns the extra columns that reward functions logged for a batch, and the mean of each logged metric."""
    extra: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = defaultdict(list)
    for function in functions:
        for column, values in function.extra.items():
            if len(values) != count:
                raise ZooError(
                    f"The reward function {function.name} logged {len(values)} values as {column!r} for {count} "
                    "completions: log one for each."
                )
            # Append the function's name if the table of completions or an earlier function has this column already.
            extra[f"{column} ({function.name})" if column in extra or column in TABLE_COLUMNS else column] = values
        for name, values in function.metrics.items():
            metrics[name] += values
    return extra, {name: _mean(values) for name, values in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    """Computes a mean; NaN if the numbers include infinities of both signs, or if their sum overflows."""
    try:
        return math.fsum(values) / len(values)
    except (ValueError, OverflowError):
        return math.nan


def _models_of(reward: Any) -> list[RewardModel]:
    """Returns the reward models that a reward consists of; [] for a function."""
    if isinstance(reward, RewardEnsemble):
        return reward.models
    return [reward] if isinstance(reward, RewardModel) else []


def _check_reward(reward: Any) -> None:
    if _models_of(reward):
        return
    # A class of iterable objects may serve as a function: a call returns the rewards.
    if isinstance(reward, type) and not hasattr(reward, "__iter__"):
        raise ZooError(
            f"The reward {reward.__name__} is a class instead of an object: use {reward.__name__}(…), or in a recipe "
            "its name with settings, NAME(key=value)."
        )
    if not callable(reward):
        raise ZooError(f"{reward!r} cannot score completions: pass a model, a path or Hub id, or a function.")


def _check_finite(name: str, scores: Tensor, batch: Batch) -> Tensor:
    is_not_finite = ~scores.isfinite()
    if is_not_finite.any():
        row = int(is_not_finite.nonzero()[0])
        raise ZooError(
            f"The reward model {name} scored {float(scores[row])} for row {row}, prompt {batch.quoted_prompt(row)}: "
            "check its weights, and the mean and deviation in its config."
        )
    return scores


def _name_reward(reward: RewardModel | RewardEnsemble | RewardFunction) -> str:
    """Returns a reward's name in metrics: the function's name (under any partials), or the name of its class."""
    if _models_of(reward):
        return "reward_model"
    function = unwrap_partials(reward)
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) and name else type(function).__name__


def _make_unique(names: Sequence[str]) -> list[str]:
    """Makes names unique: each copy of a repeated name gets its index in the list as a suffix."""
    used_names = {name for name in names if names.count(name) == 1}
    unique_names = []
    for index, name in enumerate(names):
        if names.count(name) > 1:
            name = f"{name}_{index}"
            while name in used_names:
                name += "_"
            used_names.add(name)
        unique_names.append(name)
    return unique_names
