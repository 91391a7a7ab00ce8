"""Publication of a daemon's run in directories; a failure does not end the daemon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from thinwire.collectives.transport.interface import Contact
from thinwire.node.discovery.announcer import CARD_SECONDS, announce
from thinwire.node.discovery.public_runs import DirectoryError
from thinwire.node.discovery.sources import open_directory
from thinwire.node.peer.peer import Peer
from thinwire.node.peer.reporter import Reporter
from thinwire.node.runtime.asyncio_extra import cancelled
from thinwire.node.runtime.load_settings import Config
from thinwire.swarm.identity.run_card import RunCard, RunDescription


def card_of(peer: Peer, loss: float | None, wall: float) -> RunCard | None:
    """Return the card of a peer's run; None while it has no state or no address.

    `wall`: seconds since 1970.
    """
    if not peer.ready:
        return None
    roster, manifest = peer.session.roster, peer.manifest
    if not roster.record.addresses:
        return None
    model = manifest.model
    description = RunDescription(
        name=manifest.run.name,
        model=f"{model.kind}-{model.layers}x{model.width}" if model.kind == "transformer" else model.kind,
        method=manifest.outer.method,
        admission=manifest.admission.mode,
        round=peer.replica.newest[0],
        peers=len(roster.peers.view),
        loss=loss,
    )
    return RunCard.create(peer.identity, roster.record, description, issued=int(wall), ttl=CARD_SECONDS)


class Announcing:
    """Task that publishes the card of the peer. Raises NotInstalled if a directory lacks its package."""

    def __init__(self, config: Config, report: Reporter, *, public: bool, lan: bool) -> None:
        self._report, self._published, self._begun = report, False, False
        self._reasons: list[str] = []
        """Why sources have failed since the last publication."""
        self._alarms: list[str] = []
        """Alarms that were raised since all sources worked, each once."""
        self._directory = open_directory(
            config, public=public, lan=lan, publishes=True, warn=self._reasons.append, opened=self._opened
        )
        self._task: asyncio.Task[None] | None = None

    def begin(self, peer: Callable[[], Peer]) -> None:
        """Publish the card of `peer()` again and again."""

        def card() -> RunCard | None:
            return card_of(peer(), self._report.loss, self._directory.wall())

        async def published(accepted: bool) -> None:
            self._report_state()
            await self._seek_others(peer())
            if self._published or not accepted:
                return
            self._published, mode = True, peer().manifest.admission.mode
            begun = "; others find it there with --bootstrap and an address of our DHT node" if self._begun else ""
            invite = (
                "" if mode == "open" else f"; peers that find it there need an invite, too (admission.mode = {mode!r})"
            )
            self._report.emit("published", {"detail": f"the run is in the directory{begun}{invite}"})

        def addresses() -> Sequence[str]:
            now = peer()  # A daemon that has changed its stage has another peer, which is not ready yet.
            return now.session.roster.record.addresses if now.ready else ()

        self._task = asyncio.create_task(announce(self._directory, card, published, addresses))

    async def end(self) -> None:
        """Stop publishing and close the directory."""
        if self._task is not None:
            await cancelled(self._task)
        await self._directory.close()

    async def _seek_others(self, peer: Peer) -> None:
        """Dial the other publishers of the run if this peer has no link.

        Their addresses, or ours, may have changed since all links were lost, and then no peer knows the address of another one.
        """
        if not peer.ready or peer.presence.live:
            return
        with contextlib.suppress(DirectoryError):  # The publication reports a directory that fails.
            cards = await self._directory.find(peer.run_id)
            others = [card.record for card in cards if card.record.peer_id != peer.identity.peer_id]
            await peer.admission.dial([Contact(one.addresses[0], one.transport_key) for one in others])

    def _opened(self, addresses: Sequence[str], begun: bool) -> None:
        self._begun = begun
        first = ", the first of a new directory: others need --bootstrap with one of its addresses" if begun else ""
        self._report.emit("directory", {"detail": f"DHT node{first}", "addresses": list(addresses)})

    def _report_state(self) -> None:
        """Report a change: sources of the directory fail, fail for other reasons, or all work again."""
        alarm = f"the directory fails: {'; '.join(self._reasons)}" if self._reasons else ""
        self._reasons.clear()
        if bool(self._alarms) != bool(alarm):
            self._report.emit("directory", {"detail": "unreachable" if alarm else "reachable again"})
        if not alarm:
            for text in self._alarms:
                self._report.end_alarm(text, "the directory can be reached again")
            self._alarms.clear()
        elif alarm not in self._alarms:
            self._alarms.append(alarm)
            self._report.emit("alarm", {"detail": alarm})
