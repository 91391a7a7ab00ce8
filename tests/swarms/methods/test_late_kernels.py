"""Rounds compile nothing: a peer compiles before it serves, since compiling would delay its answers by seconds."""

import subprocess
import sys

import pytest
from kit.programs import late_kernels


@pytest.mark.trial
@pytest.mark.parametrize("family", ["diloco", "noloco", "sieve", "demo", "powersgd", "sparse-chains"])
def test_rounds_compile_no_kernel_after_compile_kernels(family):
    """In a separate process: the kernels that other tests have compiled would hide a gap."""
    done = subprocess.run([sys.executable, late_kernels.__file__, family], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [family], done.stdout
