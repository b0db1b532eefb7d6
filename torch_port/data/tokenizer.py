"""Loading a tokenizer of the tokenizers library from a local file. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch_port.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NAME = "tokenizer.json"


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer that neither cuts nor pads, whatever its file asks for.

    Arguments: `path` of a tokenizer.json, or of a directory that holds one.
    Raises UserError when there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    file = tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise UserError(
            f"tokenizer {file}: expected a tokenizer.json of the tokenizers library, "
            f"found: {error}. Give the target's own tokenizer."
        ) from None
    # A stored truncation would cut every turn by itself, silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json that a path means. Raises UserError when there is none."""
    file = path / _NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"tokenizer {path}: expected a {_NAME} or a directory that holds one, found none; "
            "nothing is downloaded, give the target's local directory"
        )
    return file
