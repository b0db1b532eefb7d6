"""What is wrong with settings, in words that name the setting, its value and the remedy.

pydantic finds what is wrong; the words are taken from the setting's own type and bounds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from torch_port.errors import UserError

_NOUNS = {int: "whole number", float: "number", str: "text", bool: "boolean (true or false)"}
# By the attribute in which a bound of pydantic's keeps its number.
_BOUNDS = {
    "ge": "of at least {}",
    "gt": "above {}",
    "le": "of at most {}",
    "lt": "below {}",
    "multiple_of": "that is a multiple of {}",
}
_SHOWN = 60  # characters of a value


@dataclass(frozen=True)
class Problem:
    """One thing wrong: the settings it is about, by dotted name, and what to tell the user."""

    names: tuple[str, ...]
    text: str


class SettingsError(UserError):
    """Everything that is wrong with some settings, all at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = tuple(problems)


def explain(error: ValidationError, where: str, kind: type[BaseModel]) -> str:
    """Turn a pydantic error of `kind` into one line that says `where` it is."""
    return f"{where}: " + "; ".join(problem.text for problem in problems_of(error, kind))


def problems_of(error: ValidationError, kind: type[BaseModel], section: str = "") -> list[Problem]:
    """Return a pydantic error's parts, in our words.

    Arguments: the error; the class that raised it; the `section` of a run that it is, "" for none.
    """
    prefix = f"{section}." if section else ""
    problems = []
    for item in error.errors():
        path = [str(part) for part in item["loc"]]
        message = item["msg"].removeprefix("Value error, ")
        if not path:  # a rule between settings, in its own words
            problems.append(_dotted(message, kind, prefix))
            continue
        name = prefix + path[0]
        at = name + "".join(f"[{part}]" for part in path[1:])
        field = kind.model_fields.get(path[0])
        if item["type"] == "value_error":
            text = f"{at} is {shown(item['input'])}: {message}"
        elif item["type"] == "extra_forbidden" or field is None:
            text = f"{at} is no known setting (given: {shown(item['input'])}); remove it"
        else:
            wanted = describe(field.annotation, tuple(field.metadata))
            if item["type"] == "missing" and len(path) == 1:
                text = f"{name} is missing; set it to {wanted}"
            else:
                given = item["input"]
                finite = "; it must be finite" if item["type"] == "finite_number" else ""
                quotes = "; leave out the quotes" if _quoted_number(given, wanted) else ""
                text = f"{at} is {shown(given)}; set {name} to {wanted}{finite}{quotes}"
        problems.append(Problem((name,), text))
    return problems


def shown(value: Any) -> str:
    """Return a value as a run file would have it, cut to a readable length."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = repr(_lists(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def describe(annotation: Any, metadata: Sequence[Any] = (), many: bool = False) -> str:
    """Say what a setting of that type takes.

    >>> describe(int), describe(Literal["a", "b"]), describe(float | None)
    ('a whole number', "'a' or 'b'", 'a number or null')
    >>> from pydantic import Field
    >>> describe(tuple[int, ...], Field(min_length=1).metadata)
    'a list of whole numbers, at least 1'
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(parts[0], (*_flat(parts[1:]), *metadata), many)
    if origin in (Union, UnionType):
        kinds = [describe(part, metadata, many) for part in parts if part is not NoneType]
        return " or ".join([*kinds, "null"] if NoneType in parts else kinds)
    if origin is Literal:
        return _either([repr(part) for part in parts])
    if origin is tuple:
        count = "" if parts[1:] == (...,) else f"{len(parts)} "
        least = [item.min_length for item in metadata if hasattr(item, "min_length")]
        more = f", at least {least[0]}" if least else ""
        return f"a list of {count}{describe(parts[0], (), many=True)}{more}"
    noun = _NOUNS.get(annotation, getattr(annotation, "__name__", str(annotation)))
    if annotation is str and any(getattr(item, "min_length", 0) for item in metadata):
        noun = f"non-empty {noun}"
    bounds = [
        words.format(getattr(item, bound))
        for item in metadata
        for bound, words in _BOUNDS.items()
        if hasattr(item, bound)
    ]
    head = f"{noun}s" if many else f"a {noun}"
    return " ".join([head, " and ".join(bounds)]) if bounds else head


def _flat(metadata: Sequence[Any]) -> tuple[Any, ...]:
    """Unpack pydantic's Field inside Annotated into its bounds."""
    return tuple(part for item in metadata for part in getattr(item, "metadata", [item]))


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _lists(value: Any) -> Any:
    """Show tuples as the lists that they were in the file."""
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def _quoted_number(value: Any, wanted: str) -> bool:
    if not isinstance(value, str) or "number" not in wanted:
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


def _dotted(message: str, kind: type[BaseModel], prefix: str) -> Problem:
    """Give every setting that a rule's message mentions its dotted name."""
    mentioned: list[str] = []

    def dotted(match: re.Match[str]) -> str:
        mentioned.append(prefix + match[0])
        return prefix + match[0]

    names = sorted(kind.model_fields, key=len, reverse=True)
    text = re.sub(rf"(?<![\w.'])(?:{'|'.join(map(re.escape, names))})(?![\w'])", dotted, message)
    return Problem(tuple(dict.fromkeys(mentioned)), text if prefix else message)
