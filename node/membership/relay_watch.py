"""Relays that pass on control messages of a peer, and none of the data that the peer owes us."""

from __future__ import annotations

from thinwire.collectives.transport.interface import Transport
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.swarm.messages.registry import PeerId

RELAY_SECONDS = 3.0
"""Seconds in which a peer sends control messages and no overdue data, after which its relay is left.

After an outage, control messages come before the data.
"""


class RelayWatch:
    """Watch of the debtors of a send queue: the peers behind a relay that owe us data.

    It leaves the circuit of a debtor after RELAY_SECONDS in which messages of it come, and no data.
    """

    def __init__(self, transport: Transport, send_queue: SendQueue) -> None:
        self._transport, self._send_queue = transport, send_queue
        self._silent: dict[PeerId, tuple[int, float]] = {}
        """Bulk bytes that had come from a debtor, and the time of its first message since then without data."""

    def on_message(self, peer: PeerId, now: float) -> None:
        """Note that a message of a peer has come."""
        debtors = self._send_queue.debtors
        if peer not in debtors:
            return
        owed = debtors[peer]
        before, since = self._silent.pop(peer, (owed, now))
        if self._transport.bulk_received(peer) != owed:
            del debtors[peer]
        elif before != owed or now - since < RELAY_SECONDS:
            self._silent[peer] = owed, since if before == owed else now
        else:
            del debtors[peer]
            self._transport.leave_circuit(peer)

    def forget(self, peer: PeerId) -> None:
        """Forget a peer without a link."""
        self._silent.pop(peer, None)
