"""The vocabulary map across two gloo processes: broadcasts and sharded loads (contracts §1)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from test_port_mapping import OTHER, Toy, decoded, installed
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from toys import KEPT

from torch_port.errors import UserError
from torch_port.vocabulary.broadcast import broadcast_vocab_mapping


def by_helper(toy: Toy, _: str) -> None:
    broadcast_vocab_mapping(toy)


def by_raw_broadcast(toy: Toy, _: str) -> None:
    """Past every hook; bytes, because HCCL refuses bools."""
    dist.broadcast(toy.t2d.view(torch.uint8), 0)
    dist.broadcast(toy.d2t, 0)
    dist.broadcast(toy.head.data, 0)
    toy.vocabulary_changed()


def by_rank_0s_state(toy: Toy, _: str) -> None:
    """torch's own full-state broadcast, which ends in load_state_dict."""
    state = installed().state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(toy, state, options=options)


def by_sharded_load(toy: Toy, folder: str) -> None:
    """Into the module's own tensors: what dcp.load does."""
    dcp.load(toy.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(folder))
    toy.vocabulary_changed()


WAYS: dict[str, Callable[[Toy, str], None]] = {
    way.__name__: way for way in (by_helper, by_raw_broadcast, by_rank_0s_state, by_sharded_load)
}


def outcome(toy: Toy, way: str, folder: str) -> dict[str, Any]:
    try:
        WAYS[way](toy, folder)
    except UserError as error:
        return {"error": str(error), "t2d": toy.t2d}
    return {"ids": decoded(toy), "t2d": toy.t2d, "d2t": toy.d2t, "head": toy.head.data}


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    saved = f"{folder}/saved"
    writer = dcp.HuggingFaceStorageWriter(saved, save_distributed=True)
    dcp.save(installed().state_dict(), storage_writer=writer)
    results: dict[str, Any] = {}
    for way in WAYS:
        shares = way in ("by_helper", "by_raw_broadcast")  # rank 0 has what the others get
        results[way, "fresh"] = outcome(installed() if shares and rank == 0 else Toy(), way, saved)
        own = installed(KEPT if shares and rank == 0 else OTHER)
        results[way, "other"] = outcome(own, way, saved)
    results["nothing to give"] = outcome(Toy(), "by_helper", saved)
    with torch.device("meta"):
        empty = Toy()
    results["on meta"] = outcome(empty if rank else installed(), "by_helper", saved)
    del results["on meta"]["t2d"]  # a meta tensor is not saved
    torch.save(results, f"{folder}/rank{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(rank_main, (str(folder),), nprocs=2)
    return [torch.load(Path(folder, f"rank{rank}"), weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_map_arrives_on_every_rank(ranks: list[dict[Any, Any]], way: str) -> None:
    """Field-note 16: bool t2d and int64 d2t, identical on two ranks. Fault: stale tables."""
    want = installed()
    for rank in ranks:
        got = rank[way, "fresh"]
        assert got["ids"] == list(KEPT)
        assert got["t2d"].dtype == torch.bool
        assert got["d2t"].dtype == torch.int64
        assert torch.equal(got["t2d"], want.t2d)
        assert torch.equal(got["d2t"], want.d2t)
        if way != "by_helper":
            assert torch.equal(got["head"], want.head)


@pytest.mark.parametrize("way", WAYS)
def test_another_map_is_refused(ranks: list[dict[Any, Any]], way: str) -> None:
    """Faults: rank 1's trained head repointed; with the helper, an error on one rank alone."""
    for number, rank in enumerate(ranks):
        got = rank[way, "other"]
        if way == "by_raw_broadcast" and number == 0:  # holds what it sent
            assert got["ids"] == list(KEPT)
        elif way == "by_helper" and number == 0:
            assert "rank 1 could not take rank 0's vocabulary map of 5 ids" in got["error"]
        else:
            assert "another vocabulary map is installed: 5 ids starting [1, 2, 5" in got["error"]
        if way == "by_helper":  # nothing was written over
            kept = KEPT if number == 0 else OTHER
            assert got["t2d"].nonzero().squeeze(1).tolist() == list(kept)


def test_a_source_without_a_map_stops_every_rank(ranks: list[dict[Any, Any]]) -> None:
    """Fault: rank 0 raises before the broadcast, and rank 1 waits for it."""
    assert "no vocabulary map is installed" in ranks[0]["nothing to give"]["error"]
    assert "rank 0 has no vocabulary map" in ranks[1]["nothing to give"]["error"]


def test_a_rank_on_the_meta_device_stops_every_rank(ranks: list[dict[Any, Any]]) -> None:
    """Fault: rank 1 sends from the meta device and raises alone, and rank 0 waits for it."""
    assert "rank 1 could not take rank 0's vocabulary map" in ranks[0]["on meta"]["error"]
    assert "materialise it first" in ranks[1]["on meta"]["error"]
