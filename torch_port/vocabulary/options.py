"""What `torch-port vocab` makes of its options before any work: lists, sizes, places. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch_port.data.conversations import DataError
from torch_port.errors import UserError
from torch_port.vocabulary.parallel import check_workers

if TYPE_CHECKING:
    from torch_port.vocabulary.sweep import Ranking


def whole_numbers(text: str, option: str) -> list[int]:
    """Parse a list such as "8192,16384".

    Raises UserError, naming the option, for anything that is no whole number.

    >>> whole_numbers("8192, 16384", "--sizes")
    [8192, 16384]
    """
    numbers = []
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.removeprefix("-").isdigit()):
            raise UserError(
                f"{option} is {text!r}, but {word!r} is no whole number; write {option} 8192,16384"
            )
        numbers.append(int(word))
    return numbers


def resolve_vocab_size(vocab_size: int | None, target: Path | None) -> int:
    """Return V, the rows of the target's head, from an option or from the target's config.json.

    Raises UserError when neither says it, or when both do and differ.
    """
    configured = None if target is None else _configured_size(target)
    if vocab_size is None and configured is None:
        raise UserError(
            "vocab_size is not known: give --vocab-size V, the rows of the target's head (its "
            "config.json says them), or --target DIR; a tokenizer may have fewer ids"
        )
    if vocab_size is not None and configured is not None and vocab_size != configured:
        raise UserError(
            f"--vocab-size is {vocab_size}, but --target's config.json says {configured}; "
            "leave --vocab-size out"
        )
    chosen = configured if vocab_size is None else vocab_size
    assert chosen is not None
    if chosen < 1:
        raise UserError(
            f"--vocab-size is {chosen}, but a head has at least 1 row; give the vocab_size of the "
            "target's config.json"
        )
    return chosen


def are_features(paths: list[Path]) -> bool:
    """Whether the corpus is feature directories (True) or JSONL files (False).

    Raises UserError for a path that is neither, a directory of JSONL files, and a mixture.
    """
    for path in paths:
        if not path.exists():
            raise DataError(f"corpus {path}: no such file or directory; check the path")
        if path.is_dir() and not (path / "index.json").exists() and _texts(path):
            raise UserError(
                f"corpus {path} is a directory of JSONL files, and only feature directories are "
                f"read whole; give its files: {path}/*.jsonl"
            )
    kinds = {path.is_dir() for path in paths}
    if len(kinds) != 1:
        raise UserError(
            "corpus: JSONL files and feature directories are mixed, and the same conversation "
            "could count twice; count one kind at a time"
        )
    return kinds.pop()


def check_count_options(
    from_features: bool,
    chat_template: str | None,
    max_length: int | None,
    teacher_mass: bool,
    target: Path | None,
) -> None:
    """Refuse settings that are missing, and settings that would be ignored.

    Raises UserError: JSONL without a chat template or maximum length, or with the teacher's mass;
    features with either of the two; mass without a target.
    """
    settings = {"--chat-template": chat_template, "--max-length": max_length}
    for name, value in settings.items():
        if from_features and value is not None:
            raise UserError(
                f"{name} is {value}, but features hold tokens already and it would be ignored; "
                "leave it out"
            )
        if not from_features and value is None:
            raise UserError(
                f"{name} is not given, and it decides which tokens the conversations become; give "
                "the one that the draft will be trained with (--chat-template chatml, "
                "--max-length 4096)"
            )
    if teacher_mass and not from_features:
        raise UserError(
            "--teacher-mass needs captured states, and JSONL has none; give feature directories, "
            "or leave it out"
        )
    if teacher_mass and target is None:
        raise UserError("--teacher-mass needs the target's head; give --target DIR")


def resolve_workers(workers: int | None) -> int:
    """Return how many processes count: all cores that this process may use, if not given."""
    if workers is None:
        return len(os.sched_getaffinity(0))
    check_workers(workers)
    return workers


def check_first(first: int) -> None:
    """Refuse to list fewer than one id."""
    if first < 1:
        raise UserError(
            f"--first is {first}, but at least 1 id is listed; give 1 or more, or leave it out "
            "for 12"
        )


def check_size(size: int, option: str, ranking: Ranking) -> int:
    """Return K. Raises UserError, naming the option, for a K that no map of the ranking has."""
    usable, pins = len(ranking.ids), ranking.pins
    if size < 1:
        raise UserError(
            f"{option} is {size}, but a map keeps at least 1 id; give {max(pins, 1)} … {usable}"
        )
    if size < pins:
        raise UserError(
            f"{option} is {size}, but {pins} ids are pinned; give at least {pins}, or pin fewer "
            "(--pin, --no-pin-special, --no-pin-bytes)"
        )
    if size > usable:
        raise UserError(
            f"{option} is {size}, but the tokenizer produces only {usable} ids; give at most "
            f"{usable}"
        )
    return size


def check_map_name(path: Path) -> None:
    """Refuse a name that would be read back as another kind of file."""
    if path.suffix != ".safetensors":
        raise UserError(
            f"--out {path}: maps are written as .safetensors, and a reader goes by the name; "
            f"write --out {path.with_suffix('.safetensors')}"
        )


def check_writable(
    path: Path, option: str, overwrite: bool, read: Callable[[Path], object]
) -> None:
    """Say before any work whether a file may be written; nothing is touched.

    Arguments: `path` and the `option` that gave it; `overwrite`; `read`, which raises UserError
    for a file that is not of the kind to be written: somebody's corpus is never replaced.
    Raises UserError for an existing file without --overwrite or of another kind, a directory, a
    missing directory.
    """
    if path.is_dir():
        raise UserError(f"{option} {path} is a directory; give a file's name in it")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: its directory does not exist; create {path.parent}")
    if not path.exists():
        return
    if not overwrite:
        raise UserError(f"{option} {path} exists already; choose another name or add --overwrite")
    try:
        read(path)
    except UserError:
        raise UserError(
            f"{option} {path} is no file of this command's, and such files are never replaced; "
            "choose another name, or remove it yourself"
        ) from None


def read_svg(path: Path) -> None:
    """Refuse a file that is no SVG."""
    with open(path, "rb") as stream:
        if not stream.read(4) == b"<svg":
            raise UserError(f"{path}: no SVG")


def _texts(directory: Path) -> bool:
    """Whether a directory holds JSONL files."""
    return next(directory.glob("*.jsonl"), None) is not None


def _configured_size(target: Path) -> int:
    try:
        config = json.loads((target / "config.json").read_bytes())
        inner = config.get("text_config")  # where a multimodal target keeps its decoder's settings
        size = (inner if isinstance(inner, dict) else config).get("vocab_size")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"--target {target}: expected a model's local directory with config.json, found: "
            f"{getattr(error, 'strerror', None) or error}; nothing is downloaded"
        ) from None
    if type(size) is not int:
        raise UserError(
            f"--target {target}: its config.json says vocab_size {size!r}; give --vocab-size"
        )
    return size
