"""The language proof: which changes of a file count as changes of its code."""

import shutil

import pytest
from tools.language_proof import ROOT, differing, main

CODE = '''"""Sum."""
LIMIT = 3
"""Largest sum."""


def add(a, b):
    """Return the sum."""
    # both are positive
    return a + b
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Return the sum.", "Sum of two numbers."),
        ('    """Return the sum."""\n', ""),
        ("Largest sum.", "Limit."),
        ('"""Sum."""\n', ""),
        ("both are positive", "neither is negative"),
        ("a + b", "(a + b)"),
    ],
)
def test_language_proof_ignores_docstrings_and_comments(old, new):
    assert CODE.replace(old, new) != CODE
    assert differing({"a.py": CODE}, {"a.py": CODE.replace(old, new)}) == []


@pytest.mark.parametrize(("old", "new"), [("a + b", "a - b"), ("LIMIT = 3", "LIMIT = 4"), ("return a + b", "pass")])
def test_language_proof_finds_changed_code(old, new):
    assert differing({"a.py": CODE}, {"a.py": CODE.replace(old, new)}) == ["a.py"]


def test_language_proof_finds_added_and_removed_files():
    assert differing({"a.py": CODE, "b.py": CODE}, {"b.py": CODE, "c.py": CODE}) == ["a.py", "c.py"]


@pytest.mark.skipif(not shutil.which("git") or not (ROOT / ".git").exists(), reason="not a git checkout")
def test_language_proof_of_one_commit_succeeds(capsys):
    assert main(["HEAD", "HEAD"]) == 0
    assert "no difference" in capsys.readouterr().out


def test_language_proof_without_commits_prints_usage(capsys):
    assert main([]) == 2
    assert "hint:" in capsys.readouterr().err
