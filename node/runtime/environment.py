"""The environment: a peer's only access to the outside world.

`tests/test_lints.py` lists the modules that may create one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from thinwire.collectives.transport.interface import Admit, Transport
from thinwire.node.runtime.asyncio_extra import Work, at_once
from thinwire.node.runtime.disk import Disk


@dataclass(frozen=True, slots=True)
class Environment:
    """Clocks, randomness, disk; the network comes as an OpenTransport.

    `now`: monotonic seconds, `wall`: seconds since 1970.

    Waiting uses asyncio, so the event loop's clock must advance like `now`.

    - `aside`: runs computations that other peers wait for and that our training does not need, such as averages of chunks that
      we own; not in the thread that trains.
    - `write`: runs the disk operations of a checkpoint while training continues.
    - `spare`: bytes of memory that this machine has left.
    """

    now: Callable[[], float]
    wall: Callable[[], float]
    rng: random.Random
    disk: Disk
    aside: Work = at_once
    write: Work = at_once
    spare: Callable[[], int] = lambda: sys.maxsize


OpenTransport = Callable[[Admit], Awaitable[Transport]]
"""Opens the transport of a peer with the given gate decision."""
