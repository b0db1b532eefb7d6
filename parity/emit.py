"""`parity emit`: conformance vectors written by the specification, from fixed seeds.

The answers are the spec's in float64, so they judge every other implementation and never the spec
itself; `../shared/vectors` style sets from a third implementation do that.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from parity.cases import FORMAT, Case, CaseError, write_case
from parity.draw import draw_recipe
from parity.recipes import RECIPES, S
from parity.sides import Answer
from parity.vectors import answer_case

MANIFEST = "MANIFEST.json"
_FILES = ("case.json", "tensors.safetensors")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "safetensors")


def emit(
    directory: Path, overwrite: bool = False, wrote: Callable[[Path], object] = lambda path: None
) -> list[str]:
    """Write every recipe's case below `directory`; return their names.

    `wrote` is called with the directory of each case as soon as it is there.

    With `overwrite`, cases of an earlier set that no recipe makes any more are removed: those that
    the directory's manifest names and whose files are the ones it describes. Nothing else is.

    Raises CaseError, before anything is written, when a case of a recipe's name exists and
    `overwrite` is off, or a case that would be removed has been changed; RuntimeError when the spec
    does not give the answer or the error that a recipe is for.
    """
    held = [recipe.name for recipe in RECIPES if (directory / recipe.name).exists()]
    if held and not overwrite:
        raise CaseError(
            f"{directory} already holds {', '.join(held)}; choose another directory, or add "
            "--overwrite to replace those"
        )
    stale = stale_cases(directory) if overwrite else []
    for recipe in RECIPES:
        # Seeded by its name: a new recipe in the list must not change the others' bytes.
        case = draw_recipe(recipe, zlib.crc32(recipe.name.encode()))
        answer = answer_case(case, "spec", "float64")
        if answer.error is not None and (recipe.error is None or recipe.error not in answer.error):
            raise RuntimeError(f"{recipe.name}: the spec refuses: {answer.error}")
        if recipe.error is not None and answer.error is None:
            raise RuntimeError(f"{recipe.name}: the spec does not refuse")
        if recipe.decoding is not None:
            check_decoding(case, answer)
        if recipe.eagle3 is not None and recipe.error is None:
            check_eagle3(case, answer)
        _write(directory / recipe.name, case, answer, recipe.error)
        wrote(directory / recipe.name)
    for path in stale:
        for name in _FILES:
            (path / name).unlink()
        path.rmdir()
    _write_manifest(directory)
    return [recipe.name for recipe in RECIPES]


def stale_cases(directory: Path) -> list[Path]:
    """Return the cases that an earlier emit wrote to `directory` and no recipe makes any more.

    Raises CaseError when one of them holds other files than the manifest says: somebody's work.
    """
    try:
        written = json.loads((directory / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        raise CaseError(f"{directory / MANIFEST} is no manifest of emit's; remove it") from None
    current = {recipe.name for recipe in RECIPES}
    stale = []
    # Names of what is there, looked up in the manifest: a manifest cannot point elsewhere.
    for path in sorted(directory.iterdir()):
        own = {f"{path.name}/{name}": path / name for name in _FILES}
        if path.name in current or not path.is_dir() or not own.keys() & written.keys():
            continue
        held = {file.name for file in path.iterdir()}
        changed = path.is_symlink() or held != set(_FILES)
        if changed or any(_digest(file) != written.get(name) for name, file in own.items()):
            raise CaseError(
                f"{path} is a case that emit no longer writes, but it has been changed since; move "
                "it elsewhere or remove it, then emit again"
            )
        stale.append(path)
    return stale


def check_decoding(case: Case, answer: Answer) -> None:
    """Refuse a decoding case that could not tell a wrong implementation from a right one.

    Some round must accept a whole block and some reject a proposal; and a setting that a case
    brings (truncation, V_tok) must make a difference to it.

    Raises RuntimeError, naming what does not occur.
    """
    settings, rounds = case.extra["decoding"], answer.tensors["rounds"]
    proposed, accepted, committed = rounds.T
    n = settings["proposals"]
    occurs = {
        "a whole block accepted": ((accepted == n) & (committed == n + 1)).any(),
        "a proposal rejected": (accepted < proposed).any(),
        "a rejection after an acceptance": ((accepted > 0) & (accepted < proposed)).any(),
    }
    if "confidence_threshold" in settings:
        # The last round's statistics may be cut by the limit.
        occurs["a truncated block"] = (proposed[:-1] < n).any()
    if settings["end_of_text"] is not None:
        inside = accepted[-1] == committed[-1] == proposed[-1] < n
        ends = answer.tensors["tokens"][-1] == settings["end_of_text"]
        occurs["an end of text accepted inside a block"] = inside and ends
    for name in ("confidence_threshold", "tokenizer_size"):
        if name not in settings:
            continue
        rest = {key: value for key, value in settings.items() if key != name}
        without = answer_case(replace(case, extra={"decoding": rest}), "spec", "float64")
        equal = np.array_equal(without.tensors["tokens"], answer.tensors["tokens"])
        occurs[f"tokens that depend on {name}"] = not equal
    missing = [what for what, there in occurs.items() if not there]
    if missing:
        raise RuntimeError(f"{case.name}: the case lacks {', '.join(missing)}")


def check_eagle3(case: Case, answer: Answer) -> None:
    """Refuse an EAGLE3 case in which a step has nothing to tell.

    Every step must count some slot and, where the draft prunes, leave a supervised one uncounted.

    Raises RuntimeError, naming what does not occur.
    """
    counted, supervised = answer.metrics["in_vocabulary_step"]
    occurs = {
        "a counted slot in every step": (counted > 0).all(),
        "a pruned choice in every step": case.tensors["weights/t2d"].all()
        or (counted < supervised).all(),
        "an unsupervised slot": not answer.tensors["eval_mask"][:, 0, : S - 2].all(),
    }
    missing = [what for what, there in occurs.items() if not there]
    if missing:
        raise RuntimeError(f"{case.name}: the case lacks {', '.join(missing)}")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _write_manifest(directory: Path) -> None:
    """Record what was written and by what: sha256 of each file, versions of spec and packages."""
    files = [directory / recipe.name / name for recipe in RECIPES for name in _FILES]
    manifest = {
        "format": FORMAT,
        "spec": version("jaxdraft"),
        "packages": {name: version(name) for name in _PACKAGES},
        "files": {file.relative_to(directory).as_posix(): _digest(file) for file in sorted(files)},
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _write(directory: Path, case: Case, answer: Answer, error: str | None) -> None:
    tensors = dict(case.tensors)
    expect: dict[str, Any] = {"error": error}
    if error is None:
        expect = {
            "loss": answer.loss,
            "metrics": {n: [a.tolist(), b.tolist()] for n, (a, b) in answer.metrics.items()},
        }
        tensors |= {f"expect/grad/{n}": v for n, v in answer.gradients.items()}
        tensors |= {f"expect/{n}": v for n, v in answer.tensors.items()}
    write_case(directory, replace(case, tensors=tensors, expect=expect))
