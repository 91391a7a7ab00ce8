"""Example of a custom training loop, run like a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_own_loop_example_two_processes_learn_digits():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"process (\d): test accuracy (0\.\d+) after round (\d+), digest (\w{16})", done.stdout)
    assert [one[0] for one in found] == ["1", "2"], done.stdout + done.stderr
    assert all(float(accuracy) > 0.9 for _, accuracy, _, _ in found), done.stdout
    (_, first, *end), (_, second, *other_end) = found
    assert end == other_end and first == second, "both hold the same network"
    assert done.stdout.endswith("the digests agree\n")


def test_own_loop_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 70
