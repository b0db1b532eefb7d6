"""Where the vectors are, and running all of them on one side: shared by the tests per dtype."""

from pathlib import Path

from parity.cases import list_cases
from parity.vectors import run_case

OWN = Path(__file__).parent.parent / "vectors"

# What the specification has and the port has not yet: it must say so, and the case must fail.
NOT_BUILT_IN_PORT = {path.name for path in OWN.glob("decoding-*")}

PLAIN = {"objective": "plain", "attention": "dense"}


def failures(
    directories: list[Path], side: str, dtype: str, compute: dict[str, str] | None = None
) -> list[tuple[str, object]]:
    """Every case that fails; one that is not built in the port must say that it is not."""
    failed = []
    for directory in directories:
        for path in list_cases(directory):
            result = run_case(path, [side], dtype, compute)
            if side == "port" and path.parent == OWN and path.name in NOT_BUILT_IN_PORT:
                assert result.comparisons["port"].problem.startswith("not built"), path.name
            elif not result.passes:
                failed.append((path.name, result))
    return failed
