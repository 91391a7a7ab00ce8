"""Parts of a peer that its work in the steps of a group uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.node.runtime.event_log import Emit
from thinwire.swarm.messages.registry import PeerId


@dataclass(frozen=True, slots=True)
class StepContext:
    """Identity, send queue, clock (seconds), worker and event log of a peer, for an origin or a host."""

    me: PeerId
    send_queue: SendQueue
    now: Callable[[], float]
    work: Work
    emit: Emit
