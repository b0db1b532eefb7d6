"""Feature directories in pieces of whole samples, read by rows: what several processes share.

Pieces do not depend on how a directory is sharded, nor on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from torch_port.data.conversations import DataError
from torch_port.data.features import FeatureDirectory


@dataclass(frozen=True)
class Run:
    """Samples that lie one after the other in a shard, from row `start` on."""

    shard: Path
    start: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class FeaturePiece:
    """Consecutive samples of one directory, in its order."""

    runs: tuple[Run, ...]

    @property
    def rows(self) -> int:
        """Tokens of the piece."""
        return sum(sum(run.lengths) for run in self.runs)

    @property
    def samples(self) -> int:
        """Samples of the piece."""
        return sum(len(run.lengths) for run in self.runs)


def feature_pieces(features: Sequence[FeatureDirectory], rows: int) -> list[FeaturePiece]:
    """Cut directories into pieces that end with the sample that brings them to `rows` tokens."""
    return [piece for directory in features for piece in _pieces_of(directory, rows)]


def _pieces_of(directory: FeatureDirectory, rows: int) -> Iterator[FeaturePiece]:
    # Runs, because opening a shard anew for every sample costs 50 times the reading.
    runs: list[Run] = []
    lengths: list[int] = []  # of the run that is open
    shard, start, end, held = directory.path, 0, 0, 0

    def close() -> None:
        if lengths:
            runs.append(Run(shard, start, tuple(lengths)))
            lengths.clear()

    for place, length in zip(directory.places, directory.lengths, strict=True):
        if place != (shard, end):
            close()
        if not lengths:
            shard, start = place
            end = start
        lengths.append(length)
        end += length
        held += length
        if held >= rows:
            close()
            yield FeaturePiece(tuple(runs))
            held = 0
            runs.clear()
    close()
    if runs:
        yield FeaturePiece(tuple(runs))


def read_samples(piece: FeaturePiece, names: Sequence[str]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the named tensors of every sample of a piece; a run is read at once.

    Raises DataError for a shard that is missing, damaged or shorter than its index says.
    """
    for run in piece.runs:
        rows = sum(run.lengths)
        try:
            with safe_open(run.shard, framework="pt") as file:
                tensors = [file.get_slice(name)[run.start : run.start + rows] for name in names]
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{run.shard}: expected a feature shard, found: {error}. Write the features again."
            ) from None
        if any(len(tensor) != rows for tensor in tensors):
            raise DataError(
                f"{run.shard}: expected rows up to {run.start + rows}, as the index says, found "
                "fewer. Write the features again."
            )
        yield from zip(*(tensor.split(run.lengths) for tensor in tensors), strict=True)
