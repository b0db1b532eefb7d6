"""Corpora of conversations in pieces: ranges of bytes that several processes read. No torch.

A piece is a range of bytes of one file; its lines are those that begin inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_port.data.conversations import DataError


@dataclass(frozen=True)
class TextPiece:
    """The lines of a file that begin in its bytes start … end − 1."""

    file: Path
    start: int
    end: int


def text_pieces(files: Sequence[Path], size: int) -> list[TextPiece]:
    """Cut files into pieces of `size` bytes."""
    pieces = []
    for file in files:
        length = file.stat().st_size
        pieces += [TextPiece(file, at, min(at + size, length)) for at in range(0, length, size)]
    return pieces


def read_lines(piece: TextPiece) -> Iterator[tuple[int, bytes]]:
    """Yield (first byte, line) of a piece's lines that are not blank.

    Raises DataError for a file that cannot be read.
    """
    try:
        with open(piece.file, "rb") as stream:
            if piece.start:  # the line that began before is the previous piece's
                stream.seek(piece.start - 1)
                stream.readline()
            while (at := stream.tell()) < piece.end and (line := stream.readline()):
                if line.strip():
                    yield at, line
    except OSError as error:
        raise DataError(
            f"{piece.file}: expected a readable JSONL file, found: {error.strerror}. "
            "Check the path and its permissions."
        ) from None


def line_number(file: Path, at: int) -> int:
    """Return the number of the line that begins at a byte, from 1."""
    number, left = 1, at
    with open(file, "rb") as stream:
        while left and (block := stream.read(min(left, 1 << 20))):
            number += block.count(b"\n")
            left -= len(block)
    return number


def id_of_place(file: Path, at: int) -> str:
    """Return the id of a conversation that gives none: its file and the byte it begins at."""
    return f"{file.name}@{at}"
