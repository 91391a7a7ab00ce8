"""Code blocks of the documents."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@dataclass(frozen=True)
class Block:
    """Fenced block of a document, without its indentation; `title`: text after the language, empty if there is none."""

    document: str
    title: str
    code: str


def blocks(language: str) -> list[Block]:
    """Return all blocks of a language, in the order of the documents."""
    fence = re.compile(rf'^( *)```{language}(?: title="([^"\n]*)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
    return [
        Block(str(document.relative_to(ROOT)), title, textwrap.dedent(code))
        for document in DOCUMENTS
        for _, title, code in fence.findall(document.read_text())
    ]


def shell_lines() -> list[str]:
    """Return the different lines of the documents' shell blocks, without comments."""
    lines = {line.partition(" #")[0].strip() for block in blocks("sh") for line in block.code.splitlines()}
    return sorted(lines - {""})
