"""The gradient of each form of KL penalty equals a closed form, on softmax policies over few actions.

The forms are KL in the reward or in the loss, per token or per completion, on policy (π = π_old) and off policy (π one
step further). The expected gradient is a closed form in NumPy. The actual gradient comes from the formulas of
`rlhf_zoo.functional` and autograd in float64, as a sum over all completions, weighted by their probabilities under
π_old.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_zoo import functional as F

Array = NDArray[np.float64]

EXACT = 1e-12  # float64; the largest error of all forms is 1e-16, in sums of at most 9 terms below 1
APART = 0.03  # different gradients of a world differ by at least this much at some logit


# ---- the worlds


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@dataclass(frozen=True, eq=False)
class World:
    """Logits (states, actions) of π, of π_old, which samples, and of π_ref; completions have one token or two.

    State 0 is the prompt. With two tokens, state 1 + a follows the first token a.
    """

    new: Array
    old: Array
    ref: Array

    @property
    def steps(self) -> int:
        return 1 if len(self.new) == 1 else 2

    def completions(self) -> NDArray[np.int64]:
        """Returns every completion: (completions, steps)."""
        return np.array([*itertools.product(range(self.new.shape[1]), repeat=self.steps)])

    def states(self, completions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the state before each token: (completions, steps)."""
        return np.concatenate([np.zeros_like(completions[:, :1]), 1 + completions[:, :-1]], axis=1)

    def probabilities(self, logits: Array) -> Array:
        """Returns the probability of each of `completions` under the policy of these logits."""
        tokens = self.completions()
        return softmax(logits)[self.states(tokens), tokens].prod(axis=1)


def _one_token(step: float) -> World:
    old, direction = np.array([[0.3, -0.7, 1.1, 0.0, -0.4]]), np.array([[0.5, 0.2, -0.6, -0.1, 0.4]])
    return World(old + step * direction, old, np.array([[-0.2, 0.4, 0.1, 0.9, -0.8]]))


def _two_tokens(step: float) -> World:
    rng = np.random.default_rng(7)
    old, direction, ref = rng.normal(size=(3, 4, 3))
    return World(old + step * direction, old, ref)


ON, OFF = _one_token(0.0), _one_token(1.0)
ON_2, OFF_2 = _two_tokens(0.0), _two_tokens(0.5)


# ---- expected gradients by the logits of π, from the probabilities p (of π), old and ref, (states, actions)

ClosedForm = Callable[[Array, Array, Array], Array]


def _pull(weights: Array, p: Array) -> Array:
    """∇ Σ_a w_a log π(a) in each state, the weights held constant: w − p·Σw."""
    return weights - p * weights.sum(axis=1, keepdims=True)


def _visits(p: Array) -> Array:
    """Returns how often p reaches each state: (states, 1)."""
    return np.ones((1, 1)) if len(p) == 1 else np.concatenate([[1.0], p[0]])[:, None]


def _kl(p: Array, q: Array) -> Array:
    """∇KL(p ‖ q) between completions: a token's gradient has its own KL and the KL of the tokens after it."""
    log_ratio = np.log(p / q)
    later_kl = np.zeros_like(p)
    if len(p) > 1:
        later_kl[0] = (p * log_ratio)[1:].sum(axis=1)
    return _visits(p) * _pull(p * (log_ratio + later_kl), p)


def _kl_reversed(p: Array, q: Array) -> Array:
    """∇KL(q ‖ p) between completions, with respect to p."""
    return _visits(q) * _pull(-q, p)


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
    """∇ Σ π·k3, where the cost of an action is the k3 of π_old."""
    return _pull(p * (ref / old - 1 - np.log(ref / old)), p)


def unweighted_k2(p: Array, old: Array, ref: Array) -> Array:
    return _pull(old * np.log(p / ref), p)


def unweighted_k3(p: Array, old: Array, ref: Array) -> Array:
    return _pull(old * (1 - ref / p), p)


def kl_ref_by_state(p: Array, old: Array, ref: Array) -> Array:
    """∇KL(π ‖ π_ref) of each state's own tokens, weighted by π_old's visits: no KL of later tokens."""
    return _visits(old) * _pull(p * np.log(p / ref), p)


def ref_kl_by_state(p: Array, old: Array, ref: Array) -> Array:
    return _visits(old) * _pull(-ref, p)


# ---- the forms: the loss of a trainer for completions that π_old sampled, β = 1

Loss = Callable[[World, Tensor, Tensor, str], Tensor]


def _logprobs(world: World, logits: Tensor, tokens: Tensor, level: str) -> tuple[Tensor, Tensor, Tensor]:
    """log π, log π_old and log π_ref of each action."""
    states, mask = torch.tensor(world.states(tokens.cpu().numpy())), torch.ones_like(tokens, dtype=torch.bool)
    all_logits = (logits, torch.tensor(world.old), torch.tensor(world.ref))
    new, old, ref = (F.sum_per_action(F.selected_logprobs(x[states], tokens), mask, level=level) for x in all_logits)
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
        if estimator == "k1":  # `kl_loss` rejects it
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


# (name, world, level, loss, expected gradient); the level matters only for completions of two tokens.
FORMS: list[tuple[str, World, str, Loss, ClosedForm]] = [
    ("reward k1", ON, "token", in_reward("k1"), kl_ref),
    ("reward k3", ON, "token", in_reward("k3"), kl_ref_less_ref_kl),
    ("reward k1", OFF, "token", in_reward("k1"), kl_ref_less_kl_old),
    ("reward k3", OFF, "token", in_reward("k3"), cost_of_k3),
    ("reward k1", ON_2, "token", in_reward("k1"), kl_ref),
    ("reward k1", ON_2, "sequence", in_reward("k1"), kl_ref),
    ("reward k1", OFF_2, "sequence", in_reward("k1"), kl_ref_less_kl_old),
    *(("loss k1", world, "token", in_loss("k1"), zero) for world in (ON, OFF)),
    *((f"loss {k}", world, "token", in_loss(k), kl_ref) for world in (ON, OFF) for k in ("k2", "k3")),
    *(("loss k3_reverse", world, "token", in_loss("k3_reverse"), ref_kl) for world in (ON, OFF)),
    *((f"loss {k}", world, "token", in_loss(k), kl_ref_by_state) for world in (ON_2, OFF_2) for k in ("k2", "k3")),
    *(("loss k3_reverse", world, "token", in_loss("k3_reverse"), ref_kl_by_state) for world in (ON_2, OFF_2)),
    *((f"loss {k}", OFF_2, "sequence", in_loss(k), kl_ref) for k in ("k2", "k3")),
    ("loss k3_reverse", OFF_2, "sequence", in_loss("k3_reverse"), ref_kl),
    *(("loss full", world, "token", full, kl_ref) for world in (ON, OFF)),
    *(("loss full", world, "token", full, kl_ref_by_state) for world in (ON_2, OFF_2)),
    ("loss k3 without ρ", ON, "token", unweighted("k3"), ref_kl),
    ("loss k1 without ρ", OFF, "token", unweighted("k1"), minus_old_kl),
    ("loss k2 without ρ", OFF, "token", unweighted("k2"), unweighted_k2),
    ("loss k3 without ρ", OFF, "token", unweighted("k3"), unweighted_k3),
]


def gradient(world: World, level: str, loss: Loss) -> Array:
    """The gradient of the mean over all completions that π_old samples, by the logits of π, (states, actions)."""
    logits = torch.tensor(world.new).clone().requires_grad_()
    weights = torch.tensor(world.probabilities(world.old))
    losses = loss(world, logits, torch.tensor(world.completions()), level)
    (grad,) = torch.autograd.grad((losses * weights[:, None]).sum(), logits)
    return grad.cpu().numpy()


def closed(form: ClosedForm, world: World) -> Array:
    return form(softmax(world.new), softmax(world.old), softmax(world.ref))


def name_of(value: object) -> str | None:
    names = {id(ON): "on", id(OFF): "off", id(ON_2): "on, two tokens", id(OFF_2): "off, two tokens"}
    return value if isinstance(value, str) else names.get(id(value)) or getattr(value, "__name__", None)


@pytest.mark.parametrize(("name", "world", "level", "loss", "expected"), FORMS, ids=name_of)
def test_penalty_gradient_equals_closed_form(
    name: str, world: World, level: str, loss: Loss, expected: ClosedForm
) -> None:
    np.testing.assert_allclose(gradient(world, level, loss), closed(expected, world), rtol=0, atol=EXACT)


@pytest.mark.parametrize("world", [ON, OFF, ON_2, OFF_2], ids=name_of)
def test_world_distinguishes_different_gradients(world: World) -> None:
    # Otherwise a form with a wrong gradient could pass.
    forms = [kl_ref, ref_kl, zero, kl_ref_less_ref_kl, kl_ref_less_kl_old, kl_ref_by_state, ref_kl_by_state]
    if world.steps == 1:
        forms += [minus_old_kl, cost_of_k3, unweighted_k2, unweighted_k3]
    for first, second in itertools.combinations(forms, 2):
        distance = np.abs(closed(first, world) - closed(second, world)).max()
        assert distance < EXACT or distance > APART
        if {first, second} in ({kl_ref, ref_kl}, {kl_ref, zero}) or (world.steps == 2 and kl_ref_by_state is second):
            assert distance > APART


def test_closed_forms_equal_finite_differences_of_kl() -> None:
    # Central differences of the KL, summed over all completions.
    for world in (OFF, OFF_2):
        ref, old = world.probabilities(world.ref), world.probabilities(world.old)
        for form, kl in (
            (kl_ref, lambda p, ref=ref: (p * np.log(p / ref)).sum()),
            (ref_kl, lambda p, ref=ref: (ref * np.log(ref / p)).sum()),
            (minus_old_kl, lambda p, old=old: -(old * np.log(old / p)).sum()),
            (kl_ref_less_kl_old, lambda p, ref=ref, old=old: (p * np.log(old / ref)).sum()),
        ):
            slopes = np.zeros_like(world.new)
            for index in np.ndindex(*slopes.shape):
                step = np.zeros_like(slopes)
                step[index] = 1e-5
                ahead, behind = (kl(world.probabilities(world.new + sign * step)) for sign in (1, -1))
                slopes[index] = (ahead - behind) / 2e-5
            np.testing.assert_allclose(closed(form, world), slopes, rtol=0, atol=1e-9)


@pytest.mark.parametrize("step", [0.25, 1.0, 3.0])
def test_early_stop_statistic_is_kl_of_old_and_new_policy(step: float) -> None:
    """Its mean is exact, and it is never negative. The mean of log π − log π_old is −KL, which would never stop."""
    world = _one_token(step)
    p, p_old = softmax(world.new)[0], softmax(world.old)[0]
    new, old = torch.tensor(np.log(p)), torch.tensor(np.log(p_old))
    token_kl = F.kl_penalty(old, new, estimator="k3").cpu().numpy()
    kl = float((p_old * np.log(p_old / p)).sum())
    assert p_old @ token_kl == pytest.approx(kl, rel=0, abs=EXACT) and (token_kl >= 0).all()
    assert p_old @ (new - old).cpu().numpy() == pytest.approx(-kl, rel=0, abs=EXACT)
