"""Counting feature directories: their supervised ids, and the teacher's mass on every id.

Ids and masks are read in pieces, by several processes; states only for the mass, the final ones.
Imports torch, as reading features does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from torch_port.data.features import TOKEN_NAMES, FeatureDirectory
from torch_port.errors import UserError
from torch_port.progress import stage
from torch_port.vocabulary.counting import count_supervised_tokens
from torch_port.vocabulary.counts import TokenCounts, cache_key, read_cache, write_cache
from torch_port.vocabulary.feature_pieces import FeaturePiece, feature_pieces, read_samples
from torch_port.vocabulary.mass import PIECE_ROWS, sum_mass
from torch_port.vocabulary.parallel import check_workers, in_processes
from torch_port.vocabulary.target_head import head_fingerprint
from torch_port.vocabulary.tokens import TokenizerFacts, check_sizes

# Tokens of a piece: 12 MB of ids and masks; with states, which are H times as wide, fewer.
_ROWS, _ROWS_WITH_STATES = 1 << 20, PIECE_ROWS
_PIECES_EACH = 8  # at least so many for each process
_STATES = "target_last_hidden_states"


def count_features(
    directories: Sequence[Path],
    tokenizer: TokenizerFacts,
    vocab_size: int,
    console: Console,
    *,
    workers: int = 1,
    head_VH: Tensor | None = None,
    cache: Path | None = None,
    piece_rows: int | None = None,
) -> tuple[TokenCounts, bool]:
    """Count the supervised tokens of feature directories, and sum the teacher's mass with a head.

    The corpus fingerprint is over what is counted: the samples' names and lengths, ids and masks,
    however they are sharded, not over the captured layers, which change no count. With a head the
    cache also asks for the same final states.
    Finding it reads the tokens once, so they are counted on the way; the cache saves the mass.
    The result is the same, bit for bit, for any number of workers.

    Arguments: `directories`; the target's `tokenizer`; `vocab_size` V; `workers`, processes that
    count (1: this one) and threads that sum the mass; `head_VH` U, or None for counts alone;
    `cache` directory or None; `piece_rows`, tokens that a process takes at a time (chosen).
    Returns (counts, whether the cache held them).
    Raises UserError for a directory given twice or without features, supervised ids that the
    tokenizer cannot produce, and a corpus without a supervised token.
    """
    check_sizes(tokenizer, vocab_size)
    check_workers(workers)
    if len({path.resolve() for path in directories}) < len(directories):
        raise UserError(
            f"corpus: a directory is given twice among {', '.join(map(str, directories))}, and its "
            "tokens would count twice; give every directory once"
        )
    features = [FeatureDirectory(path) for path in directories]
    settings = (vocab_size, tokenizer.size, head_VH is not None)
    pieces = feature_pieces(
        features, piece_rows or (_ROWS if head_VH is None else _ROWS_WITH_STATES)
    )
    # A process starts as long as torch imports: fewer of them where there is little to count.
    processes = min(workers, len(pieces) if piece_rows else max(1, len(pieces) // _PIECES_EACH))
    counts, digest = _count_pieces(features, pieces, settings, console, processes)
    if not counts.any():
        raise UserError(
            "corpus: no supervised token in the features; their loss masks are 0 everywhere. "
            "Capture conversations with assistant turns"
        )
    target = "" if head_VH is None else head_fingerprint(head_VH)
    key = cache_key(
        digest.corpus(), tokenizer.fingerprint, vocab_size, target and target + digest.states()
    )
    held = read_cache(cache, key)
    if held is not None:
        return held, True
    result = TokenCounts(
        counts=counts,
        mass=None if head_VH is None else sum_mass(features, head_VH, console, workers),
        special_ids=np.array(tokenizer.special_ids, dtype=np.int64),
        byte_ids=np.array(tokenizer.byte_ids, dtype=np.int64),
        tokenizer_size=tokenizer.size,
        samples=sum(map(len, features)),
        truncated=0,  # the capture cut them, and features do not say which
        corpus_fingerprint=digest.corpus(),
        tokenizer_fingerprint=tokenizer.fingerprint,
        contents=digest.contents(),
        target_fingerprint=target,
    )
    write_cache(cache, key, result)
    return result, False


class _Digest:
    """Fingerprints of directories, from the digests of their samples: sharding is no part."""

    def __init__(self, features: Sequence[FeatureDirectory]) -> None:
        self._names = [
            json.dumps([list(pair) for pair in zip(one.ids, one.lengths, strict=True)])
            for one in features
        ]
        self._left = [len(one) for one in features]
        self._tokens = [hashlib.sha256() for _ in features]
        self._states = hashlib.sha256()
        self._at = 0

    def add(self, tokens: Sequence[bytes], states: bytes) -> None:
        """Add the next samples of the directory that is not complete yet."""
        while not self._left[self._at]:
            self._at += 1
        self._left[self._at] -= len(tokens)
        self._tokens[self._at].update(b"".join(tokens))
        self._states.update(states)

    def contents(self) -> tuple[str, ...]:
        """Return the sha256 of every directory's ids and masks."""
        return tuple(one.hexdigest() for one in self._tokens)

    def corpus(self) -> str:
        return hashlib.sha256(json.dumps([self._names, self.contents()]).encode()).hexdigest()

    def states(self) -> str:
        return self._states.hexdigest()


@dataclass(frozen=True)
class _Part:
    """What a piece held: `ids` that occur and how often, and its samples' digests."""

    ids: NDArray[np.int64]
    found: NDArray[np.int64]
    tokens: list[bytes]
    states: bytes


def _count_pieces(
    features: Sequence[FeatureDirectory],
    pieces: Sequence[FeaturePiece],
    settings: tuple[int, int, bool],
    console: Console,
    workers: int,
) -> tuple[NDArray[np.int64], _Digest]:
    total, digest = np.zeros(settings[0], dtype=np.int64), _Digest(features)
    if workers > 1:
        parts = in_processes(_count, pieces, workers, _start, settings)
    else:
        parts = map(_Counter(*settings), pieces)
    rows = sum(sum(directory.lengths) for directory in features)
    done = supervised = 0
    with stage("counting", rows, console) as progress:
        for piece, part in zip(pieces, parts, strict=True):
            total[part.ids] += part.found
            digest.add(part.tokens, part.states)
            done += piece.rows
            supervised += int(part.found.sum())
            progress.update(done, f"{supervised:,} supervised tokens")
    return total, digest


class _Counter:
    """Counts pieces and digests what it counted."""

    def __init__(self, vocab_size: int, usable: int, with_states: bool) -> None:
        self.vocab_size, self.usable = vocab_size, usable
        self.names = (*TOKEN_NAMES, _STATES) if with_states else TOKEN_NAMES

    def __call__(self, piece: FeaturePiece) -> _Part:
        self.tokens: list[bytes] = []
        self.states: list[bytes] = []
        counts = count_supervised_tokens(self._samples(piece), self.vocab_size, self.usable)
        ids = np.nonzero(counts)[0]
        return _Part(ids, counts[ids], self.tokens, b"".join(self.states))

    def _samples(
        self, piece: FeaturePiece
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        for ids, mask, *states in read_samples(piece, self.names):
            counted = ids.long().numpy(), mask.float().numpy()
            token_digest = hashlib.sha256(counted[0].data)
            token_digest.update(counted[1].data)
            self.tokens.append(token_digest.digest())
            for tensor in states:
                state = hashlib.sha256(f"{tensor.dtype}\0{list(tensor.shape)}\0".encode())
                state.update(_bytes(tensor.contiguous()))
                self.states.append(state.digest())
            yield counted


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes; NumPy has no bf16."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


# Of a worker process, made by `_start`.
_counter: _Counter | None = None


def _start(*settings: int) -> None:
    global _counter
    torch.set_num_threads(1)  # the processes share the cores
    _counter = _Counter(*settings)  # type: ignore[arg-type]


def _count(piece: FeaturePiece) -> _Part:
    assert _counter is not None
    return _counter(piece)
