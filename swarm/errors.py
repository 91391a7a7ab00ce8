"""The base of every error that is the user's to mend."""

from __future__ import annotations

from typing import ClassVar


class HintedError(Exception):
    """What is wrong, and in `hint` what to do about it; the command line prints both and ends with `exit_code`.

    Both are made one line of printable characters, because parts of them may come from a peer and go to a terminal.
    Subclasses set `exit_code`: 2 usage or configuration, 3 could not start here, 4 no swarm reachable, 5 mismatch.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(_line(message))
        self.hint = _line(hint)


def _line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "\ufffd" for letter in text)
