"""Words for the values that a key of a table may have: a type with its bounds, for errors."""

from __future__ import annotations

import types
import typing
from typing import Any

from msgspec import Meta

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def wanted(kind: Any) -> str:
    """Return the values of a type as text: the rest of the sentence "… is not".

    A description in the type comes first.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        marks = [mark for mark in parts[1:] if isinstance(mark, Meta)]
        described = [mark.description for mark in marks if mark.description]
        return described[0] if described else wanted(parts[0]) + "".join(_bounds(mark, parts[0]) for mark in marks)
    if origin is typing.Literal:
        return " or ".join(map(repr, parts))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(wanted(part) for part in parts if part is not type(None))
    if origin in (tuple, list):
        same = len(set(parts)) == 1 or parts[-1] is Ellipsis
        count = f"{len(parts)} values" if origin is tuple and parts[-1] is not Ellipsis else "values"
        return f"a list of {count}{f', each {wanted(parts[0])}' if same else ''}"
    return _WORDS.get(kind, "a table")


def _bounds(mark: Meta, kind: Any) -> str:
    if mark.max_length is not None:
        what = "characters" if kind is str else "values"
        return f", with {mark.min_length or 0} to {mark.max_length} {what}"
    low = f" from {mark.ge:g}" if mark.ge is not None else f" above {mark.gt:g}" if mark.gt is not None else ""
    to = " up to" if mark.gt is not None else " to"
    high = f"{to} {_most(mark.le)}" if mark.le is not None else f"{to} below {mark.lt:g}" if mark.lt is not None else ""
    return low + high


def _most(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
