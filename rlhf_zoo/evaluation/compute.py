"""The compute of a method, in tokens and FLOPs, so that methods can be compared at equal compute.

A forward pass takes 2N FLOPs per token, a forward and backward pass 6N (Kaplan et al. 2020, arXiv:2001.08361, §2.1).
`modeling.models.count_matmul_parameters` counts N. Attention over the context, padding and the optimizer's step are
left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORWARD_FLOPS, TRAINING_FLOPS = 2, 6  # per parameter and token


@dataclass(frozen=True)
class Passes:
    """The tokens that one model processed.

    Attributes:
        parameters: The model's size N.
        generated: Tokens sampled from it.
        read: Tokens passed forward without a gradient, prompts included.
        trained: Tokens passed forward and backward, counted once per epoch.
    """

    parameters: int
    generated: float = 0.0
    read: float = 0.0
    trained: float = 0.0

    @property
    def flops(self) -> float:
        """The FLOPs of all passes."""
        # With a key-value cache, sampling costs one forward pass per token, like reading.
        return self.parameters * (FORWARD_FLOPS * (self.generated + self.read) + TRAINING_FLOPS * self.trained)


@dataclass(frozen=True)
class Compute:
    """The passes of each model.

    Attributes:
        models: Passes by role: policy, reference, reward, critic.
    """

    models: Mapping[str, Passes] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """The FLOPs over all models."""
        return sum(passes.flops for passes in self.models.values())

    def total(self, kind: str) -> float:
        """Counts the tokens of one kind over all models.

        Args:
            kind: "generated", "read" or "trained".
        """
        return sum(getattr(passes, kind) for passes in self.models.values())

    def __add__(self, other: Compute) -> Compute:
        """Adds the tokens of each role.

        Raises:
            ValueError: A role has different sizes in the two.
        """
        models = dict(self.models)
        for role, passes in other.models.items():
            own = models.get(role, Passes(passes.parameters))
            # Models of different sizes cannot share one token count.
            if own.parameters != passes.parameters:
                raise ValueError(
                    f"The {role} has {own.parameters} parameters in one count and {passes.parameters} in the other."
                )
            models[role] = Passes(
                own.parameters, own.generated + passes.generated, own.read + passes.read, own.trained + passes.trained
            )
        return Compute(models)

    def times(self, factor: float) -> Compute:
        """Scales every token count.

        Args:
            factor: For example n for n samples, or 1/n for the mean of n runs.
        """
        models = {
            role: Passes(passes.parameters, passes.generated * factor, passes.read * factor, passes.trained * factor)
            for role, passes in self.models.items()
        }
        return Compute(models)

    def to_json(self) -> dict[str, Any]:
        return {
            **{f"tokens_{kind}": self.total(kind) for kind in ("generated", "read", "trained")},
            "flops": self.flops,
            "models": {role: dict(vars(passes)) for role, passes in self.models.items()},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Compute:
        """Reads what `to_json` wrote.

        Args:
            document: The JSON object.
        """
        return cls({role: Passes(**passes) for role, passes in document["models"].items()})


def _rollout_passes(sizes: Mapping[str, int], prompt_tokens: float, completion_tokens: float) -> dict[str, Passes]:
    """Counts sampling from the policy, and one forward pass of reference, reward model and critic over its texts."""
    tokens = prompt_tokens + completion_tokens
    readers = {role: Passes(sizes[role], read=tokens) for role in ("reference", "reward", "critic") if role in sizes}
    return {"policy": Passes(sizes["policy"], generated=completion_tokens, read=prompt_tokens), **readers}


def ppo_compute(
    sizes: Mapping[str, int], *, prompt_tokens: float, completion_tokens: float, trained_tokens: float
) -> Compute:
    """Counts the passes of PPO: reference, reward model and critic read a rollout, then policy and critic train on it.

    Args:
        sizes: Parameters N by role; a missing role computes nothing.
        prompt_tokens: Prompt tokens of all rollouts.
        completion_tokens: Completion tokens of all rollouts.
        trained_tokens: Tokens of prompts and completions that are trained on, counted once per epoch.
    """
    # The critic trains on the same tokens as the policy; reference and reward model do not train.
    training = {role: Passes(sizes[role], trained=trained_tokens) for role in ("policy", "critic") if role in sizes}
    return Compute(_rollout_passes(sizes, prompt_tokens, completion_tokens)) + Compute(training)


def rloo_compute(
    sizes: Mapping[str, int], *, prompt_tokens: float, completion_tokens: float, iterations: int
) -> Compute:
    """Counts the passes of RLOO as in TRL: reference, reward model and policy read a rollout that the policy trains on.

    Args:
        sizes: Parameters N by role; a critic is ignored.
        prompt_tokens: Prompt tokens of all rollouts.
        completion_tokens: Completion tokens of all rollouts.
        iterations: Passes over each rollout.
    """
    tokens = prompt_tokens + completion_tokens
    # The policy reads the rollout again for the old log-probabilities before it trains.
    policy_passes = Passes(sizes["policy"], read=tokens, trained=iterations * tokens)
    sizes_without_critic = {role: size for role, size in sizes.items() if role != "critic"}
    return Compute(_rollout_passes(sizes_without_critic, prompt_tokens, completion_tokens)) + Compute(
        {"policy": policy_passes}
    )


def dpo_compute(sizes: Mapping[str, int], *, pair_tokens: float, epochs: float) -> Compute:
    """Counts the passes of DPO: the policy trains on both sides of each pair, and the reference reads both.

    Args:
        sizes: Parameters N of policy and reference.
        pair_tokens: Tokens of all pairs, each prompt counted twice.
        epochs: Passes over the pairs.
    """
    tokens = pair_tokens * epochs
    return Compute(
        {"policy": Passes(sizes["policy"], trained=tokens), "reference": Passes(sizes["reference"], read=tokens)}
    )


def sft_compute(
    sizes: Mapping[str, int], *, trained_tokens: float, prompt_tokens: float = 0.0, completion_tokens: float = 0.0
) -> Compute:
    """Counts the passes of SFT, and of sampling its training texts if the policy wrote them (rejection sampling).

    Args:
        sizes: Parameters N by role.
        trained_tokens: Tokens that are trained on, counted once per epoch.
        prompt_tokens: Prompt tokens of the sampled texts; 0 if the texts were given.
        completion_tokens: Completion tokens of the sampled texts.
    """
    # Rejection sampling needs no reference and no critic.
    sampling_sizes = {role: sizes[role] for role in ("policy", "reward") if role in sizes}
    training = Compute({"policy": Passes(sizes["policy"], trained=trained_tokens)})
    return Compute(_rollout_passes(sampling_sizes, prompt_tokens, completion_tokens)) + training


def best_of_n_compute(sizes: Mapping[str, int], n: int, *, prompt_tokens: float, completion_tokens: float) -> Compute:
    """Counts the passes of serving one completion by best-of-n: n samples, each scored by the reward model.

    For n = 1 there is nothing to choose, so this is the cost of plain sampling, as from a trained policy.

    Args:
        sizes: Parameters N by role.
        n: Samples per completion served.
        prompt_tokens: Mean prompt tokens of one sample.
        completion_tokens: Mean completion tokens of one sample.
    """
    roles = ("policy", "reward") if n > 1 else ("policy",)
    serving_sizes = {role: sizes[role] for role in roles if role in sizes}
    return Compute(_rollout_passes(serving_sizes, prompt_tokens, completion_tokens)).times(n)


def break_even(
    training_flops: float, serving_flops: float, *, other_training_flops: float, other_serving_flops: float
) -> float | None:
    """Computes after how many served completions a method costs less than another one.

    Args:
        training_flops: FLOPs of the first method's training.
        serving_flops: FLOPs that the first method needs to serve one completion.
        other_training_flops: FLOPs of the second method's training.
        other_serving_flops: FLOPs that the second method needs to serve one completion.

    Returns:
        The number of completions; 0 if the first method is cheaper from the start. None if the second method costs no
        more to serve, because serving then never pays for the first method's training.
    """
    if other_serving_flops <= serving_flops:
        return None
    return max(0.0, (training_flops - other_training_flops) / (other_serving_flops - serving_flops))
