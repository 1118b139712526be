"""KL penalty on or off: which two checkpoints, what the table says of them, and whatever the slider sends."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from html_page import Page

from rlhf_zoo.app.engine import TimelinePoint, TimelineRun
from rlhf_zoo.app.page.kl_switch import OFF, ON, KLSwitch
from rlhf_zoo.publishing.catalog.card import CardEstimate


def part(**figures: float) -> dict[str, CardEstimate]:
    """The figures of one kind of prompts, with intervals of ± 0.2."""
    return {name: CardEstimate(value, (value - 0.2, value + 0.2)) for name, value in figures.items()}


HIGH = {"test": part(reward=1.2, judge=0.5, win_rate=0.7)}
LOW = {"test": part(reward=2.5, judge=-0.25, win_rate=0.1, kl=40.0)}


def run(beta: float | None, *, best: int = 10, last: dict[str, dict[str, CardEstimate]] | None = None) -> TimelineRun:
    points = [
        TimelinePoint(step, f"step-{step}", None, "", chosen=step == best, evaluated=(last or {}) if step == 20 else {})
        for step in (10, 20)
    ]
    return TimelineRun(f"local/beta-{beta}", beta, tuple(points))


def timeline(*runs: TimelineRun):
    """The runs as a Timeline shows them; the first is compared."""
    by_beta = sorted((one for one in runs if one.beta is not None), key=lambda one: -one.beta)
    return SimpleNamespace(default_run=runs[0], runs_with_beta=tuple(by_beta))


def test_kl_switch_pairs_compared_checkpoint_with_run_without_penalty() -> None:
    switch = KLSwitch.of(timeline(run(0.1), run(0.0), run(0.5)), 20)
    assert switch is not None and switch.compared_position == ON
    assert [(one.beta, point.step) for one, point in (switch.on, switch.off)] == [(0.1, 20), (0.0, 20)]
    assert switch.label(ON) == "with KL penalty, β = 0.1 · step 20"
    assert switch.label(OFF) == "without KL penalty, β = 0 · step 20"
    unknown = KLSwitch.of(timeline(run(0.1), run(0.0)), None)
    assert unknown is not None and unknown.on[1].step == 10, "a card without a step: the run's best"


def test_kl_switch_pairs_run_without_penalty_with_weakest_penalty() -> None:
    switch = KLSwitch.of(timeline(run(0.0, best=20), run(0.5), run(0.1)), 20)
    assert switch is not None and switch.compared_position == OFF
    assert (switch.on[0].beta, switch.on[1].step, switch.off[0].beta) == (0.1, 10, 0.0)


@pytest.mark.parametrize("betas", [(0.1,), (0.0,), (0.1, 0.5), (None, 0.0)])
def test_kl_switch_needs_runs_with_and_without_penalty(betas) -> None:
    assert KLSwitch.of(timeline(*(run(beta) for beta in betas)), 20) is None
    assert KLSwitch.of(None, 20) is None


@pytest.mark.parametrize("value", [None, "0", [0], float("nan"), {"a": 1}])
def test_kl_switch_treats_bad_values_as_compared_checkpoint(value) -> None:
    switch = KLSwitch.of(timeline(run(0.1), run(0.0)), 20)
    assert switch is not None and switch.position_of(value) == ON and switch.checkpoint_at(value) == switch.on


def test_kl_switch_marks_higher_reward_with_lower_judge() -> None:
    switch = KLSwitch.of(timeline(run(0.1, last=HIGH), run(0.0, last=LOW)), 20)
    assert switch is not None
    page = Page(switch.html(OFF))
    assert "Without the KL penalty, the reward is higher and the judge’s score is lower." in page.text
    assert page.texts("th", scope="row") == ["On, step 20", "Off, step 20"]
    assert page.texts("td", data_figure="reward") == ["+1.20", "+2.50 ▲"]
    assert page.texts("td", data_figure="judge") == ["+0.50", "−0.25 ▼"]
    assert page.texts("td", data_figure="kl") == ["–", "40.00"], "one of the two is not measured"
    (selected,) = [text for name, attrs, text in page.elements if name == "tr" and attrs.get("data-selected")]
    assert "".join(selected).startswith("Off")


def test_kl_switch_claims_nothing_otherwise() -> None:
    same = KLSwitch.of(timeline(run(0.1, last=HIGH), run(0.0, last=HIGH)), 20)
    assert same is not None and "the reward is higher" not in same.html(ON) and "▲" not in same.html(ON)
    none = KLSwitch.of(timeline(run(0.1), run(0.0)), 20)
    assert none is not None and "<table" not in none.html(ON)


def switch_of(on: dict[str, dict[str, CardEstimate]], off: dict[str, dict[str, CardEstimate]]) -> Page:
    switch = KLSwitch.of(timeline(run(0.1, last=on), run(0.0, last=off)), 20)
    assert switch is not None
    return Page(switch.html(OFF))


def test_kl_switch_claims_only_what_intervals_show() -> None:
    """The judge's point value is lower, but the intervals overlap: neither the sentence nor an arrow says so."""
    page = switch_of(HIGH, {"test": part(reward=2.5, judge=0.2, win_rate=0.65)})
    assert "the reward is higher; these prompts do not show whether the judge’s score differs" in page.text
    assert page.texts("td", data_figure="judge") == ["+0.50", "+0.20"]
    assert page.texts("td", data_figure="reward") == ["+1.20", "+2.50 ▲"]
    assert page.texts("td", title="95% interval +0.30 to +0.70") == ["+0.50"]
    values = {name: CardEstimate(figure.value) for name, figure in LOW["test"].items()}
    without_intervals = switch_of(HIGH, {"test": values})
    assert "▲" not in without_intervals.text and "the reward is higher" not in without_intervals.text


def test_kl_switch_shows_figures_of_one_kind_of_prompts() -> None:
    """Reward, judge and KL of validation prompts never stand beside the win rate of test prompts."""
    validation = part(reward=1.0, judge=0.6, kl=2.0)
    both = switch_of(HIGH | {"validation": validation}, LOW | {"validation": validation})
    (caption,) = both.texts("caption")
    assert caption == "On test prompts · ▲▼: 95% intervals apart"
    assert both.texts("td", data_figure="judge") == ["+0.50", "−0.25 ▼"]
    # Test prompts measured only one of the two checkpoints.
    page = switch_of({"validation": validation}, LOW | {"validation": validation})
    assert page.texts("caption") == ["On validation prompts"]
    assert page.texts("td", data_figure="reward") == ["+1.00", "+1.00"]
    assert page.texts("td", data_figure="win_rate") == []


def test_kl_switch_off_shows_findings_in_texts() -> None:
    off = run(0.0, last=LOW)
    finding = "risen phrases: <b>“nice”: 0% → 44%."
    off = replace(off, points=(off.points[0], replace(off.points[1], findings=(finding,))))
    switch = KLSwitch.of(timeline(run(0.1, last=HIGH), off), 20)
    assert switch is not None
    assert Page(switch.html(OFF)).texts("p") == [f"Texts at step 20, before → after PPO: {finding}"]
    assert finding not in Page(switch.html(ON)).text
