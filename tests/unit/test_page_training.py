"""Over training: where the slider stands, what is marked, and the same prompt at every checkpoint, as HTML."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.app.engine import CheckpointResult, PolicyCompletion, Snapshot, TimelinePoint, TimelineRun
from rlhf_zoo.app.page.training import checkpoints_html, curves_html, frontier_html, nearest_step, slider_range
from rlhf_zoo.publishing.catalog.card import CardEstimate


def run(*steps: int, **marks: int) -> TimelineRun:
    points = tuple(
        TimelinePoint(
            step, f"step-{step}", "a" * 40, f"local/x@{'a' * 40}", reward=step / 10, kl=step / 100,
            chosen=step == marks.get("chosen"), recommended=step == marks.get("recommended"),
        )
        for step in steps
    )  # fmt: skip
    return TimelineRun("local/x", 0.05, points)


@settings(deadline=None)
@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=30))
def test_slider_reaches_every_checkpoint(steps: set[int]) -> None:
    found = run(*sorted(steps))
    bar = slider_range(found)
    assert bar["minimum"] == min(steps) and bar["maximum"] >= max(steps) and bar["maximum"] > bar["minimum"]
    for step in steps:
        assert (step - bar["minimum"]) % bar["step"] == 0 and nearest_step(found, step) == step


@pytest.mark.parametrize(
    ("stands", "step"),
    [(0, 10), (14, 10), (15, 10), (16, 20), (31, 40), (99, 40), (None, 20), (float("nan"), 20)]
    + [(odd, 20) for odd in (10**400, "40", [40], {"a": 1}, True)],
)
def test_nearest_step_picks_closest_checkpoint(stands, step: int) -> None:
    assert nearest_step(run(10, 20, 40, recommended=20), stands) == step


def test_curves_mark_selected_step_and_name_others() -> None:
    found = run(10, 20, 40, chosen=40, recommended=20)
    drawn = curves_html(found, 10)
    assert {"recommended", "best", "step 10"} <= set(re.findall(r">([^<>]+)</text>", drawn))
    assert drawn.count('class="zoo-selected"') == 4, "a mark in each panel, for phones and for wide screens"
    assert "step-10 · in training: reward +1.00, KL 0.10 nats" in drawn
    assert "KL to SFT, nats" in drawn and "KL to the base, nats" in curves_html(found, 10, "the base")
    places = [
        re.search(r'class="zoo-selected" d="M([\d.]+)', curves_html(found, step)).group(1) for step in (10, 20, 40)
    ]
    assert sorted(places, key=float) == places and len(set(places)) == 3
    watched = tuple(replace(point, watched={"<b>gold": 0.25}) for point in found.points)
    assert (
        "&lt;b&gt;gold (watched)" in (drawn := curves_html(replace(found, points=watched), 10)) and "<b>" not in drawn
    )
    assert curves_html(run(10), 10) and curves_html(
        replace(found, points=(replace(found.points[0], reward=None, kl=None),)), 10
    )


def test_curves_show_evaluated_figures_with_intervals() -> None:
    found = run(10, 20, 40, recommended=10)
    figures = {
        10: {"reward": CardEstimate(0.9, (0.8, 1.0)), "judge": CardEstimate(0.7, (0.5, 0.9)), "kl": CardEstimate(1.9)},
        20: {"judge": CardEstimate(0.6, (1e300, 0.8))},
    }
    points = tuple(replace(point, evaluated={"validation": figures.get(point.step, {})}) for point in found.points)
    drawn = curves_html(replace(found, points=points), 10)
    titles = re.findall(r'class="zoo-title"[^>]*>([^<]+)<', drawn)
    assert titles == ["Reward", "Judge’s score", "KL to SFT, nats"] * 2, "for phones and for wide screens"
    assert "step-10 (recommended) · on validation prompts: reward +0.90, judge +0.70, KL 1.90 nats · bars: 95%" in drawn
    bars = re.findall(r'class="zoo-interval" d="([^"]*)"', drawn)
    assert [bar.count("M") for bar in bars] == [1, 1, 0] * 2, "one end of the interval at step 20 is out of range"
    assert "step 10: Judge’s score 0.700 (0.500 to 0.900)" in drawn and "step 20: Judge’s score 0.600<" in drawn
    assert "step-40 · in training: reward +4.00" in curves_html(replace(found, points=points), 40)


def side(text: str) -> PolicyCompletion:
    return PolicyCompletion(text, 1.5, -0.2, (0.1, 0), (text, "</s>"), 2, True, stop="eos", token_kl=(0.2, 0), kl=0.2)


def test_each_checkpoint_has_a_row_or_a_problem() -> None:
    found = run(10, 20, 40, chosen=40, recommended=20)
    good = Snapshot("<b>p", 1, 1.0, 1.0, 8, sft=(side("a"),), ppo=(side("<i>x"),), done=True)
    rows = [
        CheckpointResult("local/x", 0.05, found.points[0], good),
        CheckpointResult("local/x", 0.05, found.points[1], None, "It is <gone>: choose another."),
    ]
    page = checkpoints_html(rows, requested_count=3, total_count=40)
    assert 'data-state="writing"' in page and "2 of 3 checkpoints, spread over all 40" in page
    assert re.findall(r'data-step="(\d+)"', page) == ["0", "10", "20"], "SFT comes first"
    assert "It is &lt;gone&gt;: choose another." in page and "&lt;i&gt;x" in page
    assert "<gone>" not in page and "<i>x" not in page and "<b>p" not in page and "/s&gt;" not in page
    assert page.count("recommended") == 1
    whole = checkpoints_html(
        [*rows, CheckpointResult("local/x", 0.05, found.points[2], good)],
        requested_count=3,
        total_count=3,
        by_beta=True,
    )
    assert 'data-state="done"' in whole and ">3 runs<" in whole and "β = 0.05" in whole


def test_frontier_plots_evaluated_figures_if_every_run_has_them() -> None:
    figures = {key: CardEstimate(value) for key, value in {"reward": 0.9, "judge": -0.7, "kl": 1.9}.items()}
    logged = run(10, 20, recommended=10)
    evaluated = replace(
        logged, beta=0.1, points=tuple(replace(point, evaluated={"validation": figures}) for point in logged.points)
    )
    drawn = frontier_html([evaluated], 0)
    titles = re.findall(r'class="zoo-title"[^>]*>([^<]+)<', drawn)
    wanted = ["Reward against KL: validation prompts", "Judge’s score against KL: validation prompts"]
    assert titles == [title for title in wanted for _ in ("phone", "wide screen")]
    assert "step 20: judge’s score −0.700, KL 1.900 nats" in drawn and "reward 2.000" not in drawn
    assert "β = 0.1: recommended step 10, reward 0.90 at KL 1.90" in drawn
    assert "Circled: the recommended step of each run." in drawn
    assert "KL to the base, nats" in frontier_html([evaluated], 0, "the base")
    mixed = frontier_html([evaluated, run(10, 20)], 0)
    assert set(re.findall(r'class="zoo-title"[^>]*>([^<]+)<', mixed)) == {
        "Reward against KL: rollouts, as logged in training"
    }
    assert "step 20: reward 2.000, KL 0.200 nats" in mixed and "reward 0.900" not in mixed
    assert "β = 0.05: last step 20, reward 2.00" in mixed and "the recommended or last step of each run" in mixed


def test_frontier_names_only_steps_that_are_circled() -> None:
    logged = run(10, 20, recommended=10)
    without_figures = replace(
        run(10, 20), points=tuple(replace(point, reward=None, kl=None) for point in run(10, 20).points)
    )
    assert "Circled: the recommended step of each run." in frontier_html([logged, without_figures], 0)
    assert "Circled" not in frontier_html([without_figures], 0)
