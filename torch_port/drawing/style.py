"""Colours and rules of the charts: one colour per subject, light and dark.

The colours are Okabe and Ito's, darkened or lightened until they read as text on their background;
lines of the same colour differ in their dashes, so that no reader depends on hue alone.
"""

import re

from torch_port.drawing.svg import HEIGHT, WIDTH

COLOURS = """
:root {
  --page: #f6f7f8; --card: #ffffff; --ink: #1b1e23; --soft: #5a626e; --edge: #dfe3e8;
  --pruned: #0067a8; --full: #bf4f00; --untrained: #6f7782; --coverage: #00785a;
  --parity: #9a3d73; --good: #00785a; --bad: #c02f1d; --open: #8a6200;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121418; --card: #1b1e24; --ink: #e9ebee; --soft: #a2a9b5; --edge: #31363f;
    --pruned: #62b8ee; --full: #f29a58; --untrained: #949ca9; --coverage: #45c9a0;
    --parity: #e59cc6; --good: #45c9a0; --bad: #ff8d78; --open: #e8b84a;
  }
}
"""
"""The colours by name, for a page's style sheet."""

CHARTS = """
.pruned { color: var(--pruned); } .full { color: var(--full); }
.untrained { color: var(--untrained); } .coverage { color: var(--coverage); }
.parity { color: var(--parity); }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .label { fill: currentColor; font-size: 13px; font-weight: 600; }
svg .note { font-size: 11.5px; }
svg .grid { stroke: var(--edge); stroke-width: 1; }
svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .line { fill: none; stroke: currentColor; stroke-width: 2.25; }
svg .line { stroke-linejoin: round; stroke-linecap: round; }
svg .dashed { stroke-dasharray: 5 5; }
svg .faint { stroke-width: 1; opacity: 0.28; }
svg .leader { fill: none; stroke: currentColor; stroke-width: 1; opacity: 0.5; }
svg .rule { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 3; }
svg .dot { fill: currentColor; }
svg .ring { fill: var(--card); stroke: currentColor; stroke-width: 2.25; }
svg .hit { fill: transparent; }
svg .hit:hover { fill: currentColor; fill-opacity: 0.35; }
"""
"""The rules of the charts, for a page that has `COLOURS`."""


def standalone(chart: str) -> str:
    """Return a chart of `line_chart` as an SVG document that needs nothing beside it.

    Colours are the light ones, written out: not every viewer knows var().

    Arguments: `chart`, an SVG element without a size.
    """
    colours = dict(re.findall(r"--(\w+): (#\w+);", COLOURS.split("@media")[0]))
    font = 'svg { font-family: system-ui, "Segoe UI", Roboto, Arial, sans-serif; }'
    style = re.sub(r"var\(--(\w+)\)", lambda m: colours[m[1]], font + CHARTS)
    head, rest = chart.split(">", 1)
    size = f'width="{2 * WIDTH}" height="{2 * HEIGHT}"'
    page = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{colours["card"]}"/>'
    return f"{head} {size}><style>{style}</style>{page}{rest}\n"
