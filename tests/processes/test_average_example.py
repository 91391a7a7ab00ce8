"""Example of averages without training, run like a user runs it; one of three processes is killed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "average.py"


@pytest.mark.trial
def test_average_example_two_processes_finish_when_third_is_killed():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    met = re.findall(r"process (\d): the mean loss of (\d) is (\S+)", done.stdout)
    assert sorted(met) == [("1", "3", "0.20"), ("2", "3", "0.20"), ("3", "3", "0.20")], done.stdout + done.stderr
    big = re.findall(r"process (\d): (\d) were in it, sum (\d+), all equal: True", done.stdout)
    assert {who for who, _, _ in big} == {"1", "2"}, done.stdout + done.stderr
    assert len({(count, total) for _, count, total in big}) == 1 and big[0][1:] in (("2", "6"), ("3", "14"))
    assert done.stdout.endswith("the others ended with 0 and -9\n")
