"""Option --part of the tests, which divides a long run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*options):
    command = [sys.executable, "-m", "pytest", "--collect-only", "tests/test_layers.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("part", ["7", "0/8", "9/8", "x/8"])
def test_part_without_a_place_among_the_parts_is_a_usage_error(part):
    ended = run("-n", "2", "--part", part)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR and not ended.stdout
    assert f"argument --part: '{part}' is not K/N with K from 1 to N" in ended.stderr


def test_parts_are_all_tests_and_each_test_is_in_one():
    parts, whole = [run("--part", f"{part}/2").stdout for part in (1, 2)], run().stdout
    names = [[line for line in text.splitlines() if "::" in line] for text in (*parts, whole)]
    assert sorted(names[0] + names[1]) == sorted(names[2]) and names[0] and names[1]
