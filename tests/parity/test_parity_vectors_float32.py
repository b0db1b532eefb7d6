"""The vectors, ours and the outside judge's, on both sides in float32.

A file per dtype: the runner gives a file to one worker, and these are the longest tests.
"""

from pathlib import Path

import pytest
from vector_runs import PLAIN, failures


@pytest.mark.parametrize("side", ["port", "spec"])
def test_every_vector(vectors_directories: list[Path], side: str) -> None:
    """Faults: any of the six that issue 2 names, in either implementation."""
    assert not failures(vectors_directories, side, "float32")


def test_every_vector_on_the_ports_plain_forms(vectors_directories: list[Path]) -> None:
    """Fault: one of the reference forms that the defaults are compared with goes wrong."""
    assert not failures(vectors_directories, "port", "float32", PLAIN)
