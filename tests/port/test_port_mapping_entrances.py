"""More ways into and out of the vocabulary buffers: copies, wrappers, heads, other devices."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from test_port_mapping import (
    KEPT,
    OTHER,
    ROWS,
    AlwaysBuffered,
    K,
    Toy,
    V,
    a_map,
    decoded,
    installed,
)
from torch import nn

from torch_port.errors import UserError
from torch_port.vocabulary.files import load_map
from torch_port.vocabulary.mapping import buffers_from_kept


def saved_and_loaded(toy: Toy) -> Toy:
    stream = io.BytesIO()
    torch.save(toy, stream)
    stream.seek(0)
    loaded: Toy = torch.load(stream, weights_only=False)  # a whole module, our own
    return loaded


COPIES: dict[str, Callable[[Toy], Toy]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda toy: pickle.loads(pickle.dumps(toy)),  # noqa: S301 - our own
    "torch.save": saved_and_loaded,
    "half": lambda toy: toy.half(),
    "share_memory": lambda toy: toy.share_memory(),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_refuses_what_its_original_refuses(way: str) -> None:
    """Fault: a copy that lost the load hooks or the map, and takes another one of the same K."""
    toy = COPIES[way](installed())
    other = installed(OTHER).state_dict()
    for assign in (False, True):
        for strict in (False, True):
            with pytest.raises(UserError, match="another vocabulary map is installed"):
                toy.load_state_dict(other, assign=assign, strict=strict)
    with pytest.raises(UserError, match="another vocabulary map is installed"):
        toy.install_vocab_mapping(*a_map(OTHER))
    assert decoded(toy.float()) == list(KEPT)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_a_wrapped_draft_refuses_another_map(prefix: str) -> None:
    """Fault: hooks that look for t2d without the wrapper's prefix."""
    wrapped = nn.Module()
    wrapped.add_module(prefix.rstrip("."), installed())
    state = {prefix + name: value for name, value in installed(OTHER).state_dict().items()}
    with pytest.raises(UserError, match="another vocabulary map is installed"):
        wrapped.load_state_dict(state, strict=False)


def test_another_map_by_functional_call_is_refused() -> None:
    """Fault: tables of the draft's own buffers used for those of the call, or kept after it."""

    class Emits(Toy):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.to_target_ids(ids)

    toy = Emits()
    toy.install_vocab_mapping(*a_map(KEPT))
    ids = torch.arange(K)
    assert toy(ids).tolist() == list(KEPT)
    t2d, d2t = a_map(OTHER)
    with pytest.raises(UserError, match="another vocabulary map is installed"):
        torch.func.functional_call(toy, {"t2d": t2d, "d2t": d2t}, (ids,))
    assert toy(ids).tolist() == list(KEPT)


def test_a_pickled_draft_brings_no_target_head() -> None:
    """Fault: V·H and K·H more numbers to every process that the draft is sent to."""
    toy = installed()
    before = len(pickle.dumps(toy))
    toy.draft_head(torch.zeros(V, 4096))
    assert len(pickle.dumps(toy)) < before + 4096


def test_maps_are_made_and_checked_whatever_the_default_device_is() -> None:
    """Fault: helpers on torch's default device (an accelerator's) beside buffers on the host."""
    kept, (t2d, d2t), toy = torch.tensor(KEPT), a_map(KEPT), Toy()
    full = AlwaysBuffered(V, V)
    with torch.device("meta"):
        made = buffers_from_kept(kept, V)
        toy.install_vocab_mapping(t2d, d2t)
        ids = toy.kept_target_ids(), full.kept_target_ids()
        plain = Toy.kept_target_ids(_unpruned())
    assert torch.equal(made[0], t2d)
    assert torch.equal(made[1], d2t)
    assert ids[0].tolist() == list(KEPT)
    assert ids[1].tolist() == plain.tolist() == list(range(V))
    assert decoded(toy) == list(KEPT)


def _unpruned() -> Toy:
    with torch.device("cpu"):
        return Toy(V, V)


def test_a_head_of_another_target_is_refused() -> None:
    """Fault: K rows of a head with fewer or more rows than V, each of another token."""
    for toy in (installed(), Toy(V, V)):
        for rows in (V - 3, V + 8):  # every kept id is a row of both
            with pytest.raises(UserError, match=rf"head has {rows} rows, but .* vocab_size is {V}"):
                toy.draft_head(torch.zeros(rows, 1))


def test_a_head_that_was_written_anew_is_sliced_anew() -> None:
    """Fault: rows of the head as it was before the target's weights arrived in it."""
    toy, head = installed(), torch.zeros(V, 1)
    assert not toy.draft_head(head).any()
    head.copy_(ROWS)
    assert toy.draft_head(head)[:, 0].tolist() == list(KEPT)


def test_export_reads_the_buffers_anew() -> None:
    """A write that torch does not count, as a collective's or through `.data`.

    Fault: the draft decodes with the map before while its export carries the other one.
    """
    toy = installed()
    t2d, d2t = a_map(OTHER)
    toy.t2d.data.copy_(t2d)
    toy.d2t.data.copy_(d2t)
    with pytest.raises(UserError, match="another vocabulary map is installed"):
        toy.exported_vocabulary()


@pytest.mark.parametrize("value", [[True] * V, np.ones(V, dtype=bool), "t2d"])
def test_what_is_no_tensor_is_refused_in_words(value: object) -> None:
    """Fault: an AttributeError of the check's own."""
    with pytest.raises(UserError, match="t2d must be a tensor"):
        Toy().install_vocab_mapping(value, torch.zeros(K, dtype=torch.int64))  # type: ignore[arg-type]
    state = {"head": torch.zeros(K, 1), "t2d": value, "d2t": value}
    for toy in (Toy(), Toy(V, V)):
        with pytest.raises(UserError, match="both must be tensors"):
            toy.load_state_dict(state, strict=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_a_map_file_without_plain_values_is_refused_in_words(tmp_path: Path, kind: str) -> None:
    """Fault: torch's own NotImplementedError out of the check that follows the reading."""
    t2d, d2t = a_map(KEPT)
    given = t2d.to_sparse() if kind == "sparse" else t2d.to("meta")
    torch.save({"t2d": given, "d2t": d2t}, tmp_path / "map.pt")
    with pytest.raises(UserError, match=r"map\.pt: no vocabulary map .*must be plain tensors"):
        load_map(tmp_path / "map.pt")
