"""Where the vectors are, and running all of them on one side: shared by the tests per dtype."""

from pathlib import Path

from parity.cases import list_cases
from parity.vectors import run_case

OWN = Path(__file__).parent.parent / "vectors"

PLAIN = {"objective": "plain", "attention": "dense"}


def failures(
    directories: list[Path],
    side: str,
    dtype: str,
    compute: dict[str, str] | None = None,
    every: int = 1,
) -> list[tuple[str, object]]:
    """Every case that fails, with its result; one that a side has not built is one of them."""
    paths = [path for directory in directories for path in list_cases(directory)[::every]]
    results = [(path.name, run_case(path, [side], dtype, compute)) for path in paths]
    return [(name, result) for name, result in results if not result.passes]
