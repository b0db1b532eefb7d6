"""The same small things written on both sides, compared: config reading and the vocabulary map."""

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdraft.config import DraftConfig as SpecConfig
from jaxdraft.dflash import DFlashObjective
from jaxdraft.vocabulary import build_map, map_from_buffers
from parity.recipes import BARE, NESTED, TOP
from torch_port.config import DFlashObjectiveConfig
from torch_port.config import DraftConfig as PortConfig
from torch_port.vocabulary.mapping import buffers_from_kept, check_map
from torch_port.vocabulary.selection import select_by_count

VALUES = [None, 0, -1, 1, 2, 3, 5, 40, 41, True, 2.0, "2", [], [0, 2], [0, 3], [1, 1], "vanilla"]
FIELDS = [(None, name) for name in TOP] + [("dflash_config", name) for name in NESTED]
VALUES += ["none", "dflash", "dspark", ["DSparkDraftModel"], ["DFlashDraftModel"]]
BASES = {
    "dspark": TOP | {"dflash_config": NESTED},
    "dflash": TOP
    | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {n: NESTED[n] for n in BARE} | {"projector_type": "dflash"},
    },
}


def outcome(call: Any) -> tuple[bool, Any]:
    """Return (accepted, value); only an error meant for users counts as a refusal."""
    try:
        return True, call()
    except (ValueError, NotImplementedError):
        return False, None


@pytest.mark.parametrize("base", BASES)
def test_every_field_with_odd_values(base: str) -> None:
    """Fault: a config that one side reads and the other refuses, or that they read differently."""
    shared = set(PortConfig.model_fields) & set(SpecConfig.__dataclass_fields__)
    assert len(shared) > 18
    for where, name in FIELDS:
        for value in VALUES:
            raw = copy.deepcopy(BASES[base])
            (raw if where is None else raw[where])[name] = value
            (port_ok, port) = outcome(lambda raw=raw: PortConfig.from_hf(raw))
            (spec_ok, spec) = outcome(lambda raw=raw: SpecConfig.from_hf(raw))
            assert port_ok == spec_ok, (name, value, "port" if port_ok else "spec", "accepts")
            if port_ok:
                for attribute in shared:
                    assert getattr(port, attribute) == getattr(spec, attribute), (name, value)


@pytest.mark.parametrize("dpace", ["none", "both", "continuation", "decay", "left out"])
def test_every_dflash_objective(dpace: str) -> None:
    """Fault: an objective that one side reads and the other refuses."""
    for decay in (None, 4.0, 0.0, -1.0, np.inf, np.nan, "left out"):
        for beta in (0.5, 0.0, 1.0, 1.5, np.nan, "left out"):
            named = {"loss_decay_gamma": decay, "dpace": dpace, "beta": beta}
            values: Any = {name: value for name, value in named.items() if value != "left out"}
            (port_ok, port) = outcome(lambda values=values: DFlashObjectiveConfig(**values))
            (spec_ok, spec) = outcome(lambda values=values: DFlashObjective(**values))
            assert port_ok == spec_ok, values
            if port_ok:
                assert all(getattr(port, name) == getattr(spec, name) for name in named), values


@settings(max_examples=200)
@given(st.data())
def test_same_counts_give_the_same_map(data: st.DataObject) -> None:
    """Faults: another order of ties, pins or fill; an error on one side only."""
    counts = np.array(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=24)))
    V = len(counts)
    size = data.draw(st.integers(-1, V + 1))
    pinned = data.draw(st.lists(st.integers(-1, V), max_size=4))
    usable = data.draw(st.none() | st.integers(0, V + 1))
    port_ok, kept = outcome(lambda: select_by_count(counts, size, pinned, usable))
    spec_ok, spec = outcome(lambda: build_map(counts, size, pinned, usable))
    assert port_ok == spec_ok, (counts, size, pinned, usable)
    if port_ok:
        import torch

        t2d, d2t = buffers_from_kept(torch.from_numpy(kept), V)
        assert np.array_equal(t2d.numpy(), np.asarray(spec.t2d))
        assert np.array_equal(d2t.numpy(), np.asarray(spec.d2t))


@settings(max_examples=200)
@given(st.data())
def test_the_same_buffers_are_refused(data: st.DataObject) -> None:
    """Fault: an invariant checked on one side only. Small buffers, so that valid ones occur."""
    import torch

    V, K = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    t2d = np.array(data.draw(st.lists(st.booleans(), min_size=V, max_size=V)))
    d2t = np.array(data.draw(st.lists(st.integers(-1, 3), min_size=K, max_size=K)), dtype=np.int64)
    port_ok, _ = outcome(lambda: check_map(torch.from_numpy(t2d), torch.from_numpy(d2t), V, K))
    spec_ok, _ = outcome(lambda: map_from_buffers(t2d, d2t))
    assert port_ok == spec_ok, (t2d, d2t)


@pytest.mark.parametrize("size", [True, 2.0, "2"])
def test_sizes_are_not_coerced(size: Any) -> None:
    for call in (select_by_count, build_map):
        with pytest.raises(ValueError, match="size"):
            call(np.ones(8, dtype=np.int64), size)


@pytest.mark.parametrize("pin", [1.7, True, "1"])
def test_pins_are_not_coerced(pin: Any) -> None:
    """Fault: 1.7 pinning id 1."""
    for call in (select_by_count, build_map):
        with pytest.raises(ValueError, match="pinned"):
            call(np.ones(8, dtype=np.int64), 4, [pin])
