"""The doctor's look at versions, environment variables and cards. Runs nothing on a card.

Where CANN keeps its version differs between releases: the places below are those of its toolkit
packages 7 and 8, and none of them could be looked at where this was written.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from torch_port.device import NPU_PACKAGE, Card, npu_cards, npu_version
from torch_port.doctor.checks import Check, guarded
from torch_port.drawing.text import size
from torch_port.errors import UserError

CANN_ROOTS = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
CANN_FILES = ("version.cfg", "version.info", "compiler/version.info", "*/*_install.info")
TORCH = "2.13"  # each torch_npu pins torch's minor version
EXTRA = 'pip install -e ".[npu]"'
SOURCE = "install the CANN toolkit and `source …/ascend-toolkit/set_env.sh` before training"

_ALLOC, _VISIBLE = "PYTORCH_NPU_ALLOC_CONF", "ASCEND_RT_VISIBLE_DEVICES"
_HCCL = "HCCL_"


def check_versions(environment: Mapping[str, str]) -> list[Check]:
    """Look at Python, torch, torch_npu and CANN."""
    return [
        Check("versions", "python", "ok", platform.python_version()),
        _torch(version("torch")),
        _extra(npu_version()),
        _cann(environment),
    ]


def _torch(found: str) -> Check:
    if found.startswith(f"{TORCH}."):
        return Check("versions", "torch", "ok", found)
    remedy = f"pip install 'torch>={TORCH},<2.14': torch_npu {TORCH}.0 is built for that one"
    return Check("versions", "torch", "failed", f"{found}, not {TORCH}.x", remedy)


def _extra(found: str | None) -> Check:
    if found is None:
        return Check("versions", NPU_PACKAGE, "missing", "not installed", EXTRA)
    if not found.startswith(f"{TORCH}."):
        text = f"{found} beside torch {TORCH}.x: it pins torch's minor version"
        return Check("versions", NPU_PACKAGE, "failed", text, EXTRA)
    try:
        npu_cards()
    except UserError as error:
        return Check("versions", NPU_PACKAGE, "failed", f"{found}; {error}", SOURCE)
    except Exception as error:  # noqa: BLE001 (a broken driver must not end the report)
        return guarded("versions", NPU_PACKAGE, error, "look at the driver: npu-smi info")
    return Check("versions", NPU_PACKAGE, "ok", found)


def _cann(environment: Mapping[str, str]) -> Check:
    roots = [(name, environment[name]) for name in CANN_ROOTS if environment.get(name)]
    if not roots:
        text = f"neither {' nor '.join(CANN_ROOTS)} is set"
        return Check("versions", "CANN", "missing", text, SOURCE)
    for name, root in roots:
        found = cann_version(Path(root))
        if found is not None:
            return Check("versions", "CANN", "ok", f"{found} ({name}={root})")
    told = "; ".join(f"{name}={root}" for name, root in roots)
    text = f"{told}: no version in {', '.join(CANN_FILES)}"
    return Check("versions", "CANN", "failed", text, SOURCE)


def cann_version(root: Path) -> str | None:
    """Return the version that a CANN toolkit's directory states, or None.

    Read from the first of `CANN_FILES` with a line such as `Version=8.0.RC2` or
    `runtime_running_version=[7.3.0.1:8.0.RC2]`.
    """
    for pattern in CANN_FILES:
        for file in sorted(root.glob(pattern)):
            try:
                text = file.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            match = re.search(r"version\s*=\s*\[?([^\s\]]+)", text, flags=re.IGNORECASE)
            if match:
                return match[1].rsplit(":", 1)[-1]
    return None


def check_variables(environment: Mapping[str, str]) -> list[Check]:
    """Look at the variables that change a run: visibility, the allocator, HCCL's own."""
    visible = environment.get(_VISIBLE)
    checks = [
        Check("environment", _VISIBLE, "ok", visible or "not set: every card is visible"),
        _allocator(environment.get(_ALLOC)),
    ]
    told = [f"{n}={v}" for n, v in sorted(environment.items()) if n.startswith(_HCCL)]
    checks.append(Check("environment", "HCCL_*", "ok", ", ".join(told) or "none set: defaults"))
    return checks


def _allocator(value: str | None) -> Check:
    if value is not None and "expandable_segments:true" in value.lower():
        return Check("environment", _ALLOC, "ok", value)
    remedy = f"export {_ALLOC}=expandable_segments:True: it cures fragmentation"
    return Check("environment", _ALLOC, "missing", value or "not set", remedy)


def check_cards() -> tuple[list[Check], list[Card]]:
    """Look at the visible cards and their memory; return them too."""
    if npu_version() is None:
        return [Check("devices", "cards", "missing", f"no {NPU_PACKAGE} to ask", EXTRA)], []
    remedy = f"npu-smi info shows what the driver sees; {_VISIBLE} hides cards"
    try:
        cards = npu_cards()
    except Exception as error:  # noqa: BLE001 (a broken driver must not end the report)
        return [guarded("devices", "cards", error, remedy)], []
    if not cards:
        return [Check("devices", "cards", "missing", "none visible", remedy)], []
    return [_card(index, card) for index, card in enumerate(cards)], cards


def _card(index: int, card: Card) -> Check:
    text = f"{card.name}, {size(card.total)}, {size(card.free)} free"
    if card.free < 0.9 * card.total:
        remedy = "another process holds memory of this card: npu-smi info names it"
        return Check("devices", f"npu:{index}", "failed", text, remedy)
    return Check("devices", f"npu:{index}", "ok", text)


def environment() -> dict[str, str]:
    """Return this process' environment variables."""
    return dict(os.environ)
