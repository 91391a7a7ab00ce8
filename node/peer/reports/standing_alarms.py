"""Alarms that have not ended, for a status."""

from __future__ import annotations

MOST = 64
"""Most alarms that are remembered, the newest ones."""


class StandingAlarms:
    """Texts of alarms in the order in which they were last raised."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    def begin(self, text: str) -> None:
        self.end(text)
        self._texts[text] = None
        if len(self._texts) > MOST:
            del self._texts[next(iter(self._texts))]

    def end(self, text: str) -> None:
        self._texts.pop(text, None)

    @property
    def shown(self) -> str:
        """Newest alarm that has not ended; empty if there is none."""
        return next(reversed(self._texts), "")
