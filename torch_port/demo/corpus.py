"""The demo's corpus: functions of the installed standard library as instruction pairs."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_port.data.atomic import atomic_file
from torch_port.demo.recipe import Recipe
from torch_port.errors import UserError

# Not library source: installed packages, compiled modules, build files, and test suites (whose
# functions are near copies of each other and would cross the train/held-out border).
_SKIPPED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "lib-dynload", "__pycache__", "test", "tests", "idle_test"}
)

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class CorpusStats:
    """What `build_corpus` read, skipped and wrote."""

    modules_train: int
    modules_heldout: int
    files_skipped: int
    pairs_train: int
    pairs_heldout: int
    characters_train: int


@dataclass(frozen=True)
class Pair:
    """One instruction pair: a function's signature and docstring ask, its body answers."""

    name: str
    ask: str
    answer: str


def build_corpus(
    path_train: Path, path_heldout: Path, recipe: Recipe, stdlib: Path | None = None
) -> CorpusStats:
    """Write the training and the held-out corpus as JSONL, split by module.

    One line is `{"id": "json.decoder:JSONDecoder.decode", "conversations": [user, assistant]}`.
    A module is held out when a hash of its name is below `recipe.heldout_percent`, so a function
    never has a neighbour of its own module on the other side. Files are read in the
    order of their names; a file that does not decode or parse is skipped and counted.

    Args:
        path_train: file for the training pairs; its directory exists.
        path_heldout: file for the held-out pairs.
        recipe: gives `heldout_percent`, `max_modules` and `max_answer_characters`.
        stdlib: root of the sources; the running interpreter's standard library by default.

    Returns:
        Counts of modules, skipped files, pairs and characters.

    Raises:
        UserError: one of the two sides would be empty.

    Source: issue 2, item 7.
    """
    root = Path(sysconfig.get_path("stdlib")) if stdlib is None else stdlib
    lines: dict[bool, list[str]] = {False: [], True: []}
    modules: Counter[bool] = Counter()
    skipped = 0
    for module, path in _modules(root, recipe.max_modules):
        try:
            pairs = function_pairs(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):  # no text, null bytes: ValueErrors
            skipped += 1
            continue
        heldout = is_heldout(module, recipe.heldout_percent)
        modules[heldout] += 1
        lines[heldout] += [
            _line(module, pair)
            for pair in pairs
            if len(pair.answer) <= recipe.max_answer_characters
        ]
    for side, name in ((False, "training"), (True, "held-out")):
        if not lines[side]:
            raise UserError(
                f"{name} corpus: expected functions with docstrings below {root}, found none in "
                f"{modules[side]} modules. Install the standard library's .py sources, or change "
                "max_modules or heldout_percent."
            )
    for path, side in ((path_train, False), (path_heldout, True)):
        with atomic_file(path) as stream:
            stream.write("".join(lines[side]).encode())
    return CorpusStats(
        modules_train=modules[False],
        modules_heldout=modules[True],
        files_skipped=skipped,
        pairs_train=len(lines[False]),
        pairs_heldout=len(lines[True]),
        characters_train=sum(map(len, lines[False])),
    )


def is_heldout(module: str, percent: int) -> bool:
    """Whether a module belongs to the held-out side, by a hash of its dotted name.

    >>> is_heldout("json.decoder", 0), is_heldout("json.decoder", 100)
    (False, True)

    Args:
        module: dotted name relative to the standard library.
        percent: share of modules to hold out, 0 … 100.

    Returns:
        True when the first 8 bytes of sha256(module), mod 100, are below percent: the same on
        every machine.
    """
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:8]) % 100 < percent


def function_pairs(source: str) -> list[Pair]:
    r"""Cut a module's source into one instruction pair per documented function or method.

    >>> function_pairs('def f(x):\n    "Twice x."\n    return 2 * x\n')
    [Pair(name='f', ask='def f(x):\n    "Twice x."', answer='return 2 * x')]

    Functions inside functions are part of their parent's answer and no pairs of their own. A
    second definition of a name (a property's setter, an `else` branch) gets `#2` behind it.

    Args:
        source: text of one module.

    Returns:
        Pairs in the order of the source.

    Raises:
        SyntaxError, ValueError: the source does not parse.
    """
    with warnings.catch_warnings():
        # Invalid escapes in old docstrings warn at parse time; they are not ours to repair.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    lines = source.split("\n")
    seen: Counter[str] = Counter()
    pairs = []
    for name, node in _functions(tree, ""):
        parts = _ask_and_answer(node, lines)
        if parts is None:
            continue
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name}#{seen[name]}"
        pairs.append(Pair(unique, *parts))
    return pairs


def _modules(root: Path, limit: int | None) -> Iterator[tuple[str, Path]]:
    """Dotted names and paths of the library's modules, in the order of their relative paths."""
    relative = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts[:-1])
    )
    for name in relative[:limit]:
        yield name.removesuffix(".py").removesuffix("/__init__").replace("/", "."), root / name


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Function]]:
    """Functions of a module or class with qualified names, through `if`, `try` and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _functions(child, prefix)


def _ask_and_answer(node: _Function, lines: list[str]) -> tuple[str, str] | None:
    """Source of (signature + docstring, the rest of the body), or None where one is missing."""
    if ast.get_docstring(node, clean=False) is None or len(node.body) < 2:
        return None
    docstring = node.body[0]
    last, end = docstring.end_lineno, node.end_lineno
    assert last is not None
    assert end is not None
    if node.body[1].lineno <= last:  # `"doc"; return x` on one line has no cut between lines
        return None
    ask = textwrap.dedent("\n".join(lines[node.lineno - 1 : last])).strip()
    answer = textwrap.dedent("\n".join(lines[last:end])).strip("\n").rstrip()
    return ask, answer


def _line(module: str, pair: Pair) -> str:
    """One JSONL line of the field's conversation format."""
    turns = [
        {"role": "user", "content": pair.ask},
        {"role": "assistant", "content": pair.answer},
    ]
    return json.dumps({"id": f"{module}:{pair.name}", "conversations": turns}) + "\n"
