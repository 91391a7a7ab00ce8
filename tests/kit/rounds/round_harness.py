"""One peer's side of a round without a network: tests pass frames in and read the frames that it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import blake3
import msgspec
import numpy as np
from kit.rounds.fake_keys import FakeKeys
from thinwire.collectives.aggregation.norm_bounds import NormBound
from thinwire.collectives.aggregation.rule_factory import RULES
from thinwire.collectives.consensus.farewells import signed
from thinwire.collectives.consensus.justification import justify
from thinwire.collectives.consensus.members.peer_standing import PeerStanding
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import name_of, statement
from thinwire.collectives.rounds.data_planes.contributions import UNCHECKED, OwnerChecks
from thinwire.collectives.rounds.data_planes.data_plane import DataPlane
from thinwire.collectives.rounds.data_planes.owner_records import basis_of
from thinwire.collectives.rounds.data_planes.owner_results import Reducer
from thinwire.collectives.rounds.round import LinkReport, Round
from thinwire.collectives.topology.shards import grid
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression import registry
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import (
    Ballot,
    Blame,
    Contribution,
    Digest,
    Farewell,
    Leave,
    Message,
    PeerId,
    Promise,
    Proposal,
    Propose,
    Ready,
    Result,
    ResultRecord,
)

PEERS = tuple(bytes([index]) * 32 for index in range(5))
LEADER, ME = PEERS[:2]
KEYRING = Keyring(Identity.generate(bytes(32)), bytes(32), lambda peer: None)
BASE, PLAN = bytes(32), bytes([1]) * 32
CODEC = registry.parse("fp32")
GRID = grid(6 * 4096 - 100, CODEC)
"""Six chunks, the last one shorter."""

FIRST, SECOND = Ballot(1, LEADER), Ballot(2, LEADER)
DENSE = {"reducer": Reducer(CODEC, RULES["mean"], BufferPool()), "grid": GRID, "seed": b"seed"}
"""Arguments of the data planes that average dense values."""

Sent = tuple[PeerId, Message, bytes]


class FixedLife(MemoryVoteStore):
    """Store of a given life."""

    def __init__(self, life: bytes) -> None:
        super().__init__()
        self.given = life

    @property
    def life(self) -> bytes:
        """The given life."""
        return self.given


class FakeSendQueue:
    """Send queue that stores frames.

    `waiting`: frames queued for any peer; `paced`: those with pauses; `stirring`: received bytes;
    `departed`: time when the last frame left; `busy`: more has to leave; `behind`: peers behind a relay;
    `dropped`: peers whose waiting data of a round and fragment was dropped.
    """

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.waiting, self.recalled = 0, 0
        self.dropped: list[tuple[PeerId, int, int]] = []
        self.paced: list[Sent] = []
        self.stirring: dict[PeerId, int] = {}
        self.departed, self.busy = 0.0, False
        self.behind: set[PeerId] = set()
        self.debtors: dict[PeerId, int] = {}

    def received_over_relay(self, peer: PeerId) -> int | None:
        return self.received(peer) if peer in self.behind else None

    def note_debtor(self, peer: PeerId, before: int | None) -> None:
        SendQueue.note_debtor(cast(SendQueue, self), peer, before)

    def received(self, peer: PeerId) -> int:
        return self.stirring.get(peer, 0)

    def fail(self, error: Exception) -> None:
        raise error

    def last_sent(self, round: int, fragment: int) -> float:
        return self.departed

    def uplink_limits(self, round: int, fragment: int) -> bool:
        return self.busy

    def requested(self, to: PeerId, kind: type = Message) -> int:
        return self.waiting if kind is Message else len(self.paced)

    def control(self, to: PeerId, message: Message) -> None:
        self.sent.append((to, message, b""))

    def bulk(self, to: PeerId, frame: Frame, *, requested: bool = False, paced: bool = False) -> None:
        (self.paced if paced else self.sent).append((to, frame.message, bytes(frame.payload)))

    def drop_ring_frames(self, round: int, fragment: int) -> None:
        self.recalled += 1

    def drop_data(self, peer: PeerId, round: int, fragment: int) -> None:
        self.dropped.append((peer, round, fragment))

    def of(self, kind: type) -> list[Sent]:
        """Return the messages of one kind that were sent since the last call, and forget them."""
        found = [entry for entry in self.sent if isinstance(entry[1], kind)]
        self.sent = [entry for entry in self.sent if not isinstance(entry[1], kind)]
        return found


def hashes_of(chunks: Iterable[bytes]) -> bytes:
    """Return the hashes of these chunks, as in a Ready or a ResultRecord."""
    return b"".join(blake3.blake3(chunk).digest() for chunk in chunks)


def signature(peer: PeerId, message: object) -> bytes:
    """Return 64 bytes that serve as the peer's signature of the message."""
    return blake3.blake3(peer + repr(message).encode()).digest(64)


def dense_payloads(seed: int) -> list[bytes]:
    """Return random values as the chunks of GRID."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(GRID.size(index)).astype(np.float32).tobytes() for index in range(len(GRID))]


def mean(chunks: Sequence[bytes], weights: Sequence[float]) -> bytes:
    """Return the weighted mean of a chunk's contributions, encoded with CODEC."""
    out = np.empty(len(chunks[0]) // 4, np.float32)
    RULES["mean"](CODEC, [np.frombuffer(chunk, np.uint8) for chunk in chunks], weights, out)
    return out.tobytes()


def ready(
    chunks: Iterable[bytes] = (), attempt: int = 1, *, hashes: bytes | None = None, site: str = "", norms: bytes = b""
) -> Ready:
    """Return the announcement of these chunks in round 1, or of these hashes."""
    hashes = hashes_of(chunks) if hashes is None else hashes
    return Ready(1, 0, attempt, BASE, PLAN, 10, hashes, True, 0.0, 0.0, site=site, norms=norms)


def opening(peers: Sequence[PeerId], **changes: Any) -> Proposal:
    """Return the leader's proposal of round 1 to these members: all contribute once, with weight 10."""
    given = dict(
        round=1,
        fragment=0,
        ballot=FIRST,
        group=tuple(peers),
        alive=tuple(peers),
        contributors=tuple(Contribution(peer, 1, 10) for peer in peers),
        excluded=(),
        adopted=None,
        sources=(),
        electorate=RoundTerms(1, 0, tuple(peers), BASE, PLAN).electorate,
    )
    return Proposal(**(given | changes))


START = Ballot(0, bytes(32))
"""Ballot below all others."""


def freely(
    proposal: Proposal,
    peers: Iterable[PeerId],
    sign: Callable[[PeerId, Message], bytes] = lambda peer, message: bytes(64),
) -> Propose:
    """Return a proposal with promises of these peers, of which none has voted.

    If it adopts results, `peers` are all members. Their holders have voted for them, and so few others have promised that
    the results may be decided.
    """
    promise = Promise(proposal.round, proposal.fragment, proposal.ballot, None, None, proposal.lineage)
    promises = dict.fromkeys(peers, promise)
    if proposal.adopted is not None:
        others = [peer for peer in promises if peer not in proposal.sources]
        needed = len(promises) // 2 + 1 - len(proposal.sources)
        promises = dict.fromkeys([*proposal.sources, *others[: max(0, needed)]], promise)
        group = proposal.kept
        first = msgspec.structs.replace(
            proposal,
            ballot=Ballot(1, proposal.ballot.leader),
            adopted=None,
            sources=(),
            kept=(),
            group=group,
            alive=group,
        )
        if proposal.lineage:
            first = msgspec.structs.replace(first, seal=sign(first.ballot.leader, statement(first)))
        voted = msgspec.structs.replace(promise, voted=first, digest=proposal.adopted)
        promises |= dict.fromkeys(proposal.sources, voted)
    found = justify(proposal, {peer: (one, sign(peer, one)) for peer, one in promises.items()}, ())
    assert found is not None
    return found


def leaving(
    peer: PeerId,
    promised: Ballot = START,
    voted: Proposal | None = None,
    digest: Digest | None = None,
    *,
    round: int = 5,
    fragment: int = 0,
    lineage: bytes = b"",
    sign: Callable[[Message], bytes] = lambda message: b"signed",
) -> Leave:
    """Return the message of a member that leaves a round after this promise and vote."""
    said = Farewell(peer, promised, name_of(voted) if voted is not None else None, digest, b"")
    return signed(Leave(round, fragment, lineage, said, voted), sign)


def farewell(peer: PeerId, promised: Ballot = START) -> Farewell:
    """Return the farewell of a member without a vote."""
    return leaving(peer, promised).farewell


class Standing(PeerStanding):
    """Standing by which the peers in `harness.slow` get results with pauses."""

    def __init__(self, harness: RoundHarness) -> None:
        self._harness = harness

    def paced(self, peer: PeerId, round: int) -> bool:
        self._harness.asked.append((peer, round))
        return peer in self._harness.slow


class RoundHarness:
    """Round 1 of peer ME. `on_message` delivers a frame of another peer; `queue` has the frames that ME sends.

    `now` is its clock. A subclass chooses the data plane and the form of its messages.
    """

    def __init__(
        self,
        plane: Callable[..., DataPlane],
        *,
        peers: Sequence[PeerId],
        terms: RoundTerms | None = None,
        site: str = "",
        **options: Any,
    ) -> None:
        """Create the round. `options`: arguments of the data plane, beside those that all planes have."""
        self.now, self.queue, self.peers = 0.0, FakeSendQueue(), tuple(peers)
        self.audited = options.get("checks", UNCHECKED).audited
        self.usual: dict[Any, Any] = {}
        self.slow, self.asked = frozenset[PeerId](), list[tuple[PeerId, int]]()
        """Peers that get results with pauses, and for whom and which round that was asked."""
        self.terms = terms or RoundTerms(1, 0, self.peers, BASE, PLAN)
        agreement = Agreement(
            FakeKeys(ME, signature, lambda peer, message, proof: proof == signature(peer, message)),
            self.terms,
            live=self.peers,
        )
        made = plane(agreement, send_queue=self.queue, now=lambda: self.now, usual=self.usual, **options)
        self.round = Round(made, KEYRING, links=LinkReport(site), standing=Standing(self))

    def on_message(self, sender: PeerId, message: Message, payload: bytes = b"") -> None:
        """Deliver a frame, signed by its sender."""
        self.round.on_frame(sender, Frame(message, payload, signature(sender, message.statement())))

    def open(self, **changes: Any) -> Proposal:
        """Let the leader open the round; return its proposal."""
        proposal = self.opening(**changes)
        later = proposal.ballot.term > 1
        message = freely(proposal, self.terms.members, signature) if later else Propose(proposal)
        self.on_message(proposal.ballot.leader, message)
        return proposal

    def opening(self, **changes: Any) -> Proposal:
        """Return the leader's proposal of the round."""
        return opening(self.peers, **({"electorate": self.terms.electorate} | changes))

    def sent(self, kind: type) -> list[Sent]:
        """Return the messages of one kind that ME sent since the last call: (to, message, payload)."""
        return self.queue.of(kind)

    def blamed(self) -> list[tuple[PeerId, str]]:
        """Return the peers that ME has blamed since the last call, with reasons."""
        return [(message.peer, message.reason) for _, message, _ in self.queue.of(Blame)]


class DenseHarness(RoundHarness):
    """Round with dense contributions: `sources` has the chunks of each peer. A subclass defines `result`."""

    def __init__(
        self,
        plane: Callable[..., DataPlane],
        *,
        peers: Sequence[PeerId],
        sites: Sequence[str] = (),
        audited: bool = False,
        bound: NormBound | None = None,
        **more: Any,
    ):
        if audited or bound is not None:
            more["checks"] = OwnerChecks(audited, bound)
        sited = dict(zip(peers, sites or [""] * len(peers), strict=True))
        super().__init__(plane, peers=peers, site=sited[ME], **DENSE, **more)
        self.sources = {peer: dense_payloads(seed) for seed, peer in enumerate(peers)}
        self.round.announce(self.sources[ME], weight=10, loss=0.0, speed=0.0)
        for peer in peers:
            if peer != ME:
                norms = self.round.data_plane.summarize(self.sources[peer]).norms
                self.on_message(peer, ready(self.sources[peer], site=sited[peer], norms=norms))

    def result(self, index: int) -> bytes:
        """Return the result of a chunk, as its owner sends it."""
        raise NotImplementedError

    def results_of(self, sender: PeerId, *indices: int, ballot: Ballot = FIRST) -> None:
        """Deliver results of these chunks."""
        for index in indices:
            self.on_message(sender, Result(1, 0, ballot, index), self.result(index))

    def record_of(self, owner: PeerId, *indices: int, ballot: Ballot = FIRST) -> None:
        """Deliver an owner's record of these chunks' results."""
        self.on_message(owner, self.record(*indices, ballot=ballot))

    def record(self, *indices: int, ballot: Ballot = FIRST) -> ResultRecord:
        """Return an owner's record of these chunks' results; in audited rounds it has computed them."""
        proposal = self.round.agreement.proposal
        basis = basis_of(proposal.contributors) if self.audited and proposal is not None else b""
        return ResultRecord(1, 0, ballot, indices, hashes_of(map(self.result, indices)), b"", basis)
