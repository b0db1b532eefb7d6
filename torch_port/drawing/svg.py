"""Line charts as inline SVG: pure functions from points to text, no dependency.

Colours come from the page: an element carries the class of its series (`pruned`, `full`, …), the
page's style sheet gives that class a colour, and every stroke is `currentColor`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_port.drawing.text import escape, finite, tick_text

WIDTH, HEIGHT = 520, 300
"""The view box of every chart, in its own pixels."""
LEFT, RIGHT, TOP, BOTTOM = 56, 104, 32, 48
"""Margins around the plot: tick labels left and below, direct labels right, axis name on top."""

_FEW_POINTS = 12  # up to this many, each point is a visible dot
_HOVER_POINTS = 60  # a longer series carries at most this many tooltips
_LABEL_HEIGHT = 31  # a name and a note, one line each
_LABEL_ABOVE = 3.0  # from the middle of a label up to the base line of its name

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Axis:
    """One axis: its name, its kind, how a tick reads, and values it must reach."""

    name: str
    log: bool = False
    text: Callable[[float], str] = tick_text
    include: tuple[float, ...] = ()
    whole: bool = False  # only whole numbers are ticked (steps, slots)


@dataclass(frozen=True)
class Series:
    """One line: its points in x order (a y of None leaves a gap), its class, its label."""

    name: str
    points: Sequence[Point]
    style: str
    note: str = ""  # the second line of the direct label
    dashed: bool = False
    faint: bool = False  # background (the raw values behind a running mean), without a label


@dataclass(frozen=True)
class Marker:
    """A vertical rule at x with its name, and a dot on each y."""

    x: float
    name: str
    dots: tuple[tuple[float, str], ...] = ()  # (y, class)


@dataclass(frozen=True)
class Scale:
    """A map from [low, high] onto the pixels [start, end], linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value: start + (end − start)·(f(value) − f(low)) / (f(high) − f(low)).

        >>> Scale(1, 100, 0, 200, log=True)(10)
        100.0
        """
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (self.end - self.start) * (at - low) / (high - low)


def nice_step(span: float, intervals: int = 5) -> float:
    """The smallest of 1, 2, 5 × 10ⁿ that cuts `span` into at most `intervals` pieces.

    Args:
        span: a positive length.
        intervals: the largest number of pieces.

    Returns:
        The step.

    >>> nice_step(10), nice_step(0.9)
    (2.0, 0.2)
    """
    power = math.floor(math.log10(span / intervals))
    for step in (1, 2, 5, 10):
        # Through the decimal text, so that 2e-1 is 0.2 and not 2 * 0.1 with its rounding error.
        candidate = float(f"{step}e{power}")
        if span <= candidate * intervals * (1 + 1e-9):
            return candidate
    return float(f"1e{power + 2}")


def linear_ticks(low: float, high: float, step: float) -> list[float]:
    """The multiples of `step` in [low, high], without rounding noise.

    Args:
        low: the lower end.
        high: the upper end, at least `low`.
        step: a nice step, positive.

    Returns:
        The ticks, ascending.

    >>> linear_ticks(0.0, 0.6, 0.2)
    [0.0, 0.2, 0.4, 0.6]
    """
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(k * step, digits) + 0.0 for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2, 5 × 10ⁿ on up to three decades, else powers of ten.

    More than seven powers are thinned to every second, third, … one.

    Args:
        low: the lower end, positive.
        high: the upper end, above `low`.

    Returns:
        The ticks inside [low, high], ascending.

    >>> log_ticks(64, 1000)
    [100.0, 200.0, 500.0, 1000.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    wide = math.log10(high / low) > 3
    steps: tuple[int, ...] = (1,) if wide else (1, 2, 5)
    stride = math.ceil((last - first) / 7) if wide else 1
    ticks = [float(f"{m}e{n}") for n in range(first, last + 1, stride) for m in steps]
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def spread(centres: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves labels apart until neighbours are `gap` away and all are inside [low, high].

    The order is kept. When there is no room for all, the last ones pass `low`.

    Args:
        centres: where each label would like to be, in any order.
        gap: the least distance between two of them.
        low: the least position.
        high: the greatest position.

    Returns:
        The positions, in the order of `centres`.

    >>> spread([50, 52], gap=30, low=0, high=100)
    [50, 80]
    >>> spread([90, 95], gap=30, low=0, high=100)
    [70, 100]
    """
    order = sorted(range(len(centres)), key=lambda i: centres[i])
    placed = list(centres)
    floor = low
    for i in order:
        placed[i] = max(placed[i], floor)
        floor = placed[i] + gap
    ceiling = high
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed


def running_mean(points: Sequence[Point], width: int) -> list[Point]:
    """The mean of each point and its neighbours, over `width` points; shorter at both ends.

    Args:
        points: in x order; a y of None is left out of the means and stays None.
        width: the number of points in a window, odd.

    Returns:
        As many points, with the same x.

    >>> running_mean([(0, 1.0), (1, 2.0), (2, 6.0)], 3)
    [(0, 1.5), (1, 3.0), (2, 4.0)]
    """
    half, means = width // 2, []
    for i, (x, y) in enumerate(points):
        near = [value for _, value in points[max(0, i - half) : i + half + 1] if value is not None]
        means.append((x, None if y is None else sum(near) / len(near)))
    return means


def line_chart(
    name: str, description: str, series: Sequence[Series], x: Axis, y: Axis, marker: Marker | None
) -> str:
    """One line chart as an SVG element, or a paragraph saying that nothing was measured.

    The x domain is that of the points; a linear y domain is widened to whole ticks, a logarithmic
    one to whole decades. A point that is not finite (or not positive, on a logarithmic axis) leaves
    a gap in its line.

    Args:
        name: the accessible title.
        description: the accessible description.
        series: the lines, drawn in this order.
        x: the horizontal axis.
        y: the vertical axis.
        marker: a vertical rule, or None. It is left out when its x is outside the x domain.

    Returns:
        A `<svg role="img">` element, or `<p class="empty">`.
    """
    lines = [(line, _drawable(line.points, x, y)) for line in series]
    seen = [(a, b) for _, points in lines for a, b in points if b is not None]
    if not seen:
        return '<p class="empty">No data: nothing was measured for this chart.</p>'
    across = _scale([a for a, _ in seen], x, LEFT, WIDTH - RIGHT, exact=True)
    up = _scale([b for _, b in seen], y, HEIGHT - BOTTOM, TOP, exact=False)
    parts = [_frame(x, y, across, up)]
    if marker is not None and across.low <= marker.x <= across.high:
        parts.append(_rule(marker, across, up))
    parts += [_line(line, points, x, y, across, up) for line, points in lines]
    parts.append(_labels(lines, across, up))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f"<title>{escape(name)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def _drawable(points: Sequence[Point], x: Axis, y: Axis) -> list[Point]:
    """The points whose x can be drawn; a y that cannot becomes None."""

    def usable(value: object, axis: Axis) -> float | None:
        number = finite(value)
        return None if number is None or (axis.log and number <= 0) else number

    pairs = [(usable(a, x), usable(b, y)) for a, b in points]
    return [(a, b) for a, b in pairs if a is not None]


def _scale(values: Sequence[float], axis: Axis, start: float, end: float, exact: bool) -> Scale:
    low, high = min([*values, *axis.include]), max([*values, *axis.include])
    if axis.log:
        if not exact:
            low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        return Scale(low, high if high > low else 10 * low, start, end, log=True)
    # A flat line gets room above and below it, more than the rounding of its value.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(low) / 10 or 1.0
        low, high = low - room, high + room
    elif not exact:
        step = nice_step(high - low)
        low = step * math.floor(low / step + 1e-9)
        high = step * math.ceil(high / step - 1e-9)
    return Scale(low, high, start, end)


def _ticks(axis: Axis, scale: Scale) -> list[float]:
    if axis.log:
        return log_ticks(scale.low, scale.high)
    step = nice_step(scale.high - scale.low)
    return linear_ticks(scale.low, scale.high, max(1.0, step) if axis.whole else step)


def _frame(x: Axis, y: Axis, across: Scale, up: Scale) -> str:
    """Grid, tick labels and the names of the axes."""
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in _ticks(y, up):
        at = f"{up(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text class="tick" text-anchor="end" x="{LEFT - 8}" y="{up(value) + 4:.1f}">'
            f"{escape(y.text(value))}</text>"
        )
    for value in _ticks(x, across):
        at = f"{across(value):.1f}"
        parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{floor}" y2="{floor + 4}"/>')
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{at}" y="{floor + 18}">'
            f"{escape(x.text(value))}</text>"
        )
    middle = (LEFT + right) / 2
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    parts.append(f'<text class="name" x="{LEFT - 48}" y="14">{escape(y.name)}</text>')
    parts.append(
        f'<text class="name" text-anchor="middle" x="{middle:.0f}" y="{HEIGHT - 8}">'
        f"{escape(x.name)}</text>"
    )
    return "".join(parts)


def _line(line: Series, points: Sequence[Point], x: Axis, y: Axis, across: Scale, up: Scale) -> str:
    """The path of one series, its dots, and tooltips on them."""
    path, pen, dots = [], "M", []
    for a, b in points:
        if b is None:
            pen = "M"
            continue
        path.append(f"{pen}{across(a):.1f},{up(b):.1f}")
        dots.append((a, b))
        pen = "L"
    if not path:
        return ""
    kind = "line" + (" dashed" if line.dashed else "") + (" faint" if line.faint else "")
    parts = [f'<path class="{kind}" d="{"".join(path)}"/>']
    if not line.faint:
        shape, radius = ("dot", 3.2) if len(dots) <= _FEW_POINTS else ("hit", 7)
        for a, b in dots[:: math.ceil(len(dots) / _HOVER_POINTS)]:
            tip = escape(f"{line.name}: {b:.4g} at {x.name} {x.text(a)}")
            parts.append(
                f'<circle class="{shape}" cx="{across(a):.1f}" cy="{up(b):.1f}" r="{radius}">'
                f"<title>{tip}</title></circle>"
            )
    return f'<g class="{escape(line.style)}">{"".join(parts)}</g>'


def _rule(marker: Marker, across: Scale, up: Scale) -> str:
    at = across(marker.x)
    # On the side with more room, so that the name stays inside the plot.
    anchor, shift = ("start", 6) if at < (LEFT + WIDTH - RIGHT) / 2 else ("end", -6)
    parts = [
        f'<line class="rule" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
        f'<text class="note" text-anchor="{anchor}" x="{at + shift:.1f}" '
        f'y="{HEIGHT - BOTTOM - 8}">{escape(marker.name)}</text>',
    ]
    for y, style in marker.dots:
        if up.low <= y <= up.high:
            parts.append(
                f'<circle class="ring {escape(style)}" cx="{at:.1f}" cy="{up(y):.1f}" r="4"/>'
            )
    return "".join(parts)


def _labels(lines: Sequence[tuple[Series, Sequence[Point]]], across: Scale, up: Scale) -> str:
    """Each line's name and note beside its last point, moved apart, with a thin leader."""
    ends = []
    for line, points in lines:
        drawn = [(a, b) for a, b in points if b is not None]
        if drawn and not line.faint:
            ends.append((line, across(drawn[-1][0]), up(drawn[-1][1])))
    places = spread([y for *_, y in ends], _LABEL_HEIGHT, TOP + 6, HEIGHT - BOTTOM - 8)
    right, parts = WIDTH - RIGHT, []
    for (line, x, y), place in zip(ends, places, strict=True):
        parts.append(
            f'<g class="{escape(line.style)}">'
            f'<path class="leader" d="M{x + 4:.1f},{y:.1f}L{right + 12},{place:.1f}"/>'
            f'<text class="label" x="{right + 16}" y="{place + _LABEL_ABOVE:.1f}">'
            f"{escape(line.name)}</text>"
            f'<text class="note" x="{right + 16}" y="{place + _LABEL_ABOVE + 13:.1f}">'
            f"{escape(line.note)}</text></g>"
        )
    return "".join(parts)
