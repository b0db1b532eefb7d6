"""The draft families by name, with what each can do. Imports no torch: classes come when asked for.

Planning reads capabilities from here before any model is built; each class states its own again,
and a test holds the two equal.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_port.config import Settings, check_draft_vocab_size
from torch_port.errors import NotBuiltError, UserError


@dataclass(frozen=True)
class Algorithm:
    """One draft family.

    `layout`: what the slots predict (spec sheet §3, §13). `supports_vocab_mapping`: a map given to
    it is used. `keeps_vocab_buffers_when_unpruned`: its state dict holds t2d and d2t also when
    K = V. `markov_head`, `confidence_head`: it may have one. The last three are "module:name".
    """

    name: str
    layout: str
    supports_vocab_mapping: bool
    keeps_vocab_buffers_when_unpruned: bool
    drafts_blocks: bool
    markov_head: bool
    confidence_head: bool
    draft: str
    config: str
    objective: str

    def draft_class(self) -> type[Any]:
        """Return the model's class. Raises NotBuiltError when this version lacks it."""
        return _load(self, self.draft)

    def config_class(self) -> type[Settings]:
        """Return the draft config's class. Raises NotBuiltError when this version lacks it."""
        return _load(self, self.config)

    def objective_class(self) -> type[Settings]:
        """Return the objective's settings. Raises NotBuiltError when this version lacks them."""
        return _load(self, self.objective)


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            name="eagle3",
            layout="training-time-test",
            supports_vocab_mapping=True,
            keeps_vocab_buffers_when_unpruned=True,
            drafts_blocks=False,
            markov_head=False,
            confidence_head=False,
            draft="torch_port.models.eagle3:Eagle3Draft",
            config="torch_port.config_eagle3:Eagle3Config",
            objective="torch_port.config_eagle3:Eagle3Objective",
        ),
        Algorithm(
            name="dspark",
            layout="anchor-first",
            supports_vocab_mapping=True,
            keeps_vocab_buffers_when_unpruned=False,
            drafts_blocks=True,
            markov_head=True,
            confidence_head=True,
            draft="torch_port.models.dspark:DSparkDraft",
            config="torch_port.config:DraftConfig",
            objective="torch_port.config:ObjectiveConfig",
        ),
        Algorithm(
            name="dflash",
            layout="bonus-anchor",
            supports_vocab_mapping=True,
            keeps_vocab_buffers_when_unpruned=False,
            drafts_blocks=True,
            markov_head=False,
            confidence_head=False,
            draft="torch_port.models.dflash:DFlashDraft",
            config="torch_port.config:DraftConfig",
            objective="torch_port.config:DFlashObjectiveConfig",
        ),
    )
}


def find_algorithm(name: object) -> Algorithm:
    """Return the family of that name.

    Raises UserError for any other, with the known names and, when it is near, the one meant.

    >>> find_algorithm("dspark").layout
    'anchor-first'
    """
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    near = difflib.get_close_matches(str(name), ALGORITHMS, n=1)  # of difflib's own cutoff, 0.6
    meant = f"did you mean {near[0]!r}? There are" if near else "there are"
    raise UserError(f"algorithm {name!r} is not known; {meant} {', '.join(ALGORITHMS)}")


def _load(algorithm: Algorithm, place: str) -> type[Any]:
    module, name = place.split(":")
    found: type[Any] | None = None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # something that the module itself needs
    if found is None:
        raise NotBuiltError(f"algorithm {algorithm.name!r}: {name} is not built in this version")
    return found


def read_draft_config(path: str | Path) -> dict[str, Any] | None:
    """Read a draft's `config.json`, or the one in a directory; None when nothing is there.

    Planning must work where the file is not on disk yet. Raises UserError for a directory without
    it and for a file that cannot be read or holds no JSON object: that is no absence.
    """
    return read_config(path, "draft.config")


def read_config(path: str | Path, setting: str) -> dict[str, Any] | None:
    """Read a `config.json`, or the one in a directory; None when nothing is at `path`.

    Raises UserError, naming the `setting` that the path is from, for anything else.
    """
    place = Path(path)
    problem = unusable_path(setting, path)
    if problem is not None:
        raise UserError(problem)
    try:
        content = (place / "config.json" if place.is_dir() else place).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if place.is_dir():
            raise UserError(
                f"{setting} {path}: the directory is there and holds no config.json; write it "
                "there, or name another place"
            ) from None
        return None
    except OSError as error:
        raise UserError(
            f"{setting} {path}: {error.strerror}; expected a readable config.json"
        ) from None
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{setting} {path}: no JSON ({error}); write the file again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{setting} {path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def unusable_path(setting: str, path: str | Path) -> str | None:
    """Say why a path of that setting can be no file's, or None; an absent file has one.

    >>> unusable_path("data.path", "not/on/disk") is None
    True
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # too long, not permitted, a link in a circle, a NUL
        reason = getattr(error, "strerror", None) or error
        shown = repr(str(path)[:60])  # on one line, whatever it holds
        return f"{setting} {shown}: {reason}; name a path that can be read"
    return None


def vocabulary_sizes(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Return (V, K) of a draft config.

    `draft_vocab_size` stands at the top level; older files have it in `dflash_config`, and one that
    is missed there would make a pruned draft look unpruned.
    Raises UserError when V is no size, or K no size of a draft vocabulary.

    >>> vocabulary_sizes({"vocab_size": 16, "draft_vocab_size": 5})
    (16, 5)
    """
    nested = raw.get("dflash_config")
    places = [raw, nested] if isinstance(nested, Mapping) else [raw]

    def value(name: str) -> object:
        found = [place[name] for place in places if name in place]
        if len(found) > 1:
            raise UserError(f"draft config: {name} stands both at the top and in dflash_config")
        return found[0] if found else None

    vocab_size = value("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise UserError(
            f"draft config: vocab_size must be a whole number of at least 1, not {vocab_size!r}; "
            "write the number of rows of the target's head"
        )
    return vocab_size, check_draft_vocab_size(value("draft_vocab_size"), vocab_size)


def prunes_vocabulary(config: Mapping[str, Any] | str | Path | None) -> bool | None:
    """Tell whether a draft prunes: True, False, or None when its config cannot be read.

    Arguments: a parsed config, or where one is. None is no evidence either way.
    Raises UserError for sizes that are none. Source: contracts §2.

    >>> prunes_vocabulary({"vocab_size": 16}), prunes_vocabulary("not/on/disk")
    (False, None)
    """
    if isinstance(config, str | Path):
        try:
            config = read_draft_config(config)
        except UserError:
            return None  # planning's first rule says what is wrong with the file
    if config is None:
        return None
    vocab_size, draft_vocab_size = vocabulary_sizes(config)
    return draft_vocab_size < vocab_size
