"""What a method computes, counted in tokens and FLOPs, so that methods can be compared at equal compute.

A forward pass takes 2N FLOPs a token and a forward and backward pass 6N (Kaplan et al. 2020, arXiv:2001.08361, §2.1; N
as in `models.matrix_parameters`). Attention over the context, padding and the optimizer's step are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

READ, TRAINED = 2, 6  # FLOPs a parameter and token


@dataclass(frozen=True)
class Passes:
    """Tokens that one model of N `parameters` saw.

    generated: sampled from it; read: passed forward without a gradient, prompts included; trained: passed forward and
    backward, once for each epoch.
    """

    parameters: int
    generated: float = 0.0
    read: float = 0.0
    trained: float = 0.0

    @property
    def flops(self) -> float:
        return self.parameters * (READ * (self.generated + self.read) + TRAINED * self.trained)


@dataclass(frozen=True)
class Compute:
    """The passes of each model, by its role: policy, reference, reward, critic."""

    models: Mapping[str, Passes] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        return sum(passes.flops for passes in self.models.values())

    def total(self, kind: str) -> float:
        """Tokens of a kind (generated, read, trained) over all models."""
        return sum(getattr(passes, kind) for passes in self.models.values())

    def __add__(self, other: Compute) -> Compute:
        """Raises ValueError where a role has two sizes."""
        models = dict(self.models)
        for role, more in other.models.items():
            one = models.get(role, Passes(more.parameters))
            if one.parameters != more.parameters:
                raise ValueError(f"The {role} has {one.parameters} parameters in one and {more.parameters} in another.")
            models[role] = Passes(
                one.parameters, one.generated + more.generated, one.read + more.read, one.trained + more.trained
            )
        return Compute(models)

    def times(self, factor: float) -> Compute:
        return Compute(
            {
                role: Passes(one.parameters, one.generated * factor, one.read * factor, one.trained * factor)
                for role, one in self.models.items()
            }
        )

    def to_json(self) -> dict[str, Any]:
        kinds = {f"tokens_{kind}": self.total(kind) for kind in ("generated", "read", "trained")}
        return {**kinds, "flops": self.flops, "models": {role: dict(vars(one)) for role, one in self.models.items()}}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Compute:
        return cls({role: Passes(**one) for role, one in document["models"].items()})


def _rollout(sizes: Mapping[str, int], prompts: float, completions: float) -> dict[str, Passes]:
    """Sampling completions, and a pass over prompt and completion by reference, reward and critic where they are."""
    whole = prompts + completions
    readers = {role: Passes(sizes[role], read=whole) for role in ("reference", "reward", "critic") if role in sizes}
    return {"policy": Passes(sizes["policy"], generated=completions, read=prompts), **readers}


def ppo_compute(
    sizes: Mapping[str, int], *, prompt_tokens: float, completion_tokens: float, trained_tokens: float
) -> Compute:
    """PPO: a rollout read by reference, reward model and critic; policy and critic train on it.

    sizes: N by role; a role that is not there computes nothing. prompt_tokens, completion_tokens: of all rollouts.
    trained_tokens: of prompts and completions, once for each epoch over them.
    """
    trained = {role: Passes(sizes[role], trained=trained_tokens) for role in ("policy", "critic") if role in sizes}
    return Compute(_rollout(sizes, prompt_tokens, completion_tokens)) + Compute(trained)


def rloo_compute(
    sizes: Mapping[str, int], *, prompt_tokens: float, completion_tokens: float, iterations: int
) -> Compute:
    """RLOO as trl has it: a rollout read by reference and reward model and once more by the policy, which trains on it.

    iterations: passes over each rollout.
    """
    whole = prompt_tokens + completion_tokens
    again = Passes(sizes["policy"], read=whole, trained=iterations * whole)
    without = {role: size for role, size in sizes.items() if role != "critic"}
    return Compute(_rollout(without, prompt_tokens, completion_tokens)) + Compute({"policy": again})


def dpo_compute(sizes: Mapping[str, int], *, pair_tokens: float, epochs: float) -> Compute:
    """DPO: policy and reference over both sides of each pair. pair_tokens: of all pairs, the prompt counted twice."""
    seen = pair_tokens * epochs
    return Compute(
        {"policy": Passes(sizes["policy"], trained=seen), "reference": Passes(sizes["reference"], read=seen)}
    )


def sft_compute(
    sizes: Mapping[str, int], *, trained_tokens: float, prompt_tokens: float = 0.0, completion_tokens: float = 0.0
) -> Compute:
    """SFT. prompt_tokens, completion_tokens: of texts that the policy sampled for it, which the reward read."""
    sampled = {role: sizes[role] for role in ("policy", "reward") if role in sizes}
    trained = Compute({"policy": Passes(sizes["policy"], trained=trained_tokens)})
    return Compute(_rollout(sampled, prompt_tokens, completion_tokens)) + trained


def best_of_n_compute(sizes: Mapping[str, int], n: int, *, prompt_tokens: float, completion_tokens: float) -> Compute:
    """Serving one completion by best-of-n: n samples, each read by the reward. Tokens are means of one sample.

    The reward has nothing to choose for n = 1, which is plain sampling: what serving costs for every trained policy.
    """
    roles = ("policy", "reward") if n > 1 else ("policy",)
    served = {role: sizes[role] for role in roles if role in sizes}
    return Compute(_rollout(served, prompt_tokens, completion_tokens)).times(n)


def break_even(training: float, per_completion: float, *, other_training: float, other: float) -> float | None:
    """After how many completions a method that trains has spent no more than one that serves at a higher price.

    training, per_completion: FLOPs of the first; other_training, other: of the second. None where the second is never
    dearer; 0 where the first is cheaper from the start.
    """
    if other <= per_completion:
        return None
    return max(0.0, (training - other_training) / (other - per_completion))
