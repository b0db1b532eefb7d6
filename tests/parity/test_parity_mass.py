"""Selection by the teacher's mass on both sides: the sum, the map, and what is refused."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft.vocabulary import build_map_by_mass, teacher_mass
from torch_port.vocabulary.mass import TeacherMass
from torch_port.vocabulary.selection import select_by_mass


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ValueError:
        return None


@settings(max_examples=150)
@given(st.data())
def test_same_mass_gives_the_same_map(data: st.DataObject) -> None:
    """Faults: padding kept for its mass; another order of ties, pins or fill; an error on one
    side only. Few values, so that ties occur; a NaN and an infinity among them."""
    values = st.sampled_from([0.0, 0.25, 0.5, 3.0, float("nan"), float("inf"), -1.0])
    common = st.sampled_from([0.0, 0.25, 0.5, 3.0])
    chosen = data.draw(st.sampled_from([values, common, common, common]))
    mass = np.array(data.draw(st.lists(chosen, min_size=1, max_size=20)))
    size = data.draw(st.integers(-1, len(mass) + 1))
    pinned = data.draw(st.lists(st.integers(-1, len(mass)), max_size=4))
    usable = data.draw(st.none() | st.integers(0, len(mass) + 1))
    port = outcome(lambda: select_by_mass(mass, size, pinned, usable))
    spec = outcome(lambda: build_map_by_mass(mass, size, pinned, usable))
    assert (port is None) == (spec is None), (mass, size, pinned, usable)
    if port is not None:
        assert port.tolist() == np.flatnonzero(np.asarray(spec.t2d)).tolist()


def test_same_states_give_the_same_mass() -> None:
    """Fault: the teacher of a position taken one too late, or positions beyond the mask counted."""
    random = np.random.default_rng(0)
    states, head = random.normal(size=(3, 7, 5)), random.normal(size=(11, 5))
    mask = (random.random((3, 7)) < 0.6).astype(np.float64)
    port = TeacherMass(torch.from_numpy(head))
    for row, on in zip(states, mask, strict=True):
        port.add(torch.from_numpy(row), torch.from_numpy(on))
    spec = np.asarray(teacher_mass(jnp.float32(states), jnp.float32(mask), jnp.float32(head)))
    # The specification's sum is float32 here: some 10 additions of numbers below 1
    assert np.allclose(port.total().numpy(), spec, rtol=1e-5, atol=1e-6)
