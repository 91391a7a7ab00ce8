"""Parts of the reference pages in Markdown: the note at the top, tables, paragraphs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

NOTE = "<!-- Written by docs/reference/generate.py; change the code instead. -->\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with one line for each row."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def paragraph(text: str) -> str:
    """Return a paragraph, wrapped to the width of a page."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False) + "\n"
