"""The spec's tests run in float64, with strict dtype promotion and no implicit rank promotion."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def strict_float64() -> Iterator[None]:
    """Set for these modules only, and put back: other tests may want float32."""
    wanted = {
        "jax_enable_x64": True,
        "jax_numpy_dtype_promotion": "strict",
        "jax_numpy_rank_promotion": "raise",
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
