"""The loader: the same steps on every rank, an order that is a function of (seed, epoch, place)."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_toys import QUIET, V, feature_sample, write_drawn_features
from torch import Tensor

from torch_port.data.batch import Batch, collate
from torch_port.data.check import check_features
from torch_port.data.features import FeatureDirectory, write_features
from torch_port.data.field_files import open_features, write_file
from torch_port.data.loader import BatchSettings, FeatureLoader
from torch_port.data.order import Split, epoch_order, steps_per_epoch
from torch_port.errors import UserError

SETTINGS = BatchSettings(num_anchors=3, vocab_size=V, block_size=2)
LENGTHS = [3 + (7 * i) % 31 for i in range(50)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loader")
    return write_drawn_features(root / "f", LENGTHS, shard_rows=200)


def loader(directory: Path, split: Split, seed: int = 5, **settings: Any) -> FeatureLoader:
    return FeatureLoader(open_features(directory), split, SETTINGS, seed=seed, **settings)


def tensors(batch: Batch) -> list[Tensor]:
    assert batch.layout is not None
    found = [v for v in vars(batch).values() if isinstance(v, Tensor)]
    return [*found, batch.layout.slots_M, batch.layout.positions_P]


def same(first: Batch, second: Batch) -> bool:
    pairs = zip(tensors(first), tensors(second), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def who(batches: list[Batch], directory: Path) -> list[list[int]]:
    """Which samples a batch holds, told by their first states."""
    features = FeatureDirectory(directory)
    known = {_first(features[i]["hidden_states"]): i for i in range(len(features))}
    return [[known[_first(row)] for row in batch.hidden_states] for batch in batches]


def _first(states: Tensor) -> bytes:
    return states[0].view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_takes_the_same_number_of_steps(tmp_path: Path, world_size: int) -> None:
    """Field note 15. 41 samples, of which 4 that cannot be trained on and very uneven lengths.
    Faults: a rank that skips an untrainable sample alone; ranks that share a sample; a rank with a
    step more; every epoch leaves out the same samples."""
    lengths = [4 + i % 3 + 90 * (i % 10 == 0) for i in range(41)]
    bad = {3, 10, 11, 40}
    apart = {i: ([0.0, 1.0] * lengths[i])[: lengths[i]] for i in bad}
    samples = [feature_sample(f"s{i}", n, mask=apart.get(i)) for i, n in enumerate(lengths)]
    write_features(tmp_path / "f", samples)
    ranks = [loader(tmp_path / "f", Split(2, 2, world_size, rank)) for rank in range(world_size)]
    steps = 37 // (4 * world_size)
    assert {one.steps_per_epoch for one in ranks} == {steps}
    assert {one.untrainable for one in ranks} == {4}
    left_out = []
    batches = [iter(one) for one in ranks]
    for epoch in range(3):
        taken: list[int] = []
        for one, stream in zip(ranks, batches, strict=True):
            assert (one.epoch, one.step, one.micro) == (epoch, 0, 0)
            ids = who(list(islice(stream, 2 * steps)), tmp_path / "f")
            taken += [i for rows in ids for i in rows]
        assert len(set(taken)) == len(taken) == steps * 4 * world_size
        assert not set(taken) & bad
        left_out.append(frozenset(set(range(41)) - bad - set(taken)))
    assert len(set(left_out)) == 3


def test_a_batch_is_what_collate_makes_of_its_samples(directory: Path) -> None:
    """Faults: anchors that hang on the place in a batch, or on a rank; an epoch's anchors used
    again in the next; padding on the left."""
    stream = iter(loader(directory, Split(3, 1, 2, 1)))
    epochs = [list(islice(stream, 8)) for _ in range(2)]
    features = FeatureDirectory(directory)
    for epoch, batches in enumerate(epochs):
        for batch, rows in zip(batches, who(batches, directory), strict=True):
            expected = collate(
                [features[i] for i in rows],
                rows,
                num_anchors=3,
                seed=5,
                epoch=epoch,
                vocab_size=V,
                block_size=2,
            )
            assert same(batch, expected)
            assert batch.input_ids.shape[1] == max(LENGTHS[i] for i in rows)


def test_ranks_and_accumulation_only_spread_a_step(directory: Path) -> None:
    """The samples of a step are those of any split with the same number in all. Fault: another
    world size, after a resume, trains on other steps."""
    for split in (Split(8), Split(2, 4), Split(4, 1, 2), Split(2, 2, 2), Split(1, 2, 4)):
        ranks = [replace(split, rank=rank) for rank in range(split.world_size)]
        spread = [epoch_order(LENGTHS, one, 9, 2) for one in ranks]
        assert spread[0].shape == (6, split.accumulation, split.batch_size)
        steps = np.sort(np.stack(spread).transpose(1, 0, 2, 3).reshape(6, 8), axis=1)
        if split == Split(8):
            whole = steps
        assert (steps == whole).all()
    assert (epoch_order(LENGTHS, Split(8), 9, 2) != epoch_order(LENGTHS, Split(8), 9, 3)).any()
    assert (epoch_order(LENGTHS, Split(8), 9, 2) != epoch_order(LENGTHS, Split(8), 8, 2)).any()


def test_like_lengths_share_a_batch() -> None:
    """Lengths drawn from 1 … 1000 in batches of 8 on 2 ranks. Random batches would be padded to
    about 890 on average, for samples of 500. Faults: no buckets; ranks whose batches of one step
    are of very different lengths; short samples first in every epoch."""
    lengths = np.random.default_rng(0).integers(1, 1001, 4000)
    spread = np.stack([epoch_order(lengths, Split(8, 1, 2, r), 0, 0) for r in range(2)])
    padded = lengths[spread[:, :, 0]].max(-1)  # [rank, step]
    # 64 steps of 16 are sorted at a time: a step spans about 1000/64 = 16 lengths.
    assert padded.sum() * 8 < 1.05 * lengths[spread].sum()
    assert (np.abs(padded[0] - padded[1]) < 20).mean() > 0.95
    assert abs(np.corrcoef(np.arange(padded.shape[1]), padded[0])[0, 1]) < 0.2


@pytest.mark.parametrize("taken", [0, 1, 6, 12, 25])
def test_a_restored_loader_goes_on_exactly(directory: Path, taken: int) -> None:
    """12 batches an epoch: between and inside of steps, at an epoch's end, in the third epoch. The
    state crosses JSON. Faults: a position that counts what was read ahead; the last batch again, or
    one skipped; anchors of another epoch."""
    split = Split(2, 2, 2, 1)
    whole = list(islice(loader(directory, split), taken + 14))
    first = loader(directory, split)
    for batch, expected in zip(islice(first, taken), whole, strict=False):
        assert same(batch, expected)
    state = json.loads(json.dumps(first.state()))
    again = loader(directory, split)
    again.restore(state)
    for batch, expected in zip(islice(again, 14), whole[taken:], strict=True):
        assert same(batch, expected)


def test_reading_ahead_in_processes_changes_nothing(directory: Path) -> None:
    """Real processes. Faults: batches in the order in which processes finish; a state that is ahead
    of what was handed out; draws from the global generator, which training uses."""
    split = Split(2, 1, 2, 0)
    expected = list(islice(loader(directory, split), 20))
    before = torch.get_rng_state()
    ahead = loader(directory, split, workers=2, prefetch=3)
    stream = iter(ahead)
    for batch in expected[:15]:
        assert same(next(stream), batch)
    assert (ahead.epoch, ahead.step) == (1, 3)
    assert torch.equal(torch.get_rng_state(), before)
    state = ahead.state()
    stream.close()  # type: ignore[attr-defined]
    ahead = loader(directory, split, workers=1)
    ahead.restore(state)
    for batch, wanted in zip(islice(ahead, 5), expected[15:], strict=True):
        assert same(batch, wanted)


def test_what_fails_in_a_process_is_one_line(tmp_path: Path) -> None:
    """Real processes. Faults: a traceback of another process; a hang after one was killed."""
    write_drawn_features(tmp_path / "f", [5] * 12, shard_rows=1)
    reader = loader(tmp_path / "f", Split(2), workers=1)
    for shard in (tmp_path / "f").glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(UserError, match="expected a feature shard") as caught:
        next(iter(reader))
    assert "\n" not in str(caught.value)

    write_drawn_features(tmp_path / "g", [5] * 12)
    stream = iter(loader(tmp_path / "g", Split(2), workers=1, prefetch=1))
    next(stream)
    for child in reading_children():
        os.kill(child, signal.SIGKILL)
    with pytest.raises(UserError, match="a process that reads features ended") as caught:
        list(islice(stream, 50))
    assert "\n" not in str(caught.value)


def reading_children() -> list[int]:
    """The loader's processes: children of the fork server, which is a child of ours."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    return [
        grandchild
        for child in parents.get(os.getpid(), [])
        for grandchild in parents.get(child, [])
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 6}, "seed 6, but it is 5"),
        ({"step_samples": 16}, "step_samples 16, but it is 8"),
        ({"samples": "x"}, "samples x"),
        ({"micro": 1, "accumulation": 4}, "inside of a step of accumulation 4"),
    ],
)
def test_a_position_of_something_else_is_refused(
    directory: Path, change: dict[str, Any], named: str
) -> None:
    """Fault: a run goes on at a place that means other samples."""
    reader = loader(directory, Split(2, 2, 2, 0))
    with pytest.raises(UserError, match=named):
        reader.restore({**reader.state(), **change})
    # Another split of the same step is fine, between steps.
    other = loader(directory, Split(8))
    other.restore(reader.state() | {"step": 2})
    assert (other.step, steps_per_epoch(50, other.split)) == (2, 6)


def test_what_cannot_be_loaded_is_refused_at_once(tmp_path: Path, directory: Path) -> None:
    """Faults: files opened to learn their lengths; an epoch of no step, which never ends; an index
    that does not say what can be trained on."""
    (tmp_path / "field").mkdir()
    for i in range(4):
        write_file(tmp_path / "field" / f"s{i}.ckpt", feature_sample(f"s{i}", 5 + i))
    with pytest.raises(UserError, match="--write-index"):
        loader(tmp_path / "field", Split(2))
    check_features(tmp_path / "field", QUIET, write_index=True)
    batch = next(iter(loader(tmp_path / "field", Split(4))))
    assert batch.input_ids.shape == (4, 8)
    with pytest.raises(UserError, match="4 trainable samples do not fill one step of 6"):
        loader(tmp_path / "field", Split(3, 2))
    with pytest.raises(UserError, match="distinct rows"):
        loader(directory, Split(1), samples=[1, 1])
    assert loader(directory, Split(1), samples=[4, 2]).steps_per_epoch == 2
    index = tmp_path / "field" / "index.json"
    index.write_text(index.read_text().replace('"trainable":true', '"trainable":null'))
    with pytest.raises(UserError, match="earlier version"):
        loader(tmp_path / "field", Split(2))
