"""`parity selection`: two rules for choosing the draft vocabulary, on the same captured features.

By counts of the supervised tokens, and by the teacher's summed probability, which is by
construction the K-subset with the largest mean kept mass on the data it was summed over. What it
gains there and on held-out data is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from parity.cases import CaseError
from parity.sides import setup_jax

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class SelectionRow:
    """One K: what the map by counts and the map by mass keep, a pair for each measure."""

    size: int
    shared: float  # share of the K ids that both maps keep
    train: tuple[float, float]  # mean kept mass on the training samples
    heldout: tuple[float, float]  # and on the held-out ones
    coverage: tuple[float, float]  # of held-out tokens


def compare_rules(
    directory: Path, sizes: Sequence[int], progress: Callable[[int, int], None] = lambda *_: None
) -> tuple[list[SelectionRow], int]:
    """Build both maps for every K and measure them.

    Arguments: `directory` of a prepared demo (features/train, features/heldout, target); K's.
    Returns a row per K, and V.
    Raises CaseError when the directory holds no such features.
    """
    setup_jax()
    from jaxdraft.vocabulary import build_map, build_map_by_mass

    weights = directory / "target" / "model.safetensors"
    if not weights.is_file():
        raise CaseError(
            f"{directory}: no prepared demo; run `torch-port demo` and give the directory below "
            "demo/ in its cache (TORCH_PORT_CACHE, else the user's cache directory)"
        )
    with safe_open(weights, "np") as file:
        head = file.get_tensor("lm_head.weight")
    V = len(head)
    mass, counts = _sums(directory / "features" / "train", head, progress)
    heldout_mass, heldout_counts = _sums(directory / "features" / "heldout", head, progress)
    rows = []
    for size in sizes:
        by_count = np.asarray(build_map(counts, size).t2d)
        by_mass = np.asarray(build_map_by_mass(mass, size).t2d)
        kept = (by_count, by_mass)
        rows.append(
            SelectionRow(
                size=size,
                shared=float((by_count & by_mass).sum() / size),
                train=_shares(mass, kept),
                heldout=_shares(heldout_mass, kept),
                coverage=_shares(heldout_counts.astype(np.float64), kept),
            )
        )
    return rows, V


def _shares(
    total: Vector, kept: tuple[NDArray[np.bool_], NDArray[np.bool_]]
) -> tuple[float, float]:
    by_count, by_mass = (float(total[map_].sum() / total.sum()) for map_ in kept)
    return by_count, by_mass


def _sums(
    features: Path, head: NDArray[np.float32], progress: Callable[[int, int], None]
) -> tuple[Vector, NDArray[np.int64]]:
    """Sum the teacher's probability and count the tokens over a set's supervised positions."""
    import jax

    from jaxdraft.vocabulary import teacher_mass

    add = jax.jit(teacher_mass)
    mass, counts = np.zeros(len(head)), np.zeros(len(head), dtype=np.int64)
    for done, total, ids, mask, states in _padded(features):
        mass += np.asarray(add(states[None], mask[None], head), dtype=np.float64)
        supervised = mask > 0.5
        supervised[0] = False  # its teacher would stand before the sequence
        counts += np.bincount(ids[supervised], minlength=len(head))
        progress(done, total)
    return mass, counts


def _padded(
    features: Path,
) -> Iterator[tuple[int, int, NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]]:
    """Yield every sample padded to the longest, so that one compilation serves all."""
    from torch_port.data.features import FeatureDirectory

    directory = FeatureDirectory(features)
    longest = max(directory.lengths)
    for index in range(len(directory)):
        sample = {name: value.numpy() for name, value in directory[index].items()}
        pad = longest - len(sample["input_ids"])
        yield (
            index + 1,
            len(directory),
            np.pad(sample["input_ids"], (0, pad)),
            np.pad(sample["loss_mask"], (0, pad)),
            np.pad(sample["target_last_hidden_states"], ((0, pad), (0, 0))),
        )


def markdown(rows: Sequence[SelectionRow]) -> str:
    """Return the rows as a Markdown table, shares in per cent."""
    lines = [
        "| K | ids shared | kept mass, training: count → mass | held-out: count → mass | gain "
        "held-out | held-out coverage: count → mass |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        (train_a, train_b), (held_a, held_b) = row.train, row.heldout
        cover_a, cover_b = row.coverage
        lines.append(
            f"| {row.size} | {row.shared:.1%} | {train_a:.2%} → {train_b:.2%} | {held_a:.2%} → "
            f"{held_b:.2%} | {100 * (held_b - held_a):+.2f} pt | {cover_a:.2%} → {cover_b:.2%} |"
        )
    return "\n".join(lines)
