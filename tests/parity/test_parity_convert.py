"""Every ordered pair of the five formats: A → B → A, bit for bit (contracts §4, issue 6)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from format_toys import (
    CASES,
    D2T,
    DTYPE,
    HEADS,
    KEPT,
    Case,
    D,
    H,
    K,
    V,
    assert_same,
    borrowed,
    deepspec_fields,
    draft_shapes,
    draft_tensors,
    eagle3_fields,
    eagle3_shapes,
    fill,
    hf_fields,
    map_tensors,
    read_json,
    speculators_fields,
    target_tensors,
    write,
    write_draft,
    write_eagle3,
    write_target,
)
from torch import Tensor

from parity.convert import FORMATS, convert, read_checkpoint
from torch_port.errors import UserError
from torch_port.formats.checkpoint import EMBEDDING, HEAD
from torch_port.formats.convert import Options
from torch_port.formats.target import TargetDirectory

NAME = "org/target"
FIELDS = {"hf": hf_fields, "deepspec": deepspec_fields, "speculators": speculators_fields}
# What each format can hold beside the draft's own weights, map and config.
KEEPS = {
    "port": {HEAD, EMBEDDING, NAME},
    "orbax": {HEAD, EMBEDDING, NAME},
    "hf": set[str](),
    "deepspec": {HEAD, EMBEDDING},
    "speculators": {HEAD, EMBEDDING, NAME},
}


@dataclass(frozen=True)
class Kind:
    case: Case
    dtype: torch.dtype = DTYPE


KINDS = {
    "pruned bf16, neutral fields": Kind(CASES["sliding"]),
    "pruned float32": Kind(CASES["vanilla"], torch.float32),
    "unpruned bf16": Kind(CASES["full gated"]),
    "unpruned float32": Kind(CASES["full vocabulary"], torch.float32),
    "dflash": Kind(CASES["dflash"]),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetDirectory:
    return TargetDirectory(write_target(tmp_path_factory.mktemp("target") / "t"))


def beside(kind: Kind, name: str) -> dict[str, Any]:
    """What a by-hand checkpoint of a format has beside the draft; port and orbax come of
    speculators'.
    """
    rows = borrowed(kind.case, kind.dtype)
    if name == "hf":
        return {}
    if name == "deepspec":
        return rows
    return (rows if kind.case.pruned else {}) | {NAME: True}


def needs(kind: Kind, name: str) -> set[str]:
    return {
        "deepspec": {HEAD, EMBEDDING},
        "speculators": {HEAD} if kind.case.pruned else set(),
    }.get(name, set())


def move(
    kind: Kind, held: dict[str, Any], there: str, source: Path, goal: Path, target: TargetDirectory
) -> dict[str, Any]:
    """Convert, check what is told as lost, and return what the new checkpoint holds."""
    rows, missing = borrowed(kind.case), needs(kind, there) - set(held)  # the target's are bf16
    options = Options(target, verifier=NAME) if missing else Options()
    _, lost = convert(source, goal, there, options)
    words = []
    for what in set(held) - KEEPS[there]:
        shape = "" if what == NAME else list(held[what].shape)
        words.append(f"the target's name, {NAME}" if what == NAME else f"{what} {shape}")
    assert sorted(lost) == sorted(words)
    kept = {what: value for what, value in held.items() if what in KEEPS[there]}
    named = {NAME: True} if missing and there == "speculators" else {}
    return kept | {what: rows[what] for what in missing} | named


def tensors_of(directory: Path) -> dict[str, Tensor]:
    checkpoint = read_checkpoint(directory)
    refs = checkpoint.weights | {
        n: r for n, r in ((HEAD, checkpoint.head), (EMBEDDING, checkpoint.embedding)) if r
    }
    return {name: ref.load() for name, ref in refs.items()}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_there_and_back_is_the_identity(
    kind: Kind, tmp_path: Path, target: TargetDirectory
) -> None:
    """All 25 ordered pairs, against tensors and configs written by hand.

    Faults: a kernel not transposed back, a dtype cast, a name mapped one way only, a map rebuilt
    otherwise, a neutral field or the target's name forgotten, a loss that is not told.
    """
    case, place = kind.case, {}
    for name in ("hf", "deepspec", "speculators"):
        place[name] = write_draft(tmp_path / name, case, name, kind.dtype)
    for name in ("port", "orbax"):
        place[name] = tmp_path / name
        convert(place["speculators"], place[name], name)
    for a, b in product(FORMATS, FORMATS):
        there, back = tmp_path / f"{a}-{b}", tmp_path / f"{a}-{b}-{a}"
        held = move(kind, beside(kind, a), b, place[a], there, target)
        held = move(kind, held, a, there, back, target)
        wanted = draft_tensors(case, kind.dtype) | {n: t for n, t in held.items() if n != NAME}
        assert_same(tensors_of(back), wanted)
        first, last = read_checkpoint(place[a]), read_checkpoint(back)
        assert (last.format, last.algorithm, last.config) == (a, case.algorithm, first.config)
        assert last.neutral == first.neutral, (a, b)
        assert (last.verifier or {}).get("name_or_path") == (NAME if NAME in held else None)
        if a in FIELDS:
            want, got = FIELDS[a](case), read_json(back / "config.json")
            if a == "speculators" and NAME not in held:
                want["speculators_config"].pop("verifier")
                got["speculators_config"].pop("verifier")
            assert got == want, (a, b)


@pytest.mark.parametrize("pruned", [True, False])
def test_eagle3_there_and_back(pruned: bool, tmp_path: Path) -> None:
    """The three formats that have it. Faults: the identity map dropped, the head left behind or
    not transposed, the embedding lost.
    """
    place = {"hf": write_eagle3(tmp_path / "hf", pruned)}
    for name in ("port", "orbax"):
        place[name] = tmp_path / name
        convert(place["hf"], place[name], name)
    wanted = fill(eagle3_shapes(pruned)) | map_tensors(pruned)
    wanted[EMBEDDING] = target_tensors()[EMBEDDING]
    for a, b in product(place, place):
        there, back = tmp_path / f"{a}-{b}", tmp_path / f"{a}-{b}-{a}"
        assert convert(place[a], there, b)[1] == []
        assert convert(there, back, a)[1] == []
        assert_same(tensors_of(back), wanted)
        if a == "hf":
            assert read_json(back / "config.json") == eagle3_fields(pruned)
    for name in ("deepspec", "speculators"):
        with pytest.raises(UserError, match="EAGLE3"):
            convert(place["orbax"], tmp_path / name, name)
        assert not (tmp_path / name).exists()


def kernel(tensor: Tensor) -> Any:
    return tensor.float().T.numpy()


def plain(tensor: Tensor) -> Any:
    return tensor.float().numpy()


def test_what_orbax_holds_is_what_the_specification_reads(tmp_path: Path) -> None:
    """Square matrices among others: q_proj and o_proj are 8 by 8, gate_proj of the Markov head too
    would slip through a rule of shapes. By `load_draft`, against names written here.

    Faults: reader and writer wrong in the same way; a transposition by shape; W1 transposed.
    """
    from jaxdraft.draft_checkpoint import load_draft

    case = Case(head="gated")
    shapes = draft_shapes(case)
    for name in shapes:  # two heads of four: square
        if "q_proj" in name or "o_proj" in name:
            shapes[name] = (H, H)
    tensors = fill(shapes) | map_tensors(True)
    fields = hf_fields(case) | {"num_attention_heads": HEADS // 2, "num_key_value_heads": 2}
    assert H == HEADS // 2 * D
    convert(write(tmp_path / "hf", fields, tensors), tmp_path / "o", "orbax")
    draft = load_draft(tmp_path / "o")
    layer, head = draft.params["layers_1"], draft.params["markov_head"]
    for got, name, rule in (
        (layer["self_attn"]["q_proj"]["kernel"], "layers.1.self_attn.q_proj.weight", kernel),
        (layer["self_attn"]["o_proj"]["kernel"], "layers.1.self_attn.o_proj.weight", kernel),
        (layer["self_attn"]["q_norm"]["scale"], "layers.1.self_attn.q_norm.weight", plain),
        (layer["mlp"]["down_proj"]["kernel"], "layers.1.mlp.down_proj.weight", kernel),
        (draft.params["fc"]["kernel"], "fc.weight", kernel),
        (head["markov_w1"]["embedding"], "markov_head.markov_w1.weight", plain),
        (head["markov_w2"]["kernel"], "markov_head.markov_w2.weight", kernel),
        (head["gate_proj"]["kernel"], "markov_head.gate_proj.weight", kernel),
        (head["gate_proj"]["bias"], "markov_head.gate_proj.bias", plain),
    ):
        assert got.dtype.name == "bfloat16"
        assert np.array_equal(got.astype(np.float32), rule(tensors[name])), name
    assert draft.vocabulary is not None
    assert draft.vocabulary.d2t.tolist() == list(D2T)
    assert np.flatnonzero(draft.vocabulary.t2d).tolist() == list(KEPT)
    assert (draft.config.draft_vocab_size, draft.config.target_layer_ids) == (K, (0, 2))
    assert draft.config.vocab_size == V


def test_every_layer_arrives_under_its_own_number(tmp_path: Path) -> None:
    """Field-note 24, with 12 layers: each filled with its index, and 10 after 9.

    Faults: a loop that writes one key; layers in the order of strings.
    """
    from jaxdraft.draft_checkpoint import load_draft

    case = Case(pruned=False, head="none", layers=12)
    tensors = draft_tensors(case)
    for name in tensors:
        if name.startswith("layers."):
            tensors[name].fill_(int(name.split(".")[1]))
    convert(write(tmp_path / "hf", hf_fields(case), tensors), tmp_path / "o", "orbax")
    params = load_draft(tmp_path / "o").params
    for i in range(12):
        for part in params[f"layers_{i}"].values():
            for leaf in _leaves(part):
                assert (leaf == i).all(), i
    names = [n for n in read_checkpoint(tmp_path / "o").weights if n.endswith("up_proj.weight")]
    assert names == [f"layers.{i}.mlp.up_proj.weight" for i in range(12)]
    convert(tmp_path / "o", tmp_path / "back", "hf")
    assert_same(tensors_of(tmp_path / "back"), tensors)


def _leaves(tree: Any) -> list[Any]:
    return (
        [x for part in tree.values() for x in _leaves(part)] if isinstance(tree, dict) else [tree]
    )


def test_bf16_specials_and_subnormals_cross(tmp_path: Path) -> None:
    """Field-note 21: all 65536 bit patterns of bf16 through orbax, NaN payloads among them.

    Faults: a way through NumPy's own float types, a subnormal flushed to 0, a NaN made quiet.
    """
    case = Case(pruned=False, head="none", layers=1)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    tensors = draft_tensors(case)
    for name, shape in {"gate": (8192, H), "up": (8192, H), "down": (H, 8192)}.items():
        tensors[f"layers.0.mlp.{name}_proj.weight"] = every.reshape(shape).clone()
    fields = hf_fields(case) | {"intermediate_size": 8192}
    convert(write(tmp_path / "hf", fields, tensors), tmp_path / "o", "orbax")
    convert(tmp_path / "o", tmp_path / "back", "port")
    assert_same(tensors_of(tmp_path / "back"), tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_cross_unchanged(dtype: torch.dtype, tmp_path: Path) -> None:
    """Fault: float64 cut to float32 on the way, as jax does it without x64."""
    case = CASES["vanilla"]
    convert(write_draft(tmp_path / "hf", case, dtype=dtype), tmp_path / "o", "orbax")
    convert(tmp_path / "o", tmp_path / "back", "hf")
    assert_same(tensors_of(tmp_path / "back"), draft_tensors(case, dtype))


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    """Faults: a traceback of orbax; a weight that is absent filled in; something overwritten."""
    from jaxdraft.draft_checkpoint import load_draft, save_draft

    case = CASES["full vocabulary"]
    first = write_draft(tmp_path / "hf", case)
    convert(first, tmp_path / "o", "orbax")
    with pytest.raises(UserError, match="exists already"):
        convert(first, tmp_path / "o", "orbax")
    with pytest.raises(UserError, match="unknown format; there are port, hf, deepspec, specul"):
        convert(first, tmp_path / "x", "onnx")
    params = load_draft(tmp_path / "o").params
    del params["norm"]
    params["fc"] = {"kernel": np.zeros((H, 2 * H), np.float32), "bias": np.zeros(H)}
    with pytest.raises(ValueError, match="norm/scale: missing") as caught:
        save_draft(tmp_path / "none", hf_fields(case), params, None)
    for words in ("fc/bias: no parameter", "fc/kernel: shape [8, 16], the config says [16, 8]"):
        assert words in str(caught.value)
    pruned = convert(write_draft(tmp_path / "p", CASES["vanilla"]), tmp_path / "q", "orbax")[0]
    params = load_draft(tmp_path / "q").params
    with pytest.raises(ValueError, match="no vocabulary map, but the draft keeps 5 of 16"):
        save_draft(tmp_path / "none", pruned.config.to_hf(), params, None)
    assert not (tmp_path / "none").exists()
    for file in sorted((tmp_path / "o" / "draft" / "d").iterdir()):
        file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"draft cannot be read .*copy the checkpoint again"):
        read_checkpoint(tmp_path / "o")
