"""Fingerprints of what a run read: sha256 of a tokenizer, a corpus, a target (contracts §1)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path


def tokenizer_fingerprint(tokenizer_json: Path) -> str:
    """Return the sha256 of `tokenizer.json`, in hexadecimal."""
    return _digest(tokenizer_json)


def corpus_fingerprint(
    root: Path, files: Sequence[Path], chat_template: str, max_length: int
) -> str:
    """Return the sha256 over (relative name, size, sha256) of the files in order, plus settings.

    Arguments: `root` that names are relative to; the files; chat template and maximum length, which
    decide what tokens the same text becomes.
    """
    total = hashlib.sha256()
    for file in files:
        name = file.relative_to(root).as_posix()
        total.update(f"{name}\0{file.stat().st_size}\0{_digest(file)}\0".encode())
    total.update(f"{chat_template}\0{max_length}".encode())
    return total.hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
