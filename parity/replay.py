"""`parity replay`: a failing case on disk, and running what was compared of it again.

A case directory as `parity.cases` has it; `compared` in case.json says which check found it, in
which dtype, in which form of the port, and what was measured then.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity.cases import Case, CaseError, read_case, write_case
from parity.checks.base import CHECKS, Finding, Measured

COMPARED = "compared"


def save_finding(directory: Path, finding: Finding) -> Path | None:
    """Write a finding's case below `directory`; return its path, None where it has no case."""
    if finding.case is None:
        return None
    name = re.sub(r"[^a-z0-9]+", "-", f"{finding.check} {finding.case.name}".lower()).strip("-")
    compared = {
        "check": finding.check,
        "stage": finding.stage,
        "error": finding.error if math.isfinite(finding.error) else None,
        "tolerance": finding.tolerance,
        "dtype": finding.dtype,
        "compute": dict(finding.case.compute),
    }
    extra = finding.case.extra | {COMPARED: compared}
    write_case(directory / name, replace(finding.case, extra=extra))
    return directory / name


def replay(path: Path) -> tuple[Case, dict[str, Any], list[Measured]]:
    """Run a saved case again; return it, what was compared, and all comparisons in their order.

    Arguments: the case directory, or its case.json.
    Raises CaseError for a directory that holds no case, or one that `parity run` did not write.
    """
    directory = path.parent if path.name == "case.json" else path
    case = read_case(directory)
    compared = case.extra.get(COMPARED)
    if not isinstance(compared, dict) or compared.get("check") not in CHECKS:
        raise CaseError(
            f"{directory}: case.json does not say what was compared; `parity replay` takes what "
            "`parity run` wrote, `parity vectors` takes any other case"
        )
    extra = {name: value for name, value in case.extra.items() if name != COMPARED}
    case = replace(case, extra=extra, compute=compared.get("compute") or {})
    return case, compared, measure(case, compared["check"], compared.get("dtype", "float64"))


def measure(case: Case, check: str, dtype: str) -> list[Measured]:
    """Run a check on one case."""
    if check == "vocabulary":
        from parity.checks.vocabulary import compare_maps

        return compare_maps(case)
    if check == "decoding":
        from parity.checks.decoding import measure_decoding

        return measure_decoding(case)[0]
    if check == "training":
        from parity.checks.training import compare_masters, compare_runs

        return compare_masters(case) if "masters" in case.extra else compare_runs(case)[0]
    if check == "precision":
        from parity.checks.precision import compare_precisions

        return compare_precisions(case)
    if check == "checkpoints":
        from parity.checks.checkpoints import compare_conversions

        return compare_conversions(case)
    from parity.checks.batches import compare_case

    return compare_case(case, dtype)
