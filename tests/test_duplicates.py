"""Search for copied code: no block of code lines stands twice in the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("swarm", "compression", "collectives", "node", "sims")
MOST = 12
"""Largest number of equal lines in a row. Longer blocks must be shared."""

COMMENT = re.compile(r"(^|\s\s)#.*$")


def code_lines(text: str) -> list[tuple[int, str]]:
    """Return the code lines of a module, each with its number, without indentation, imports, docstrings and comments."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        string = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if string or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = ((number, COMMENT.sub("", line).strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in numbered if line and number not in left_out]


def duplicates(modules: Iterable[tuple[str, str]], most: int = MOST) -> Iterator[str]:
    """Yield the places of each block of more than `most` lines that stands twice in these modules (name, text)."""
    seen: dict[tuple[str, ...], tuple[str, int, int]] = {}
    for name, text in modules:
        lines, last = code_lines(text), ("", -1)
        for at in range(len(lines) - most):
            block = tuple(line for _, line in lines[at : at + most + 1])
            other, index, number = seen.setdefault(block, (name, at, lines[at][0]))
            if (other, index) == (name, at) or (other == name and at - index <= most):
                continue  # the block itself, or a repetition that overlaps itself
            if last != (other, index - 1):  # else it continues the block before
                yield f"{other}:{number} and {name}:{lines[at][0]}"
            last = other, index


def test_package_has_no_copied_blocks() -> None:
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    found = list(duplicates((str(path.relative_to(ROOT)), path.read_text()) for path in files))
    assert len(files) > 300 and not found, "\n".join(found)


def test_duplicates_finds_copy_with_other_comments_and_indentation() -> None:
    body = [f"x{n} = {n}" for n in range(MOST + 1)]
    copied = ["import os", "def f():", '    """Text."""', *(f"    {line}  # {at}\n" for at, line in enumerate(body))]
    modules = [("a", "\n".join(body)), ("b", "\n".join(copied)), ("c", "\n".join(body[1:]))]
    assert list(duplicates(modules)) == ["a:1 and b:4"]
