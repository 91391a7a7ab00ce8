"""Audits of owners: members compute results again, and exclude owners that have signed false ones.

An owner that sends different results to different peers contradicts its own record. One that sends the same false result
to all does not, and the result commits. So after each commit a member audits one chunk, with the probability
`Manifest.audit_chance`: it fetches the contributions, which their announced hashes prove, and computes the result. The
probability is higher if results were adopted, and only members that may lie had reported votes for them. The decided
proposal names the announcement of each contributor (`Contribution.announced`), so all peers judge an owner by the same
contributions, and it cannot claim that it received others.

Commit, then choose. The chunk follows from the auditor's signature of the digest of all results. The digest alone would
not do: the owner that sends its results last knows all others, and could try false results until the digest chooses none
of its chunks. No other peer knows the auditor's signature of the digest, and an Ed25519 signature leaves the auditor no
choice. So an owner has signed and sent its results before another peer knows which chunks are computed again.

Verdicts. An auditor that finds a false result tells all peers (`Verdict`). Each member fetches the contributions from the
accuser, checks them against the announced hashes, computes, and sends its own verdict if it agrees. An owner is excluded when
a quorum of the members, at least two, say so, whatever chunks they name: the same quorum could commit any result. Members
repeat the verdict to each new link, so newcomers learn of it. A verdict is a decision of its lineage, like a round. If that
gives way to another one, the verdict ends (`Audits.lift_verdicts`), unless it was given before the fork.

False accusations. A peer without one of the announcements that the proposal names concludes nothing. So neither two different
announcements nor payloads with other hashes can frame an owner. After REFUTED accusations that were wrong, or for which it
did not send the contributions, an accuser is not followed any more.

Refusals. A contributor that does not send its chunk to the auditor prevents one audit. It frames no peer. It pauses as owner
in rounds that the auditor leads, and from the third refusal on as contributor, for 8, 16, 32 and 64 rounds
(`PeerBackoff.audited`). The auditor audits the owner of that chunk in each round in which it owns something, until an
audit is decided. So after some rounds a refusal protects no owner, also not an owner that refuses its own contribution.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import blake3
from thinwire.collectives.consensus.members.quorum import enough
from thinwire.collectives.rounds.data_planes.butterfly import Butterfly
from thinwire.collectives.rounds.data_planes.owner_results import AuditData
from thinwire.collectives.rounds.round import Round
from thinwire.collectives.state_sync.chunk_transfer import IN_FLIGHT
from thinwire.collectives.topology.peer_backoff import PeerBackoff
from thinwire.compression.core.types import Buffer
from thinwire.node.membership.presence import Presence
from thinwire.node.outer.verification.own_contributions import OwnContributions, name_of
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.lineage import contains
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.membership.gossip_items import read_stored, read_verdict
from thinwire.swarm.messages.registry import Chunk, Digest, Fetch, PeerId, Verdict

EXAMINABLE = 4
"""Rounds whose results this peer can still examine."""

MOST_CASES = 3
"""Maximum number of chunks, of one's own audit and of accusations, whose contributions are in memory."""

REFUTED = 3
"""Refuted accusations of a peer, after which this peer examines no more of them."""

DOUBTED = 3.0
"""Least number of audits to be expected after a round whose results may be those of liars only."""

MOST_ACCUSED = 64
"""Maximum number of owners that a peer can accuse at a time; the oldest accusation is dropped."""


@dataclass(slots=True)
class _Case:
    """A result that this peer examines.

    accuser: member whose verdict is examined; None: our own audit. served: members that got the contributions from us.
    """

    data: AuditData
    index: int
    accuser: PeerId | None
    wanted: frozenset[Digest]
    payloads: dict[Digest, Buffer] = field(default_factory=dict)
    served: set[PeerId] = field(default_factory=set)
    false: bool = False

    @property
    def owner(self) -> PeerId:
        return self.data.claims[self.index][0]

    @property
    def name(self) -> Digest:
        """Name of all contributions together, for requests."""
        return name_of(b"".join(self.data.inputs(self.index)))


class Audits:
    """Audits of one fragment's rounds by one peer. Without effect if the manifest has none."""

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        run_id: bytes,
        *,
        replica: Replica,
        presence: Presence,
        own_contributions: OwnContributions,
        fragment: int,
        backoff: PeerBackoff,
        emit: Emit,
    ) -> None:
        self._identity, self._me, self._run_id = identity, identity.peer_id, run_id
        self._manifest, self._replica, self._presence, self._fragment = manifest, replica, presence, fragment
        self._roster, self._send_queue = presence.roster, presence.send_queue
        self._backoff, self._emit = backoff, emit
        self._own_contributions = own_contributions
        self._last: Callable[[], object] = lambda: None
        """Data plane of the last round, as long as others need it: it has the results."""
        self._data: dict[int, AuditData] = {}
        self._cases: list[_Case] = []
        self._verdicts: dict[PeerId, dict[PeerId, Verdict]] = {}
        """Verdicts by sender and owner."""
        self._refuted: Counter[PeerId] = Counter()
        self._suspects: set[PeerId] = set()
        """Owners whose last audit was not decided."""

    @property
    def accusers(self) -> set[PeerId]:
        """Peers whose verdicts are stored."""
        return set(self._verdicts)

    # --- rounds

    def begin(self, done: Round) -> None:
        """Note a committed and applied round, report refused results, and audit a chunk of it if it is chosen."""
        data_plane = done.data_plane
        if not isinstance(data_plane, Butterfly) or data_plane is self._last():
            return
        self._last = weakref.ref(data_plane)
        for peer, reason in data_plane.refused.items():
            detail = f"peer {short(peer)}: {reason}"
            self._emit("result_refused", {"peer": peer.hex(), "round": done.round, "detail": detail})
        if not self._manifest.audited:
            return
        self._expire(done.round)
        data = data_plane.audit_data
        if data is None:
            return
        self._data[done.round] = data
        for old in [number for number in self._data if not done.round - EXAMINABLE < number <= done.round]:
            del self._data[old]
        self._recount()
        members, present = done.agreement.terms.members, {entry.peer for entry in data.contributors}
        index = self._choice(data, len(members), doubted=done.agreement.decision.doubted)
        if index is not None and self._me in members and self._me in present:
            self._fetch(data, index)

    def _recount(self) -> None:
        """Count the verdicts of present members; forget those of peers that are neither member nor linked."""
        members, live = set(self._replica.members), self._presence.live
        self._verdicts = {
            peer: verdicts for peer, verdicts in self._verdicts.items() if peer in members | live or peer == self._me
        }
        named = Counter(owner for peer, verdicts in self._verdicts.items() if peer in members for owner in verdicts)
        for owner in sorted(owner for owner, count in named.items() if count > 1):
            self._count(owner)

    def _choice(self, data: AuditData, peers: int, *, doubted: bool) -> int | None:
        """Return the chunk that this peer audits in a round; None: none of them.

        doubted: see `Decision.doubted`.
        """
        seed = blake3.blake3(
            self._identity.sign("audit", self._run_id, data.lineage, data.round.to_bytes(8, "big"), data.digest)
        ).digest()
        chunks = sorted(index for index, (owner, _) in data.claims.items() if owner != self._me)
        chance = max(self._manifest.audit_chance(len(data.grid), peers), DOUBTED / peers if doubted else 0.0)
        if suspected := [index for index in chunks if data.claims[index][0] in self._suspects]:
            chunks, chance = suspected, 1.0
        if not chunks or int.from_bytes(seed[:8], "big") >= chance * 2**64:
            return None
        return chunks[int.from_bytes(seed[8:16], "big") % len(chunks)]

    def _fetch(self, data: AuditData, index: int) -> None:
        case, own = self._open(data, index, None), self._own_contributions.of(data.round)
        for entry in data.contributors:
            if entry.peer == self._me and own:
                self._put(case, own[index])
            elif entry.peer != self._me:
                name = name_of(data.announced[entry.peer])
                self._send_queue.control(entry.peer, Fetch(data.round, self._fragment, name, (index,)))
        self._judge(case)

    def _open(self, data: AuditData, index: int, accuser: PeerId | None) -> _Case:
        case = _Case(data, index, accuser, frozenset(data.inputs(index)))
        self._cases.append(case)
        return case

    def _expire(self, round: int) -> None:
        """End our audit of the last round, and old cases, which lack contributions."""
        for case in list(self._cases):
            if case.accuser is None and not case.false:
                self._cases.remove(case)
                self._suspects.add(case.owner)
                self._record_service(case, round)
            elif case.data.round <= round - EXAMINABLE:
                self._cases.remove(case)
                known = case.false or case.owner in self._roster.peers.banned or self._accuses(case.owner)
                if case.accuser is not None and not known:
                    self._refute(case, "its accuser does not send the contributions")

    def _record_service(self, case: _Case, round: int) -> None:
        """Record which contributors have sent their chunk to our audit. Absent ones cannot."""
        for entry, found in zip(case.data.contributors, case.data.inputs(case.index), strict=True):
            served = found in case.payloads
            if served or entry.peer in self._presence.live:
                self._backoff.audited(entry.peer, round, served=served)
            if not served:
                detail = f"peer {short(entry.peer)} does not send its chunk to an audit of {short(case.owner)}"
                self._emit("unaudited", {"peer": entry.peer.hex(), "round": case.data.round, "detail": detail})

    # --- frames and links

    def takes(self, peer: PeerId, frame: Frame) -> bool:
        """Take a frame that concerns an audit; return True if it is one."""
        message = frame.message
        if isinstance(message, Verdict):
            self._on_verdict(peer, message)
            return True
        if isinstance(message, Chunk):
            return self._take_chunk(frame, message)
        return isinstance(message, Fetch) and self._serve(peer, message)

    def on_link_up(self, peer: PeerId) -> None:
        """Tell a peer which owners are excluded."""
        if self._manifest.audited:
            verdicts = (verdict for item in self._roster.ban_items if (verdict := read_verdict(item)) is not None)
            for verdict in [one for one in verdicts if one.fragment == self._fragment][-MOST_ACCUSED:]:
                self._send_queue.control(peer, verdict)

    def _take_chunk(self, frame: Frame, message: Chunk) -> bool:
        place = message.round, message.index
        found = [case for case in self._cases if (case.data.round, case.index) == place]
        found = [case for case in found if frame.hashed() in case.wanted]
        for case in found:
            self._put(case, frame.payload)
            self._judge(case)
        return bool(found)

    def _put(self, case: _Case, payload: Buffer) -> None:
        case.payloads[blake3.blake3(payload).digest()] = payload

    def _serve(self, peer: PeerId, message: Fetch) -> bool:
        """Send the contributions to a chunk to a member that examines our verdict, once."""
        case = next((one for one in self._cases if one.false and one.name == message.digest), None)
        if case is None:
            return False
        if (
            peer in self._replica.members
            and peer not in case.served
            and self._send_queue.requested(peer) <= 2 * IN_FLIGHT
        ):
            case.served.add(peer)
            for entry, found in zip(case.data.contributors, case.data.inputs(case.index), strict=True):
                chunk = Chunk(case.data.round, self._fragment, entry.attempt, case.index)
                self._send_queue.bulk(peer, Frame(chunk, case.payloads[found]), requested=True)
        return True

    # --- verdicts

    def _judge(self, case: _Case) -> None:
        """Compute a result as soon as all contributions are here."""
        if case.false or not case.wanted <= case.payloads.keys():
            return
        data, owner = case.data, case.owner
        fields = {"peer": owner.hex(), "round": data.round, "chunk": case.index}
        case.false = not data.confirms(case.index, case.payloads)
        if case.false:
            detail = f"peer {short(owner)} has signed a false result of chunk {case.index} in round {data.round}"
            self._emit("audited", {**fields, "false": True, "detail": detail})
            self._send_verdict(Verdict(data.round, self._fragment, case.index, owner, data.lineage))
            return
        self._cases.remove(case)
        self._emit("audited", {**fields, "false": False})
        if case.accuser is None:
            self._suspects.discard(owner)
            self._record_service(case, data.round)
        else:
            self._refute(case, "the result is right")

    def _refute(self, case: _Case, reason: str) -> None:
        assert case.accuser is not None
        self._refuted[case.accuser] += 1
        detail = f"the accusation of {short(case.owner)} by {short(case.accuser)} is refuted: {reason}"
        self._emit("audit_refuted", {"peer": case.accuser.hex(), "round": case.data.round, "detail": detail})

    def _send_verdict(self, verdict: Verdict) -> None:
        for peer in sorted(self._presence.live):
            self._send_queue.control(peer, verdict)
        self._note(self._me, verdict)
        self._count(verdict.owner)

    def _note(self, peer: PeerId, verdict: Verdict) -> None:
        verdicts = self._verdicts.setdefault(peer, {})
        verdicts[verdict.owner] = verdict
        for owner in list(verdicts)[:-MOST_ACCUSED]:
            del verdicts[owner]

    def _accuses(self, owner: PeerId) -> bool:
        """Return True if this peer has found a false result of an owner."""
        return owner in self._verdicts.get(self._me, ())

    def _on_verdict(self, peer: PeerId, verdict: Verdict) -> None:
        if not self._manifest.audited or verdict.owner in self._roster.peers.banned or peer not in self._presence.live:
            return
        self._note(peer, verdict)
        self._count(verdict.owner)
        data = self._data.get(verdict.round)
        if (
            data is None
            or data.lineage != verdict.lineage
            or verdict.owner in (self._me, peer)
            or self._accuses(verdict.owner)
            or verdict.owner in self._roster.peers.banned
            or data.claims.get(verdict.index, (b"",))[0] != verdict.owner
            or peer not in self._replica.members
            or self._refuted[peer] >= REFUTED
            or not self._is_new(data, verdict.index, peer)
        ):
            return
        case = self._open(data, verdict.index, peer)
        self._send_queue.control(peer, Fetch(data.round, self._fragment, case.name, (verdict.index,)))

    def _is_new(self, data: AuditData, index: int, accuser: PeerId) -> bool:
        """Return True if no such case is open, there is room, and this accuser has none."""
        cases = self._cases
        same = any((one.data.round, one.index) == (data.round, index) and one.accuser for one in cases)
        return not same and len(cases) < MOST_CASES and all(one.accuser != accuser for one in cases)

    def lift_verdicts(self) -> None:
        """Drop the verdicts of quorums whose rounds are not in the history of our state any more."""
        chain = self._replica.chain
        stored = [one for item in self._roster.ban_items if (one := read_stored(item)) is not None] if chain else []
        for one in stored:
            if one.verdict.fragment == self._fragment and not contains(chain, one.lineage, one.round):
                self._presence.lift_verdict(one.verdict.owner)

    def _count(self, owner: PeerId) -> None:
        """Exclude an owner if enough members have sent a verdict; then this peer sends one, too."""
        members = self._replica.members
        agree = {peer for peer, given in self._verdicts.items() if peer in members and owner in given}
        verdicts = {peer: self._verdicts[peer][owner] for peer in agree}
        agree = {one for one in agree if contains(self._replica.chain, verdicts[one].lineage, verdicts[one].round)}
        # More than half of the members, also where a tie would do to commit: the ban outlives the round.
        if (
            len(agree) < 2
            or 2 * len(agree) <= len(members)
            or not enough(agree, members, fraction=self._manifest.quorum)
        ):
            return
        verdict = verdicts[min(agree)]
        for given in self._verdicts.values():
            given.pop(owner, None)
        if self._me not in agree and owner != self._me:
            for peer in sorted(self._presence.live):
                self._send_queue.control(peer, verdict)
        self._presence.expel(verdict, self._replica.lineage, self._replica.round)
