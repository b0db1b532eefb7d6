"""The vectors, ours and the outside judge's, on both sides in float32.

A file per dtype: the runner gives a file to one worker, and these are the longest tests.
"""

from pathlib import Path

from vector_runs import PLAIN, failures


def test_every_vector_on_the_port(vectors_directories: list[Path]) -> None:
    """Faults: any of the six that issue 2 names."""
    assert not failures(vectors_directories, "port", "float32")


def test_every_third_vector_on_the_spec(vectors_directories: list[Path]) -> None:
    """Fault: a float64 constant in the specification's float32; XLA compiles each case for it."""
    assert not failures(vectors_directories, "spec", "float32", every=3)


def test_every_vector_on_the_ports_plain_forms(vectors_directories: list[Path]) -> None:
    """Fault: one of the reference forms that the defaults are compared with goes wrong."""
    assert not failures(vectors_directories, "port", "float32", PLAIN)
