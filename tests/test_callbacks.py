"""Search for functions that are assigned to an object from outside: they are arguments of its constructor instead."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("swarm", "compression", "collectives", "node")


def late_callbacks(text: str) -> Iterator[int]:
    """Yield the line of each public attribute that is declared as a function, and of each function given to an object."""
    for node in ast.walk(ast.parse(text)):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if not isinstance(target, ast.Attribute) or target.attr.startswith("_"):
                continue
            own = isinstance(target.value, ast.Name) and target.value.id == "self"
            declared = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Callable")
            if declared or isinstance(node.value, ast.Lambda) or (not own and ast.unparse(node.value) == "self"):
                yield node.lineno


def test_package_assigns_no_callbacks_late() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in late_callbacks(path.read_text())]
    assert len(files) > 200 and not found, found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("self.done: Callable[[], None] = nothing", 1),
        ("other.done = lambda: None", 1),
        ("presence.handler = self", 1),
        ("self._done: Callable[[], None] = done", 0),
        ("self.done = done", 0),
    ],
)
def test_late_callbacks_finds_functions_given_to_objects(text, count):
    assert len(list(late_callbacks(text))) == count
