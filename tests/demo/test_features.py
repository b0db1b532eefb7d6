"""Feature directories: round trip, nothing opened while listing, nothing half written."""

import dataclasses
import json

import pytest
import torch

import torch_port.data.features as features_module
from torch_port.data.conversations import DataError
from torch_port.data.features import FeatureDirectory, FeatureSample, write_features


def sample(name, length, dtype=torch.float32):
    draw = torch.Generator().manual_seed(length)
    return FeatureSample(
        id=name,
        input_ids=torch.randint(0, 50, (length,), generator=draw),
        loss_mask=(torch.rand(length, generator=draw) > 0.4).float(),
        hidden_states=torch.randn(length, 6, generator=draw).to(dtype),
        target_last_hidden_states=torch.randn(length, 3, generator=draw).to(dtype),
        target_log_normalizer=torch.randn(length, generator=draw),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_over_several_shards(tmp_path, dtype):
    # Fault: row offsets that do not restart with a shard, or a dtype changed on the way.
    samples = [sample(f"s{n}", n, dtype) for n in (5, 1, 7, 3, 9, 2)]
    write_features(tmp_path / "f", iter(samples), metadata={"layers": [0, 2]}, shard_rows=8)
    read = FeatureDirectory(tmp_path / "f")
    assert len(list((tmp_path / "f").glob("*.safetensors"))) == 3  # 5+1+7, 3+9, 2
    assert (len(read), read.lengths, read.ids) == (6, [5, 1, 7, 3, 9, 2], [s.id for s in samples])
    assert read.supervised == [int(s.loss_mask.sum()) for s in samples]
    assert read.metadata == {"layers": [0, 2]}
    for i, written in enumerate(samples):
        item = read[i]
        assert item.keys() == {f.name for f in dataclasses.fields(FeatureSample)} - {"id"}
        for name, tensor in item.items():
            assert tensor.dtype == getattr(written, name).dtype
            assert torch.equal(tensor, getattr(written, name))
        assert torch.equal(read.tokens(i)["input_ids"], written.input_ids)
    ids = torch.cat([ids for ids, _ in read.iter_tokens()])
    assert torch.equal(ids, torch.cat([s.input_ids for s in samples]))
    with pytest.raises(IndexError):
        read[6]


def test_listing_opens_no_shard(tmp_path, monkeypatch):
    # Fault: field note 18, a start that opens every file. Ids and masks read no state either.
    write_features(tmp_path / "f", [sample("a", 4), sample("b", 6)], shard_rows=1)
    opened, real = [], features_module.safe_open

    class Counting:
        def __init__(self, path, **options):
            self.file = real(path, **options)

        def __enter__(self):
            self.open = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def get_slice(self, name):
            opened.append(name)
            return self.open.get_slice(name)

    monkeypatch.setattr(features_module, "safe_open", Counting)
    read = FeatureDirectory(tmp_path / "f")
    assert (len(read), read.lengths, len(read.ids), len(read.supervised)) == (2, [4, 6], 2, 2)
    assert opened == []
    list(read.iter_tokens())
    assert set(opened) == {"input_ids", "loss_mask"}


def test_interrupted_write_leaves_nothing(tmp_path):
    # Fault: a directory without its index, or with half of its shards, after an error.
    def broken():
        yield sample("a", 4)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_features(tmp_path / "f", broken(), shard_rows=1)
    assert list(tmp_path.iterdir()) == []


def test_refusals(tmp_path):
    # Faults: an old run overwritten, an empty directory written, tensors of unequal length.
    write_features(tmp_path / "f", [sample("a", 4)])
    with pytest.raises(DataError, match="does not exist"):
        write_features(tmp_path / "f", [sample("b", 4)])
    assert FeatureDirectory(tmp_path / "f").ids == ["a"]
    with pytest.raises(DataError, match="at least one sample"):
        write_features(tmp_path / "g", [])
    wrong = dataclasses.replace(sample("c", 4), loss_mask=torch.ones(3))
    with pytest.raises(DataError, match="sample c"):
        write_features(tmp_path / "g", [wrong])
    assert not (tmp_path / "g").exists()


def test_missing_or_damaged_files_are_named(tmp_path):
    # Fault: a raw SafetensorError or KeyError that names no file.
    with pytest.raises(DataError, match=r"index\.json"):
        FeatureDirectory(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(DataError, match="shards"):
        FeatureDirectory(tmp_path)
    write_features(tmp_path / "f", [sample("a", 4)])
    shard = tmp_path / "f" / "features-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(DataError, match="features-00000"):
        FeatureDirectory(tmp_path / "f")[0]
    shard.unlink()
    with pytest.raises(DataError, match="features-00000"):
        FeatureDirectory(tmp_path / "f")[0]
