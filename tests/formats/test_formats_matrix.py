"""Every ordered pair of the four formats without jax: A → B → A, bit for bit (contracts §4)."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from format_toys import (
    CASES,
    D2T,
    KEPT,
    LAYERS,
    Case,
    H,
    K,
    V,
    assert_same,
    borrowed,
    deepspec_fields,
    draft_tensors,
    eagle3_fields,
    eagle3_shapes,
    fill,
    hf_fields,
    map_tensors,
    read_json,
    read_tensors,
    speculators_fields,
    target_tensors,
    write,
    write_draft,
    write_eagle3,
    write_target,
)

from torch_port.formats.convert import FORMATS, Options, convert, read_checkpoint
from torch_port.formats.target import TargetDirectory

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
FIELDS = {"hf": hf_fields, "deepspec": deepspec_fields, "speculators": speculators_fields}
ALL = {"head", "embedding", "name"}  # what a checkpoint may have beside the draft's own weights
KEEPS = {"hf": set(), "deepspec": {"head", "embedding"}, "speculators": ALL, "port": ALL}


def source(folder: Path, case: Case, kind: str) -> Path:
    """A checkpoint of format `kind`: by hand, or for port made of a by-hand speculators one."""
    if kind != "port":
        return write_draft(folder / kind, case, kind)
    convert(write_draft(folder / "for port", case, "speculators"), folder / "port", "port")
    return folder / "port"


def has(kind: str, case: Case) -> set[str]:
    """What `source` makes."""
    if kind in ("hf", "deepspec"):
        return KEEPS[kind]
    return ALL if case.pruned else {"name"}


def needs(kind: str, case: Case) -> set[str]:
    """What a format must have."""
    if kind == "deepspec":
        return {"head", "embedding"}
    return {"head"} if kind == "speculators" and case.pruned else set()


def words(lost: set[str], case: Case) -> list[str]:
    """How a loss is told."""
    rows = len(KEPT) if case.pruned else V
    told = {
        "head": f"{HEAD} [{rows}, {H}]",
        "embedding": f"{EMBEDDING} [{V}, {H}]",
        "name": "the target's name, org/target",
    }
    return sorted(told[what] for what in lost)


def parsed(directory: Path) -> Any:
    checkpoint = read_checkpoint(directory)
    return checkpoint.algorithm, checkpoint.config


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetDirectory:
    return TargetDirectory(write_target(tmp_path_factory.mktemp("target") / "t", shards=2))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_there_and_back_is_the_identity(
    case: Case, tmp_path: Path, target: TargetDirectory
) -> None:
    """A → B → A for all 16 ordered pairs.

    Faults: a name mapped one way only, a dtype cast, layer ids shifted once, the head's rows in
    another order, a config field dropped or left at its default, a loss that is not told, a tensor
    told as lost that came back.
    """
    place = {kind: source(tmp_path, case, kind) for kind in FORMATS}
    for a, b in product(FORMATS, FORMATS):
        there, back = tmp_path / f"{a}-{b}", tmp_path / f"{a}-{b}-{a}"
        borrow = needs(b, case) - has(a, case)
        checkpoint, lost = convert(place[a], there, b, Options(target) if borrow else None)
        assert checkpoint.format == a
        assert sorted(lost) == words(has(a, case) - KEEPS[b], case), (a, b)
        held = (has(a, case) & KEEPS[b]) | borrow
        again = needs(a, case) - held
        convert(there, back, a, Options(target) if again else None)
        assert parsed(back) == parsed(place[a]), (a, b)
        held = (held & KEEPS[a]) | again
        wanted = dict(draft_tensors(case))
        wanted |= {HEAD: borrowed(case)[HEAD]} if "head" in held else {}
        wanted |= {EMBEDDING: borrowed(case)[EMBEDDING]} if "embedding" in held else {}
        assert_same(read_tensors(back), wanted)
        if a != "port":
            want, got = FIELDS[a](case), read_json(back / "config.json")
            if "name" in has(a, case) - KEEPS[b]:
                want["speculators_config"].pop("verifier")
                got["speculators_config"].pop("verifier")
            assert got == want, (a, b)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("kind", ["hf", "deepspec", "speculators"])
def test_what_is_written_is_what_was_made(
    case: Case, kind: str, tmp_path: Path, target: TargetDirectory
) -> None:
    """One step from by-hand `hf`: the new directory against one written by hand in that format.

    Fault: reader and writer wrong in the same way, which the way back would hide.
    """
    options = Options(target, with_head=False, verifier="org/target")
    convert(write_draft(tmp_path / "hf", case), tmp_path / "out", kind, options)
    want = draft_tensors(case)
    if kind == "deepspec":
        want |= borrowed(case)
    if kind == "speculators" and case.pruned:
        want[HEAD] = borrowed(case)[HEAD]
    assert_same(read_tensors(tmp_path / "out"), want)
    fields = FIELDS[kind](case)
    assert read_json(tmp_path / "out" / "config.json") == fields


@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("with_embedding", [True, False])
def test_eagle3_between_hf_and_port(pruned: bool, with_embedding: bool, tmp_path: Path) -> None:
    """Faults: the identity map of K = V dropped, the optional embedding demanded or lost, the head
    taken for the target's."""
    first = write_eagle3(tmp_path / "hf", pruned, with_embedding)
    want = fill(eagle3_shapes(pruned)) | map_tensors(pruned)
    if with_embedding:
        want[EMBEDDING] = target_tensors()[EMBEDDING]
    way = [first]
    for kind in ("port", "port", "hf", "hf"):
        way.append(tmp_path / f"{len(way)}-{kind}")
        _, lost = convert(way[-2], way[-1], kind)
        assert lost == []
        assert_same(read_tensors(way[-1]), want)
        assert parsed(way[-1]) == parsed(first)
    assert read_json(way[-1] / "config.json") == eagle3_fields(pruned)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dtypes_cross_unchanged(dtype: torch.dtype, tmp_path: Path) -> None:
    """Fault: everything written as bf16, or widened."""
    case = CASES["gated"]
    way = [write_draft(tmp_path / "hf", case, dtype=dtype)]
    for kind in ("port", "hf"):
        way.append(tmp_path / f"{len(way)}")
        convert(way[-2], way[-1], kind)
    assert_same(read_tensors(way[-1]), draft_tensors(case, dtype))


def test_bf16_specials_and_subnormals_cross(tmp_path: Path, target: TargetDirectory) -> None:
    """Field-note 21: all 65536 bit patterns of bf16, NaN payloads among them.

    Fault: a way through NumPy's float types, or a NaN made quiet.
    """
    case = Case(pruned=False, head="none", layers=1)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    tensors = draft_tensors(case)
    for name, shape in {"gate": (8192, H), "up": (8192, H), "down": (H, 8192)}.items():
        tensors[f"layers.0.mlp.{name}_proj.weight"] = every.reshape(shape).clone()
    fields = hf_fields(case) | {"intermediate_size": 8192}
    way = [write(tmp_path / "hf", fields, tensors)]
    for kind in ("deepspec", "speculators", "port", "hf"):
        way.append(tmp_path / kind / "out")
        convert(way[-2], way[-1], kind, Options(target))
    assert_same(read_tensors(way[-1]), tensors)


def test_every_layer_arrives_under_its_own_number(tmp_path: Path) -> None:
    """Field-note 24, with 12 layers: 10 sorts before 9 as a string.

    Faults: a loop that writes one key, an order of layers by string.
    """
    case = Case(pruned=False, head="none", layers=12)
    tensors = draft_tensors(case)
    for name in tensors:
        if name.startswith("layers."):
            tensors[name].fill_(int(name.split(".")[1]))
    way = [write(tmp_path / "hf", hf_fields(case), tensors)]
    for kind in ("port", "speculators", "hf"):
        way.append(tmp_path / kind / "out")
        convert(way[-2], way[-1], kind)
        for name, tensor in read_tensors(way[-1]).items():
            if name.startswith("layers."):
                assert (tensor == int(name.split(".")[1])).all(), name


def test_captured_layers_count_from_the_embedding_in_speculators_alone(tmp_path: Path) -> None:
    """Field-note 25, by hand: layers 0 and 2 of 4 are hidden_states[1] and [3].

    Faults: ids passed through, shifted in both formats, shifted twice on the way back.
    """
    case = CASES["full vocabulary"]
    first = write_draft(tmp_path / "hf", case)
    convert(first, tmp_path / "s", "speculators")
    assert read_json(tmp_path / "s" / "config.json")["aux_hidden_state_layer_ids"] == [1, 3]
    convert(tmp_path / "s", tmp_path / "back", "hf")
    nested = read_json(tmp_path / "back" / "config.json")["dflash_config"]
    assert nested["target_layer_ids"] == [0, 2]
    # A 4-layer target whose layer k adds 10^k to a stream that starts at 0: the states that both
    # conventions name are the same ones.
    stream = [sum(10**k for k in range(n)) for n in range(LAYERS + 1)]  # hidden_states, by index
    outputs = stream[1:]  # layer i's output
    assert [outputs[i] for i in nested["target_layer_ids"]] == [1, 111]
    assert [stream[i] for i in (1, 3)] == [1, 111]


@pytest.mark.parametrize("kind", ["speculators", "deepspec", "hf"])
@pytest.mark.parametrize("name", ["vanilla", "dflash"])
def test_pruned_exports_carry_the_kept_rows(
    kind: str, name: str, tmp_path: Path, target: TargetDirectory
) -> None:
    """Field-note 26: a server that shares the target's full head accepts about 1 %.

    Faults: the head left out, the first K rows, all V rows, rows by d2t read as absolute ids.
    """
    options = Options(target, with_head=True)
    convert(write_draft(tmp_path / "hf", CASES[name]), tmp_path / "out", kind, options)
    tensors = read_tensors(tmp_path / "out")
    U = target_tensors()[HEAD]
    assert tensors[HEAD].shape == (K, H)
    for draft_id, target_id in enumerate(KEPT):
        assert torch.equal(tensors[HEAD][draft_id], U[target_id])
        assert draft_id + int(tensors["d2t"][draft_id]) == target_id
    assert tensors["d2t"].tolist() == list(D2T)
    assert tensors["t2d"].nonzero().flatten().tolist() == list(KEPT)
