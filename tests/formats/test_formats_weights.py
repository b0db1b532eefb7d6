"""Weights and maps that are refused; every problem of a checkpoint is named at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from format_faults import refuse, with_tensors
from format_toys import (
    CASES,
    DTYPE,
    KEPT,
    H,
    K,
    V,
    borrowed,
    deepspec_fields,
    draft_tensors,
    map_tensors,
    read_json,
    read_tensors,
    target_tensors,
    write,
    write_draft,
    write_eagle3,
)
from torch import Tensor

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
PRUNED = CASES["vanilla"]


def test_missing_weights_are_all_named(tmp_path: Path) -> None:
    """Field-note 22: one norm and the head left out: both named.

    Faults: filled with fresh values; only the first one named."""
    case = CASES["full vocabulary"]
    tensors = draft_tensors(case) | borrowed(case)
    del tensors["layers.1.input_layernorm.weight"], tensors["markov_head.markov_w2.weight"]
    message = refuse(write(tmp_path / "a", deepspec_fields(case), tensors), "missing")
    assert "layers.1.input_layernorm.weight: missing" in message
    assert "markov_head.markov_w2.weight: missing" in message


def test_a_missing_norm_and_eagle3s_missing_head(tmp_path: Path) -> None:
    """Field-note 22 where the head is the draft's own."""
    directory = write_eagle3(tmp_path / "whole")
    tensors = read_tensors(directory)
    del tensors["norm.weight"], tensors[HEAD]
    message = refuse(
        write(tmp_path / "a", read_json(directory / "config.json"), tensors), "missing"
    )
    assert "norm.weight: missing" in message
    assert "lm_head.weight: missing" in message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"extra__weight": torch.ones(3)}, r"extra\.weight: no weight of"),
        ({"layers__2__norm": torch.ones(3)}, r"layers\.2\.norm: the config has .*layers 2"),
        ({"fc__weight": torch.zeros(H, H).bfloat16()}, r"fc\.weight: shape \[8, 8\].*\[8, 16\]"),
        ({"fc__weight": torch.zeros(2 * H, H).bfloat16()}, r"fc\.weight: shape \[16, 8\]"),
        ({"fc__weight_scale": torch.ones(H)}, r"fc\.weight_scale: of a quantised draft"),
        ({"fc__weight": torch.zeros(H, 2 * H, dtype=torch.int8)}, "weight is of dtype I8: quant"),
        ({"fc__weight": torch.zeros(H, 2 * H).to(torch.float8_e4m3fn)}, "is of dtype F8"),
        ({"fc__weight": torch.zeros(H, 2 * H, dtype=torch.int64)}, r"fc\.weight: dtype I64"),
        ({"fc__weight": torch.zeros(H, 2 * H).half()}, "both F16 and BF16"),
        ({"d2t": torch.zeros(K, dtype=torch.int32)}, r"d2t is of dtype I32"),
        ({"d2t": torch.zeros(K)}, r"d2t: dtype F32, but I64"),
        ({"t2d": torch.zeros(V, dtype=torch.int64)}, r"t2d: dtype I64, but BOOL"),
    ],
)
def test_weights_that_do_not_fit(changes: dict[str, Tensor], text: str, tmp_path: Path) -> None:
    """Faults: an unknown weight dropped; a transposed one turned by its shape; codes as values."""
    message = refuse(with_tensors(tmp_path, **changes), text)
    assert "destination" not in message


def test_a_map_in_an_unpruned_draft(tmp_path: Path) -> None:
    """Fault: silently dropped: the head rows would mean other tokens."""
    source = with_tensors(tmp_path, CASES["full vocabulary"], **map_tensors(True))
    refuse(source, r"t2d: the config has no draft_vocab_size below vocab_size")


def test_a_pruned_draft_without_its_map(tmp_path: Path) -> None:
    """Fault: ids 0 … K−1 (field-note 2)."""
    message = refuse(with_tensors(tmp_path, t2d=None, d2t=None), "t2d: missing")
    assert "d2t: missing" in message


def kept(*ids: int) -> Tensor:
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[list(ids)] = True
    return t2d


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"t2d": torch.zeros(V, dtype=torch.bool)}, "never installed"),
        ({"t2d": kept(0, 3, 4, 9, 13)}, "nonzero"),
        ({"d2t": torch.tensor(KEPT)}, "offsets, not absolute ids"),
        ({"d2t": torch.tensor([0, 2, 2, 6, 99])}, "nonzero"),
        ({"d2t": torch.tensor([-1, 2, 2, 6, 8])}, "nonzero"),
        ({"t2d": kept(0, 3, 4, 9)}, "nonzero"),
        ({"t2d": kept(0, 3, 4, 9, 12)[:-1].clone()}, r"t2d: shape \[15\]"),
    ],
)
def test_maps_that_contradict_themselves(
    changes: dict[str, Tensor], text: str, tmp_path: Path
) -> None:
    """Field-note 3. Faults: d2t read as ids; −1 or V as an id; a map never installed exported."""
    refuse(with_tensors(tmp_path, **changes), text)


@pytest.mark.parametrize(
    ("name", "rows", "text"),
    [
        (HEAD, V, "all of the target's rows, not the K kept ones"),
        (HEAD, K - 1, r"lm_head\.weight: shape \[4, 8\]"),
        (EMBEDDING, V + 8, "8 rows more than vocab_size 16 are padding, no pruning"),
    ],
)
def test_rows_of_what_is_borrowed(name: str, rows: int, text: str, tmp_path: Path) -> None:
    """Field-notes 26, 27. Faults: all V rows beside a map; padding taken for pruning or cut off."""
    case = PRUNED
    tensors = draft_tensors(case) | borrowed(case)
    tensors[name] = torch.zeros(rows, H, dtype=DTYPE)
    refuse(write(tmp_path / "a", deepspec_fields(case), tensors), text)


def test_padded_head_rows_are_no_pruning(tmp_path: Path) -> None:
    """Field-note 27 in an unpruned file: 24 rows, vocab_size 16.

    Faults: read as a vocabulary of 24, or cut to 16 in silence."""
    case = CASES["full vocabulary"]
    tensors = draft_tensors(case) | target_tensors(V + 8)
    refuse(
        write(tmp_path / "a", deepspec_fields(case), tensors), "8 rows more.*padding, no pruning"
    )


@pytest.mark.parametrize(
    ("kind", "name"), [("deepspec", HEAD), ("deepspec", EMBEDDING), ("speculators", HEAD)]
)
def test_what_a_format_always_carries(kind: str, name: str, tmp_path: Path) -> None:
    """Field-note 22. Fault: a file that lost its head is read as one that never had it."""
    directory = write_draft(tmp_path / "whole", PRUNED, kind)
    tensors = read_tensors(directory)
    del tensors[name]
    source = write(tmp_path / "a", read_json(directory / "config.json"), tensors)
    refuse(source, f"{name}: missing")
