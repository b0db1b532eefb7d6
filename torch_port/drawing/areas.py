"""Stacked areas as inline SVG: what a whole consists of, over time.

Like `svg`, pure functions from points to text: an area carries the class of its layer and is filled
with `currentColor`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_port.drawing.svg import Axis, Scale, linear_ticks, nice_step
from torch_port.drawing.text import escape

WIDTH, HEIGHT = 1080, 380
"""The view box of a stacked chart, in its own pixels."""
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 40, 40


@dataclass(frozen=True)
class Layer:
    """One layer: its name, its class, and its thickness at each x."""

    name: str
    style: str
    values: Sequence[float]


@dataclass(frozen=True)
class Limit:
    """A horizontal line that the stack should stay below, with its name."""

    y: float
    name: str


@dataclass(frozen=True)
class Span:
    """A stretch of x with its name, drawn above the plot, and the tooltip of its part."""

    start: float
    stop: float
    name: str
    note: str = ""


def stacked_chart(
    name: str,
    description: str,
    across: Sequence[float],
    layers: Sequence[Layer],
    limits: Sequence[Limit],
    spans: Sequence[Span],
    y: Axis,
) -> str:
    """One chart of stacked layers, the first at the bottom, as an SVG element.

    Args:
        name: the accessible title.
        description: the accessible description.
        across: the x of every point, ascending.
        layers: as many values each as there are points, 0 or more.
        limits: horizontal lines.
        spans: stretches of x, with a thin line where each starts.
        y: the vertical axis, linear.

    Returns:
        A `<svg role="img">` element, or `<p class="empty">` without two points.
    """
    if len(across) < 2:
        return '<p class="empty">No data: nothing was measured for this chart.</p>'
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    top = max([*totals, *(limit.y for limit in limits), 1e-9])
    step = nice_step(top)
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    sideways = Scale(across[0], across[-1], LEFT, right)
    up = Scale(0.0, step * -(-top // step), floor, TOP)
    parts = [_grid(up, step, y)]
    below = [0.0] * len(across)
    for layer in layers:
        above = [low + value for low, value in zip(below, layer.values, strict=True)]
        parts.append(_area(layer, across, below, above, sideways, up))
        below = above
    parts += [_span(span, sideways) for span in spans]
    parts += [_limit(limit, up) for limit in limits]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f"<title>{escape(name)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def _grid(up: Scale, step: float, y: Axis) -> str:
    parts = [f'<text class="name" x="{LEFT - 48}" y="14">{escape(y.name)}</text>']
    for value in linear_ticks(up.low, up.high, step):
        at = f"{up(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text class="tick" text-anchor="end" x="{LEFT - 8}" y="{up(value) + 4:.1f}">'
            f"{escape(y.text(value))}</text>"
        )
    return "".join(parts)


def _area(
    layer: Layer,
    across: Sequence[float],
    below: Sequence[float],
    above: Sequence[float],
    sideways: Scale,
    up: Scale,
) -> str:
    there = [f"{sideways(x):.1f},{up(v):.1f}" for x, v in zip(across, above, strict=True)]
    back = [f"{sideways(x):.1f},{up(v):.1f}" for x, v in zip(across, below, strict=True)]
    path = "M" + "L".join([*there, *reversed(back)]) + "Z"
    most = max(layer.values)
    return (
        f'<g class="{escape(layer.style)}"><path class="area" d="{path}">'
        f"<title>{escape(f'{layer.name}: at most {most:.4g}')}</title></path></g>"
    )


def _span(span: Span, sideways: Scale) -> str:
    start, stop = sideways(span.start), sideways(span.stop)
    tip = escape(f"{span.name} {span.note}".strip())
    floor = HEIGHT - BOTTOM
    parts = [
        f'<line class="rule" x1="{start:.1f}" x2="{start:.1f}" y1="{TOP}" y2="{floor}"/>',
        f'<rect class="hit" x="{start:.1f}" y="{TOP}" width="{stop - start:.1f}" '
        f'height="{floor - TOP}"><title>{tip}</title></rect>',
    ]
    if stop - start > 7 * len(span.name):  # else the name would run into the next one
        parts.append(
            f'<text class="note" text-anchor="middle" x="{(start + stop) / 2:.1f}" '
            f'y="{floor + 18}">{escape(span.name)}</text>'
        )
    return "".join(parts)


def _limit(limit: Limit, up: Scale) -> str:
    at = up(limit.y)
    return (
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="note" text-anchor="end" x="{WIDTH - RIGHT}" y="{at - 5:.1f}">'
        f"{escape(limit.name)}</text>"
    )
