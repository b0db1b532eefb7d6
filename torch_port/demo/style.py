"""The style sheet of the demo's report: system fonts, the charts' colours, light and dark."""

from torch_port.drawing.style import CHARTS, COLOURS

_PAGE = """
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1160px; margin: 0 auto; padding: 36px 20px 48px; }
header p { margin: 4px 0 0; color: var(--soft); }
h1 { margin: 0; font-size: 28px; line-height: 1.2; letter-spacing: -0.015em; }
h2 { margin: 40px 0 14px; font-size: 19px; letter-spacing: -0.01em; }
h3 { margin: 0; font-size: 14px; font-weight: 600; }
.badge {
  margin-left: 10px; padding: 1px 9px; border: 1px solid currentColor; border-radius: 99px;
  font-size: 12px; color: var(--open);
}
.cards, .pair { display: grid; gap: 16px; }
.cards { margin-top: 24px; }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(100%, 245px), 1fr)); }
.pair { grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
@media (min-width: 960px) { .uneven { grid-template-columns: 9fr 11fr; align-items: start; } }
.card, figure, .table {
  margin: 0; padding: 16px 18px; background: var(--card); border: 1px solid var(--edge);
  border-radius: 10px;
}
.card h3 { color: var(--soft); }
.card p { margin: 10px 0 0; font-size: 13.5px; color: var(--soft); overflow-wrap: anywhere; }
.card p.figure { margin: 4px 0 10px; font-size: 30px; font-weight: 650; line-height: 1.2; }
.card p.figure { letter-spacing: -0.02em; font-variant-numeric: tabular-nums; }
.bar { display: grid; grid-template-columns: 66px 1fr 62px; gap: 8px; align-items: center; }
.bar { font-size: 12px; line-height: 1.7; }
.bar span:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.bar span { color: var(--ink); white-space: nowrap; }
.bar i { height: 8px; border-radius: 4px; background: var(--edge); overflow: hidden; }
.bar b { display: block; height: 100%; background: currentColor; border-radius: 4px; }
figure svg { display: block; width: 100%; height: auto; margin-top: 8px; }
figcaption { margin-top: 8px; font-size: 13px; color: var(--soft); }
.empty { margin: 28px 0; text-align: center; color: var(--soft); }
.card p.pruned { color: var(--pruned); } .card p.coverage { color: var(--coverage); }
.card p.good { color: var(--good); } .card p.bad { color: var(--bad); }
.card p.open { color: var(--open); }
.table { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; }
th, td { padding: 5px 0 5px 18px; text-align: right; font-variant-numeric: tabular-nums; }
td { white-space: nowrap; }
.uneven th, .uneven td { padding-left: 14px; font-size: 13px; }
tr th:first-child { padding-left: 0; text-align: left; font-weight: 400; }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
tbody tr { border-top: 1px solid var(--edge); }
tr.brief th, tr.brief td { font-weight: 600; }
tr.good td:last-child { color: var(--good); }
tr.bad td, tr.bad th { color: var(--bad); font-weight: 600; }
dl { display: grid; grid-template-columns: auto 1fr; gap: 2px 12px; margin: 10px 0 0; }
dl { font-size: 13px; }
dt { color: var(--soft); }
dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
"""

STYLE = COLOURS + _PAGE + CHARTS
"""The whole sheet."""
