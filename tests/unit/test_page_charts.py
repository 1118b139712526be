"""Charts of the page: well-formed SVG, everything where its number says, and nothing of a text that is markup."""

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhf_zoo.app.page import chart_parts, charts
from rlhf_zoo.app.page.chart_parts import choose_ticks
from rlhf_zoo.app.page.charts import (
    KLCurve,
    Series,
    draw_frontier,
    draw_step_curves,
    draw_token_bars,
    draw_token_line,
)

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title></svg><script>alert('1')</script>\"&\x00\x1b\u202e\ud800"
NAN, INF = math.nan, math.inf
NUMBERS = st.one_of(st.none(), st.floats(), st.floats(-1e6, 1e6), st.just(0.0))


def parsed(svg: str) -> ET.Element:
    """The drawing, after what holds for every one of them."""
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img" and root.get("aria-label")
    left, top, width, height = map(float, root.get("viewBox").split())
    assert (left, top, width) == (0, 0, chart_parts.PHONE_WIDTH) and height > 0
    assert "width:100%" in root.get("style")
    assert {one.tag.removeprefix(SVG) for one in root.iter()} <= {
        "svg",
        "g",
        "path",
        "circle",
        "text",
        "title",
        "style",
    }
    plain = re.compile(r"none|currentColor|var\(--zoo-(sft|ppo|quiet|mark),currentColor\)")
    for one in root.iter():
        assert not {"href", "onload", "onclick"} & set(one.attrib)
        for paint in ("fill", "stroke"):
            assert plain.fullmatch(one.get(paint, "none"))
        for name in ("d", "x", "y", "cx", "cy", "r", "stroke-width"):
            assert not re.search("nan|inf|None", one.get(name, ""))
        if one.tag == f"{SVG}text" and one.get("class") != "zoo-title":
            assert 0 <= float(one.get("x")) <= width and 0 <= float(one.get("y")) <= height
    return root


def named(root: ET.Element, kind: str) -> list[ET.Element]:
    return [one for one in root.iter() if kind in one.get("class", "").split()]


def hits(root: ET.Element) -> list[tuple[float, str]]:
    """x and words of each place that can be pointed at."""
    return [
        (float(re.match(r"M([\d.]+) ", path.get("d"))[1]), path.find(f"{SVG}title").text)
        for group in named(root, "zoo-tooltips")
        for path in group
    ]


def bars(root: ET.Element) -> list[tuple[float, float]]:
    """x and height of each bar."""
    found = re.findall(r"M([\d.]+) [\d.]+v-([\d.]+)", named(root, "zoo-bars")[0].get("d"))
    return [(float(x), float(height)) for x, height in found]


def lines(root: ET.Element, number: int = 0) -> list[list[tuple[float, float]]]:
    """The unbroken stretches of a curve."""
    written = named(root, "zoo-curve")[number][0].get("d")
    return [
        [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", stretch)]
        for stretch in written.split("M")[1:]
    ]


def numbers(root: ET.Element, group: int = 0) -> list[str]:
    """The numbers of a vertical axis, from the bottom."""
    return [one.text for one in named(root, "zoo-ticks")[group] if one.get("class") != "zoo-along"]


def boxes(root: ET.Element) -> list[charts.Box]:
    """Around each label, whichever way it is anchored."""
    found = []
    for one in named(root, "zoo-flag"):
        x, y, wide = float(one.get("x")), float(one.get("y")), len(one.text) * chart_parts.GLYPH_WIDTH
        x -= wide / 2 if one.get("text-anchor") == "middle" else 0
        assert x > 0 and x + wide < chart_parts.PHONE_WIDTH
        found.append((x, y - 10, x + wide, y + 2))
    return found


def apart(found: list[charts.Box]) -> bool:
    return not any(charts._boxes_overlap(one, other) for k, one in enumerate(found) for other in found[:k])


def draw(values, *, chart=draw_token_bars, **options):
    labels = options.pop("labels", [f" t{place}" for place in range(len(values))])
    return parsed(chart(values, labels=labels, role="ppo", unit="nats", title="KL", **options))


@settings(deadline=None)
@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12), st.booleans())
def test_ticks_are_three_to_five_round_numbers(one, other, whole):
    low, high = sorted((one, other))
    found = choose_ticks(low, high, integers_only=whole)
    assert 3 <= len(found) <= 5
    slack = 1e-6 + 1e-8 * max(abs(low), abs(high))
    assert found[0] <= low + slack and high - slack <= found[-1]
    steps = [after - before for before, after in pairwise(found)]
    assert np.allclose(steps, steps[0], rtol=1e-6)
    assert round(float(f"{steps[0]:.6e}".split("e")[0]), 4) in (1, 2, 2.5, 5)
    assert len({chart_parts.tick_label(value) for value in found}) == len(found)
    if whole:
        assert all(value == int(value) for value in found)


def test_bars_have_position_and_height_of_their_values():
    values = [0.5, 2.0, 1.0, 0.0, 4.0]
    root = draw(values)
    drawn = bars(root)
    assert [x for x, _ in drawn] == sorted({x for x, _ in drawn}) and len(drawn) == 5
    gaps = [after - before for (before, _), (after, _) in pairwise(drawn)]
    assert np.allclose(gaps, gaps[0], atol=0.11)
    assert [height for _, height in drawn] == [10.5, 42.0, 21.0, 1.0, 84.0]  # of 84; a 0 is seen, a gap is not
    assert hits(root) == [
        (x, f"“ t{k}” {value:.3f} nats") for k, ((x, _), value) in enumerate(zip(drawn, values, strict=True))
    ]
    assert numbers(root) == ["0", "1", "2", "3", "4"]
    under = {one.text: float(one.get("x")) for one in named(root, "zoo-along")}
    assert set(under) == {"5", "10"} and under["5"] == drawn[4][0]  # no axis is shorter than ten tokens
    assert root.get("aria-label") == "KL: 5 tokens, from 0.000 to 4.000 nats"
    assert named(root, "zoo-bars")[0].get("stroke") == "var(--zoo-ppo,currentColor)"
    sft = parsed(draw_token_bars([1.0], labels=["a"], role="sft", unit="nats", title="KL"))
    assert named(sft, "zoo-bars")[0].get("stroke") == "var(--zoo-sft,currentColor)"
    assert "zoo-sft" in sft.get("class").split()


@pytest.mark.parametrize("chart", [draw_token_bars, draw_token_line])
@pytest.mark.parametrize("missing", [None, NAN, -INF, 1e300])
def test_nonfinite_values_are_gaps(chart, missing):
    values = [1.0, 2.0, missing, 3.0, missing, 2.0, 2.0]
    root, whole = draw(values, chart=chart), draw([0.0 if v is missing else v for v in values], chart=chart)
    assert [words.split()[0] for _, words in hits(root)] == ["“", "“", "“", "“", "“"]
    assert [words for _, words in hits(root)] == [words for k, (_, words) in enumerate(hits(whole)) if k not in (2, 4)]
    assert [x for x, _ in hits(root)] == [x for k, (x, _) in enumerate(hits(whole)) if k not in (2, 4)]
    if chart is draw_token_line:
        assert [len(stretch) for stretch in lines(root)] == [2, 1, 2]
        dots = list(named(root, "zoo-curve")[0][1])
        assert [float(dot.get("cx")) for dot in dots] == [hits(root)[2][0]]  # alone between gaps: no line shows it


@settings(deadline=None, max_examples=60)
@given(st.lists(NUMBERS, max_size=40), st.floats(min_value=0))
@example([3.0] * 9, 0.0)
@example([1e-300, 1e-9], 0.0)
@example([1e11, 1e11 + 1], 0.0)
def test_charts_accept_any_numbers(values, top):
    for chart, options in ((draw_token_bars, {"y_max": top}), (draw_token_line, {})):
        root = draw(values, chart=chart, **options)
        assert 3 <= len(numbers(root)) <= 5
        assert hits(root) or root.get("aria-label") == "KL: no values"
    steps = list(range(len(values)))
    series = [Series("a", values), Series("b", values, is_nonnegative=True)]
    parsed(draw_step_curves(steps, series, selected=3, labels={1: "best"}))
    if values:
        curve = KLCurve("β = 0.1", [(step, value, value) for step, value in enumerate(values)], 2, "last")
        parsed(draw_frontier([curve], name="Reward", source="rollouts", selected=0))


def test_charts_escape_text():
    for svg in (
        draw_token_bars([1.0], labels=[HOSTILE], role="ppo", unit=HOSTILE, title=HOSTILE),
        draw_token_line([1.0], labels=[HOSTILE], role="ppo", unit=HOSTILE, title=HOSTILE),
        draw_step_curves([1], [Series(HOSTILE, [1.0], HOSTILE)], selected=1, labels={1: HOSTILE}),
    ):
        root = parsed(svg)  # which allows no script
        assert "<script" not in svg and svg.count("</svg>") == 1 and "\x00" not in svg and "\u202e" not in svg
        assert any("</svg><script>alert('1')</script>" in (one.text or "") for one in root.iter())
    ((_, words),) = hits(draw([1.0], labels=["x" * 10_000]))
    assert len(words) < 100


STEPS = [200, 400, 600, 800, 1000]
REWARD = [0.0, 1.0, None, 3.0, 2.0]
KL = [-0.1, 2.0, 4.0, 6.0, 8.0]


def curves(selected, **options):
    series = [Series("Reward", REWARD), Series("KL to SFT", KL, "nats", is_nonnegative=True)]
    return parsed(draw_step_curves(STEPS, series, selected=selected, **options))


def test_step_curves_share_their_axis():
    root = curves(selected=800, labels={400: "recommended", 1000: "best"})
    reward, kl = lines(root, 0), lines(root, 1)
    assert [len(stretch) for stretch in reward] == [2, 2] and [len(stretch) for stretch in kl] == [5]
    xs = [x for x, _ in kl[0]]
    assert [x for stretch in reward for x, _ in stretch] == [*xs[:2], *xs[3:]]
    assert np.allclose(np.diff(xs), xs[1] - xs[0], atol=0.11) and xs[1] > xs[0]
    zero = next(float(one.get("y")) for one in named(root, "zoo-ticks")[1] if one.text == "0")
    assert kl[0][0][1] == pytest.approx(zero - 3.8, abs=0.05) and numbers(root, 1) == ["0", "2", "4", "6", "8"]
    marks = [one.get("d") for one in named(root, "zoo-selected")]
    assert len(marks) == 2 and all(float(re.match(r"M([\d.]+) ", mark)[1]) == xs[3] for mark in marks)
    rings = [(float(one.get("cx")), float(one.get("cy"))) for one in named(root, "zoo-labeled")]
    assert rings == [reward[0][1], reward[1][1], kl[0][1], kl[0][4]]
    flags = {one.text: one for one in named(root, "zoo-flag")}
    assert set(flags) == {"step 800", "recommended", "best"}
    assert float(flags["step 800"].get("x")) == pytest.approx(xs[3], abs=0.1)
    assert flags["step 800"].get("fill") == "var(--zoo-mark,currentColor)"
    assert [one.text for one in named(root, "zoo-along")] == ["200", "400", "600", "800", "1000"]
    (style,) = root.iter(f"{SVG}style")
    margins = [float(share) for share in re.findall(r"--zoo-(?:left|right): ([\d.]+)", style.text)]
    slider_ends = [chart_parts.PHONE_WIDTH * margins[0], chart_parts.PHONE_WIDTH * (1 - margins[1])]
    assert slider_ends == pytest.approx([xs[0], xs[-1]], abs=0.1)
    words = [words for _, words in hits(root)]
    assert words[0] == "step 200: Reward 0.000" and words[4] == "step 200: KL to SFT −0.100 nats" and len(words) == 9
    assert root.get("aria-label") == (
        "Reward over training, at step 800: 3.000; KL to SFT over training, at step 800: 6.000 nats; "
        "recommended: step 400; best: step 1000"
    )


def test_frontier_marks_one_step_of_each_run():
    curves = [
        KLCurve(
            f"β = {beta:g}",
            [(step, step / 100 / (beta + 0.1), math.sqrt(step) / (1 + beta)) for step in STEPS],
            800,
            "recommended",
        )
        for beta in (0.02, 0.05, 0.1, 0.2, 0.4)
    ]
    root = parsed(draw_frontier(curves, name="Reward", source="validation prompts", selected=2))
    title, *descriptions = root.get("aria-label").split("; ")
    assert title == "Reward against KL: validation prompts" == named(root, "zoo-title")[0].text
    assert descriptions[-1] == "β = 0.1: recommended step 800, reward 25.71 at KL 40.00", "a later reward is higher"
    assert len(named(root, "zoo-run")) == 5 and len(named(root, "zoo-emphasized")) == 1
    flags = {one.text: one for one in named(root, "zoo-flag")}
    assert set(flags) == {"β = 0.02", "β = 0.05", "β = 0.1", "β = 0.2", "β = 0.4"}
    assert [text for text, one in flags.items() if one.get("fill") == "var(--zoo-ppo,currentColor)"] == ["β = 0.1"]
    (emphasized,) = named(root, "zoo-emphasized")
    spots = [
        (one.get("cx"), one.get("cy")) for one in emphasized.iter(f"{SVG}circle") if one.find(f"{SVG}title") is not None
    ]
    assert len(spots) == 5
    assert [float(x) for x, _ in spots] == sorted({float(x) for x, _ in spots})  # KL grows with the step
    rings = [(one.get("cx"), one.get("cy")) for one in named(root, "zoo-labeled")]
    assert len(rings) == 5 and spots[3] in rings
    (mark,) = named(root, "zoo-selected")
    assert (mark.get("cx"), mark.get("cy")) == spots[3]
    titles = [one.text for one in emphasized.iter(f"{SVG}title")]
    assert titles[3] == "β = 0.1, step 800: reward 25.713, KL 40.000 nats"
    assert apart(boxes(root))


def test_frontier_label_avoids_points_of_its_curve():
    curve = KLCurve("β = 0.1", [(10, 2.0, 0.7), (20, 2.5, 0.7), (30, 10.0, 0.0)], 10, "recommended")
    root = parsed(draw_frontier([curve], name="Reward", source="rollouts", selected=0))
    ((left, top, right, bottom),) = boxes(root)
    points = [(float(one.get("cx")), float(one.get("cy"))) for one in root.iter(f"{SVG}circle")]
    assert len(points) > 3 and not [(x, y) for x, y in points if left <= x <= right and top <= y <= bottom]
