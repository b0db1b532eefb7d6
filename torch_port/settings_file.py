"""Reading settings from YAML and `a.b=c` overrides, so that a value is what it looks like.

PyYAML follows YAML 1.1: `6e-4` is a string there, `on` is true, `010` is 8, `1:30` is 90, and of a
name given twice the last one counts. Here numbers and booleans are those of YAML 1.2, and a name
given twice is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from torch_port.errors import UserError
from torch_port.setting_errors import Problem


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's plain numbers and booleans; builds no objects of other kinds."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node; refuse aliases (a value could contain itself) and tags."""
        event = self.peek_event()
        alias = isinstance(event, yaml.AliasEvent)
        if alias or getattr(event, "tag", None) is not None:
            what = f"alias *{event.anchor}" if alias else f"tag {event.tag}"
            raise yaml.composer.ComposerError(
                None, None, f"{what}: write the value out", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; refuse a name given twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                problem = "is given twice" if isinstance(key, yaml.ScalarNode) else "is no name"
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} {problem}", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_PLAIN = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
)
_Loader.yaml_implicit_resolvers = {}  # its own: SafeLoader's are YAML 1.1's
for _kind, _pattern, _first in _PLAIN:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), [*_first]
    )
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^$"), [""])
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value, 10))


def parse_value(text: str) -> Any:
    """Read one YAML value. Raises UserError when it is none.

    >>> parse_value("6e-4"), parse_value("on"), parse_value("010"), parse_value("[1, 2]")
    (0.0006, 'on', 10, [1, 2])
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"no YAML value: {_one_line(error)}") from None


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings.

    Raises UserError when it cannot be read, is no YAML, or is no mapping of names.
    """
    try:
        values = parse_value(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a YAML file of settings") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: no UTF-8 text; expected a YAML file of settings") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise UserError(f"{path}: expected a mapping of setting names to values, found {found}")
    return values


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """Set `a.b=c` in nested `values`; c is a YAML value.

    Returns, by dotted name, the text of the override that set it.
    Raises UserError for a text without a name or "=", and where a section is overridden whole or a
    setting is treated as a section.
    """
    done = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        parts = name.split(".")
        if not equals or not all(part.isidentifier() for part in parts):
            raise UserError(f"override {text!r}: expected name=value, as optimizer.peak_rate=6e-4")
        place: Any = values
        for part in parts[:-1]:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
            if not isinstance(place, dict):
                raise UserError(f"override {text!r}: {part} is a setting, no section")
        try:
            parsed = parse_value(value)
        except UserError as error:
            raise UserError(f"override {text!r}: {error}") from None
        if isinstance(parsed, dict) or isinstance(place.get(parts[-1]), dict):
            raise UserError(f"override {text!r}: name one setting of a section, not all of it")
        place[parts[-1]] = parsed
        done[name] = text
    return done


def unknown_names(
    given: Iterable[object],
    known: Iterable[str],
    section: str = "",
    elsewhere: Mapping[str, Sequence[str]] | None = None,
) -> list[Problem]:
    """Tell which names are no settings, each with the one that was meant, or the known ones.

    Arguments: the given names; the known ones of this `section`; by name, the dotted names of the
    settings called so `elsewhere`. A name is only suggested when it is near: a far one misleads.

    >>> unknown_names(["peek_rate"], ["peak_rate", "eps"], "optimizer")[0].text
    'optimizer.peek_rate is no setting; did you mean optimizer.peak_rate?'
    """
    names, prefix, problems = list(known), f"{section}." if section else "", []
    places = elsewhere or {}
    for name in map(str, given):
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, n=1)  # difflib's own cutoff, 0.6
        far = difflib.get_close_matches(name, places, n=1)
        if name in places:
            meant = f"did you mean {' or '.join(places[name])}?"
        elif near:
            meant = f"did you mean {prefix}{near[0]}?"
        elif far:
            meant = f"did you mean {' or '.join(places[far[0]])}?"
        else:
            meant = f"{section or 'a run file'} has {', '.join(names)}"
        problems.append(Problem((prefix + name,), f"{prefix}{name} is no setting; {meant}"))
    return problems


def tuples(value: Any) -> Any:
    """Return YAML's lists as tuples, which settings are made of, at every depth."""
    if isinstance(value, list):
        return tuple(tuples(item) for item in value)
    if isinstance(value, dict):
        return {name: tuples(item) for name, item in value.items()}
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
