"""Checks of the arguments of the Python interface: an error names the argument and what it must be."""

from __future__ import annotations

from numbers import Real
from typing import Any


def whole_number(name: str, value: Any, what: str, least: int = 0, most: int | None = None) -> int:
    """Return a whole number, for example of a tensor, as an int.

    `what`: the rest of the sentence "… must be a whole number". Raises ValueError if it is no whole number, below `least` or
    above `most` (None: no limit).
    """
    try:
        number = int(value)
        whole = not isinstance(value, str | bytes) and bool(number == value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        number, whole = 0, False
    if not whole or number < least or (most is not None and number > most):
        raise ValueError(f"{name} must be a whole number {what}, not {value!r}")
    return number


def samples(name: str, value: Any) -> int:
    """Return a number of samples. Raises ValueError."""
    return whole_number(name, value, "of samples")


def seconds(name: str, value: Any) -> float:
    """Return a number of seconds, 0 or more, also infinite. Raises ValueError."""
    if not isinstance(value, Real) or not float(value) >= 0:
        raise ValueError(f"{name} must be a number of seconds, 0 or more, not {value!r}")
    return float(value)


def text(name: str, value: Any) -> str:
    """Return a text. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, not {type(value).__name__}")
    return value
