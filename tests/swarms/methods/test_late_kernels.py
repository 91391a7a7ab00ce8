"""Rounds compile nothing: a peer compiles before it serves, since compiling would delay its answers by seconds."""

import subprocess
import sys

import pytest
from kit.programs import late_kernels

OFTEN, SELDOM = ("noloco",), ("demo", "powersgd", "diloco", "sparse-butterfly", "sparse-fragments")


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(name, marks=pytest.mark.trial) for name in OFTEN),
        *(pytest.param(name, marks=pytest.mark.soak) for name in SELDOM),
    ],
)
def test_rounds_compile_no_kernel_after_compile_kernels(family):
    """In a separate process: the kernels that other tests have compiled would hide a gap."""
    done = subprocess.run([sys.executable, late_kernels.__file__, family], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [family], done.stdout
