"""Feature directories of both kinds: listing, checking, converting."""

import builtins
import gzip
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from data_toys import QUIET, contents, feature_sample, write_drawn_features
from safetensors.torch import load_file, save_file

import torch_port.data.features as features_module
import torch_port.data.field_files as field_module
from torch_port.data.check import check_features
from torch_port.data.conversations import DataError
from torch_port.data.convert import convert_features
from torch_port.data.features import FeatureDirectory, FeatureSample, write_features
from torch_port.data.field_files import FieldDirectory, open_features, read_file, write_file


def write_field(directory: Path, lengths: list[int], suffix: str = ".ckpt") -> Path:
    directory.mkdir()
    for i, length in enumerate(lengths):
        write_file(directory / f"s{i}{suffix}", feature_sample(f"s{i}", length))
    return directory


@pytest.mark.parametrize("kind", ["field", "field with index", "shards"])
def test_listing_opens_no_feature_file(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field note 18: 46 silent minutes of opening files. Fault: any of them opened, or asked for
    its size, to list a directory."""
    if kind == "shards":
        write_drawn_features(tmp_path / "f", [4, 5, 6], shard_rows=1)
    else:
        write_field(tmp_path / "f", [4, 5, 6])
        if kind == "field with index":
            check_features(tmp_path / "f", QUIET, write_index=True)
    opened: list[str] = []

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def watching(file: Any, *given: Any, **named: Any) -> Any:
            opened.append(Path(file).name if isinstance(file, str | Path) else "a stream")
            return real(file, *given, **named)

        monkeypatch.setattr(module, name, watching)

    for module, name in (
        (builtins, "open"),
        (io, "open"),
        (gzip, "open"),
        (torch, "load"),
        (features_module, "safe_open"),
        (Path, "stat"),
    ):
        watch(module, name)
    read = open_features(tmp_path / "f")
    assert (len(read), list(read.ids)) == (3, ["s0", "s1", "s2"])
    assert read.lengths == (None if kind == "field" else [4, 5, 6])
    assert set(opened) <= {"index.json"}
    read[1]  # the watch works: reading does open
    assert set(opened) - {"index.json"}


def test_a_long_listing_costs_names_alone(tmp_path: Path) -> None:
    """2000 files that could not be read. Fault: work for every file beyond its name."""
    (tmp_path / "f").mkdir()
    for i in range(2000):
        (tmp_path / "f" / f"s{i:05d}.ckpt").touch()
    read = FieldDirectory(tmp_path / "f")
    assert (len(read), read.ids[1999]) == (2000, "s01999")
    with pytest.raises(DataError, match=r"s00007\.ckpt: cannot be read"):
        read[7]


@pytest.mark.parametrize("kind", ["ckpt", "ckpt.gz"])
def test_there_and_back_keeps_every_byte(tmp_path: Path, kind: str) -> None:
    """Faults: bf16 widened; a view's whole storage written; samples in another order; the index
    without lengths; ids that are no file names, or occur twice."""
    names = ["b", "a/x", "b", ".hidden", "c"]
    samples = [
        feature_sample(name, 4 + i, mask=[1.0, 0.0] * 2 + [0.0] * i if name == "c" else None)
        for i, name in enumerate(names)
    ]
    write_features(tmp_path / "f", samples, metadata={"layers": [1]}, shard_rows=10)
    convert_features(tmp_path / "f", tmp_path / "field", kind, QUIET)
    field = open_features(tmp_path / "field")
    assert isinstance(field, FieldDirectory)
    assert field.ids == names
    assert field.metadata == {"layers": [1]}
    convert_features(tmp_path / "field", tmp_path / "back", "sharded", QUIET)
    back = FeatureDirectory(tmp_path / "back")
    for i, written in enumerate(samples):
        assert back.ids[i] == written.id
        assert back.trainable[i] is (written.id != "c")
        for name, tensor in back[i].items():
            assert tensor.dtype == getattr(written, name).dtype
            assert torch.equal(tensor, getattr(written, name))
    convert_features(tmp_path / "back", tmp_path / "again", kind, QUIET)
    assert contents(tmp_path / "again") == contents(tmp_path / "field")
    if kind == "ckpt":
        sizes = [len(value) for name, value in contents(tmp_path / "field").items()]
        assert max(sizes) < 10_000  # a shard's storage in each file would be more
    with pytest.raises(DataError, match="exists already"):
        convert_features(tmp_path / "back", tmp_path / "field", kind, QUIET)


def test_field_files_with_other_dtypes_and_without_a_normalizer(tmp_path: Path) -> None:
    """As the field stores them: int32 ids, bool masks, no normaliser. Faults: refused, or read in
    types that collating does not take; a normaliser of zeros made up."""
    (tmp_path / "field").mkdir()
    whole = feature_sample("s", 6)
    content = {
        "input_ids": whole.input_ids.int(),
        "loss_mask": whole.loss_mask.bool(),
        "hidden_states": whole.hidden_states,
        "target_last_hidden_states": whole.target_last_hidden_states,
    }
    torch.save(content, tmp_path / "field" / "s.ckpt")
    sample = read_file(tmp_path / "field" / "s.ckpt")
    assert (sample["input_ids"].dtype, sample["loss_mask"].dtype) == (torch.int64, torch.float32)
    convert_features(tmp_path / "field", tmp_path / "out", "sharded", QUIET)
    read = FeatureDirectory(tmp_path / "out")[0]
    assert "target_log_normalizer" not in read
    assert torch.equal(read["hidden_states"], whole.hidden_states)
    result = check_features(tmp_path / "out", QUIET)
    assert (result.problems, result.with_normalizer) == ((), False)


class Harmful:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("suffix", [".ckpt", ".ckpt.gz"])
def test_a_file_that_runs_code_is_refused_unrun(tmp_path: Path, suffix: str) -> None:
    """Fault: a load without weights_only=True."""
    stream = io.BytesIO()
    torch.save({"input_ids": Harmful(tmp_path / "ran")}, stream)
    content = stream.getvalue()
    file = tmp_path / f"s{suffix}"
    file.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(DataError, match="cannot be read"):
        read_file(file)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Harmful(tmp_path / "ran")))  # noqa: S301 - that it does run code
    assert (tmp_path / "ran").exists()


def test_mapped_files_cost_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a .ckpt read whole where it could be mapped."""
    write_field(tmp_path / "f", [4])
    asked: list[Any] = []
    real = torch.load
    monkeypatch.setattr(
        field_module.torch, "load", lambda *a, **k: asked.append(k) or real(*a, **k)
    )
    read_file(tmp_path / "f" / "s0.ckpt")
    assert asked[0]["mmap"] is True
    assert asked[0]["weights_only"] is True


def changed(directory: Path, **tensors: Any) -> None:
    """Change tensors of the first shard."""
    shard = directory / "features-00000.safetensors"
    held = load_file(shard)
    for name, change in tensors.items():
        held[name] = change(held[name].clone())
    save_file(held, shard)


def nan_at_2(tensor: torch.Tensor) -> torch.Tensor:
    tensor[2] = torch.nan
    return tensor


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"hidden_states": nan_at_2}, "s0: hidden_states has values that are not finite"),
        ({"target_log_normalizer": nan_at_2}, "s0: target_log_normalizer has values"),
        ({"target_log_normalizer": torch.Tensor.bfloat16}, "must be float32"),
        ({"hidden_states": torch.Tensor.long}, "no floating type of states"),
        ({"hidden_states": lambda t: t[:, :5].contiguous()}, "5 wide, no multiple of 3"),
        ({"loss_mask": torch.zeros_like}, "the index says"),
        ({"input_ids": lambda t: -t - 1}, "negative ids"),
    ],
)
def test_check_finds_what_is_wrong(tmp_path: Path, change: Any, found: str) -> None:
    """Fault: a damaged sample that is called fine, or blamed on another one."""
    write_drawn_features(tmp_path / "f", [4, 5, 6], shard_rows=4)
    result = check_features(tmp_path / "f", QUIET)
    assert (result.problems, result.checked, result.tokens, result.trainable) == ((), 3, 15, 3)
    changed(tmp_path / "f", **change)
    problems = check_features(tmp_path / "f", QUIET).problems
    assert any(found in problem for problem in problems), problems
    assert not any("s1" in problem for problem in problems if "differ" not in problem)


def test_check_finds_wrong_indices_lost_files_and_odd_ones_out(tmp_path: Path) -> None:
    """Faults: samples that share rows; a shard that vanished; one sample of another width; a sample
    of all files looked at although N was asked for."""
    write_drawn_features(tmp_path / "f", [4, 5, 6], shard_rows=9)
    index = tmp_path / "f" / "index.json"
    index.write_text(index.read_text().replace('"start":4', '"start":3'))
    assert "before s0 ends" in check_features(tmp_path / "f", QUIET).problems[0]
    (tmp_path / "f" / "features-00001.safetensors").unlink()
    problems = check_features(tmp_path / "f", QUIET).problems
    assert any("features-00001" in problem for problem in problems)
    write_field(tmp_path / "field", [4, 5, 6, 7])
    odd = feature_sample("s9", 5)
    wide = FeatureSample(**{**vars(odd), "hidden_states": odd.hidden_states.repeat(1, 2)})
    write_file(tmp_path / "field" / "s9.ckpt", wide)
    assert "differ from the first" in check_features(tmp_path / "field", QUIET).problems[0]
    assert check_features(tmp_path / "field", QUIET, sample=2).checked == 2
    with pytest.raises(DataError, match="--write-index"):
        check_features(tmp_path / "field", QUIET, sample=2, write_index=True)


def test_an_index_of_other_files_is_refused(tmp_path: Path) -> None:
    """Fault: a file added after the index was written shifts every sample by one."""
    write_field(tmp_path / "f", [4, 5])
    check_features(tmp_path / "f", QUIET, write_index=True)
    write_file(tmp_path / "f" / "s00.ckpt", feature_sample("s00", 3))
    with pytest.raises(DataError, match="index is of 2 files"):
        open_features(tmp_path / "f")
