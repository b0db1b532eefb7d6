"""docs/spec.md says what is: its table is printed by the example, its functions exist."""

import importlib
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")


def test_conventions_are_what_the_example_prints() -> None:
    """Fault: numbers in the docs that no code gives any more."""
    place = ROOT / "examples" / "conventions.py"
    description = importlib.util.spec_from_file_location("conventions", place)
    example = importlib.util.module_from_spec(description)
    description.loader.exec_module(example)
    assert example.table() in TEXT


def test_every_function_named_is_there() -> None:
    """Fault: a reader sent to a function that was renamed."""
    seen = 0
    for row in re.findall(r"^\| (?:§|contracts).*$", TEXT, flags=re.MULTILINE):
        module = None
        for name in re.findall(r"`([\w.]+)`", row.split("|")[4]):
            if "." in name:
                module, name = name.split(".")
            assert hasattr(importlib.import_module(f"jaxdraft.{module}"), name), f"{module}.{name}"
            seen += 1
    assert seen > 50
