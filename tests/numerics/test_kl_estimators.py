"""The tables of `kl_estimators.py`: which KL form has which gradient, and which statistic can stop an epoch early."""

from __future__ import annotations

import itertools

import kl_estimators
import numpy as np
import pytest
import torch
from kl_estimators import FORMS, LABELS, OFF, OFF_2, ON, ON_2, STEPS, STOP_ABOVE, Form, Measured, World

from rlhf_zoo import functional

EXACT = 1e-12  # float64; the worst of all forms is 1e-16, a rounding in sums of at most 9 terms below 1
APART = 0.03  # no two gradients of a world that differ at all are nearer to each other, at some logit

each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name}, {form.where}")


def measured(name: str, world: World, level: str = "token") -> Measured:
    (form,) = (form for form in FORMS if (form.name, form.world, form.level) == (name, world, level))
    return kl_estimators.measure(form)


def closed(form: kl_estimators.ClosedForm, world: World) -> np.ndarray:
    return form(*(kl_estimators.softmax(logits) for logits in (world.new, world.old, world.ref)))


def same(got: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(got, wanted, rtol=0, atol=EXACT)


def differ(got: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(got - wanted).max() > APART


# ---- gradients


@each_form
def test_the_exact_gradient_is_the_one_it_should_be(form: Form) -> None:
    same(kl_estimators.measure(form).exact, closed(form.wanted, form.world))


@each_form
def test_a_sample_estimates_the_exact_gradient(form: Form) -> None:
    assert kl_estimators.measure(form).standard_errors < 5


@pytest.mark.parametrize("world", [ON, OFF, ON_2, OFF_2], ids=["on", "off", "two on", "two off"])
def test_the_world_tells_gradients_apart(world: World) -> None:
    # Else a form with the wrong gradient would pass for one with the right one.
    single_only = {kl_estimators.cost_of_k3, kl_estimators.unweighted_k2, kl_estimators.unweighted_k3}
    forms = [form for form in LABELS if world.steps == 1 or form not in single_only]
    for one, other in itertools.combinations(forms, 2):
        distance = np.abs(closed(one, world) - closed(other, world)).max()
        assert distance < EXACT or distance > APART
    differ(closed(kl_estimators.kl_ref, world), closed(kl_estimators.ref_kl, world))
    differ(closed(kl_estimators.kl_ref, world), closed(kl_estimators.zero, world))


def test_the_closed_forms_are_gradients_of_the_kl_that_they_name() -> None:
    # Central differences of KLs between all completions, summed up one by one.
    def completions(world: World, logits: np.ndarray) -> np.ndarray:
        tokens = world.completions()
        return kl_estimators.softmax(logits)[world.states(tokens), tokens].prod(axis=1)

    for world in (OFF, OFF_2):
        ref, old = completions(world, world.ref), completions(world, world.old)
        for form, kl in (
            (kl_estimators.kl_ref, lambda p, ref=ref: (p * np.log(p / ref)).sum()),
            (kl_estimators.ref_kl, lambda p, ref=ref: (ref * np.log(ref / p)).sum()),
            (kl_estimators.minus_old_kl, lambda p, old=old: -(old * np.log(old / p)).sum()),
            (
                kl_estimators.kl_ref_less_kl_old,
                lambda p, ref=ref, old=old: (p * np.log(p / ref)).sum() - (p * np.log(p / old)).sum(),
            ),
        ):
            slopes = np.zeros_like(world.new)
            for index in np.ndindex(*slopes.shape):
                step = np.zeros_like(slopes)
                step[index] = 1e-5
                ahead, behind = (kl(completions(world, world.new + sign * step)) for sign in (1, -1))
                slopes[index] = (ahead - behind) / 2e-5
            np.testing.assert_allclose(closed(form, world), slopes, rtol=0, atol=1e-9)


def test_k1_in_the_loss_pulls_nowhere_and_is_refused() -> None:
    for world in (ON, OFF):
        seen = measured("loss k1", world)
        same(seen.exact, np.zeros_like(seen.exact))
        assert seen.noise > 0.5  # while every sample of it pulls somewhere
    with pytest.raises(ValueError, match="k1"):
        functional.kl_loss(*torch.zeros(3, 1, 1), estimator="k1")


def test_k3_in_the_reward_pulls_away_from_the_reference_as_well() -> None:
    seen, kl = measured("reward k3", ON), measured("reward k1", ON)
    same(kl.exact - seen.exact, closed(kl_estimators.ref_kl, ON))
    differ(seen.exact, kl.exact)


def test_k2_and_k3_in_the_loss_are_one_estimator_of_the_gradient() -> None:
    for world, level in ((ON, "token"), (OFF, "token"), (ON_2, "token"), (OFF_2, "token"), (OFF_2, "sequence")):
        k2, k3 = measured("loss k2", world, level), measured("loss k3", world, level)
        same(k3.sampled, k2.sampled)
        same(k3.deviation, k2.deviation)


def test_on_policy_k1_in_the_reward_of_one_token_is_k2_in_the_loss() -> None:
    reward, loss = measured("reward k1", ON), measured("loss k2", ON)
    same(reward.sampled, loss.sampled)
    same(reward.deviation, loss.deviation)


def test_the_exact_kl_in_the_loss_has_the_least_noise() -> None:
    for world in (ON, OFF):
        assert measured("loss full", world).noise < EXACT < measured("loss k2", world).noise
    for world in (ON_2, OFF_2):
        assert measured("loss full", world).noise < 0.5 * measured("loss k2", world).noise


def test_kl_in_the_loss_per_token_leaves_out_where_a_token_leads() -> None:
    # The reward form and whole completions as actions hold each token to the KL that follows it.
    whole = closed(kl_estimators.kl_ref, ON_2)
    same(measured("reward k1", ON_2).exact, whole)
    same(measured("reward k1", ON_2, "sequence").exact, whole)
    for name in ("loss k2", "loss k3", "loss full"):
        seen = measured(name, ON_2).exact
        differ(seen[0], whole[0])
        same(seen[1:], whole[1:])  # nothing follows the second token


def test_off_policy_a_loss_without_the_ratio_has_no_kl_s_gradient() -> None:
    for name in ("loss k2 without ρ", "loss k3 without ρ"):
        seen = measured(name, OFF).exact
        for form in (kl_estimators.kl_ref, kl_estimators.ref_kl, kl_estimators.zero):
            differ(seen, closed(form, OFF))


# ---- the early stop


@pytest.mark.parametrize("step", STEPS)
def test_the_statistic_of_the_early_stop_is_the_kl_and_the_log_ratio_is_minus_it(step: float) -> None:
    seen = kl_estimators.early_stop(step)
    assert seen.low_variance_mean == pytest.approx(seen.kl, rel=0, abs=EXACT)
    assert seen.log_ratio_mean == pytest.approx(-seen.kl, rel=0, abs=EXACT)
    for values, mean in ((seen.low_variance, seen.low_variance_mean), (seen.log_ratio, seen.log_ratio_mean)):
        assert abs(values.mean() - mean) < 5 * values.std() / np.sqrt(len(values))


@pytest.mark.parametrize("step", STEPS)
def test_the_early_stop_comes_where_the_kl_is_large_and_the_log_ratio_never_brings_it(step: float) -> None:
    seen = kl_estimators.early_stop(step)
    assert (seen.low_variance >= 0).all()
    if not 0.5 < seen.kl / STOP_ABOVE < 2:
        assert (seen.low_variance > STOP_ABOVE).mean() == float(seen.kl > STOP_ABOVE)
    assert not (seen.log_ratio > STOP_ABOVE).any()
    assert seen.low_variance.std() < 0.5 * seen.log_ratio.std()


def test_the_steps_lie_on_both_sides_of_the_threshold() -> None:
    kls = [kl_estimators.early_stop(step).kl for step in STEPS]
    assert kls == sorted(kls)
    assert kls[0] < 0.5 * STOP_ABOVE and kls[-1] > 2 * STOP_ABOVE


# ---- the script


def test_the_script_prints_a_line_for_each_form_and_step(capsys: pytest.CaptureFixture[str]) -> None:
    kl_estimators.main()
    lines = capsys.readouterr().out.splitlines()
    for form in FORMS:
        assert any(line.startswith(f"{form.name:<18} {form.where:<26} {LABELS[form.wanted]} ") for line in lines)
    assert len(lines) == 1 + len(FORMS) + 4 + 2 + len(STEPS)
