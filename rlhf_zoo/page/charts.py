"""Charts as inline SVG: strings without scripts, addresses or colors of their own. Pure: numbers in, text out.

Colors are `currentColor` and the page's variables --zoo-sft, --zoo-ppo, --zoo-quiet and --zoo-mark. A chart is as wide
as its column, up to --zoo-chart-width. Values that are None or not finite leave gaps, and so do those beyond ±1e12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Literal

from .html import number, text

__all__ = [
    "Checkpoint",
    "FrontierRun",
    "Role",
    "Series",
    "frontier",
    "step_curves",
    "ticks",
    "token_bars",
    "token_line",
]

Role = Literal["sft", "ppo"]
Values = Sequence[float | None]
Scale = Callable[[float], float]
Box = tuple[float, float, float, float]
Point = tuple[str, str] | None  # x and y, as they are written

WIDTH = 360  # of every drawing, in its own units: those of the screen on a phone
RIGHT = WIDTH - 12
TITLE = 20  # height of the line of text over a panel
FONT = 11
GLYPH = 6.2  # width of a character at that size, for what must not overlap
BEYOND = 1e12
FLAT = 1e-6  # what differs by less is equal
MOST_DOTS = 80  # with more points, a curve shows no dots
LONGEST_HINT = 60
FEWEST_SLOTS = 10  # so that the first token is no bar as wide as the chart
QUIET, MARK = "var(--zoo-quiet,currentColor)", "var(--zoo-mark,currentColor)"
COLORS = {"sft": "var(--zoo-sft,currentColor)", "ppo": "var(--zoo-ppo,currentColor)"}


@dataclass(frozen=True)
class Series:
    """One curve over the steps. from_zero: it cannot be negative, so an estimate below 0 is drawn at 0."""

    name: str
    values: Values
    unit: str = ""
    from_zero: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A point of a run. kl: to SFT, in nats."""

    step: int
    reward: float | None
    kl: float | None


@dataclass(frozen=True)
class FrontierRun:
    """A run and its checkpoints in the order of training. best: the step whose point carries the label."""

    label: str
    points: Sequence[Checkpoint]
    best: int | None = None


def token_bars(
    values: Values,
    *,
    labels: Sequence[str],
    side: Role,
    unit: str,
    title: str,
    top: float | None = None,
    width: int | None = None,
) -> str:
    """One bar from 0 for each token position; what is below 0 by rounding counts as 0.

    labels: the tokens, for hovering. top, width: value and position that the axes reach at least, by which two
    completions share them. Raises ValueError where values and labels differ in number.
    """
    known = [None if value is None else max(value, 0.0) for value in _finite(values)]
    heights = [value for value in known if value is not None]
    axis = ticks(0.0, _ends([0.0, *_finite([top]), *heights])[1])
    plot = _Plot.over_tokens(axis, max(len(known), width or 0, FEWEST_SLOTS), height=84)
    slot, unit_text, scale = plot.slot, text(unit), plot.high / axis[-1]
    hit, foot = f" {plot.top}v{plot.high}", f" {plot.bottom}v-"
    drawn, hits = [], []
    for x, value, label in zip(plot.places(len(known)), known, labels, strict=True):
        if value is None:
            continue
        drawn.append(f"M{x}{foot}{max(value * scale, 1.0):.1f}")
        hits.append(f'<path d="M{x}{hit}"><title>“{_hint(label)}” {_measured(value, unit_text)}</title></path>')
    bar = f'stroke="{_color(side)}" stroke-width="{min(slot * 0.8 if slot > 2 else slot, 16.0):.2f}"'
    body = plot.axes(_titled(title, unit)) + _hits(hits, slot)
    body += f'<path class="zoo-bars" fill="none" {bar} pointer-events="none" d="{"".join(drawn)}"/>'
    return _svg(plot.bottom + 18, f"zoo-bars-chart zoo-{side}", _told(title, heights, len(known), unit), body)


def token_line(
    values: Values,
    *,
    labels: Sequence[str],
    side: Role,
    unit: str,
    title: str,
    span: tuple[float, float] | None = None,
    width: int | None = None,
) -> str:
    """A line over token positions and the line of 0. span, width: what the axes reach at least; see `token_bars`."""
    known = _finite(values)
    heights = [value for value in known if value is not None]
    axis = _axis([0.0, *heights, *_finite(span or ())])
    plot = _Plot.over_tokens(axis, max(len(known), width or 0, FEWEST_SLOTS), height=84)
    points: list[Point] = []
    hit, unit_text = f" {plot.top}v{plot.high}", text(unit)
    hits = []
    for x, value, label in zip(plot.places(len(known)), known, labels, strict=True):
        points.append(None if value is None else (x, f"{plot.y(value):.1f}"))
        if value is not None:
            hits.append(f'<path d="M{x}{hit}"><title>“{_hint(label)}” {_measured(value, unit_text)}</title></path>')
    zero = f'<path class="zoo-zero" d="M{plot.left:.1f} {plot.y(0.0):.1f}H{RIGHT}" stroke="{QUIET}"/>'
    body = plot.axes(_titled(title, unit)) + zero + _hits(hits, plot.slot) + _curve(points, _color(side))
    return _svg(plot.bottom + 18, f"zoo-line-chart zoo-{side}", _told(title, heights, len(known), unit), body)


def step_curves(
    steps: Sequence[int],
    series: Sequence[Series],
    *,
    chosen: int | None = None,
    labeled: Mapping[str, int] | None = None,
    side: Role = "ppo",
) -> str:
    """Curves over the training step, one panel under the other, with one axis of steps.

    chosen: the step of the vertical mark. labeled: label -> step of an outlined marker; labels of one step are joined.
    Raises ValueError where a series has not one value for each step.
    """
    names: dict[int, str] = {}
    for label, step in (labeled or {}).items():
        names[step] = f"{names[step]}, {label}" if step in names else label
    axis = ticks(*_ends([*steps, *([] if chosen is None else [chosen])]), whole=True)
    panels = [sorted(zip(steps, _finite(one.values), strict=True), key=lambda pair: pair[0]) for one in series]
    scales = [
        _axis(
            [0.0, *(value and max(value, 0.0) for _, value in panel)]
            if one.from_zero
            else [value for _, value in panel]
        )
        for one, panel in zip(series, panels, strict=True)
    ]
    left = max([_gutter(scale) for scale in scales], default=_gutter((0.0, 1.0)))
    x = _linear(axis[0], axis[-1], left, RIGHT - 4)
    gaps = [after - before for before, after in pairwise(sorted({x(step) for step in steps}))]
    flags = [(x(step), label, "currentColor") for step, label in names.items()]
    if chosen is not None:
        flags.append((x(chosen), f"step {chosen}", MARK))
    written, bottom = _flags(flags, left)
    body, spoken = [written], []
    for place, (one, panel, scale) in enumerate(zip(series, panels, scales, strict=True)):
        plot = _Plot(scale, top=bottom + TITLE, height=96, left=left)
        last = place == len(series) - 1
        hit, name, unit = f" {plot.top}v{plot.high}", text(one.name), text(one.unit)
        points: list[Point] = []
        hits, rings = [], []
        for step, value in panel:
            if value is None:
                points.append(None)
                continue
            at = (f"{x(step):.1f}", f"{plot.y(max(value, scale[0])):.1f}")
            points.append(at)
            hits.append(f'<path d="M{at[0]}{hit}"><title>step {step}: {name} {_measured(value, unit)}</title></path>')
            if step in names:
                rings.append(f'<circle class="zoo-labeled" cx="{at[0]}" cy="{at[1]}" r="5.5"/>')
        body.append(plot.axes(_titled(one.name, one.unit), x=x, along=axis, numbered=last))
        if chosen is not None:
            line = f'd="M{x(chosen):.1f} {plot.top}v{plot.high}" stroke="{MARK}" stroke-width="1.5"'
            body.append(f'<path class="zoo-chosen" {line}/>')
        body.append(_curve(points, _color(side), dots=len(panel) <= MOST_DOTS))
        body.append(f'<g fill="none" stroke="currentColor" stroke-width="1.5">{"".join(rings)}</g>' if rings else "")
        body.append(_hits(hits, min([24.0, *gaps])))
        bottom = plot.bottom + 8
        spoken.append(f"{one.name} over training" + _at(panel, chosen, one.unit))
    body.append(f'<text x="{RIGHT}" y="{bottom + 24}" text-anchor="end" fill="{QUIET}">training step</text>')
    spoken += [f"{label}: step {step}" for step, label in names.items()]
    return _svg(bottom + 30, "zoo-steps-chart", "; ".join(spoken), "".join(body))


def frontier(
    runs: Sequence[FrontierRun],
    *,
    chosen: int | None = None,
    step: int | None = None,
    title: str = "Reward against KL",
    across: str = "KL to SFT, nats per completion",
) -> str:
    """Reward against KL: each run a thin line through its checkpoints, with its best point marked and labeled.

    chosen: the index of the run that is emphasized. step: of its checkpoint that carries the mark.
    """
    placed = [
        [
            (point.step, max(kl, 0.0), reward, kl)
            for point in run.points
            for kl, reward in [_finite([point.kl, point.reward])]
            if kl is not None and reward is not None
        ]
        for run in runs
    ]
    across_axis = _axis([0.0, *(kl for points in placed for _, kl, _, _ in points)])
    plot = _Plot(_axis([reward for points in placed for _, _, reward, _ in points]), top=TITLE, height=180)
    x = _linear(across_axis[0], across_axis[-1], plot.left, RIGHT - 4)
    order = sorted(range(len(runs)), key=lambda index: index == chosen)  # the emphasized one over the others
    lines, marks, spoken, traces = [], [], [], []
    for index in order:
        emphasized = index == chosen
        color = COLORS["ppo"] if emphasized else QUIET
        trace: list[Point] = [(f"{x(kl):.1f}", f"{plot.y(reward):.1f}") for _, kl, reward, _ in placed[index]]
        traces.append(trace)
        dots = "".join(
            f'<circle cx="{x(kl):.1f}" cy="{plot.y(reward):.1f}" r="{2.5 if emphasized else 1.8}"><title>'
            f"{text(runs[index].label)}, step {at}: reward {number(reward, 3)}, KL {number(raw, 3)} nats</title>"
            "</circle>"
            for at, kl, reward, raw in placed[index]
        )
        kind = "zoo-run zoo-emphasized" if emphasized else "zoo-run"
        lines.append(
            f'<g class="{kind}">{_curve(trace, color, width=2.0 if emphasized else 1.0)}'
            f'<g fill="{color}" stroke="{color}" stroke-opacity="0" stroke-width="10">{dots}</g></g>'
        )
        for at, kl, reward, _ in placed[index]:
            if at == runs[index].best:
                marks.append((x(kl), plot.y(reward), runs[index].label, emphasized))
                spoken.append(f"{runs[index].label}: best reward {number(reward)} at KL {number(kl)}")
            if emphasized and at == step:
                spot = f'cx="{x(kl):.1f}" cy="{plot.y(reward):.1f}" r="8.5"'
                lines.append(f'<circle class="zoo-chosen" {spot} fill="none" stroke="{MARK}" stroke-width="1.5"/>')
    body = plot.axes(title, x=x, along=across_axis) + "".join(lines) + _named(marks, traces, plot)
    body += f'<text x="{RIGHT}" y="{plot.bottom + 32}" text-anchor="end" fill="{QUIET}">{text(across)}</text>'
    return _svg(plot.bottom + 38, "zoo-frontier-chart", "; ".join([title, *spoken]), body)


def ticks(low: float, high: float, *, whole: bool = False) -> tuple[float, ...]:
    """Three to five round numbers, evenly apart, of which the outer ones enclose low and high. whole: integers."""
    size = max(abs(low), abs(high))
    if size < FLAT:
        low, high = 0.0, 1.0
    elif high - low < max(1e-3 * size, FLAT):
        low, high = low - size / 10, high + size / 10
    power = math.floor(math.log10((high - low) / 5))
    for step in (factor * 10.0**place for place in range(power, power + 20) for factor in (1, 2, 2.5, 5)):
        if whole and step % 1:
            continue
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= 4:
            return tuple(float(f"{count * step:.12g}") for count in range(first, max(last, first + 2) + 1))
    raise AssertionError("a step as wide as the range is always among those tried")


class _Plot:
    """A rectangle with a vertical axis; `slot` is the width of a token position, where it is over tokens."""

    def __init__(self, axis: Sequence[float], *, top: float, height: float, left: float | None = None) -> None:
        self.axis, self.top, self.high = axis, top, height
        self.bottom = top + height
        self.left = _gutter(axis) if left is None else left
        self.y = _linear(axis[0], axis[-1], self.bottom, top)
        self.positions, self.slot = 0, 0.0

    @classmethod
    def over_tokens(cls, axis: Sequence[float], positions: int, *, height: float) -> _Plot:
        plot = cls(axis, top=TITLE, height=height)
        plot.positions, plot.slot = positions, (RIGHT - plot.left) / positions
        return plot

    def places(self, count: int) -> list[str]:
        """The middles of the first token positions."""
        return [f"{self.left + (place + 0.5) * self.slot:.1f}" for place in range(count)]

    def axes(
        self, title: str, *, x: Scale | None = None, along: Sequence[float] | None = None, numbered: bool = True
    ) -> str:
        """Title, grid and numbers. x, along: the horizontal axis, where it is not of token positions."""
        grid = "".join(f"M{self.left:.1f} {self.y(value):.1f}H{RIGHT}" for value in self.axis)
        numbers = [
            f'<text x="{self.left - 5:.1f}" y="{self.y(value) + 3.8:.1f}" text-anchor="end">{said}</text>'
            for value, said in zip(self.axis, _labels(self.axis), strict=True)
        ]
        if x is None or along is None:
            x, along = _linear(0.5, self.positions + 0.5, self.left, RIGHT), _places(self.positions)
        for value, said in zip(along, _labels(along), strict=True):
            grid += f"M{x(value):.1f} {self.bottom}v3"
            if numbered:
                at = f'x="{x(value):.1f}" y="{self.bottom + 14}"'
                numbers.append(f'<text class="zoo-along" {at} text-anchor="middle">{said}</text>')
        return (
            f'<text class="zoo-title" x="2" y="{self.top - 9}" fill="currentColor">{text(title)}</text>'
            f'<path class="zoo-grid" d="{grid}" stroke="{QUIET}" stroke-opacity=".35"/>'
            f'<g class="zoo-ticks" fill="{QUIET}">{"".join(numbers)}</g>'
        )


def _svg(height: float, kind: str, told: str, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="zoo-chart {kind}" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{text(told)}" font-size="{FONT}" '
        f'style="display:block;width:100%;max-width:var(--zoo-chart-width,520px);height:auto">{body}</svg>'
    )


def _hits(paths: Iterable[str], width: float) -> str:
    """Columns as high as the plot that are not seen: a bar of height 0 could not be pointed at."""
    style = f'stroke="currentColor" stroke-opacity="0" stroke-width="{width:.2f}" pointer-events="stroke"'
    return f'<g class="zoo-hits" {style}>{"".join(paths)}</g>'


def _curve(points: Sequence[Point], color: str, *, dots: bool = False, width: float = 1.6) -> str:
    """A line through the points, broken at None; a point between two gaps is a dot."""
    line, single = [], []
    before: Point = None
    for point, after in zip_longest(points, points[1:]):
        if point is not None:
            line.append(f"{'L' if before else 'M'}{point[0]} {point[1]}")
            if dots or (before is None and after is None):
                single.append(f'<circle cx="{point[0]}" cy="{point[1]}" r="2.2"/>')
        before = point
    style = f'fill="none" stroke="{color}" stroke-width="{width:g}" stroke-linejoin="round"'
    return (
        f'<g class="zoo-curve" pointer-events="none"><path {style} d="{"".join(line)}"/>'
        f'<g fill="{color}">{"".join(single)}</g></g>'
    )


def _flags(flags: Sequence[tuple[float, str, str]], left: float) -> tuple[str, float]:
    """Labels over their x, in as many lines as they need, and the height of those: (x, label, color) each."""
    lines: list[list[tuple[float, float]]] = []
    drawn = []
    for x, label, color in sorted(flags):
        half = len(label) * GLYPH / 2
        middle = max(min(x, WIDTH - 2 - half), left + half)
        free = (k for k, line in enumerate(lines) if all(abs(middle - at) > half + other + 6 for at, other in line))
        place = next(free, len(lines))
        if place == len(lines):
            lines.append([])
        lines[place].append((middle, half))
        at = f'x="{middle:.1f}" y="{place * 14 + 11}" text-anchor="middle" fill="{color}"'
        drawn.append(f'<text class="zoo-flag" {at}>{text(label)}</text>')
    return "".join(drawn), len(lines) * 14.0


def _named(marks: Sequence[tuple[float, float, str, bool]], curves: Iterable[Sequence[Point]], plot: _Plot) -> str:
    """Best points outlined, each with its label where it covers least of the others: (x, y, label, emphasized)."""
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y, _, _ in marks]
    lines = [spot for curve in curves for spot in _along(curve)]
    drawn = []
    for x, y, label, emphasized in reversed(marks):  # the emphasized one chooses first
        wide = len(label) * GLYPH
        around = [(x + 9, y), (x - 9 - wide, y), (x - wide / 2, y - 15), (x - wide / 2, y + 15)]
        around += [(x + aside, y + far) for far in (15, -15, 28, -28, 41, -41) for aside in (5, -5 - wide)]
        boxes = [(at, height - 6, at + wide, height + 6) for at, height in around]
        inside = [
            box for box in boxes if box[0] > plot.left and box[2] < WIDTH and plot.top < box[1] and box[3] < plot.bottom
        ]

        def covered(box: Box) -> int:
            crossed = sum(box[0] < right < box[2] and box[1] < down < box[3] for right, down in lines)
            return crossed + 1000 * sum(_overlap(box, other) for other in taken)

        box = min(inside or boxes, key=covered)
        taken.append(box)
        color = COLORS["ppo"] if emphasized else "currentColor"
        weight = ' font-weight="600"' if emphasized else ""
        ring = f'cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="{color}" stroke-width="1.5"'
        drawn.append(
            f'<circle class="zoo-labeled" {ring}/><text class="zoo-flag" x="{box[0]:.1f}" y="{box[1] + 10:.1f}" '
            f'fill="{color}"{weight}>{text(label)}</text>'
        )
    return f'<g pointer-events="none">{"".join(drawn)}</g>'


def _along(curve: Sequence[Point]) -> list[tuple[float, float]]:
    """Spots on a curve, eight to a stretch."""
    spots = [(float(point[0]), float(point[1])) for point in curve if point is not None]
    return spots + [
        (x + (right - x) * part / 8, y + (down - y) * part / 8)
        for (x, y), (right, down) in pairwise(spots)
        for part in range(1, 8)
    ]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _finite(values: Iterable[float | None]) -> list[float | None]:
    return [value if value is not None and -BEYOND < value < BEYOND else None for value in values]


def _ends(values: Iterable[float | None]) -> tuple[float, float]:
    known = [value for value in values if value is not None]
    return min(known, default=0.0), max(known, default=0.0)


def _axis(values: Iterable[float | None]) -> tuple[float, ...]:
    return ticks(*_ends(values))


def _linear(low: float, high: float, start: float, end: float) -> Scale:
    slope = (end - start) / (high - low)
    return lambda value: start + (value - low) * slope


def _places(positions: int) -> list[float]:
    """Up to five round token positions from the first on, which counts as 1."""
    for step in (factor * 10**power for power in range(12) for factor in (1, 2, 5)):
        found = [*([1] if step >= 5 else []), *range(step, positions + 1, step)]
        if len(found) <= 5:
            return [float(place) for place in found]
    return []


def _labels(axis: Sequence[float]) -> list[str]:
    """Each number with as many decimals as their distance needs."""
    step = axis[1] - axis[0] if len(axis) > 1 else 1.0
    if step < 1e-4 or max(map(abs, axis)) >= 1e6:
        found = [f"{value:.5g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e") for value in axis]
    else:
        decimals = next(count for count in range(7) if abs(round(step, count) - step) < 1e-3 * step)
        found = [f"{value:.{decimals}f}" for value in axis]
    return [said.replace("-", "\N{MINUS SIGN}") for said in found]


def _gutter(axis: Sequence[float]) -> float:
    """Room for the numbers of a vertical axis; equal for all of up to four characters."""
    return 8 + GLYPH * max(4, *map(len, _labels(axis)))


def _color(side: str) -> str:
    return COLORS[side]


def _titled(name: str, unit: str) -> str:
    return f"{name}, {unit}" if unit else name


def _measured(value: float, unit: str) -> str:
    """unit: as it stands in an attribute or in text, so escaped."""
    return f"{number(value, 3)} {unit}" if unit else number(value, 3)


@lru_cache(maxsize=4096)
def _hint(label: str) -> str:
    """A token for hovering. Kept, since a text being written is drawn again at each of its tokens."""
    return text(label if len(label) <= LONGEST_HINT else label[: LONGEST_HINT - 1] + "…").replace("\n", "↵")


def _told(title: str, known: Sequence[float], positions: int, unit: str) -> str:
    """What a screen reader says of a chart over tokens."""
    if not known:
        return f"{title}: no values"
    low, high = number(min(known), 3), number(max(known), 3)
    return f"{title}: {positions} token{'s' * (positions != 1)}, from {low} to {high} {unit}".rstrip()


def _at(panel: Iterable[tuple[int, float | None]], chosen: int | None, unit: str) -> str:
    found = [value for step, value in panel if step == chosen and value is not None]
    return f", at step {chosen}: {number(found[0], 3)} {unit}".rstrip() if found else ""
