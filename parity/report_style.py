"""The style sheet of the suite's report: the demo's, and what a matrix of errors needs."""

from torch_port.demo.style import STYLE as DEMO

_OWN = """
.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.card small { color: var(--soft); font-weight: 400; }
.card ul { margin: 4px 0 0; padding-left: 18px; font-size: 13px; color: var(--soft); }
td.left { text-align: left; white-space: normal; min-width: 220px; }
code { font-size: 12px; overflow-wrap: anywhere; }
.bad-rows th { color: var(--bad); }
.texts thead th { text-align: left; }
.narrow { max-width: 700px; }
.matrix { font-size: 12px; }
.matrix th, .matrix td { padding: 2px 6px; }
.matrix tbody th { white-space: nowrap; padding-left: 0; }
.matrix td.none { color: var(--edge); text-align: center; }
.matrix thead th { text-align: right; }
.m { border-radius: 3px; }
span.m { padding: 1px 7px; }
.m0 { background: color-mix(in srgb, var(--good) 34%, transparent); }
.m1 { background: color-mix(in srgb, var(--good) 20%, transparent); }
.m2 { background: color-mix(in srgb, var(--open) 22%, transparent); }
.m3 { background: color-mix(in srgb, var(--bad) 22%, transparent); }
.mx { background: var(--bad); color: var(--card); font-weight: 700; }
.legend { margin: 10px 0 0; font-size: 12.5px; color: var(--soft); }
svg .rail { stroke: var(--edge); stroke-width: 1; }
svg .over { stroke: var(--bad); stroke-width: 5; opacity: 0.16; }
svg .limit { stroke: var(--bad); stroke-width: 2; }
svg .call { fill: var(--good); fill-opacity: 0.55; }
svg .miss { fill: var(--bad); }
svg .row { fill: var(--ink); font-size: 13px; }
"""

STYLE = DEMO + _OWN
