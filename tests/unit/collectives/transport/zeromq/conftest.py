"""Fixtures of the tests that use real transports on loopback."""

import pytest
from kit.wire import Wire, until


@pytest.fixture
def wire():
    """Return an empty set of peers; `ProxyPipe.run` closes the peers that a test adds."""
    return Wire()


@pytest.fixture
def eventually():
    """Return the coroutine function that waits until a condition is true."""
    return until
