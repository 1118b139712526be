"""The parts of the page's charts: plot areas with axes, curves and tooltips as inline SVG."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from .html import escape_text, format_number

Scale = Callable[[float], float]
Point = tuple[str, str] | None  # x and y, formatted; None for a gap

PHONE_WIDTH = 330  # of a chart, in SVG units: the page's width in CSS pixels on a phone
RIGHT_MARGIN = 12
FONT_SIZE = 11  # in SVG units
GLYPH_WIDTH = 6.2  # average width of a character at FONT_SIZE, to place labels without overlap
MAX_ABSOLUTE = 1e12
MIN_DIFFERENCE = 1e-6  # smaller values and differences count as zero
QUIET_COLOR = "var(--zoo-quiet,currentColor)"


def choose_ticks(low: float, high: float, *, integers_only: bool = False) -> tuple[float, ...]:
    """Chooses three to five evenly spaced round numbers that enclose low and high.

    Args:
        low: The lowest value.
        high: The highest value.
        integers_only: Whether the numbers must be integers.
    """
    magnitude = max(abs(low), abs(high))
    if magnitude < MIN_DIFFERENCE:  # all values are 0
        low, high = 0.0, 1.0
    elif high - low < max(1e-3 * magnitude, MIN_DIFFERENCE):  # all values are equal
        low, high = low - magnitude / 10, high + magnitude / 10
    power = math.floor(math.log10((high - low) / 5))
    for step in (factor * 10.0**exponent for exponent in range(power, power + 20) for factor in (1, 2, 2.5, 5)):
        if integers_only and step % 1:
            continue
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)  # multiples of `step`
        if last - first <= 4:
            return tuple(float(f"{multiple * step:.12g}") for multiple in range(first, max(last, first + 2) + 1))
    raise AssertionError("one of the steps is wider than the range")


class Plot:
    """A plot area with the ticks of both axes. `x` and `y` map values to positions."""

    def __init__(
        self,
        y_ticks: Sequence[float],
        x_ticks: Sequence[float],
        x: Scale,
        *,
        top: float,
        height: float,
        left: float,
        width: int = PHONE_WIDTH,
    ) -> None:
        self.y_ticks, self.x_ticks, self.x, self.width = y_ticks, x_ticks, x, width
        self.top, self.height, self.bottom, self.left = top, height, top + height, left
        self.y = linear_scale(y_ticks[0], y_ticks[-1], self.bottom, top)

    def axes(self, title: str, *, with_x_labels: bool = True) -> str:
        """Draws the title, the grid and the tick labels.

        Args:
            title: Title of the plot.
            with_x_labels: Whether the x axis has labels.
        """
        grid = "".join(f"M{self.left:.1f} {self.y(value):.1f}H{self.width - RIGHT_MARGIN}" for value in self.y_ticks)
        labels = [
            f'<text x="{self.left - 5:.1f}" y="{self.y(value) + 3.8:.1f}" text-anchor="end">{tick_label(value)}</text>'
            for value in self.y_ticks
        ]
        for value in self.x_ticks:
            grid += f"M{self.x(value):.1f} {self.bottom}v3"
            if with_x_labels:
                attributes = f'x="{self.x(value):.1f}" y="{self.bottom + 14}"'
                labels.append(f'<text class="zoo-along" {attributes} text-anchor="middle">{tick_label(value)}</text>')
        return (
            f'<text class="zoo-title" x="2" y="{self.top - 9}" fill="currentColor">{escape_text(title)}</text>'
            f'<path class="zoo-grid" d="{grid}" stroke="{QUIET_COLOR}" stroke-opacity=".35"/>'
            f'<g class="zoo-ticks" fill="{QUIET_COLOR}">{"".join(labels)}</g>'
        )

    def tooltip_column(self, x_value: float, tooltip: str) -> str:
        """Draws an invisible column with a tooltip, as high as the plot.

        Args:
            x_value: Where the column stands.
            tooltip: The escaped text.
        """
        return f'<path d="M{self.x(x_value):.1f} {self.top}v{self.height}"><title>{tooltip}</title></path>'


def axis_title(title: str, y: float, width: int) -> str:
    """Draws the title of the x axis.

    Args:
        title: The title.
        y: Its baseline.
        width: The chart's width.
    """
    return f'<text x="{width - RIGHT_MARGIN}" y="{y}" text-anchor="end" fill="{QUIET_COLOR}">{title}</text>'


def svg_element(height: float, css_class: str, description: str, body: str, width: int = PHONE_WIDTH) -> str:
    """Wraps a chart in an SVG element.

    Args:
        height: The chart's height.
        css_class: A class of the chart.
        description: The text for screen readers.
        body: The chart's markup.
        width: The chart's width.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="zoo-chart {css_class}" viewBox="0 0 {width} {height:g}" '
        f'role="img" aria-label="{escape_text(description)}" font-size="{FONT_SIZE}" '
        f'style="display:block;width:100%;max-width:var(--zoo-chart-width,520px);height:auto">{body}</svg>'
    )


def group_tooltips(columns: Iterable[str], width: float) -> str:
    """Groups the tooltip columns. They are invisible and as high as the plot, because a bar of height 0 has no area.

    Args:
        columns: The columns, from `Plot.tooltip_column`.
        width: The width of a column.
    """
    style = f'stroke="currentColor" stroke-opacity="0" stroke-width="{width:.2f}" pointer-events="stroke"'
    return f'<g class="zoo-tooltips" {style}>{"".join(columns)}</g>'


def draw_curve(points: Sequence[Point], color: str, *, dots: bool = False, width: float = 1.6) -> str:
    """Draws a line through the points, broken at None. A point between two gaps becomes a dot.

    Args:
        points: The points, from left to right.
        color: Color of the line.
        dots: Whether each point gets a dot.
        width: Width of the line.
    """
    path, circles = [], []
    previous_point: Point = None
    for point, next_point in zip_longest(points, points[1:]):
        if point is not None:
            path.append(f"{'L' if previous_point else 'M'}{point[0]} {point[1]}")
            if dots or (previous_point is None and next_point is None):
                circles.append(f'<circle cx="{point[0]}" cy="{point[1]}" r="2.2"/>')
        previous_point = point
    style = f'fill="none" stroke="{color}" stroke-width="{width:g}" stroke-linejoin="round"'
    return (
        f'<g class="zoo-curve" pointer-events="none"><path {style} d="{"".join(path)}"/>'
        f'<g fill="{color}">{"".join(circles)}</g></g>'
    )


def drop_out_of_range(values: Iterable[float | None]) -> list[float | None]:
    """Replaces values that are not finite or beyond ±1e12 by None.

    Args:
        values: The values.
    """
    return [value if value is not None and -MAX_ABSOLUTE < value < MAX_ABSOLUTE else None for value in values]


def axis_ticks(values: Iterable[float | None]) -> tuple[float, ...]:
    """Chooses the ticks of an axis that shows all values.

    Args:
        values: The values; None if missing.
    """
    numbers = [value for value in values if value is not None]
    return choose_ticks(min(numbers, default=0.0), max(numbers, default=0.0))


def linear_scale(low: float, high: float, start: float, end: float) -> Scale:
    """Returns the function that maps values to positions.

    Args:
        low: A value.
        high: A larger value.
        start: The position of `low`.
        end: The position of `high`.
    """
    slope = (end - start) / (high - low)
    return lambda value: start + (value - low) * slope


def tick_label(value: float) -> str:
    """Formats a tick.

    Args:
        value: Its value.
    """
    return f"{value:.6g}".replace("e+", "e").replace("-", "\N{MINUS SIGN}")


def axis_width(y_ticks: Sequence[float]) -> float:
    """Returns the width of the y axis labels. It is the same for up to four characters, so that charts align.

    Args:
        y_ticks: The ticks.
    """
    return 8 + GLYPH_WIDTH * max(4, *(len(tick_label(value)) for value in y_ticks))


def with_unit(name: str, unit: str) -> str:
    """Returns a quantity's name and unit.

    Args:
        name: The name.
        unit: The unit; "" if there is none.
    """
    return f"{name}, {unit}" if unit else name


def value_with_unit(value: float, unit: str) -> str:
    """Formats a value with its unit.

    Args:
        value: The value.
        unit: The unit; "" if there is none.
    """
    return f"{format_number(value, 3)} {unit}".rstrip()
