"""The demo's cache: one directory per recipe fingerprint, built stage by stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from torch_port.cache import CACHE_VARIABLE
from torch_port.data.atomic import atomic_directory
from torch_port.demo.recipe import Recipe
from torch_port.errors import UserError

_MANIFEST = "complete.json"


def recipe_directory(recipe: Recipe, cache_root: Path) -> Path:
    """Directory of everything that is cached for a recipe.

    Args:
        recipe: the demo's sizes.
        cache_root: root of the cache.

    Returns:
        `<root>/demo/<name>-<fingerprint>`.
    """
    return cache_root / "demo" / f"{recipe.name}-{recipe.fingerprint()[:16]}"


def cached_stage(
    directory: Path, build: Callable[[Path], None], dependents: Sequence[Path] = ()
) -> bool:
    """Make sure a stage's directory is there and complete.

    A stage is complete when its manifest names exactly the files it has, with their sizes. One
    that is not (an interrupted copy, a deleted or cut file) is removed and built again.

    Args:
        directory: where the stage lives.
        build: fills the directory it is given.
        dependents: directories of later stages, made from this one: removed before it is built.

    Returns:
        True when the stage was taken from the cache, False when it was built.

    Raises:
        UserError: the cache cannot be written.
    """
    if _is_complete(directory):
        return True
    try:
        for stale in (*dependents, directory):
            if stale.exists():
                shutil.rmtree(stale)
        with atomic_directory(directory) as temporary:
            build(temporary)
            manifest = json.dumps(_sizes(temporary))
            (temporary / _MANIFEST).write_text(manifest, encoding="utf-8")
    except OSError as error:
        if _is_complete(directory):  # another process built the same meanwhile
            return False
        raise UserError(
            f"{directory}: the demo's cache cannot be written ({error.strerror or error}). "
            f"Set {CACHE_VARIABLE} to a directory with 1 GB free that you may write to."
        ) from error
    return False


def _is_complete(directory: Path) -> bool:
    try:
        manifest = json.loads((directory / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    sizes = _sizes(directory)
    del sizes[_MANIFEST]
    return bool(manifest == sizes)


def _sizes(directory: Path) -> dict[str, int]:
    """Size of every file below a directory, by relative name."""
    return {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
