"""Bytes as they were on the wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """To and from a peer, by plane."""

    control_up: int = 0
    control_down: int = 0
    bulk_up: int = 0
    bulk_down: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.control_up + other.control_up,
            self.control_down + other.control_down,
            self.bulk_up + other.bulk_up,
            self.bulk_down + other.bulk_down,
        )
