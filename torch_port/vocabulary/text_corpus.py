"""Counting a corpus of conversations: streamed in pieces, by several processes. No torch.

A piece is a range of bytes of one file; its lines are those that begin inside it. A process holds
one conversation at a time and answers with the ids that it saw, so memory does not grow with the
corpus.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from torch_port.data.conversations import (
    CHAT_TEMPLATE,
    Conversation,
    DataError,
    encode_conversation,
    parse_conversation,
)
from torch_port.data.fingerprints import corpus_fingerprint
from torch_port.errors import UserError
from torch_port.progress import stage
from torch_port.vocabulary.counting import count_supervised_tokens
from torch_port.vocabulary.counts import TokenCounts, cache_key, read_cache, write_cache
from torch_port.vocabulary.tokens import TokenizerFacts, check_sizes, load_tokenizer

CHAT_TEMPLATES = {"chatml": CHAT_TEMPLATE}
# Some seconds of work: short for a progress bar, long beside its overhead.
PIECE_BYTES = 4 << 20
_PIECES_EACH = 8  # at least so many for each process, that none waits long for the last one


@dataclass(frozen=True)
class TextCorpus:
    """Conversations and what turns them into tokens; `chat_template` is a key of CHAT_TEMPLATES."""

    files: tuple[Path, ...]
    tokenizer: TokenizerFacts
    chat_template: str
    max_length: int

    def check(self, vocab_size: int) -> None:
        """Refuse settings that would count something else than was meant.

        Raises UserError for a file that is missing or given twice, an unknown chat template, a
        maximum length below 2 and a tokenizer with more than V ids.
        """
        for file in self.files:
            if not file.is_file():
                raise UserError(
                    f"corpus {file}: expected a JSONL file of conversations; check the path"
                )
        if len({file.resolve() for file in self.files}) < len(self.files):
            raise UserError(
                f"corpus: a file is given twice among {', '.join(map(str, self.files))}, and its "
                "tokens would count twice; give every file once"
            )
        if self.chat_template not in CHAT_TEMPLATES:
            raise UserError(
                f"--chat-template is {self.chat_template!r}, but this version renders only "
                f"{', '.join(CHAT_TEMPLATES)}; convert the conversations' tokens elsewhere and "
                "count their feature directory, or use a model with that template"
            )
        if self.max_length < 2:
            raise UserError(
                f"--max-length is {self.max_length}, but a sample needs at least 2 positions; "
                "give the maximum length that the draft will be trained with"
            )
        check_sizes(self.tokenizer, vocab_size)

    def fingerprint(self) -> str:
        """Return the corpus fingerprint of contracts §1, names relative to the common folder."""
        root = Path(os.path.commonpath([file.resolve().parent for file in self.files]))
        files = [file.resolve() for file in self.files]
        return corpus_fingerprint(root, files, CHAT_TEMPLATES[self.chat_template], self.max_length)


def count_text(
    corpus: TextCorpus,
    vocab_size: int,
    console: Console,
    *,
    workers: int = 1,
    cache: Path | None = None,
    piece_bytes: int | None = None,
) -> tuple[TokenCounts, bool]:
    """Count the supervised tokens of conversations, or take the counts from the cache.

    Every supervised token counts, also in a conversation too short to train on.

    Arguments: `corpus`; `vocab_size` V; `workers`, processes that tokenize (1: this one);
    `cache` directory or None; `piece_bytes` of a file that a process takes at a time (chosen).
    Returns (counts, whether they were cached).
    Raises UserError for unusable settings, a bad line (with its file and number), a corpus
    without a supervised token, a process that died.
    """
    corpus.check(vocab_size)
    if workers < 1:
        raise UserError(f"--workers is {workers}, but at least 1 process must count")
    with stage("fingerprint", 1, console):
        fingerprint = corpus.fingerprint()
    key = cache_key(fingerprint, corpus.tokenizer.fingerprint, vocab_size, "")
    held = read_cache(cache, key)
    if held is not None:
        return held, True
    if piece_bytes is None:
        share = sum(file.stat().st_size for file in corpus.files) // (_PIECES_EACH * workers)
        piece_bytes = max(1 << 16, min(PIECE_BYTES, share))
    total, samples, truncated = _count_pieces(corpus, vocab_size, console, workers, piece_bytes)
    if not total.any():
        raise UserError(
            "corpus: no supervised token; the conversations hold no assistant turn within "
            f"--max-length {corpus.max_length}: raise it, or check the roles"
        )
    counts = TokenCounts(
        counts=total,
        mass=None,
        special_ids=np.array(corpus.tokenizer.special_ids, dtype=np.int64),
        byte_ids=np.array(corpus.tokenizer.byte_ids, dtype=np.int64),
        tokenizer_size=corpus.tokenizer.size,
        samples=samples,
        truncated=truncated,
        source=f"conversations, {corpus.chat_template}, max_length {corpus.max_length}",
        corpus_fingerprint=fingerprint,
        tokenizer_fingerprint=corpus.tokenizer.fingerprint,
    )
    write_cache(cache, key, counts)
    return counts, False


@dataclass(frozen=True)
class _Piece:
    """The lines of a file that begin in its bytes start … end − 1."""

    file: Path
    start: int
    end: int


@dataclass(frozen=True)
class _Part:
    """What a piece held: `ids` that occur and how often, samples read and samples cut."""

    ids: NDArray[np.int64]
    found: NDArray[np.int64]
    samples: int
    truncated: int


def _count_pieces(
    corpus: TextCorpus, vocab_size: int, console: Console, workers: int, piece_bytes: int
) -> tuple[NDArray[np.int64], int, int]:
    pieces = _pieces(corpus.files, piece_bytes)
    settings = (corpus.tokenizer.file, corpus.max_length, vocab_size, corpus.tokenizer.size)
    workers = min(workers, len(pieces))
    total = np.zeros(vocab_size, dtype=np.int64)
    samples = truncated = supervised = 0
    parts = _in_processes(pieces, workers, settings) if workers > 1 else _here(pieces, settings)
    with stage("counting", len(pieces), console) as progress:
        for done, part in enumerate(parts, start=1):
            total[part.ids] += part.found
            samples += part.samples
            truncated += part.truncated
            supervised += int(part.found.sum())
            progress.update(done, f"{samples:,} samples, {supervised:,} supervised tokens")
    return total, samples, truncated


def _pieces(files: Sequence[Path], size: int) -> list[_Piece]:
    pieces = []
    for file in files:
        length = file.stat().st_size
        pieces += [_Piece(file, at, min(at + size, length)) for at in range(0, length, size)]
    return pieces


class _Counter:
    """Counts pieces with a tokenizer of its own."""

    def __init__(self, tokenizer: Path, max_length: int, vocab_size: int, usable: int) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self.max_length, self.vocab_size, self.usable = max_length, vocab_size, usable
        self.samples = self.truncated = 0

    def __call__(self, piece: _Piece) -> _Part:
        self.samples = self.truncated = 0
        counts = count_supervised_tokens(self._samples(piece), self.vocab_size, self.usable)
        ids = np.nonzero(counts)[0]
        return _Part(ids, counts[ids], self.samples, self.truncated)

    def _samples(self, piece: _Piece) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        for conversation in _conversations(piece):
            sample = encode_conversation(self.tokenizer, conversation, self.max_length)
            self.samples += 1
            self.truncated += sample.truncated
            yield sample.input_ids, sample.loss_mask


def _conversations(piece: _Piece) -> Iterator[Conversation]:
    try:
        with open(piece.file, "rb") as stream:
            if piece.start:  # the line that began before is the previous piece's
                stream.seek(piece.start - 1)
                stream.readline()
            while (at := stream.tell()) < piece.end and (line := stream.readline()):
                if line.strip():
                    yield _parse(line, piece.file, at)
    except OSError as error:
        raise DataError(
            f"{piece.file}: expected a readable JSONL file, found: {error.strerror}. "
            "Check the path and its permissions."
        ) from None


def _parse(line: bytes, file: Path, at: int) -> Conversation:
    try:
        return parse_conversation(line, "")
    except DataError:
        # Only now is the line's number worth reading the file up to it.
        return parse_conversation(line, f"{file}:{_line_number(file, at)}")


def _line_number(file: Path, at: int) -> int:
    """The number of the line that begins at a byte, from 1."""
    number, left = 1, at
    with open(file, "rb") as stream:
        while left and (block := stream.read(min(left, 1 << 20))):
            number += block.count(b"\n")
            left -= len(block)
    return number


_Settings = tuple[Path, int, int, int]


def _here(pieces: Sequence[_Piece], settings: _Settings) -> Iterator[_Part]:
    yield from map(_Counter(*settings), pieces)


# Of a worker process, made by `_start`.
_counter: _Counter | None = None


def _start(*settings: Path | int) -> None:
    global _counter
    # Ctrl-C reaches the whole group, and ends this process at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _counter = _Counter(*settings)  # type: ignore[arg-type]


def _count(piece: _Piece) -> _Part:
    assert _counter is not None
    return _counter(piece)


def _in_processes(pieces: Sequence[_Piece], workers: int, settings: _Settings) -> Iterator[_Part]:
    """Yield the parts as they come; two pieces per process are under way, not the whole list."""
    # Spawned, not forked: a fork would copy the locks of whatever threads there are.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, settings)
    waiting = iter(pieces)
    try:
        running = {pool.submit(_count, piece) for piece in islice(waiting, 2 * workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
            running |= {pool.submit(_count, piece) for piece in islice(waiting, len(done))}
    except BrokenProcessPool:
        raise UserError(
            f"a counting process ended without an answer (out of memory?); --workers is {workers}, "
            "lower it"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
