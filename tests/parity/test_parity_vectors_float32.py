"""The vectors, ours and the outside judge's, on both sides in float32.

A file per dtype: the runner gives a file to one worker, and these are the longest tests.
"""

from pathlib import Path

import pytest
from vector_runs import failures


@pytest.mark.parametrize("side", ["port", "spec"])
def test_every_vector(vectors_directories: list[Path], side: str) -> None:
    """Faults: any of the six that issue 2 names, in either implementation."""
    assert not failures(vectors_directories, side, "float32")
