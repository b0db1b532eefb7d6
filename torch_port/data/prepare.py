"""Conversations to token ids and loss masks on disk: what a capture reads. No torch.

A prepared directory has the index of a feature directory, and shards with `input_ids` int32 and
`loss_mask` uint8 alone; its tokens are read by the same reader. One piece of the corpus makes one
shard, so the bytes do not depend on how many processes worked.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from safetensors.numpy import save_file

from torch_port.anchors import is_trainable
from torch_port.data.atomic import atomic_file
from torch_port.data.conversations import DataError, Sample, parse_conversation
from torch_port.data.fingerprints import corpus_fingerprint, tokenizer_fingerprint
from torch_port.data.index import Index, entry, read_index
from torch_port.data.parallel import in_processes
from torch_port.data.resumable import INDEX_NAME, claimed, read_about, write_index, write_shard
from torch_port.data.templates import ChatTemplate, encoder
from torch_port.data.text_pieces import TextPiece, id_of_place, read_lines, text_pieces
from torch_port.progress import stage

RECORD_NAME = "prepare.json"
DROPS_NAME = "drops.jsonl"
# Some seconds of work and a shard of some megabytes; fixed, since the shards' bytes hang on it.
PIECE_BYTES = 4 << 20

# Why a conversation is left out.
UNREADABLE = "no conversation of system, user and assistant turns"
TEMPLATE = "the chat template cannot render it, or not turn by turn"
NO_ANSWER = "no assistant turn"
CUT_OFF = "no two supervised tokens in a row before --max-length"
TOO_SHORT = "no two supervised tokens in a row"


@dataclass(frozen=True)
class Corpus:
    """Conversations and what makes tokens of them; `tokenizer` is a tokenizer.json."""

    files: tuple[Path, ...]
    tokenizer: Path
    chat_template: ChatTemplate
    max_length: int
    piece_bytes: int = PIECE_BYTES

    def inputs(self) -> dict[str, Any]:
        """Return all that decides the result; names of the files are no part of it."""
        contents = [corpus_fingerprint(file.parent, [file], "", 0) for file in self.files]
        return {
            "format": 1,
            "corpus": hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
            "tokenizer_fingerprint": tokenizer_fingerprint(self.tokenizer),
            "chat_template": self.chat_template.name,
            "template_fingerprint": self.chat_template.fingerprint,
            "max_length": self.max_length,
            "piece_bytes": self.piece_bytes,
        }


@dataclass(frozen=True)
class PrepareSummary:
    """What became of a corpus' conversations: kept (of them cut), dropped by reason, and tokens."""

    kept: int
    truncated: int
    dropped: Mapping[str, int]
    tokens: int
    supervised: int
    shards: int


def prepare_corpus(
    corpus: Corpus, directory: Path, console: Console, workers: int = 1
) -> PrepareSummary:
    """Encode conversations, leave out what cannot train, and write a prepared directory.

    A sample is kept when it has an anchor candidate (spec sheet §3.1). What is left out is counted,
    and listed in drops.jsonl with id, reason and detail. Interrupted, it goes on with the shards
    that are not there yet; its bytes do not depend on `workers`.

    Arguments: `corpus`; `directory` to write; `workers`, processes that encode (1: this one).
    Returns the summary.
    Raises DataError for unusable settings, a directory of other inputs, a corpus of which nothing
    is left, and a file that changed while it was read.
    """
    _check(corpus)
    stamps = _stamps(corpus)
    with stage("fingerprint", 1, console):
        inputs = corpus.inputs()
    with claimed(directory, RECORD_NAME, inputs):
        if (directory / INDEX_NAME).is_file():
            return summary_of(read_index(directory))
        pieces = text_pieces(corpus.files, corpus.piece_bytes)
        jobs = [(number, piece) for number, piece in enumerate(pieces)]
        left = [job for job in jobs if not (directory / _shard_name(job[0])).is_file()]
        _encode_all(corpus, directory, left, len(jobs), console, workers)
        if _stamps(corpus) != stamps:
            raise DataError(
                f"{', '.join(map(str, corpus.files))}: changed while it was read. Remove "
                f"{directory}, and prepare again when nothing writes to the corpus."
            )
        with stage("index", 1, console):
            names = [_shard_name(number) for number, _ in jobs]
            abouts = [_about(directory / name) for name in names]
            index = _finish(directory, names, abouts, inputs)
    return summary_of(index)


def summary_of(index: Index) -> PrepareSummary:
    """Return the summary that a prepared directory's index keeps."""
    told = index.metadata
    return PrepareSummary(
        kept=len(index.samples),
        truncated=told["truncated"],
        dropped=told["dropped"],
        tokens=sum(sample.length for sample in index.samples),
        supervised=sum(sample.supervised for sample in index.samples),
        shards=len(index.shards),
    )


def _check(corpus: Corpus) -> None:
    for file in corpus.files:
        if not file.is_file():
            raise DataError(f"{file}: expected a JSONL file of conversations. Check the path.")
    if len({file.resolve() for file in corpus.files}) < len(corpus.files):
        raise DataError("corpus: a file is given twice, and would count twice. Give it once.")
    if corpus.max_length < 2:
        raise DataError(
            f"--max-length is {corpus.max_length}, but a sample needs at least 2 positions. "
            "Give the length that the draft will be trained with."
        )


def _stamps(corpus: Corpus) -> list[tuple[int, int]]:
    """Every file's time of change and size: equal ones say that nobody wrote to it."""
    return [(stat.st_mtime_ns, stat.st_size) for stat in (file.stat() for file in corpus.files)]


_Job = tuple[int, TextPiece]


def _encode_all(
    corpus: Corpus,
    directory: Path,
    jobs: Sequence[_Job],
    total: int,
    console: Console,
    workers: int,
) -> None:
    settings = (corpus, directory)
    workers = min(workers, len(jobs))
    done_before = total - len(jobs)
    if done_before:
        console.print(f"  {done_before} of {total} shards are there already", highlight=False)
    parts: Iterable[tuple[int, int]]
    if workers > 1:
        parts = in_processes(_encode, jobs, workers, _start, settings)
    else:
        parts = map(_Encoder(*settings), jobs)
    kept = dropped = 0
    with stage("encoding", total, console) as progress:
        for done, (piece_kept, piece_dropped) in enumerate(parts, start=done_before + 1):
            kept += piece_kept
            dropped += piece_dropped
            progress.update(done, f"{kept:,} samples kept, {dropped:,} dropped")


class _Encoder:
    """Encodes pieces with a tokenizer of its own, and writes their shards."""

    def __init__(self, corpus: Corpus, directory: Path) -> None:
        self.corpus, self.directory = corpus, directory
        self.encode = encoder(corpus.chat_template, corpus.tokenizer)

    def __call__(self, job: _Job) -> tuple[int, int]:
        """Write one shard. Returns how many samples were kept and dropped."""
        number, piece = job
        samples: list[Sample] = []
        drops: list[dict[str, str]] = []
        for at, line in read_lines(piece):
            found = self._sample(piece.file, at, line)
            if isinstance(found, Sample):
                samples.append(found)
            else:
                drops.append(found)
        _write(self.directory / _shard_name(number), samples, drops)
        return len(samples), len(drops)

    def _sample(self, file: Path, at: int, line: bytes) -> Sample | dict[str, str]:
        """A line's sample, or why there is none: id, reason and detail."""
        place = id_of_place(file, at)
        try:
            conversation = parse_conversation(line, place, default_id=place)
        except DataError as error:
            detail = str(error).removeprefix(f"{place}: ")
            return {"id": place, "reason": UNREADABLE, "detail": detail}
        if all(turn.role != "assistant" for turn in conversation.conversations):
            return {"id": conversation.id, "reason": NO_ANSWER}
        try:
            sample = self.encode(conversation, self.corpus.max_length)
        except DataError as error:
            if not self.corpus.chat_template.jinja:
                raise  # the tokenizer lacks ChatML: no conversation's fault
            return {"id": conversation.id, "reason": TEMPLATE, "detail": str(error)}
        if not is_trainable(sample.loss_mask):
            reason = CUT_OFF if sample.truncated else TOO_SHORT
            return {"id": conversation.id, "reason": reason}
        return sample


def _write(path: Path, samples: Sequence[Sample], drops: list[dict[str, str]]) -> None:
    start, entries = 0, []
    for sample in samples:
        one = entry(sample.id, sample.loss_mask, start=start)
        entries.append(one.model_dump(exclude={"shard"}))
        start += one.length
    ids = [np.empty(0, np.int32), *(sample.input_ids.astype(np.int32) for sample in samples)]
    masks = [np.empty(0, np.uint8), *(sample.loss_mask.astype(np.uint8) for sample in samples)]
    tensors = {"input_ids": np.concatenate(ids), "loss_mask": np.concatenate(masks)}
    about = {
        "samples": entries,
        "drops": drops,
        "truncated": sum(sample.truncated for sample in samples),
    }
    write_shard(path, lambda name, metadata: save_file(tensors, name, metadata), about)


def _about(path: Path) -> dict[str, Any]:
    about = read_about(path)
    if about is None:
        raise DataError(f"{path}: vanished while the others were written. Run the command again.")
    return about


def _finish(
    directory: Path,
    names: Sequence[str],
    abouts: Sequence[Mapping[str, Any]],
    inputs: Mapping[str, Any],
) -> Index:
    """Write drops.jsonl and the index. Raises DataError when nothing is left to train on."""
    drops = [drop for about in abouts for drop in about["drops"]]
    with atomic_file(directory / DROPS_NAME) as stream:
        for drop in drops:
            stream.write(json.dumps(drop, ensure_ascii=False).encode() + b"\n")
    if not any(about["samples"] for about in abouts):
        told = "; ".join(f"{n} × {why}" for why, n in Counter(d["reason"] for d in drops).items())
        raise DataError(
            f"corpus: no conversation of it can be trained on ({told or 'it is empty'}). "
            f"{directory / DROPS_NAME} says of each why; raise --max-length, or check the roles."
        )
    dropped = dict(sorted(Counter(drop["reason"] for drop in drops).items()))
    metadata = {
        **inputs,
        "truncated": sum(about["truncated"] for about in abouts),
        "dropped": dropped,
    }
    return write_index(directory, names, [about["samples"] for about in abouts], metadata)


def _shard_name(number: int) -> str:
    return f"tokens-{number:05d}.safetensors"


# Of a worker process, made by `_start`.
_encoder: _Encoder | None = None


def _start(corpus: Corpus, directory: Path) -> None:
    global _encoder
    _encoder = _Encoder(corpus, directory)


def _encode(job: _Job) -> tuple[int, int]:
    assert _encoder is not None
    return _encoder(job)
