"""Fixtures of the tests of whole swarms in virtual time."""

import pytest
from kit.swarm import Swarm


@pytest.fixture
def swarm() -> type[Swarm]:
    """Return the class of swarms with artificial training (tests/kit/swarm.py)."""
    return Swarm
