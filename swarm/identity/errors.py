"""Base class of all errors that the user can fix."""

from __future__ import annotations

from typing import ClassVar

MOST = 2000
"""Most characters of a message or a hint."""


class HintedError(Exception):
    """Error with a message and a `hint` for the user, both printed by the command line and in tracebacks.

    The command line ends with `exit_code`. Message and hint are reduced to one line of printable characters, because
    parts of them may come from a peer and are written to a terminal. The middle of a long one is left out. Subclasses set
    `exit_code`: 2 usage or configuration, 3 could not start here, 4 no swarm reachable, 5 mismatch.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(_line(message))
        self.hint = _line(hint)
        if self.hint:
            self.add_note(f"hint: {self.hint}")


class NotInstalled(HintedError):
    """A package that a command, a setting or a manifest needs is not installed, or is too old.

    Its code is one after which a service is not started again: a person has to install the package.
    """

    exit_code: ClassVar[int] = 2


def _line(text: str) -> str:
    if len(text) > MOST:
        text = f"{text[: MOST // 2]}…{text[-MOST // 2 :]}"
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "\ufffd" for letter in text)
