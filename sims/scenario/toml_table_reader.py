"""Strict reader of tables that a person wrote: every error names the line and a remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec
from thinwire.sims.scenario.toml_lines import Place, line_at
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.manifest.type_words import wanted


class ScenarioTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables. A `description` of a field's type completes the sentence "… is not" of an error."""


Kind = TypeVar("Kind", bound=ScenarioTable)

MOST_LISTED = 40
"""Most words that a hint lists: all kinds of faults or lies, but not all peers of a large swarm."""


class ScenarioError(HintedError):
    """Invalid scenario; the message names the file and the line."""

    exit_code: ClassVar[int] = 2


class Reader:
    """Reader of one file; `lines` maps values to line numbers."""

    def __init__(self, file: Path, lines: Mapping[Place, int]) -> None:
        self.file, self._lines = file, lines

    def table(self, kind: type[Kind], table: object, place: Place) -> Kind:
        """Check and return the table at `place`. Raises ScenarioError."""
        if not isinstance(table, dict):
            raise self.error(place, f"{_dotted(place)} is a table", f"write {self._header(place)} on a separate line")
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        values = {}
        for key, value in table.items():
            where = (*place, key)
            if key not in fields:
                raise self.error(where, f"{_dotted(where)}: unknown key", nearest(key, fields, "keys: "))
            if not _finite(value):
                raise self.error(where, f"{_dotted(where)}: {value!r} is not a finite number", "write a number")
            try:
                values[key] = msgspec.convert(value, fields[key].type)
            except msgspec.ValidationError:
                raise self.error(where, f"{_dotted(where)}: {value!r} is not {wanted(fields[key].type)}") from None
        for field in fields.values():
            if field.required and field.name not in values:
                raise self.error(place, f"{_dotted((*place, field.name))} is missing", f"add {field.name} = …")
        return kind(**values)

    @staticmethod
    def _header(place: Place) -> str:
        return f"[[{_dotted(place)}]]" if isinstance(place[-1], int) else f"[{_dotted(place)}]"

    def error(self, place: Place, text: str, hint: str = "`thinwire sim new FILE` explains every key") -> ScenarioError:
        """Return an error at `place`."""
        return ScenarioError(f"{self.file}, line {line_at(self._lines, place)}: {text}", hint)


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint for an unknown word: the nearest known one, or `otherwise` and the first of all."""
    words = list(known)
    if close := difflib.get_close_matches(word, words, n=1):
        return f"did you mean {close[0]!r}?"
    rest = len(words) - MOST_LISTED
    return otherwise + ", ".join(words[:MOST_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _finite(value: object) -> bool:
    if isinstance(value, list):
        return all(_finite(inner) for inner in value)
    return not isinstance(value, float) or math.isfinite(value)


def _dotted(place: Place) -> str:
    return ".".join(str(part) for part in place if isinstance(part, str))
