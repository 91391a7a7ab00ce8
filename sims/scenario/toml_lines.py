"""TOML features that the standard library lacks: line numbers of values, and writing tables."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Place: TypeAlias = tuple[str | int, ...]
"""Keys from the top of the document, with an index for each array of tables."""


def lines_of(text: str) -> dict[Place, int]:
    """Return the line (from 1) of each table and key of a TOML text. Raises tomllib.TOMLDecodeError."""
    tomllib.loads(text)
    lines = text.split("\n")
    found: dict[Place, int] = {(): 1}
    counts: dict[tuple[str, ...], int] = {}
    table: Place = ()
    start = 0
    while start < len(lines):
        end = start + 1
        # A statement ends with the first line that completes it: multi-line text or an array over several lines.
        while (statement := _read("\n".join(lines[start:end]))) is None:
            end += 1
        if lines[start].strip().startswith("["):
            raw = tuple(_keys(statement))
            if lines[start].strip().startswith("[["):
                counts[raw] = counts.get(raw, 0) + 1
                # A new element of the array has no keys of the last one.
                for other in [one for one in counts if one[: len(raw)] == raw and one != raw]:
                    del counts[other]
            table = _numbered(raw, counts)
            found.setdefault(table, start + 1)
        else:
            for place in _places(statement):
                found.setdefault(table + place, start + 1)
        start = end
    return found


def line_at(lines: Mapping[Place, int], place: Place) -> int:
    """Return the line of `place`, or of the nearest enclosing table."""
    while place not in lines:
        place = place[:-1]
    return lines[place]


def _read(chunk: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(chunk)
    except tomllib.TOMLDecodeError:
        return None


def _keys(statement: dict[str, Any]) -> Iterator[str]:
    inner: Any = statement
    while inner:
        ((key, inner),) = inner.items()
        yield key
        inner = inner[0] if isinstance(inner, list) else inner


def _numbered(raw: tuple[str, ...], counts: Mapping[tuple[str, ...], int]) -> Place:
    place: Place = ()
    for depth, key in enumerate(raw, start=1):
        place += (key,)
        if raw[:depth] in counts:
            place += (counts[raw[:depth]] - 1,)
    return place


def _places(value: object, place: Place = ()) -> Iterator[Place]:
    if place:
        yield place
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*place, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _places(inner, (*place, index))


def as_toml(tables: Mapping[str, Any]) -> str:
    """Return values and tables of values (no deeper) as TOML text."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    for key, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{_key(key)}]", *(f"{_key(name)} = {_value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)
