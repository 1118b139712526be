"""Which form of a KL penalty has which gradient? On softmax policies over few actions, where every sum can be done.

    python tests/numerics/kl_estimators.py

The first table sets the gradient of each form beside the one it should have: KL in the reward or in the loss, per token
or per completion, on policy (π = π_old) and off (π one step further). What it should have is a closed form in NumPy;
what it has comes from the formulas of `rlhf_zoo.functional` through autograd in float64, once as the sum over all
completions, weighted by their probabilities under π_old, and once from a sample of them. The second table sets the
statistic of an early stop, mean(ρ − 1 − log ρ), beside the mean of log π − log π_old.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlhf_zoo import functional as F

Array = NDArray[np.float64]

SAMPLES = 40_000
ROLLOUTS, ROLLOUT_TOKENS = 1000, 256
STOP_ABOVE = 1.5 * 0.02  # nats per token, with an early_stop_kl of 0.02


# ---- the worlds


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@dataclass(frozen=True, eq=False)
class World:
    """Logits (states, actions) of π, of π_old, which samples, and of π_ref; completions of one token or of two.

    State 0 is the prompt. Where there are two tokens, state 1 + a follows the first token a.
    """

    new: Array
    old: Array
    ref: Array

    @property
    def steps(self) -> int:
        return 1 if len(self.new) == 1 else 2

    @property
    def on_policy(self) -> bool:
        return np.array_equal(self.new, self.old)

    def completions(self) -> NDArray[np.int64]:
        """Every one of them, (completions, steps)."""
        return np.array([*itertools.product(range(self.new.shape[1]), repeat=self.steps)])

    def states(self, completions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The state before each token. Same shape."""
        return np.concatenate([np.zeros_like(completions[:, :1]), 1 + completions[:, :-1]], axis=1)

    def weights(self) -> Array:
        """The probability of each of `completions` under π_old."""
        tokens = self.completions()
        return softmax(self.old)[self.states(tokens), tokens].prod(axis=1)


def _one_token(step: float) -> World:
    old, direction = np.array([[0.3, -0.7, 1.1, 0.0, -0.4]]), np.array([[0.5, 0.2, -0.6, -0.1, 0.4]])
    return World(old + step * direction, old, np.array([[-0.2, 0.4, 0.1, 0.9, -0.8]]))


def _two_tokens(step: float) -> World:
    rng = np.random.default_rng(7)
    old, direction, ref = rng.normal(size=(3, 4, 3))
    return World(old + step * direction, old, ref)


ON, OFF = _one_token(0.0), _one_token(1.0)
ON_2, OFF_2 = _two_tokens(0.0), _two_tokens(0.5)


# ---- what a gradient by the logits of π should be, from the probabilities p (of π), old and ref, (states, actions)

ClosedForm = Callable[[Array, Array, Array], Array]


def _pull(weights: Array, p: Array) -> Array:
    """∇ Σ_a w_a log π(a) in each state, the weights held constant: w − p·Σw."""
    return weights - p * weights.sum(axis=1, keepdims=True)


def _reached(p: Array) -> Array:
    """How often p comes to each state. (states, 1)."""
    return np.ones((1, 1)) if len(p) == 1 else np.concatenate([[1.0], p[0]])[:, None]


def _kl(p: Array, q: Array) -> Array:
    """∇KL(p ‖ q) between completions: a token answers for its own KL and for the KL that it leads to."""
    gap = np.log(p / q)
    to_come = np.zeros_like(p)
    if len(p) > 1:
        to_come[0] = (p * gap)[1:].sum(axis=1)
    return _reached(p) * _pull(p * (gap + to_come), p)


def _kl_reversed(p: Array, q: Array) -> Array:
    """∇KL(q ‖ p) between completions, by p."""
    return _reached(q) * _pull(-q, p)


def zero(p: Array, old: Array, ref: Array) -> Array:
    return np.zeros_like(p)


def kl_ref(p: Array, old: Array, ref: Array) -> Array:
    return _kl(p, ref)


def ref_kl(p: Array, old: Array, ref: Array) -> Array:
    return _kl_reversed(p, ref)


def kl_ref_less_ref_kl(p: Array, old: Array, ref: Array) -> Array:
    return _kl(p, ref) - _kl_reversed(p, ref)


def kl_ref_less_kl_old(p: Array, old: Array, ref: Array) -> Array:
    return _kl(p, ref) - _kl(p, old)


def minus_old_kl(p: Array, old: Array, ref: Array) -> Array:
    return -_kl_reversed(p, old)


def cost_of_k3(p: Array, old: Array, ref: Array) -> Array:
    """∇ Σ π·k3 with the k3 of π_old for what each action costs."""
    return _pull(p * (ref / old - 1 - np.log(ref / old)), p)


def unweighted_k2(p: Array, old: Array, ref: Array) -> Array:
    return _pull(old * np.log(p / ref), p)


def unweighted_k3(p: Array, old: Array, ref: Array) -> Array:
    return _pull(old * (1 - ref / p), p)


def kl_ref_by_state(p: Array, old: Array, ref: Array) -> Array:
    """∇KL(π ‖ π_ref) of each state's own tokens, as often as π_old comes there: nothing for where a token leads."""
    return _reached(old) * _pull(p * np.log(p / ref), p)


def ref_kl_by_state(p: Array, old: Array, ref: Array) -> Array:
    return _reached(old) * _pull(-ref, p)


LABELS: dict[ClosedForm, str] = {
    zero: "0",
    kl_ref: "∇KL(π‖ref)",
    ref_kl: "∇KL(ref‖π)",
    kl_ref_less_ref_kl: "∇KL(π‖ref) − ∇KL(ref‖π)",
    kl_ref_less_kl_old: "∇KL(π‖ref) − ∇KL(π‖old)",
    minus_old_kl: "−∇KL(old‖π)",
    cost_of_k3: "∇E_π[k3 of π_old], no KL's",
    unweighted_k2: "E_old[k1·∇log π], no KL's",
    unweighted_k3: "E_old[(1−ref/π)·∇log π], no KL's",
    kl_ref_by_state: "Σ_s old(s)·∇KL(π‖ref | s)",
    ref_kl_by_state: "Σ_s old(s)·∇KL(ref‖π | s)",
}


# ---- the forms: what a trainer would minimise for completions that π_old sampled, β = 1

Loss = Callable[[World, Tensor, Tensor, str], Tensor]


def _logprobs(world: World, logits: Tensor, tokens: Tensor, level: str) -> tuple[Tensor, Tensor, Tensor]:
    """log π, log π_old and log π_ref of each action."""
    states, mask = torch.tensor(world.states(tokens.cpu().numpy())), torch.ones_like(tokens, dtype=torch.bool)
    every = (logits, torch.tensor(world.old), torch.tensor(world.ref))
    new, old, ref = (F.actions(F.selected_logprobs(x[states], tokens), mask, level=level) for x in every)
    return new, old, ref


def in_reward(estimator: str) -> Loss:
    """r = −KL of the rollout; no critic, no discount, no clip."""

    def loss(world: World, logits: Tensor, tokens: Tensor, level: str) -> Tensor:
        new, old, ref = _logprobs(world, logits, tokens, level)
        mask, nothing = torch.ones_like(old, dtype=torch.bool), torch.zeros_like(old)
        penalty = F.kl_penalty(old, ref, estimator=estimator)
        rewards = F.token_rewards(nothing[:, 0], penalty, mask, kl_coef=1.0)
        advantages, _ = F.gae(rewards, nothing, mask, gamma=1.0, lam=1.0)
        return F.clipped_policy_loss(new, old, advantages, cliprange=math.inf)[0]

    return loss


def in_loss(estimator: str) -> Loss:
    def loss(world: World, logits: Tensor, tokens: Tensor, level: str) -> Tensor:
        new, old, ref = _logprobs(world, logits, tokens, level)
        if estimator == "k1":  # which `kl_loss` refuses
            return (new - old).exp().detach() * F.kl_penalty(new, ref, estimator="k1")
        return F.kl_loss(new, old, ref, estimator=estimator)

    return loss


def unweighted(estimator: str) -> Loss:
    """The bare estimator as a loss, in later epochs too."""

    def loss(world: World, logits: Tensor, tokens: Tensor, level: str) -> Tensor:
        new, _, ref = _logprobs(world, logits, tokens, level)
        return F.kl_penalty(new, ref, estimator=estimator)

    return loss


def full(world: World, logits: Tensor, tokens: Tensor, level: str) -> Tensor:
    states = torch.tensor(world.states(tokens.cpu().numpy()))
    return F.exact_kl(logits[states], torch.tensor(world.ref)[states])


@dataclass(frozen=True)
class Form:
    """A line of the first table: `loss` in `world` should have the gradient `wanted`."""

    name: str
    world: World
    level: str
    loss: Loss
    wanted: ClosedForm

    @property
    def where(self) -> str:
        tokens = "one token" if self.world.steps == 1 else f"two, {self.level}"
        return f"{tokens}, {'on' if self.world.on_policy else 'off'} policy"

    def closed(self, form: ClosedForm) -> Array:
        return form(softmax(self.world.new), softmax(self.world.old), softmax(self.world.ref))


FORMS = [
    Form("reward k1", ON, "token", in_reward("k1"), kl_ref),
    Form("reward k3", ON, "token", in_reward("k3"), kl_ref_less_ref_kl),
    Form("loss k1", ON, "token", in_loss("k1"), zero),
    Form("loss k2", ON, "token", in_loss("k2"), kl_ref),
    Form("loss k3", ON, "token", in_loss("k3"), kl_ref),
    Form("loss k3_reverse", ON, "token", in_loss("k3_reverse"), ref_kl),
    Form("loss full", ON, "token", full, kl_ref),
    Form("loss k3 without ρ", ON, "token", unweighted("k3"), ref_kl),
    Form("reward k1", OFF, "token", in_reward("k1"), kl_ref_less_kl_old),
    Form("reward k3", OFF, "token", in_reward("k3"), cost_of_k3),
    Form("loss k1", OFF, "token", in_loss("k1"), zero),
    Form("loss k2", OFF, "token", in_loss("k2"), kl_ref),
    Form("loss k3", OFF, "token", in_loss("k3"), kl_ref),
    Form("loss k3_reverse", OFF, "token", in_loss("k3_reverse"), ref_kl),
    Form("loss full", OFF, "token", full, kl_ref),
    Form("loss k1 without ρ", OFF, "token", unweighted("k1"), minus_old_kl),
    Form("loss k2 without ρ", OFF, "token", unweighted("k2"), unweighted_k2),
    Form("loss k3 without ρ", OFF, "token", unweighted("k3"), unweighted_k3),
    Form("reward k1", ON_2, "token", in_reward("k1"), kl_ref),
    Form("loss k2", ON_2, "token", in_loss("k2"), kl_ref_by_state),
    Form("loss k3", ON_2, "token", in_loss("k3"), kl_ref_by_state),
    Form("loss k3_reverse", ON_2, "token", in_loss("k3_reverse"), ref_kl_by_state),
    Form("loss full", ON_2, "token", full, kl_ref_by_state),
    Form("loss k2", OFF_2, "token", in_loss("k2"), kl_ref_by_state),
    Form("loss k3", OFF_2, "token", in_loss("k3"), kl_ref_by_state),
    Form("loss k3_reverse", OFF_2, "token", in_loss("k3_reverse"), ref_kl_by_state),
    Form("loss full", OFF_2, "token", full, kl_ref_by_state),
    Form("reward k1", ON_2, "sequence", in_reward("k1"), kl_ref),
    Form("reward k1", OFF_2, "sequence", in_reward("k1"), kl_ref_less_kl_old),
    Form("loss k2", OFF_2, "sequence", in_loss("k2"), kl_ref),
    Form("loss k3", OFF_2, "sequence", in_loss("k3"), kl_ref),
    Form("loss k3_reverse", OFF_2, "sequence", in_loss("k3_reverse"), ref_kl),
]


@dataclass(frozen=True)
class Measured:
    """Gradients of one form by the logits, (states, actions), and the deviation of that of a single completion."""

    wanted: Array
    exact: Array
    sampled: Array
    deviation: Array

    @property
    def error(self) -> float:
        return float(np.abs(self.exact - self.wanted).max())

    @property
    def standard_errors(self) -> float:
        """How far the sample lies from the exact gradient, in its standard errors, at the worst logit."""
        off, standard = np.abs(self.sampled - self.exact), self.deviation / math.sqrt(SAMPLES)
        # Where no sample differs from another there is only rounding.
        return float(np.where(standard > 1e-12, off / np.maximum(standard, 1e-12), off / 1e-12).max())

    @property
    def noise(self) -> float:
        """The root of the summed variances of one completion's gradient."""
        return float(np.sqrt(np.square(self.deviation).sum()))


@functools.cache
def measure(form: Form, seed: int = 0) -> Measured:
    """The exact gradient and that of `SAMPLES` completions that π_old sampled."""
    world, every, weights = form.world, torch.tensor(form.world.completions()), form.world.weights()
    logits = torch.tensor(world.new).clone().requires_grad_()

    def gradient(tokens: Tensor, counts: Array) -> Array:
        """Of the loss of these completions, each counted so often, per sequence."""
        loss = form.loss(world, logits, tokens, form.level)
        weighted = loss * torch.tensor(counts)[:, None]
        mask = torch.ones_like(loss, dtype=torch.bool)
        total = F.aggregate(weighted, mask, tokens=1, sequences=counts.sum(), mode="seq-mean-token-sum")
        return torch.autograd.grad(total, logits)[0].cpu().numpy()

    exact = gradient(every, weights)
    single = np.stack([gradient(every[i : i + 1], np.ones(1)) for i in range(len(every))])
    variance = np.einsum("c,csa->sa", weights, np.square(single - exact))
    drawn = np.random.default_rng(seed).choice(len(every), size=SAMPLES, p=weights)
    sampled = gradient(every[torch.tensor(drawn)], np.ones(SAMPLES))
    return Measured(form.closed(form.wanted), exact, sampled, np.sqrt(variance))


# ---- the early stop


@dataclass(frozen=True)
class EarlyStop:
    """Two statistics of the tokens that π_old sampled, of a policy `kl` = KL(π_old ‖ π) nats away.

    `low_variance` is mean(ρ − 1 − log ρ), `log_ratio` mean(log π − log π_old): each one's exact mean, and its value in
    each of many rollouts.
    """

    kl: float
    low_variance_mean: float
    log_ratio_mean: float
    low_variance: Array
    log_ratio: Array


@functools.cache
def early_stop(step: float, seed: int = 0) -> EarlyStop:
    """Both statistics for a policy `step` away from π_old, of `ROLLOUTS` rollouts of `ROLLOUT_TOKENS` tokens."""
    world = _one_token(step)
    p, p_old = softmax(world.new)[0], softmax(world.old)[0]
    new, old = torch.tensor(np.log(p)), torch.tensor(np.log(p_old))
    one, every = torch.ones(1, dtype=torch.bool), torch.ones(ROLLOUT_TOKENS, dtype=torch.bool)
    of_each_token = [float(F.approx_kl(new[a : a + 1], old[a : a + 1], one)) for a in range(len(p))]
    tokens = np.random.default_rng(seed).choice(len(p), size=(ROLLOUTS, ROLLOUT_TOKENS), p=p_old)
    return EarlyStop(
        kl=float((p_old * np.log(p_old / p)).sum()),
        low_variance_mean=float(p_old @ of_each_token),
        log_ratio_mean=float(p_old @ (new - old).cpu().numpy()),
        low_variance=np.array([float(F.approx_kl(new[row], old[row], every)) for row in torch.tensor(tokens)]),
        log_ratio=(new - old).cpu().numpy()[tokens].mean(axis=1),
    )


STEPS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


def main() -> None:
    print(f"{'form':<18} {'where':<26} {'gradient':<33} {'size':>7} {'error':>8} {'sample':>7} {'noise':>6}")
    for form in FORMS:
        seen = measure(form)
        size = np.linalg.norm(seen.wanted)
        print(
            f"{form.name:<18} {form.where:<26} {LABELS[form.wanted]:<33} {size:7.4f} {seen.error:8.0e}"
            f" {seen.standard_errors:7.2f} {seen.noise:6.3f}"
        )
    print("size: norm of that gradient. error: of the exact sum, at the worst logit. sample: how far the gradient of")
    print(f"{SAMPLES} completions lies from the exact one, in standard errors, at the worst logit. noise: deviation")
    print("of the gradient of one completion.\n")

    print(f"An early stop above {STOP_ABOVE} nats, {ROLLOUTS} rollouts of {ROLLOUT_TOKENS} tokens")
    print(f"{'KL(old‖π)':>9}  {'mean(ρ−1−log ρ)':>16} {'deviation':>9} {'stops':>6}", end="  ")
    print(f"{'mean(log π−log π_old)':>21} {'deviation':>9} {'stops':>6}")
    for step in STEPS:
        seen = early_stop(step)
        print(f"{seen.kl:9.4f}", end="  ")
        for mean, values, width in (
            (seen.low_variance_mean, seen.low_variance, 16),
            (seen.log_ratio_mean, seen.log_ratio, 21),
        ):
            print(f"{mean:{width}.4f} {values.std():9.4f} {(values > STOP_ABOVE).mean():6.1%}", end="  ")
        print()


if __name__ == "__main__":
    main()
