"""What a daemon tells: one line a round, events for programs, a status for people who ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from thinwire.swarm.identity import short
from thinwire.swarm.protocol import PeerId

from .console import LOGGER, bytes_text, count_text
from .events import EventLog
from .peer import Peer
from .status import PeerStatus, Status, this_process, write_status

QUIET = frozenset({"phase", "suspect", "refuted", "updated"})
"""Events that are in the log file only."""


class Reporter:
    """Keeps the books of one daemon. `emit` is where all parts send their events."""

    def __init__(
        self,
        events: Path,
        status: Path,
        *,
        name: str,
        device: str,
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.phase, self.device = "starting", device
        self.loss: float | None = None
        self.speed = 0.0
        self.sync_seconds = 0.0
        self.fp32_bytes = 0.0
        self.checkpoint = ""
        self.alarm = ""
        self._log = EventLog(events)
        self._status, self._name, self._now, self._wall = status, name, now, wall
        self._process = this_process()
        self._away: dict[PeerId, str] = {}

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """Write an event, and say it when a person should know."""
        self._log.append(kind, fields, at=self._now(), wall=self._wall())
        text = " · ".join(
            str(value)[:8] if key in ("peer", "run") else str(value)
            for key, value in fields.items()
            if value not in ("", None) and key != "digest"
        )
        if kind == "alarm":
            self.alarm = str(fields.get("detail", ""))
            LOGGER.warning("%s", self.alarm)
        else:
            LOGGER.log(10 if kind in QUIET else 20, "%s %s", kind, text)

    def round(
        self,
        peer: Peer,
        *,
        loss: float,
        contributors: int,
        missing: Mapping[PeerId, str],
        seconds: float,
        steps: int,
        tokens: int,
    ) -> None:
        """Book a committed round and print its line."""
        replica, roster = peer.replica, peer.session.roster
        up, down = peer.traffic()
        group = max(2, contributors)
        self.fp32_bytes += steps * 2 * (group - 1) / group * 4 * peer.layout.total if contributors > 1 else 0
        self.loss, self.sync_seconds = loss if math.isfinite(loss) else self.loss, seconds
        factor = self.fp32_bytes / up if up else 0.0
        self._away = dict(missing)
        fields = {
            "round": replica.round,
            "loss": loss,
            "peers": len(roster.view),
            "contributors": contributors,
            "members": [short(member) for member in replica.members],
            "missing": {short(absent): reason for absent, reason in missing.items()},
            "bytes_up": up,
            "bytes_down": down,
            "factor": factor,
            "sync_seconds": seconds,
            "tokens_per_second": self.speed,
            "tokens": tokens,
            "steps": steps,
            "strays": peer.session.strays,
            "digest": replica.digest.hex(),
        }
        self._log.append("round", fields, at=self._now(), wall=self._wall())
        absent = "".join(f" · {short(who)} out ({reason})" for who, reason in missing.items())
        LOGGER.log(
            30 if missing else 20,
            "round %d · loss %s · %d/%d peers · up %s (×%.0f) · sync %.1f s · %s tok/s%s",
            replica.round,
            f"{loss:.3f}" if math.isfinite(loss) else "-",
            contributors,
            len(roster.view),
            bytes_text(up),
            factor,
            seconds,
            count_text(self.speed),
            absent,
        )

    def uncommitted(self, peer: Peer) -> None:
        """Book a round that did not come to an end."""
        waiting = ", ".join(short(absent) for absent in peer.session.current.agreement.waiting_for())
        self.emit("uncommitted", {"round": peer.replica.round + 1, "detail": f"waiting for {waiting or 'a quorum'}"})

    def status(self, peer: Peer | None, identity: PeerId, run_id: bytes) -> None:
        """Write status.json."""
        write_status(self._status, self.snapshot(peer, identity, run_id))

    def snapshot(self, peer: Peer | None, identity: PeerId, run_id: bytes) -> Status:
        """Where we are; without a peer that is ready, only who we are."""
        process, started = self._process
        status = Status(
            process=process,
            process_started=started,
            wall=self._wall(),
            peer=identity.hex(),
            name=self._name,
            run=run_id.hex(),
            phase=self.phase,
            device=self.device,
            alarm=self.alarm,
        )
        if peer is not None and peer.ready:
            status = self._full(status, peer)
        return status

    def _full(self, status: Status, peer: Peer) -> Status:
        import msgspec

        session, replica = peer.session, peer.replica
        invite = peer.invite()
        up, down = peer.traffic()
        others = []
        for other, state in session.roster.states().items():
            record = session.roster.record_of(other)
            loss, _, _ = session.stats.get(other, (None, 0.0, 0))
            others.append(
                PeerStatus(
                    peer=other.hex(),
                    state=state,
                    address=record.addresses[0] if record and record.addresses else "",
                    round=session.roster.progress_of(other),
                    loss=loss,
                    reason=self._away.get(other, ""),
                )
            )
        return msgspec.structs.replace(
            status,
            run_name=peer.manifest.run.name,
            invite=invite.code() if invite else "",
            addresses=peer.transport.addresses(),
            round=replica.round,
            rounds=peer.manifest.run.rounds,
            digest=replica.digest.hex(),
            loss=self.loss,
            tokens_per_second=self.speed,
            bytes_up=up,
            bytes_down=down,
            fp32_bytes=int(self.fp32_bytes),
            sync_seconds=self.sync_seconds,
            peers=tuple(others),
            checkpoint=self.checkpoint,
        )

    def close(self) -> None:
        """Close the event log."""
        self._log.close()
