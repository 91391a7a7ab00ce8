"""Reports of a peer: one line a round, events for programs, a status for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
from thinwire.collectives.costs.plan_outcome import Comparison
from thinwire.collectives.outcome import Outcome
from thinwire.node.peer.peer import Peer
from thinwire.node.peer.reports.lineage_alarms import LineageAlarms
from thinwire.node.peer.reports.plan_outcome_check import PeerFacts, PlanCheck
from thinwire.node.peer.reports.plan_outcome_text import comparison_text
from thinwire.node.peer.reports.standing_alarms import StandingAlarms
from thinwire.node.peer.status import PeerStatus, Phase, Status
from thinwire.node.peer.status_parts import fetching, fragments_of, lineages, links_known, stalls, transfers
from thinwire.node.runtime.console import bytes_text, count_text, plain, saved_text
from thinwire.node.runtime.event_log import event_text
from thinwire.swarm.identity.identity import short
from thinwire.swarm.messages.registry import PeerId

DEBUG, INFO, WARNING = 10, 20, 30
"""Levels of lines; the numbers are those of `logging`."""

QUIET = frozenset({"phase", "suspect", "refuted", "updated"})
"""Events that go only to the log file."""

NOTABLE = frozenset({"waiting", "waited", "suspended", "wrong_chunk"})
"""Events that a training loop of the user's own shows, too."""

PLAN_SECONDS = 10.0
"""Seconds between two comparisons with the plan: one takes a millisecond, or ten with 64 peers."""

ABSENT = 64
"""Most peers in the status that are gone or banned, the last ones: strangers may have many keys."""

ALARMS = 64
"""Different alarms that the summary at the end lists."""


class Reporter:
    """Reporter of one peer. All parts of the peer send events to `emit`, on the loop's thread.

    write: receives every event, kind and fields. log: receives lines for people with their level,
    and the event behind each, its "kind" included. wall: seconds since
    1970. process: number and start (seconds since 1970) of the process, for the status. group: describes the group with
    which this peer holds the model. memory: returns the bytes of main memory and of the GPU that the process occupies.
    """

    def __init__(
        self,
        write: Callable[[str, Mapping[str, object]], None],
        *,
        log: Callable[[int, str, Mapping[str, object]], None] = lambda level, text, event: None,
        wall: Callable[[], float],
        name: str = "",
        device: str = "",
        process: tuple[int, float] = (0, 0.0),
        group: Callable[[], str] = lambda: "",
        memory: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self.phase: Phase = "starting"
        self.device = device
        self.loss: float | None = None
        self.held_out: float | None = None
        self.held_out_round = 0
        self.speed = 0.0
        self.sync_seconds = 0.0
        self.fp32_bytes = 0.0
        self.checkpoint = ""
        self._standing = StandingAlarms()
        self._alarms: dict[str, str] = {}
        """Alarms of this process, each with the reason of its end; empty: it has not ended."""
        self._lineages = LineageAlarms()
        self._write, self._log, self._wall, self._name, self._process = write, log, wall, name, process
        self.group, self._memory = group, memory
        self._away: dict[PeerId, str] = {}
        self._plan, self._compared, self._compared_at = PlanCheck(), tuple[Comparison, ...](), -math.inf

    @property
    def alarm(self) -> str:
        """Newest alarm that has not ended; empty if there is none."""
        return self._standing.shown

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """Write an event, and print it if people should know it."""
        self._write(kind, fields)
        if kind == "lineage":
            self._lineages.begin(fields)
        if kind == "alarm":
            text = str(fields.get("detail", ""))
            self._standing.begin(text)
            if len(self._alarms) < ALARMS or text in self._alarms:
                self._alarms[text] = ""
            self._log(WARNING, text, {"kind": kind, **fields})
        else:
            if kind == "alarm_over":
                over = str(fields["alarm"])
                self._standing.end(over)
                if over in self._alarms:
                    self._alarms[over] = str(fields["detail"])
            quiet = kind in QUIET or (
                kind == "audited" and not fields["false"]
            )  # an audit of many rounds finds no fault
            level = WARNING if kind in NOTABLE else DEBUG if quiet else INFO
            self._log(level, event_text(kind, fields), {"kind": kind, **fields})

    def book(self, peer: Peer, outcome: Outcome, *, loss: float | None, seconds: float, steps: int) -> None:
        """Record a committed round of `steps` own inner steps that took `seconds`; the status shows it."""
        group = len(outcome.contributors)
        self.fp32_bytes += steps * 2 * (group - 1) / group * 4 * peer.layout.total if group > 1 else 0
        self.loss = loss if loss is not None and math.isfinite(loss) else self.loss
        if steps:
            self.sync_seconds = seconds

    def round(
        self, peer: Peer, outcome: Outcome, *, loss: float | None, seconds: float, steps: int, weight: int
    ) -> None:
        """Print the line of a committed round that took `seconds`. `weight`: tokens or samples of our `steps`.

        It is a warning if a peer is missing that was there in the round before. A member may be absent for days.
        """
        roster, missing = peer.session.roster, outcome.missing
        number, members, digest = peer.replica.after(outcome)
        contributors, loss = len(outcome.contributors), math.nan if loss is None else loss
        up, down = peer.traffic()
        factor = self.fp32_bytes / up if up else 0.0
        news = bool(missing.keys() - self._away.keys())
        self._away = dict(missing)
        self._end_alarms(peer)
        fields = {
            "round": number,
            "loss": loss,
            "peers": len(roster.peers.view),
            "contributors": contributors,
            "members": [short(member) for member in members],
            "missing": {short(absent): reason for absent, reason in missing.items()},
            "bytes_up": up,
            "bytes_down": down,
            "factor": factor,
            "sync_seconds": seconds,
            "tokens_per_second": self.speed,
            "tokens": weight,
            "steps": steps,
            "dropped_frames": peer.session.dropped_frames,
            "digest": digest.hex(),
        }
        if outcome.commit is not None and peer.manifest.outer.fragment_count > 1:
            fields["fragment"] = outcome.commit.proposal.fragment
        if outcome.commit is not None and outcome.commit.proposal.lineage:
            fields["lineage"] = outcome.commit.proposal.lineage.hex()
        self._write("round", fields)
        if steps and peer.identity.peer_id in outcome.contributors:
            self._plan.add(fields, peer.environment.now(), fragments=peer.manifest.outer.fragment_count)
        elif steps:
            self._plan.interrupt()
        absent = "".join(f" · {short(other)} out ({reason})" for other, reason in missing.items())
        shown = f"{loss:.3f}" if math.isfinite(loss) else "-"
        self._log(
            WARNING if news else INFO,
            f"round {number} · loss {shown} · {contributors}/{len(roster.peers.view)} peers · "
            f"up {bytes_text(up)}{saved_text(factor)} · exchange {seconds:.1f} s · {count_text(self.speed)} tok/s{absent}",
            {"kind": "round", **fields},
        )

    def evaluated(self, number: int, loss: float) -> None:
        """Report the loss on held-out text after a round; NaN: nothing is held out."""
        if math.isfinite(loss):
            self.held_out, self.held_out_round = loss, number
            self.emit("held_out", {"round": number, "loss": round(loss, 6)})

    def _end_alarms(self, peer: Peer) -> None:
        """End the alarms of lineages whose peers have met again."""
        replicas = [one for _, one, _ in peer.replica.each(peer.layout)]
        for over in self._lineages.look(replicas, peer.session.live):
            self.end_alarm(over.text, over.summary)

    def end_alarm(self, text: str, summary: str) -> None:
        """Report that the alarm with this text has ended; the status does not show it any more."""
        self.emit("alarm_over", {"alarm": text, "detail": summary})

    def summary(self, peer: Peer) -> None:
        """Print lineage, plan and outcome, and alarms of this process, at its end; nothing if there were none."""
        if peer.ready and (names := lineages(peer)):
            text = f"ended in lineage {', '.join(name[:8] for name in names)}"
            self._log(INFO, text, {"kind": "ended", "lineages": names})
        if self._compared:
            figures = {"kind": "plan and outcome", "figures": msgspec.to_builtins(self._compared)}
            self._log(INFO, f"plan and outcome: {comparison_text(self._compared)}", figures)
        summaries = self._lineages.summaries
        for alarm, end in self._alarms.items():
            text = summaries.get(alarm) or (f"{alarm}; it has ended: {end}" if end else alarm)
            self._log(WARNING, f"alarm of this run: {text}", {"kind": "alarm of this run", "detail": text})

    def _plan_and_outcome(self, peer: Peer) -> tuple[Comparison, ...]:
        """Return the comparison with the plan, made again if it is old."""
        if peer.environment.now() - self._compared_at > PLAN_SECONDS or not self._compared:
            others = [peer.session.announced[one] for one in peer.session.live if one in peer.session.announced]
            trips = [peer.session.roster.distances.rtt(one) for one in peer.session.live]
            found = self._plan.compare(
                peer.manifest,
                peer.layout.total,
                PeerFacts(self.speed, *peer.presence.send_queue.bandwidth.known()),
                [PeerFacts(one.speed, one.up, one.down) for one in others],
                [trip for trip in trips if trip],
            )
            self._compared, self._compared_at = found or self._compared, peer.environment.now()
        return self._compared

    def uncommitted(self, peer: Peer, *, replaced: bool = False) -> None:
        """Record a round without a commit. `replaced`: this peer has left it, and taken the state of others."""
        others = [absent for absent in peer.session.waiting_for() if absent != peer.identity.peer_id]
        waiting = ", ".join(map(short, others))
        detail = peer.session.stalled() or f"waiting for {waiting or 'a quorum'}"
        if peer.session.fruitless:
            detail = "no peer that is here has a contribution"
        if replaced:
            detail = "most others were in another round, and this peer has taken a state of theirs"
        self.emit("uncommitted", {"round": peer.replica.round + 1, "detail": detail})

    def snapshot(self, peer: Peer) -> Status:
        """Return the status; for a peer that is not ready only its identity."""
        process, started = self._process
        memory, gpu_memory = self._memory()
        status = Status(
            process=process,
            process_started=started,
            wall=self._wall(),
            peer=peer.identity.peer_id.hex(),
            name=self._name,
            run=peer.run_id.hex(),
            phase=self.phase,
            device=self.device,
            alarm=self.alarm,
            memory=memory,
            gpu_memory=gpu_memory,
        )
        return self._full(status, peer) if peer.ready else status

    def _full(self, status: Status, peer: Peer) -> Status:
        session, replica = peer.session, peer.replica
        invite = peer.invite()
        round, digest = replica.newest
        up, down = peer.traffic()
        lent = peer.presence.transport.lent()
        return msgspec.structs.replace(
            status,
            run_name=peer.manifest.run.name,
            invite=invite.code() if invite else "",
            addresses=peer.presence.roster.record.addresses,
            reach=str(peer.admission.reachability.reach),
            round=round,
            rounds=peer.manifest.run.rounds,
            digest=digest.hex(),
            alike=replica.alike,
            loss=self.loss,
            held_out=self.held_out,
            held_out_round=self.held_out_round,
            tokens_per_second=self.speed,
            bytes_up=up,
            bytes_down=down,
            fp32_bytes=int(self.fp32_bytes),
            sync_seconds=self.sync_seconds,
            peers=self._others(peer),
            checkpoint=self.checkpoint,
            seat=peer.seats().describe(peer.identity.peer_id),
            group=self.group(),
            stalled=session.stalled(),
            stalls=stalls(peer),
            fetching=fetching(peer),
            transfers=transfers(peer),
            plan=self._plan_and_outcome(peer),
            links=links_known(peer),
            fragments=fragments_of(peer),
            lineage=", ".join(lineages(peer)),
            continued=tuple(self._lineages.summaries),
            ready=tuple(sorted(one.hex() for one in session.ready)),
            relay_circuits=lent.circuits,
            relayed_bytes=lent.carried,
            relay_left=lent.left,
            relay_refused=dict(lent.refused),
            no_sharing=peer.presence.transport.no_sharing(),
        )

    def _others(self, peer: Peer) -> tuple[PeerStatus, ...]:
        """Return the status of each other peer that is known, as `peer` sees it."""
        peers, transport, watch = peer.presence.roster.peers, peer.presence.transport, peer.presence.watch
        others, seats, traffic = [], peer.seats(), transport.by_peer()
        for other, state in peers.states(absent=ABSENT).items():
            record = peers.record_of(other)
            ready = peer.session.announced.get(other)
            relay = transport.relay_of(other)
            sent, received = traffic.get(other, (0, 0))
            others.append(
                PeerStatus(
                    peer=other.hex(),
                    name=plain(record.name) if record else "",
                    state=state,
                    address=record.addresses[0] if record and record.addresses else "",
                    round=peers.progress_of(other),
                    age=peer.presence.silence_of(other),
                    loss=None if ready is None else ready.loss,
                    reason=f"banned: {peers.ban_reason(other)}"
                    if state == "banned"
                    else peer.rounds.score_of(other) or self._away.get(other, ""),
                    seat=seats.describe(other),
                    relay="" if relay is None else relay.hex(),
                    shared=transport.shares(other),
                    diagnosis="" if watch is None else watch.shown(other),
                    up=sent,
                    down=received,
                    rtt=peer.presence.roster.distances.rtt(other),
                    obstacle=transport.obstacle(other),
                )
            )
        return tuple(others)
