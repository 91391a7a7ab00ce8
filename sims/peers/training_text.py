"""Text on which simulated peers really train."""

from __future__ import annotations

import random

LINES, LETTERS, LENGTH = 2000, 4, 50
"""Lines of the text, different letters in a line, and characters of a line."""

SEED = 1


def training_text() -> str:
    """Return a text, the same in all runs. Each line has only a few letters, drawn for it.

    Lines differ, so a step along the gradient of some lines lowers the loss of these more than that of others, which the
    trial of newcomers in an open run measures. All lines have the same form, so a model learns something about new ones.
    """
    rng = random.Random(SEED)
    alphabet = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    lines = ("".join(rng.choices(rng.sample(alphabet, LETTERS), k=LENGTH)) for _ in range(LINES))
    return "".join(f"{line}\n" for line in lines)
