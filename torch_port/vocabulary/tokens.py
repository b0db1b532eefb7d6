"""What a tokenizer says about a vocabulary: its size, its special ids, its bytes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_port.data.fingerprints import tokenizer_fingerprint
from torch_port.data.tokenizer import load_tokenizer, tokenizer_file
from torch_port.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TokenizerFacts", "check_sizes", "load_tokenizer", "tokenizer_facts"]


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer's file and fingerprint, V_tok (its largest id plus 1), and ids worth pinning.

    `special_ids` are its special tokens (end of text, turns, …); `byte_ids` the 256 tokens of one
    byte each, with which any text can be written, or empty when it has no such set.
    """

    file: Path
    fingerprint: str
    size: int
    special_ids: tuple[int, ...]
    byte_ids: tuple[int, ...]


def tokenizer_facts(path: Path) -> TokenizerFacts:
    """Read a tokenizer's facts.

    Arguments: `path` of a tokenizer.json, or of a directory that holds one.
    Raises UserError when there is none, or it cannot be read.
    """
    tokenizer = load_tokenizer(path)
    special = (i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return TokenizerFacts(
        file=tokenizer_file(path),
        fingerprint=tokenizer_fingerprint(tokenizer_file(path)),
        size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        special_ids=tuple(sorted(special)),
        byte_ids=_byte_ids(tokenizer),
    )


def check_sizes(facts: TokenizerFacts, vocab_size: int) -> None:
    """Refuse a tokenizer with more ids than the target's head has rows (V_tok > V)."""
    if facts.size > vocab_size:
        raise UserError(
            f"tokenizer {facts.file} produces {facts.size} ids, but vocab_size is {vocab_size}; "
            "vocab_size is the number of rows of the target's head: give it with the target's "
            "own tokenizer"
        )


def _byte_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the 256 one-byte tokens: byte fallback's, else the byte-level alphabet's."""
    from tokenizers.pre_tokenizers import ByteLevel

    for names in ([f"<0x{byte:02X}>" for byte in range(256)], sorted(ByteLevel.alphabet())):
        found = [tokenizer.token_to_id(name) for name in names]
        ids = [i for i in found if i is not None]
        # All or none: some letters of the alphabet are in any vocabulary.
        if len(ids) == len(names):
            return tuple(sorted(ids))
    return ()
