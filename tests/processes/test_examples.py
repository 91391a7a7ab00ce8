"""Examples, run like a user runs them: averages without training, and a custom training loop."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
AVERAGE, OWN_LOOP = EXAMPLES / "average.py", EXAMPLES / "own_loop.py"


@pytest.mark.trial
def test_average_example_two_processes_finish_when_third_is_killed():
    """One of the three is killed."""
    done = subprocess.run([sys.executable, AVERAGE], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    met = re.findall(r"process (\d): the mean loss of (\d) is (\S+)", done.stdout)
    assert sorted(met) == [("1", "3", "0.20"), ("2", "3", "0.20"), ("3", "3", "0.20")], done.stdout + done.stderr
    big = re.findall(r"process (\d): (\d) were in it, sum (\d+), all equal: True", done.stdout)
    assert {who for who, _, _ in big} == {"1", "2"}, done.stdout + done.stderr
    assert len({(count, total) for _, count, total in big}) == 1 and big[0][1:] in (("2", "6"), ("3", "14"))
    assert done.stdout.endswith("the others ended with 0 and -9\n")


def test_own_loop_example_two_processes_learn_digits():
    done = subprocess.run([sys.executable, OWN_LOOP], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"process (\d): test accuracy (0\.\d+) after round (\d+), digest (\w{16})", done.stdout)
    assert [one[0] for one in found] == ["1", "2"], done.stdout + done.stderr
    assert all(float(accuracy) > 0.9 for _, accuracy, _, _ in found), done.stdout
    (_, first, *end), (_, second, *other_end) = found
    assert end == other_end and first == second, "both hold the same network"
    assert done.stdout.endswith("the digests agree\n")


def test_own_loop_example_is_short():
    assert len(OWN_LOOP.read_text().splitlines()) < 70
