"""Settings of all tests."""

import argparse
import gc
import os
import signal
import time
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The duration of an example depends on the machine, so it never decides a test. All runs use the same examples, so that
# a new failure has a new cause; `pytest --hypothesis-profile others` looks for more.
settings.register_profile("others", deadline=None)
settings.register_profile("thinwire", deadline=None, derandomize=True)
settings.load_profile("thinwire")

# Tiny models on shared cores: more threads only wait for each other. Daemons of tests inherit this setting.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Many peers run on this machine, and other tests beside them, so none may take the default port.
os.environ.setdefault("THINWIRE_PORT", "0")

# A shell that starts the tests in the background makes them and their children ignore SIGINT; nohup does so with
# SIGHUP.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that divides a long run."""
    parser.addoption(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="K/N",
        help="run the K-th of N parts of the selected tests",
    )


def _part(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N, as in 3/8")
    return int(part), int(parts)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other parts. A test's part follows from its name, so that all parts are all tests."""
    part, parts = config.getoption("--part")
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        (kept if zlib.crc32(item.nodeid.encode()) % parts == part - 1 else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = kept


@pytest.fixture(autouse=True)
def swept() -> Iterator[None]:
    """Collect young garbage after long tests.

    Simulations hide older objects from the collector, and their own garbage stays. It is young, so older objects need
    no scan, which would take a tenth of the time of tests.
    """
    began = time.monotonic()
    yield
    if time.monotonic() > began + 1.0:
        gc.collect(1)
