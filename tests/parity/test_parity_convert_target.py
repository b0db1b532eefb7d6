"""The target's fingerprint: two implementations, one recipe (contracts §3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parity.convert import to_numpy
from parity.sides import setup_jax
from torch_port.training.resume import target_fingerprint as port_fingerprint

CONFIG = {"rope_theta": 1e6, "model_type": "qwen3", "name": "café", "rope_scaling": None}


def spec_fingerprint(E: Tensor, U: Tensor, config: dict[str, Any]) -> str:
    setup_jax()
    from jaxdraft.checkpoint import target_fingerprint
    from jaxdraft.evaluate import Target

    return target_fingerprint(Target(to_numpy(E), to_numpy(U)), config)


def tables(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    E, U = (torch.randn(16, 8, generator=g).to(dtype) for _ in range(2))
    return E, U


def one_byte(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8)[-1, -1] ^= 1
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_sides_say_the_same(dtype: torch.dtype) -> None:
    """Faults: a dtype or shape spelled as one framework prints it; bytes in another order; a
    change of one byte, name, shape, dtype or config value that one side does not see.
    """
    E, U = tables(dtype)
    cases = {
        "as it is": (E, U, CONFIG),
        "one byte of E": (one_byte(E), U, CONFIG),
        "one byte of U": (E, one_byte(U), CONFIG),
        "names exchanged": (U, E, CONFIG),
        "shape": (E.reshape(8, 16), U, CONFIG),
        "dtype": (E.view(torch.float16 if dtype is torch.bfloat16 else torch.float32), U, CONFIG),
        "config value": (E, U, CONFIG | {"rope_theta": 1e4}),
        "config name": (E, U, {"theta": 1e6, "model_type": "qwen3"}),
    }
    if dtype is torch.float32:
        del cases["dtype"]  # no other float of that width; bf16 has the case
    seen = {}
    for what, (e, u, config) in cases.items():
        seen[what] = port_fingerprint(e, u, config)
        assert spec_fingerprint(e, u, config) == seen[what], what
    assert len(set(seen.values())) == len(cases)


def test_place_and_version_do_not_count() -> None:
    """Fault: a run that cannot go on because the target was moved or saved anew."""
    E, U = tables(torch.float32)
    moved = CONFIG | {"_name_or_path": "/elsewhere", "transformers_version": "5.24.1"}
    turned = dict(reversed(moved.items()))
    expected = port_fingerprint(E, U, CONFIG)
    for config in (moved, turned):
        assert port_fingerprint(E, U, config) == expected
        assert spec_fingerprint(E, U, config) == expected
