"""The scripts of `make bench` run to their end at their smallest sizes. Their figures are not compared with anything."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "exchange.allreduce": "--peers 2 --mb 2 --turns 1",
    "exchange.tiny": "--peers 2 --sizes 100 --count 5 --turns 1",
    "exchange.outerstep": "--peers 2 --mb 4 --turns 1",
    "exchange.kill": "--peers 4 --mb 4 --kills 3",
    "exchange.wan": "--peers 2 --mb 2 --turns 1",
    "exchange.relay": "--mib 2",
    "daemon.memory": "--peers 2 --layers 2 --width 256 --rounds 3",
    "daemon.largemodels": "--only 2M --rounds 2",
    "daemon.idle": "--seconds 2 --turns 1",
    "daemon.monitoring": "--seconds 2 --turns 1",
    "swarms.linkcost": "--peers 2 --windows 2 --only sparseloco",
    "compression.codecspeed": "--mib 4 --repeats 5 --only int8",
}


def test_every_script_of_make_bench_is_here():
    assert set(re.findall(r"python -m benchmarks\.([\w.]+)", (ROOT / "Makefile").read_text())) == SMALLEST.keys()


@pytest.mark.soak
@pytest.mark.parametrize(("script", "options"), SMALLEST.items(), ids=SMALLEST.keys())
def test_benchmark_script_runs_to_its_end(script, options):
    command = [sys.executable, "-m", f"benchmarks.{script}", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
