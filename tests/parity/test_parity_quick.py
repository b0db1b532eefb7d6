"""`parity run --quick`, as it is typed: every check, every quick configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from parity.checks.base import CHECKS


def test_the_quick_form_agrees(tmp_path: Path) -> None:
    """Fault: anything on which the two sides differ; a check that is left out, or compares nothing.

    The report goes where PARITY_REPORT says: CI keeps it.
    """
    out = Path(os.environ.get("PARITY_REPORT") or tmp_path / "report")
    command = [sys.executable, "-m", "parity", "run", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "10 of 10 checks agree" in done.stdout
    assert ", 0 disagreements, " in done.stdout
    report = json.loads((out / "report.json").read_text())
    assert [check["name"] for check in report["checks"]] == list(CHECKS)
    for check in report["checks"]:
        assert sum(found["cases"] for found in check["configurations"].values()), check["name"]
    assert report["random_cases"] > 500
    assert (out / "report.html").stat().st_size > 10_000
