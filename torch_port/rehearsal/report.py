"""A rehearsal's report: everything that the table, the page and `--json` say, as one plain dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch_port.compute import ComputeConfig
from torch_port.rehearsal.collectives import Collectives, rows
from torch_port.rehearsal.flops import Flops
from torch_port.rehearsal.operators import Operators
from torch_port.rehearsal.placement import Placement
from torch_port.rehearsal.rehearse import MARGIN, Rehearsal, rehearse
from torch_port.rehearsal.trace import Finding, Observer
from torch_port.run import RunConfig

FORMAT = 1
"""The format of what `report_of` returns."""

KINDS = {
    "placement": ("host tensor", "upload", "sync", "host scalar"),
    "operators": ("CPU fallback", "float64", "int64 scatter", "data-dependent shape"),
    "collectives": ("extra collective", "collective dtype"),
}
"""The kinds of findings, by the section that shows them."""


@dataclass(frozen=True)
class Looks:
    """The observers of one rehearsal, besides memory."""

    operators: Operators
    placement: Placement
    collectives: Collectives
    flops: Flops

    @classmethod
    def at(cls, device: str) -> Looks:
        """Make observers of a rehearsal on "npu" or "cpu"."""
        return cls(Operators(device), Placement(device), Collectives(), Flops())

    def observers(self) -> list[Observer]:
        """Return them for `rehearse`."""
        return [self.operators, self.placement, self.collectives, self.flops]


def naive_operations(run: RunConfig, config: Any = None, device: str = "npu") -> int:
    """Rehearse the field's form of a run; return the products of its step, in operations.

    A dense mask, every layer computed again, and the objective in checkpointed chunks.
    """
    compute = ComputeConfig(objective="plain", attention="dense", recompute="layer")
    flops = Flops()
    # One process: how a run is sharded changes no product.
    rehearse(
        run.model_copy(update={"compute": compute}),
        config=config,
        device=device,
        observers=[flops],
    )
    return flops.total()


def report_of(
    rehearsal: Rehearsal, looks: Looks, run: Mapping[str, Any], naive: int | None = None
) -> dict[str, Any]:
    """Put a rehearsal together.

    Arguments: the rehearsal, its observers, what the run is (shown as it is: names and values), and
    the products of the field's form (`naive_operations`) where they were counted.
    """
    wrong = [finding for finding in rehearsal.findings if finding.wrong]
    noted = [finding for finding in rehearsal.findings if not finding.wrong]
    return {
        "format": FORMAT,
        "run": dict(run),
        "device": rehearsal.device,
        "world_size": rehearsal.world_size,
        "seconds": rehearsal.seconds,
        "verdict": {
            "fits": rehearsal.fits,
            "free_bytes": rehearsal.usable - rehearsal.memory.peak,
            "hbm_bytes": rehearsal.hbm_bytes,
            "margin": MARGIN,
            "usable_bytes": rehearsal.usable,
            "wrong": len(wrong),
        },
        "memory": asdict(rehearsal.memory),
        "findings": [asdict(finding) for finding in wrong],
        "noted": [asdict(finding) for finding in together(noted)],
        "operators": _operators(looks.operators, rehearsal.operators),
        "collectives": [asdict(row) for row in rows(looks.collectives.of_last_step())],
        "operations": _operations(looks.flops, naive),
    }


def passes(report: Mapping[str, Any]) -> bool:
    """Return whether the run fits and nothing in it is wrong."""
    return bool(report["verdict"]["fits"]) and not report["findings"]


def together(findings: Iterable[Finding]) -> list[Finding]:
    """Put findings of one kind and one file together under their first line, adding up counts."""
    first: dict[tuple[str, str], Finding] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for finding in findings:
        key = finding.kind, finding.where.split(":")[0]
        first.setdefault(key, finding)
        counts[key] += finding.count
    return [
        Finding(f.kind, f.name, f.where, f.text, counts[key], f.wrong) for key, f in first.items()
    ]


def _operators(operators: Operators, dispatched: int) -> dict[str, Any]:
    counted = operators.of_last_step()
    kinds: Counter[str] = Counter()
    distinct: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for operator in counted:
        kinds[operator.kind] += operator.count
        distinct[operator.kind] += 1
        for dtype in operator.dtypes:
            dtypes[dtype] += operator.count
    return {
        "dispatched": dispatched,
        "calls": dict(kinds),
        "distinct": dict(distinct),
        "dtypes": dict(dtypes),
        "all": [
            {
                "name": operator.name,
                "kind": operator.kind,
                "count": operator.count,
                "dtypes": sorted(operator.dtypes),
                "where": operator.where,
            }
            for operator in counted
        ],
    }


def _operations(flops: Flops, naive: int | None) -> dict[str, Any]:
    parts = {part: asdict(operations) for part, operations in flops.by_part().items()}
    return {"parts": parts, "products": flops.total(), "naive_products": naive}
