"""Counting a corpus of conversations: streamed in pieces, by several processes. No torch.

A process holds one conversation at a time and answers with the ids that it saw, so memory does not
grow with the corpus.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from torch_port.data.conversations import Conversation, DataError, parse_conversation
from torch_port.data.fingerprints import corpus_fingerprint
from torch_port.data.templates import ChatTemplate, encoder
from torch_port.data.text_pieces import TextPiece, id_of_place, line_number, read_lines, text_pieces
from torch_port.errors import UserError
from torch_port.progress import stage
from torch_port.vocabulary.counting import count_supervised_tokens
from torch_port.vocabulary.counts import TokenCounts, cache_key, read_cache, write_cache
from torch_port.vocabulary.parallel import check_workers, in_processes
from torch_port.vocabulary.tokens import TokenizerFacts, check_sizes

# Some seconds of work: short for a progress bar, long beside its overhead.
PIECE_BYTES = 4 << 20
_PIECES_EACH = 8  # at least so many for each process, that none waits long for the last one


@dataclass(frozen=True)
class TextCorpus:
    """Conversations and what turns them into tokens."""

    files: tuple[Path, ...]
    tokenizer: TokenizerFacts
    chat_template: ChatTemplate
    max_length: int

    def check(self, vocab_size: int) -> None:
        """Refuse settings that would count something else than was meant.

        Raises UserError for a file that is missing or given twice, a maximum length below 2 and a
        tokenizer with more than V ids.
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
        return corpus_fingerprint(root, files, self.chat_template.covered, self.max_length)

    def stamps(self) -> list[tuple[int, int]]:
        """Return every file's time of change and size: equal ones say that nobody wrote to it."""
        return [(stat.st_mtime_ns, stat.st_size) for stat in (file.stat() for file in self.files)]

    def contents(self) -> tuple[str, ...]:
        """Return the sha256 of every file's content, whatever it is called; empty ones left out."""
        found = []
        for file in self.files:
            if not file.stat().st_size:
                continue  # all empty files are alike, and none is a text
            with open(file, "rb") as stream:
                found.append(hashlib.file_digest(stream, "sha256").hexdigest())
        return tuple(found)


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
    without a supervised token, a corpus that changes meanwhile, a process that died.
    """
    corpus.check(vocab_size)
    check_workers(workers)
    stamps = corpus.stamps()
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
    if not samples:
        raise UserError(
            f"corpus {', '.join(map(str, corpus.files))}: no conversation in it, only "
            f"{sum(file.stat().st_size for file in corpus.files)} bytes without a line of JSON; "
            "check the path, or write the conversations again"
        )
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
        contents=corpus.contents(),
        chat_template=corpus.chat_template.name,
        template_fingerprint=corpus.chat_template.fingerprint,
        max_length=corpus.max_length,
        corpus_fingerprint=fingerprint,
        tokenizer_fingerprint=corpus.tokenizer.fingerprint,
    )
    if corpus.stamps() != stamps:
        # The fingerprint is of the text before, and the cache would answer for it with these.
        raise UserError(
            f"corpus {', '.join(map(str, corpus.files))}: changed while it was counted; count "
            "again when nothing writes to it"
        )
    write_cache(cache, key, counts)
    return counts, False


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
    pieces = text_pieces(corpus.files, piece_bytes)
    settings = (
        corpus.tokenizer.file,
        corpus.chat_template,
        corpus.max_length,
        vocab_size,
        corpus.tokenizer.size,
    )
    workers = min(workers, len(pieces))
    total = np.zeros(vocab_size, dtype=np.int64)
    samples = truncated = supervised = 0
    if workers > 1:
        parts = in_processes(_count, pieces, workers, _start, settings)
    else:
        parts = map(_Counter(*settings), pieces)
    with stage("counting", len(pieces), console) as progress:
        for done, part in enumerate(parts, start=1):
            total[part.ids] += part.found
            samples += part.samples
            truncated += part.truncated
            supervised += int(part.found.sum())
            progress.update(done, f"{samples:,} samples, {supervised:,} supervised tokens")
    return total, samples, truncated


class _Counter:
    """Counts pieces with a tokenizer of its own."""

    def __init__(
        self, tokenizer: Path, template: ChatTemplate, max_length: int, vocab_size: int, usable: int
    ) -> None:
        self.encode = encoder(template, tokenizer)
        self.max_length, self.vocab_size, self.usable = max_length, vocab_size, usable
        self.samples = self.truncated = 0

    def __call__(self, piece: TextPiece) -> _Part:
        self.samples = self.truncated = 0
        counts = count_supervised_tokens(self._samples(piece), self.vocab_size, self.usable)
        ids = np.nonzero(counts)[0]
        return _Part(ids, counts[ids], self.samples, self.truncated)

    def _samples(self, piece: TextPiece) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        for at, conversation in _conversations(piece):
            try:
                sample = self.encode(conversation, self.max_length)
            except DataError as error:
                raise DataError(f"{piece.file}:{line_number(piece.file, at)}: {error}") from None
            self.samples += 1
            self.truncated += sample.truncated
            yield sample.input_ids, sample.loss_mask


def _conversations(piece: TextPiece) -> Iterator[tuple[int, Conversation]]:
    """Yield a piece's conversations with the byte at which their line begins."""
    for at, line in read_lines(piece):
        yield at, _parse(line, piece.file, at)


def _parse(line: bytes, file: Path, at: int) -> Conversation:
    place = id_of_place(file, at)
    try:
        return parse_conversation(line, "", place)
    except DataError:
        # Only now is the line's number worth reading the file up to it.
        return parse_conversation(line, f"{file}:{line_number(file, at)}", place)


# Of a worker process, made by `_start`.
_counter: _Counter | None = None


def _start(*settings: Any) -> None:
    global _counter
    _counter = _Counter(*settings)


def _count(piece: TextPiece) -> _Part:
    assert _counter is not None
    return _counter(piece)
