"""Counting feature directories: their supervised ids, and the teacher's mass on every id.

Ids and masks are read shard by shard; states only for the mass, the final ones, by samples.
Imports torch, as reading features does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from torch_port.data.features import FeatureDirectory
from torch_port.errors import UserError
from torch_port.progress import Stage, stage
from torch_port.vocabulary.counting import count_supervised_tokens
from torch_port.vocabulary.counts import TokenCounts, cache_key, read_cache, write_cache
from torch_port.vocabulary.mass import TeacherMass
from torch_port.vocabulary.target_head import head_fingerprint
from torch_port.vocabulary.tokens import TokenizerFacts, check_sizes


def count_features(
    directories: Sequence[Path],
    tokenizer: TokenizerFacts,
    vocab_size: int,
    console: Console,
    *,
    head_VH: Tensor | None = None,
    cache: Path | None = None,
) -> tuple[TokenCounts, bool]:
    """Count the supervised tokens of feature directories, and sum the teacher's mass with a head.

    The corpus fingerprint is over what is counted: the samples' names and lengths, ids and masks,
    however they are sharded, not over the captured layers, which change no count. With a head the
    cache also asks for the same final states.
    Finding it reads the tokens once, so they are counted on the way; the cache saves the mass.

    Arguments: `directories`; the target's `tokenizer`; `vocab_size` V; `head_VH` U, or None for
    counts alone; `cache` directory or None.
    Returns (counts, whether the cache held them).
    Raises UserError for a directory given twice or without features, supervised ids that the
    tokenizer cannot produce, and a corpus without a supervised token.
    """
    check_sizes(tokenizer, vocab_size)
    if len({path.resolve() for path in directories}) < len(directories):
        raise UserError(
            f"corpus: a directory is given twice among {', '.join(map(str, directories))}, and its "
            "tokens would count twice; give every directory once"
        )
    features = [FeatureDirectory(path) for path in directories]
    total = sum(map(len, features))
    digest = _Digest()
    rows = sum(sum(directory.lengths) for directory in features)
    with stage("counting", rows, console) as progress:
        tokens = _tokens(features, digest, head_VH is not None, progress)
        counts = count_supervised_tokens(tokens, vocab_size, tokenizer.size)
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
        mass=None if head_VH is None else _mass(features, head_VH, total, console),
        special_ids=np.array(tokenizer.special_ids, dtype=np.int64),
        byte_ids=np.array(tokenizer.byte_ids, dtype=np.int64),
        tokenizer_size=tokenizer.size,
        samples=total,
        truncated=0,  # the capture cut them, and features do not say which
        source="features",
        corpus_fingerprint=digest.corpus(),
        tokenizer_fingerprint=tokenizer.fingerprint,
        target_fingerprint=target,
    )
    write_cache(cache, key, result)
    return result, False


class _Digest:
    """Fingerprints that grow with what is read; one stream each, so that sharding is no part."""

    def __init__(self) -> None:
        self._streams = {name: hashlib.sha256() for name in ("samples", "ids", "mask", "states")}

    def add(self, name: str, content: bytes | memoryview) -> None:
        self._streams[name].update(content)

    def corpus(self) -> str:
        parts = [self._streams[name].hexdigest() for name in ("samples", "ids", "mask")]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def states(self) -> str:
        return self._streams["states"].hexdigest()


def _tokens(
    features: Sequence[FeatureDirectory], digest: _Digest, with_states: bool, progress: Stage
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Yield ids and masks, and add to the digest what is counted of them."""
    done = 0
    for directory in features:
        samples = [list(pair) for pair in zip(directory.ids, directory.lengths, strict=True)]
        digest.add("samples", json.dumps(samples).encode())
        for ids, mask, *states in _read(directory, with_states):
            counted = ids.long().numpy(), mask.float().numpy()
            digest.add("ids", counted[0].data)
            digest.add("mask", counted[1].data)
            for tensor in states:
                digest.add("states", f"{tensor.dtype}\0{list(tensor.shape)}\0".encode())
                digest.add("states", _bytes(tensor.contiguous()))
            yield counted
            done += len(ids)
            progress.update(done)


def _read(directory: FeatureDirectory, with_states: bool) -> Iterator[tuple[Tensor, ...]]:
    """Ids and masks of a shard at a time; with the final states of a sample at a time."""
    if not with_states:
        yield from directory.iter_tokens()  # a file is opened once, not once for every sample
        return
    for i in range(len(directory)):
        sample = directory.final_states(i)
        yield sample["input_ids"], sample["loss_mask"], sample["target_last_hidden_states"]


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes; NumPy has no bf16."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _mass(
    features: Sequence[FeatureDirectory], head_VH: Tensor, total: int, console: Console
) -> NDArray[np.float64]:
    mass, done = TeacherMass(head_VH), 0
    with stage("teacher mass", total, console) as progress:
        for directory in features:
            for i in range(len(directory)):
                sample = directory.final_states(i)
                mass.add(sample["target_last_hidden_states"], sample["loss_mask"])
                done += 1
                progress.update(done)
        return mass.total().numpy()
