"""Result of one check of `thinwire doctor`."""

from __future__ import annotations

from typing import Literal

import msgspec


class Check(msgspec.Struct, frozen=True):
    """One line: the subject `name`, the result, what was found, and how to mend a failure."""

    name: str
    result: Literal["OK", "FAIL", "SKIP"]
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.result:<5}{self.name:<12}{self.detail}"
        return f"{line}\n{'':<17}fix: {self.fix}" if self.fix else line


def passed(name: str, detail: str) -> Check:
    """Return a check that found nothing wrong."""
    return Check(name, "OK", detail)


def failed(name: str, detail: str, fix: str) -> Check:
    """Return a check that found a fault."""
    return Check(name, "FAIL", detail, fix)


def skipped(name: str, detail: str) -> Check:
    """Return a check that could not be made, with the reason."""
    return Check(name, "SKIP", detail)
