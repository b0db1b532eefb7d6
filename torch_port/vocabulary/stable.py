"""Safetensors whose bytes depend on their content alone. No torch."""

from __future__ import annotations

import json


def stable_bytes(content: bytes) -> bytes:
    """Return a safetensors file with its header's keys sorted.

    The library writes metadata in an order that changes from one call to the next, so two files of
    one map would have two checksums. Offsets count from the header's end and stay as they are.

    Arguments: `content`, what `safetensors`' save returned.
    """
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(
        json.loads(content[8 : 8 + length]),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    ).encode()
    header += b" " * (-len(header) % 8)  # the tensors stay aligned
    return len(header).to_bytes(8, "little") + header + content[8 + length :]
