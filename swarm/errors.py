"""The base of every error that is the user's to mend."""

from __future__ import annotations

from typing import ClassVar


class HintedError(Exception):
    """What is wrong, and in `hint` what to do about it; the command line prints both and ends with `exit_code`.

    Subclasses set `exit_code`: 2 usage or configuration, 3 could not start here, 4 no swarm reachable, 5 mismatch.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
