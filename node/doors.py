"""The doors: the only ways from the code of a peer to the world outside. `tests/test_lints.py` says who may open one."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from thinwire.collectives.transport import Admit, Transport

from .disk import Disk
from .waiting import Work, at_once


@dataclass(frozen=True, slots=True)
class Doors:
    """Clocks, randomness, disk; the network comes as an OpenTransport. `now`: monotonic seconds, `wall`: seconds since 1970.

    Waiting is asyncio's, so the event loop's clock must go as `now` does. `aside`: computes what others wait for and nothing
    of ours needs, such as sums that we owe them: not where training may be busy for long.
    """

    now: Callable[[], float]
    wall: Callable[[], float]
    rng: random.Random
    disk: Disk
    aside: Work = at_once


OpenTransport = Callable[[Admit], Awaitable[Transport]]
"""Opens the transport of a peer with the gate's decision given."""
