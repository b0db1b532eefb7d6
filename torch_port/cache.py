"""The root of what is cached: the demo's stages, token counts. No torch."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "TORCH_PORT_CACHE"


def default_cache_root() -> Path:
    """Where things are cached: `TORCH_PORT_CACHE`, else `torch-port` in the user's own cache.

    Returns:
        The root directory; it need not exist.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch-port"
