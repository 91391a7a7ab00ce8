"""Settings of all tests."""

import gc
import os
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long one example takes depends on the machine; it never decides a test. The same examples in every run, or a change is
# blamed for what was there before; `pytest --hypothesis-profile others` looks for more.
settings.register_profile("others", deadline=None)
settings.register_profile("thinwire", deadline=None, derandomize=True)
settings.load_profile("thinwire")

# Tiny models on shared cores: more threads only wait for each other. Daemons that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background lets them ignore SIGINT, and nohup SIGHUP; what they start would, as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def swept() -> Iterator[None]:
    """Simulations hide what was there before from the collector, what they leave is found by nobody else. It is young: what
    was there before need not be looked through again, which is a tenth of the time of tests.
    """
    began = time.monotonic()
    yield
    if time.monotonic() > began + 1.0:
        gc.collect(1)
