"""Errors that the user can mend: their message and hint fit a terminal."""

from thinwire.swarm.identity.errors import MOST, HintedError


def test_message_and_hint_are_one_line_of_limited_length():
    """A path of ten thousand characters would fill the screen, and hide the reason at its end."""
    error = HintedError(f"cannot read {'x' * 10_000}\nFile name too long", "a\x1b[2J" + "y" * 10_000)
    assert str(error).startswith("cannot read x") and str(error).endswith("x File name too long")
    assert len(str(error)) == len(error.hint) == MOST + 1
    assert error.hint.startswith("a\ufffd[2J") and str(error).isprintable()
