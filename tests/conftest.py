"""Settings of the whole test run: few threads, quick compilation, hypothesis without a clock."""

import os
from pathlib import Path

from parity.compiling import XLA_FLAGS

# A short spin of OpenMP's threads: the default makes tests crawl beside another busy process.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Before torch and jax are imported anywhere. XLA's cache lets processes of one run share what was
# compiled.
os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).resolve().parent.parent / ".pytest_cache" / "xla"),
)

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "project",
    deadline=None,  # the first example of a shape pays for a compilation
    derandomize=True,  # a red run must be red again
    print_blob=True,
)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)  # two workers share two cores


@pytest.fixture(scope="session")
def vectors_directories() -> list[Path]:
    """The project's own vectors, and the outside judge's where they are there."""
    here = Path(__file__).resolve().parent
    outside = Path(os.environ.get("DRAFT_VECTORS") or here.parent.parent / "shared" / "vectors")
    return [here / "vectors"] + ([outside] if outside.is_dir() else [])
