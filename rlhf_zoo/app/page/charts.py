"""Draws charts as inline SVG, without scripts, addresses or fixed colors.

Colors are `currentColor` and the page's variables --zoo-sft, --zoo-ppo, --zoo-quiet and --zoo-mark. A chart is as wide
as its column, up to --zoo-chart-width. Values that are None, not finite or beyond ±1e12 become gaps.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import Literal

from .chart_parts import (
    GLYPH_WIDTH,
    PHONE_WIDTH,
    QUIET_COLOR,
    RIGHT_MARGIN,
    Plot,
    Point,
    axis_ticks,
    axis_title,
    axis_width,
    choose_ticks,
    draw_curve,
    drop_out_of_range,
    group_tooltips,
    linear_scale,
    svg_element,
    value_with_unit,
    with_unit,
)
from .html import escape_text, format_number

Role = Literal["sft", "ppo"]
Values = Sequence[float | None]
Box = tuple[float, float, float, float]  # left, top, right and bottom

DESKTOP_WIDTH = 760  # of a chart that spans the page on a wide screen
END_MARGIN = RIGHT_MARGIN + 4  # right margin of the axes of steps and of KL
TITLE_HEIGHT = 20  # height of the title line above a panel
MAX_DOTS = 80  # a curve with more points shows no dots
MAX_TOOLTIP_LENGTH = 60
MIN_POSITIONS = 10  # of the x axis of tokens, so that a single bar does not fill the chart
MARK_COLOR = "var(--zoo-mark,currentColor)"
COLORS = {"sft": "var(--zoo-sft,currentColor)", "ppo": "var(--zoo-ppo,currentColor)"}


@dataclass(frozen=True)
class Series:
    """One curve over the steps.

    Attributes:
        name: Its title.
        values: One value per step; None if missing.
        unit: Unit of the values.
        is_nonnegative: Whether the quantity cannot be negative. The axis then starts at 0, and negative estimates are
            drawn at 0.
        intervals: One interval per step, drawn as a vertical bar; None if missing. () if the curve has none.
    """

    name: str
    values: Values
    unit: str = ""
    is_nonnegative: bool = False
    intervals: Sequence[tuple[float, float] | None] = ()


@dataclass(frozen=True)
class KLCurve:
    """A run's values of a quantity against its KL to the policy that PPO started from.

    Attributes:
        label: The run's name.
        points: (step, KL, value) of each checkpoint; None if missing. A negative KL, an estimate, counts as 0.
        marked_step: The step to mark.
        mark: What the marked step is, such as "recommended".
    """

    label: str
    points: Sequence[tuple[int, float | None, float | None]]
    marked_step: int
    mark: str

    @cached_property
    def drawn_points(self) -> list[tuple[int, float, float]]:
        """(step, KL, value) of each checkpoint that has both."""
        points = [(step, drop_out_of_range([kl, value])) for step, kl, value in self.points]
        return [(step, max(kl, 0.0), value) for step, (kl, value) in points if kl is not None and value is not None]

    @property
    def is_marked(self) -> bool:
        """Whether the marked step has a point."""
        return any(step == self.marked_step for step, _, _ in self.drawn_points)


def draw_token_bars(
    values: Values, *, labels: Sequence[str], role: Role, unit: str, title: str, y_max: float = 0.0, x_max: int = 0
) -> str:
    """Draws one bar per token position. Values below 0, from rounding, count as 0.

    Args:
        values: One value per token.
        labels: The tokens, for tooltips.
        role: The policy that wrote the completion, which sets the color.
        unit: Unit of the values.
        title: Title of the chart.
        y_max: A value that the y axis must include, so that two charts can share a scale.
        x_max: A token position that the x axis must include, so that two charts can share a scale.

    Raises:
        ValueError: Values and labels differ in number.
    """
    numbers = [None if value is None else max(value, 0.0) for value in drop_out_of_range(values)]
    plot = _token_plot(axis_ticks([0.0, *drop_out_of_range([y_max]), *numbers]), max(len(numbers), x_max))
    slot_width = plot.x(2) - plot.x(1)
    path = "".join(
        f"M{plot.x(index):.1f} {plot.bottom}v-{max(plot.bottom - plot.y(value), 1.0):.1f}"
        for index, value in enumerate(numbers, 1)
        if value is not None
    )
    bars = (
        f'<path class="zoo-bars" fill="none" stroke="{COLORS[role]}" pointer-events="none" '
        f'stroke-width="{min(slot_width * 0.8 if slot_width > 2 else slot_width, 16.0):.2f}" d="{path}"/>'
    )
    return _token_chart(plot, numbers, labels, f"zoo-bars-chart zoo-{role}", title, unit, above=bars)


def draw_token_line(
    values: Values,
    *,
    labels: Sequence[str],
    role: Role,
    unit: str,
    title: str,
    span: tuple[float, float] | None = None,
    x_max: int = 0,
) -> str:
    """Draws a line over token positions, and a line at 0.

    Args:
        values: One value per token.
        labels: The tokens, for tooltips.
        role: The policy that wrote the completion, which sets the color.
        unit: Unit of the values.
        title: Title of the chart.
        span: The lowest and the highest value that the y axis must include, so that two charts can share a scale.
        x_max: A token position that the x axis must include, so that two charts can share a scale.

    Raises:
        ValueError: Values and labels differ in number.
    """
    numbers = drop_out_of_range(values)
    plot = _token_plot(axis_ticks([0.0, *numbers, *drop_out_of_range(span or ())]), max(len(numbers), x_max))
    points = [
        None if value is None else (f"{plot.x(position):.1f}", f"{plot.y(value):.1f}")
        for position, value in enumerate(numbers, 1)
    ]
    zero_path = f"M{plot.left:.1f} {plot.y(0.0):.1f}H{PHONE_WIDTH - RIGHT_MARGIN}"
    zero_line = f'<path class="zoo-zero" d="{zero_path}" stroke="{QUIET_COLOR}"/>'
    curve = draw_curve(points, COLORS[role])
    return _token_chart(plot, numbers, labels, f"zoo-line-chart zoo-{role}", title, unit, below=zero_line, above=curve)


def draw_step_curves(
    steps: Sequence[int],
    series: Sequence[Series],
    *,
    selected: int,
    labels: Mapping[int, str] | None = None,
    width: int = PHONE_WIDTH,
) -> str:
    """Draws curves over the training steps, in stacked panels that share the axis of steps.

    The axis begins at the first step and ends at the last, so that the slider below can have the same ends. The chart
    sets the axis's margins, as shares of the chart's width, in --zoo-left and --zoo-right (a wide chart in
    --zoo-wide-left and --zoo-wide-right). The style sheet places the slider by them.

    Args:
        steps: Ascending training steps.
        series: The curves.
        selected: The step to mark with a vertical line.
        labels: Step -> label above the panels. The points of these steps are outlined.
        width: The chart's width, PHONE_WIDTH or DESKTOP_WIDTH.

    Raises:
        ValueError: A series does not have one value per step.
    """
    labels = labels or {}
    low, high = step_range([*steps, selected])
    x_ticks = [step for step in choose_ticks(low, high, integers_only=True) if low <= step <= high] or [low, high]
    all_values = [drop_out_of_range(curve.values) for curve in series]
    all_intervals = [
        [drop_out_of_range(interval or (None, None)) for interval in curve.intervals or [None] * len(steps)]
        for curve in series
    ]
    all_y_ticks = []
    for curve, values, intervals in zip(series, all_values, all_intervals, strict=True):
        numbers = [value for value in [*values, *chain.from_iterable(intervals)] if value is not None]
        numbers = [0.0, *(max(number, 0.0) for number in numbers)] if curve.is_nonnegative else numbers
        all_y_ticks.append(axis_ticks(numbers))
    left = max(map(axis_width, all_y_ticks))
    x = linear_scale(low, high, left, width - END_MARGIN)
    step_labels = [(x(step), label, "currentColor") for step, label in labels.items()]
    step_labels.append((x(selected), f"step {selected}", MARK_COLOR))
    label_markup, bottom = _place_step_labels(step_labels, left, width)
    body, descriptions = [label_markup], []
    for curve, values, intervals, y_ticks in zip(series, all_values, all_intervals, all_y_ticks, strict=True):
        plot = Plot(y_ticks, x_ticks, x, top=bottom + TITLE_HEIGHT, height=96, left=left, width=width)
        markup, selected_value = _draw_panel(
            plot, curve, steps, values, intervals, selected=selected, ringed_steps=labels
        )
        body += [plot.axes(with_unit(curve.name, curve.unit), with_x_labels=curve is series[-1]), markup]
        bottom = plot.bottom + 8
        at_selected = "" if selected_value is None else f", at step {selected}: {selected_value}"
        descriptions.append(f"{curve.name} over training{at_selected}")
    body.append(axis_title("training step", bottom + 24, width))
    descriptions += [f"{label}: step {step}" for step, label in labels.items()]
    # The slider, another component, cannot know where the axis begins: that depends on the widths of the tick labels.
    prefix = "--zoo" if width == PHONE_WIDTH else "--zoo-wide"
    margins = f"{prefix}-left: {left / width:.4f}; {prefix}-right: {END_MARGIN / width:.4f}"
    body.append(f"<style>#step {{ {margins} }}</style>")
    return svg_element(bottom + 30, "zoo-steps-chart", "; ".join(descriptions), "".join(body), width)


def _draw_panel(
    plot: Plot,
    curve: Series,
    steps: Sequence[int],
    values: Values,
    intervals: Sequence[Values],
    *,
    selected: int,
    ringed_steps: Container[int],
) -> tuple[str, str | None]:
    """Draws a curve over the steps without its axes. Returns the markup, and the value at the selected step as text."""
    low = plot.y_ticks[0]
    points: list[Point] = []
    tooltip_columns, rings, interval_bars, selected_value = [], "", "", None
    for step, value, (lower, upper) in zip(steps, values, intervals, strict=True):
        if value is None:
            points.append(None)
            continue
        point = (f"{plot.x(step):.1f}", f"{plot.y(max(value, low)):.1f}")
        points.append(point)
        tooltip = f"step {step}: {escape_text(curve.name)} {value_with_unit(value, escape_text(curve.unit))}"
        if lower is not None and upper is not None:
            y_lower, y_upper = (plot.y(max(end, low)) for end in (lower, upper))
            interval_bars += f"M{point[0]} {y_lower:.1f}V{y_upper:.1f}"
            tooltip += f" ({format_number(lower, 3)} to {format_number(upper, 3)})"
        tooltip_columns.append(plot.tooltip_column(step, tooltip))
        if step in ringed_steps:
            rings += f'<circle class="zoo-labeled" cx="{point[0]}" cy="{point[1]}" r="5.5"/>'
        if step == selected:
            selected_value = value_with_unit(value, curve.unit)
    gaps = [plot.x(after) - plot.x(before) for before, after in pairwise(steps)]
    markup = (
        f'<path class="zoo-selected" d="M{plot.x(selected):.1f} {plot.top}v{plot.height}" stroke="{MARK_COLOR}" '
        'stroke-width="1.5"/>'
        f'<path class="zoo-interval" d="{interval_bars}" stroke="{COLORS["ppo"]}" stroke-width="2" opacity=".55"/>'
        f"{draw_curve(points, COLORS['ppo'], dots=len(values) <= MAX_DOTS)}"
        f'<g fill="none" stroke="currentColor" stroke-width="1.5">{rings}</g>'
        f"{group_tooltips(tooltip_columns, min([24.0, *gaps]))}"
    )
    return markup, selected_value


def step_range(steps: Iterable[int]) -> tuple[int, int]:
    """Returns the first and the last step, which are the ends of the axis of steps and of the slider below it.

    Args:
        steps: Training steps. If they are equal, the range ends one step later.
    """
    sorted_steps = sorted(steps)
    return sorted_steps[0], max(sorted_steps[-1], sorted_steps[0] + 1)


def draw_frontier(
    curves: Sequence[KLCurve],
    *,
    name: str,
    source: str,
    selected: int,
    initial_policy: str = "SFT",
    width: int = PHONE_WIDTH,
) -> str:
    """Draws a quantity against KL: one line per run, with its marked checkpoint labeled by the run's name.

    Args:
        curves: The runs.
        name: Name of the quantity.
        source: The prompts or rollouts of its values.
        selected: Index of the run to emphasize. Its marked checkpoint gets a second outline.
        initial_policy: The policy that KL is measured to, "SFT" or "the base".
        width: The chart's width, PHONE_WIDTH or DESKTOP_WIDTH.
    """
    title = f"{name} against KL: {source}"
    x_ticks = axis_ticks([0.0, *(kl for curve in curves for _, kl, _ in curve.drawn_points)])
    y_ticks = axis_ticks([value for curve in curves for _, _, value in curve.drawn_points])
    x = linear_scale(x_ticks[0], x_ticks[-1], axis_width(y_ticks), width - END_MARGIN)
    plot = Plot(y_ticks, x_ticks, x, top=TITLE_HEIGHT, height=180, left=axis_width(y_ticks), width=width)
    lines, marked_points, descriptions = [], [], []
    centers: list[tuple[float, float]] = []
    for index in sorted(range(len(curves)), key=lambda index: index == selected):  # the emphasized run last, on top
        curve, is_emphasized = curves[index], index == selected
        color = COLORS["ppo"] if is_emphasized else QUIET_COLOR
        curve_points: list[Point] = []
        dots, second_outline = "", ""
        for step, kl, value in curve.drawn_points:
            cx, cy = x(kl), plot.y(value)
            centers.append((cx, cy))
            curve_points.append((f"{cx:.1f}", f"{cy:.1f}"))
            dots += (
                f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{2.5 if is_emphasized else 1.8}"><title>{curve.label}, '
                f"step {step}: {name.lower()} {format_number(value, 3)}, KL {format_number(kl, 3)} nats"
                "</title></circle>"
            )
            if step == curve.marked_step:
                marked_points.append((cx, cy, curve.label, is_emphasized))
                descriptions.append(
                    f"{curve.label}: {curve.mark} step {step}, {name.lower()} {format_number(value)} at "
                    f"KL {format_number(kl)}"
                )
                if is_emphasized:
                    second_outline = (
                        f'<circle class="zoo-selected" cx="{cx:.1f}" cy="{cy:.1f}" r="8.5" fill="none" '
                        f'stroke="{MARK_COLOR}" stroke-width="1.5"/>'
                    )
        lines.append(
            f'<g class="{"zoo-run zoo-emphasized" if is_emphasized else "zoo-run"}">'
            f"{draw_curve(curve_points, color, width=2.0 if is_emphasized else 1.0)}"
            f'<g fill="{color}" stroke="{color}" stroke-opacity="0" stroke-width="10">{dots}</g></g>{second_outline}'
        )
    body = plot.axes(title) + "".join(lines) + _label_marked_points(marked_points, centers, plot)
    body += axis_title(f"KL to {initial_policy}, nats per completion", plot.bottom + 32, width)
    return svg_element(plot.bottom + 38, "zoo-frontier-chart", "; ".join([title, *descriptions]), body, width)


def _token_plot(y_ticks: Sequence[float], position_count: int) -> Plot:
    """Returns a plot whose x axis is the token position, starting at 1."""
    position_count = max(position_count, MIN_POSITIONS)
    left = axis_width(y_ticks)
    x_ticks = [tick for tick in choose_ticks(0, position_count, integers_only=True) if 1 <= tick <= position_count]
    x = linear_scale(0.5, position_count + 0.5, left, PHONE_WIDTH - RIGHT_MARGIN)
    return Plot(y_ticks, x_ticks, x, top=TITLE_HEIGHT, height=84, left=left)


def _token_chart(
    plot: Plot,
    values: Values,
    labels: Sequence[str],
    css_class: str,
    title: str,
    unit: str,
    *,
    below: str = "",
    above: str,
) -> str:
    """Composes a chart over tokens. `below` is drawn before the tooltip columns, and `above` after them."""
    escaped_unit = escape_text(unit)
    tooltip_columns = [
        plot.tooltip_column(position, f"“{_tooltip_text(label)}” {value_with_unit(value, escaped_unit)}")
        for position, (label, value) in enumerate(zip(labels, values, strict=True), 1)
        if value is not None
    ]
    numbers = [value for value in values if value is not None]
    description = f"{title}: no values"
    if numbers:
        low, high = format_number(min(numbers), 3), value_with_unit(max(numbers), unit)
        description = f"{title}: {len(values)} token{'s' * (len(values) != 1)}, from {low} to {high}"
    columns = group_tooltips(tooltip_columns, plot.x(2) - plot.x(1))
    body = plot.axes(with_unit(title, unit)) + below + columns + above
    return svg_element(plot.bottom + 18, css_class, description, body)


def _place_step_labels(labels: Sequence[tuple[float, str, str]], left: float, width: int) -> tuple[str, float]:
    """Places labels (x, label, color) above the panels, in as many lines as needed. Returns their markup and height."""
    lines: list[list[tuple[float, float]]] = []
    markup = []
    for x, label, color in sorted(labels):
        half_width = len(label) * GLYPH_WIDTH / 2
        middle = max(min(x, width - 2 - half_width), left + half_width)
        free_lines = (
            index
            for index, line in enumerate(lines)
            if all(abs(middle - center) > half_width + other_half + 6 for center, other_half in line)
        )
        line_index = next(free_lines, len(lines))
        if line_index == len(lines):
            lines.append([])
        lines[line_index].append((middle, half_width))
        attributes = f'x="{middle:.1f}" y="{line_index * 14 + 11}" text-anchor="middle" fill="{color}"'
        markup.append(f'<text class="zoo-flag" {attributes}>{escape_text(label)}</text>')
    return "".join(markup), len(lines) * 14.0


def _label_marked_points(
    marked_points: Sequence[tuple[float, float, str, bool]], centers: Sequence[tuple[float, float]], plot: Plot
) -> str:
    """Outlines the marked points (x, y, label, is_emphasized), and places their labels without overlap if possible.

    `centers` has the positions of all points, which the labels avoid too.
    """
    occupied_boxes = [(x - 6, y - 6, x + 6, y + 6) for x, y, _, _ in marked_points]
    occupied_boxes += [(x - 2, y - 2, x + 2, y + 2) for x, y in centers]
    markup = []
    for x, y, label, is_emphasized in reversed(marked_points):  # the emphasized label is placed first
        label_width = len(label) * GLYPH_WIDTH
        positions = [(x + 9, y), (x - 9 - label_width, y), (x - label_width / 2, y - 15), (x - label_width / 2, y + 15)]
        positions += [(x + dx, y + dy) for dy in (15, -15, 28, -28, 41, -41) for dx in (5, -5 - label_width)]
        boxes = [(left, middle - 6, left + label_width, middle + 6) for left, middle in positions]
        free_boxes = (
            box
            for box in boxes
            if box[0] > plot.left and box[2] < plot.width and plot.top < box[1] and box[3] < plot.bottom
            if not any(_boxes_overlap(box, other) for other in occupied_boxes)
        )
        box = next(free_boxes, boxes[0])  # if no box is free, right of the point
        occupied_boxes.append(box)
        color = COLORS["ppo"] if is_emphasized else "currentColor"
        weight = ' font-weight="600"' if is_emphasized else ""
        markup.append(
            f'<circle class="zoo-labeled" cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="{color}" '
            f'stroke-width="1.5"/><text class="zoo-flag" x="{box[0]:.1f}" y="{box[1] + 10:.1f}" '
            f'fill="{color}"{weight}>{escape_text(label)}</text>'
        )
    return f'<g pointer-events="none">{"".join(markup)}</g>'


def _boxes_overlap(box: Box, other: Box) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


@lru_cache(maxsize=4096)
def _tooltip_text(label: str) -> str:
    """Returns a token as escaped text for a tooltip. Cached, because each new token redraws the entire completion."""
    text = label if len(label) <= MAX_TOOLTIP_LENGTH else label[: MAX_TOOLTIP_LENGTH - 1] + "…"
    return escape_text(text).replace("\n", "↵")
