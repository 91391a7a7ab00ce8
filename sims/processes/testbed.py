"""Interface of testbeds: a network between real peers, with faults on command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

from thinwire.swarm.identity.errors import HintedError


class EmulationError(HintedError):
    """This machine cannot have such a network; the message names the missing feature."""

    exit_code: ClassVar[int] = 3


class Unplayable(Exception):
    """A fault that this testbed cannot inject; the message is the reason."""


class Site(NamedTuple):
    """Addresses of a peer: `host`, `port`, `ports` (first, last); others dial `advertise`.

    `prefix`: words before the command that starts its process.
    """

    host: str
    port: int
    ports: tuple[int, int]
    advertise: str
    prefix: tuple[str, ...] = ()


class PeerNetworks(Protocol):
    """Networks of peers 0…n-1."""

    async def open(self) -> Sequence[Site]:
        """Create the networks. If it raises EmulationError, nothing remains of them."""
        ...

    def meet(self, processes: Mapping[int, int]) -> None:
        """Set the process number of each peer, whenever it changes."""
        ...

    def hold(self, i: int, j: int) -> None:
        """Hold back all that i sends to j, until `release` has been called as often as `hold`."""
        ...

    def release(self, i: int, j: int) -> None:
        """End one `hold`."""
        ...

    def lose(self, probability: float) -> None:
        """Set a loss on all links, in addition to their own."""
        ...

    def disturb(self, kind: str, i: int, j: int, seconds: float) -> None:
        """Inject "reset", "half-open" (i knows, j not yet) or "slow-close". Raises Unplayable."""
        ...

    def spoil(self, kind: str, i: int, j: int) -> None:
        """Set "corrupt", "duplicate" or "reorder" for traffic of i and j; "" ends it. Raises Unplayable."""
        ...

    async def close(self) -> None:
        """Remove all that `open` has made."""
        ...
