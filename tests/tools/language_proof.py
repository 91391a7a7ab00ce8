"""Prove that a change of the language changes no code.

    python tests/tools/language_proof.py OLD NEW      # two commits

For every .py file of the two commits, the syntax trees without docstrings must be equal. Comments are not in a syntax tree.
A string that stands alone as a statement counts as a docstring, because attributes are documented so. Prints the files that
differ or that only one of the commits has; exit code 1 if there are any.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def code_of(source: str) -> str:
    """Return the dump of a module's syntax tree without docstrings. Raises SyntaxError."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # An empty body and `...` are one: a method of a protocol may have only a docstring.
            node.body = [one for one in body if not _is_docstring(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_docstring(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and (isinstance(value.value, str) or value.value is ...)


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the names of files whose code differs, or that one side lacks. Both map names to sources."""
    return [
        name
        for name in sorted({*old, *new})
        if name not in old or name not in new or (old[name] != new[name] and code_of(old[name]) != code_of(new[name]))
    ]


def sources(commit: str) -> dict[str, str]:
    """Return name -> source of all .py files of a commit. Raises subprocess.CalledProcessError."""

    def git(*words: str, data: bytes = b"") -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, input=data, capture_output=True, check=True).stdout

    rows = [row.split(b"\t") for row in git("ls-tree", "-r", "-z", commit).split(b"\0") if row]
    blobs = {name.decode(): about.split()[2] for about, name in rows if name.endswith(b".py")}
    data, found = git("cat-file", "--batch", data=b"\n".join(blobs.values()) + b"\n"), {}
    for name in blobs:
        head, _, data = data.partition(b"\n")
        size = int(head.split()[2])
        found[name], data = data[:size].decode(), data[size + 1 :]
    return found


def main(words: Sequence[str]) -> int:
    """Compare two commits."""
    if len(words) != 2:
        print("error: two commits are needed\nhint: python tests/tools/language_proof.py main HEAD", file=sys.stderr)
        return 2
    old, new = map(sources, words)
    names = differing(old, new)
    print("\n".join(names) if names else f"{len(new)} files, no difference beyond docstrings and comments")
    return int(bool(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
