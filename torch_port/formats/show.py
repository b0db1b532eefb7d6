"""What a checkpoint is, in one screen, and how two differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from torch_port.config_eagle3 import Eagle3Config
from torch_port.errors import UserError
from torch_port.formats.checkpoint import EMBEDDING, HEAD, MAP, Checkpoint, check_checkpoint_map
from torch_port.formats.config_files import hf_config
from torch_port.formats.weights import TensorRef, Weights, pieces
from torch_port.models.registry import find_algorithm

_PIECE = 2**26


def coverage(checkpoint: Checkpoint, counts_file: Path) -> str:
    """Say what share of a corpus' supervised tokens the checkpoint's map keeps.

    Arguments: `counts_file`, what `torch-port vocab count` wrote of the corpus.
    Raises UserError for counts of another V.
    """
    from torch_port.vocabulary.counts import load_counts

    counts = load_counts(counts_file).counts
    V = checkpoint.config.vocab_size
    if len(counts) != V:
        raise UserError(
            f"--counts {counts_file}: of {len(counts)} ids, but the draft has vocab_size {V}; "
            "count with the target's --vocab-size"
        )
    kept = check_checkpoint_map(checkpoint.weights, checkpoint.config, checkpoint.format)
    inside = counts.sum() if kept is None else counts[kept.numpy()].sum()
    return f"{inside / max(counts.sum(), 1):.2%} of {counts.sum():,} supervised tokens"


def summary(checkpoint: Checkpoint, counts_file: Path | None = None) -> dict[str, Any]:
    """Return what `show` prints, by name; values are JSON values.

    With `counts_file`, the map's coverage of that corpus too.
    The fingerprint of the weights is the sha256 over name, dtype, shape and bytes of each tensor in
    the order of names: equal for equal drafts in any format. It reads all of them.
    """
    config = checkpoint.config
    weights = {n: r for n, r in checkpoint.weights.items() if n not in MAP}
    count = sum(r.nbytes // _element(r) for r in weights.values())
    result: dict[str, Any] = {
        "format": checkpoint.format,
        "algorithm": checkpoint.algorithm,
        "layout": find_algorithm(checkpoint.algorithm).layout,
        "vocab_size (V)": config.vocab_size,
        "draft_vocab_size (K)": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "layers": getattr(config, "num_hidden_layers", 1),
        "heads (query/kv)": f"{config.num_attention_heads}/{config.num_key_value_heads}",
        "target layers": list(config.target_layer_ids),
    }
    if not isinstance(config, Eagle3Config):
        result |= {
            "block_size (γ)": config.block_size,
            "mask_token_id": config.mask_token_id,
            "markov head": f"{config.markov_head_type}, rank {config.markov_rank}"
            if config.markov_rank
            else "none",
            "confidence head": "yes" if config.enable_confidence_head else "none",
        }
    result |= {
        "parameters": count,
        "dtype": checkpoint.dtype,
        "output head": _borrowed_text(checkpoint.head, checkpoint.weights.get(HEAD)),
        "embedding": _borrowed_text(checkpoint.embedding, None),
        "map": _map_text(checkpoint),
        **({} if counts_file is None else {"coverage": coverage(checkpoint, counts_file)}),
        "weights sha256": fingerprint(weights),
    }
    if checkpoint.verifier:
        result["target"] = checkpoint.verifier.get("name_or_path")
    training = checkpoint.training
    if training is not None:
        result |= {
            "step": training["step"],
            "updates": training["updates"],
            "optimizer tensors": len(checkpoint.optimizer),
            "target sha256": training["target"]["fingerprint"],
        }
    return result


def fingerprint(weights: Weights) -> str:
    """Return the sha256 over name, dtype, shape and bytes of tensors, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        ref = weights[name]
        digest.update(f"{name}\0{ref.dtype}\0{list(ref.shape)}\0".encode())
        for piece in pieces(ref.load(), _PIECE):
            digest.update(piece.numpy().data)
    return digest.hexdigest()


def print_summary(
    checkpoint: Checkpoint, console: Console, counts_file: Path | None = None
) -> None:
    """Print what the checkpoint is, and what reading it derived."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in summary(checkpoint, counts_file).items():
        if type(value) is int and name in ("parameters", "vocab_size (V)", "draft_vocab_size (K)"):
            shown = f"{value:,}"
        else:
            shown = value if isinstance(value, str) else json.dumps(value)
        table.add_row(Text(name, "bold"), Text(shown))
    console.print(table)
    for note in checkpoint.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Difference:
    """One thing in which two checkpoints differ; `size` is the largest difference of a tensor."""

    name: str
    first: str
    second: str
    size: float | None = None


def differences(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    """Yield how two checkpoints differ: config, map, names, shapes, dtypes, values.

    What a format does not hold (a head that the target has) counts as a difference of names.
    """
    configs = [hf_config(c.config, {}) for c in (first, second)]
    for name in sorted(set(configs[0]) | set(configs[1])):
        values = [config.get(name) for config in configs]
        if values[0] != values[1]:
            yield Difference(f"config {name}", json.dumps(values[0]), json.dumps(values[1]))
    tensors = [_all_tensors(c) for c in (first, second)]
    for name in sorted(set(tensors[0]) | set(tensors[1])):
        a, b = (place.get(name) for place in tensors)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            yield Difference(name, _ref_text(a), _ref_text(b))
            continue
        size = _largest_difference(a.load(), b.load())
        if size is not None:
            yield Difference(name, "", "", size)


def _all_tensors(checkpoint: Checkpoint) -> Weights:
    borrowed = {HEAD: checkpoint.head, EMBEDDING: checkpoint.embedding}
    present = {name: ref for name, ref in borrowed.items() if ref is not None}
    return checkpoint.weights | present | checkpoint.optimizer


def _largest_difference(a: Tensor, b: Tensor) -> float | None:
    """Return the largest difference of two tensors of one shape, or None when bytes are equal."""
    largest, equal = 0.0, True
    for x, y in zip(_rows(a), _rows(b), strict=True):
        if torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            continue
        equal = False
        if x.dtype == torch.bool:
            largest = 1.0
        else:  # NaN where only one is: not comparable, said as infinitely far
            gap = (x.double() - y.double()).abs().nan_to_num(nan=torch.inf)
            largest = max(largest, gap.max().item())
    return None if equal else largest


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    yield from tensor.contiguous().view(-1).split(_PIECE // 8) if tensor.numel() else ()


def _element(ref: TensorRef) -> int:
    count = 1
    for extent in ref.shape:
        count *= extent
    return ref.nbytes // count if count else 1


def _ref_text(ref: TensorRef | None) -> str:
    return "absent" if ref is None else f"{ref.dtype} {list(ref.shape)}"


def _borrowed_text(ref: TensorRef | None, own: TensorRef | None) -> str:
    if own is not None:
        return f"its own, {_ref_text(own)}"
    return "the target's, not in the file" if ref is None else f"in the file, {_ref_text(ref)}"


def _map_text(checkpoint: Checkpoint) -> str:
    kept = check_checkpoint_map(checkpoint.weights, checkpoint.config, checkpoint.format)
    if kept is None:
        return "none: unpruned"
    digest = hashlib.sha256(kept.numpy().tobytes()).hexdigest()[:12]
    share = len(kept) / checkpoint.config.vocab_size
    return f"{len(kept):,} ids ({share:.1%} of V), first {kept[:5].tolist()}, sha256 {digest}"
