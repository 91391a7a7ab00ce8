"""Session of one peer without a network, and rounds of the others for it."""

import random
from types import SimpleNamespace

import blake3
import msgspec
import numpy as np
from kit.rounds.round_harness import FakeSendQueue, freely, hashes_of
from thinwire.collectives.blocking_work import RationedWork
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore
from thinwire.collectives.consensus.proposal import new_lives, statement, vote_for
from thinwire.collectives.rounds.data_planes.result_store import digest_of
from thinwire.collectives.state_sync.state_offers import ChainMemory
from thinwire.collectives.transport.sending.own_bandwidth import Bandwidth
from thinwire.node.methods.registry import METHODS
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.outer.session import SessionContext
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.state.layout import Layout, Piece
from thinwire.swarm.frame import Frame, sign_message
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.lineage import name_of_fork, new_founders
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import (
    Announced,
    Ballot,
    Commit,
    Contribution,
    Fork,
    Found,
    MemberProof,
    Prepare,
    Proof,
    Proposal,
    Ready,
    Result,
    ResultRecord,
)

LAYOUT = Layout((Piece("a", (100,), "float32", 0, 100),), 100, b"l" * 32)
RUN = b"r" * 32
KEYS = {identity.peer_id: identity for identity in (Identity.generate(bytes([number]) * 32) for number in range(4))}
ME, ANN, BEN, CAT = KEYS
ALL = (ME, ANN, BEN)


class Queue(FakeSendQueue):
    """Send queue that also has the calls of sessions.

    `released`: peers whose results have no pauses any more. `rests`: number of calls of `rest`.
    """

    def __init__(self):
        super().__init__()
        self.bandwidth = Bandwidth()
        self.released, self.rests = [], 0

    def sample_bandwidth(self):
        pass

    def rest(self):
        self.rests += 1

    def begin(self, round, fragment=0):
        pass

    def requested(self, to, *kinds):
        return self.waiting

    def end_pauses(self, peer, fragment):
        self.released.append((peer, fragment))


def first_lineage(members):
    """Return the name of the lineage of peers that are given these members."""
    return name_of_fork(Fork(0, bytes(32), (), tuple(sorted(members)), b"", ()))


FIRST = first_lineage(ALL)


class Scene:
    """Session of peer ME in a run of `members`, who are all present. `unknown`: peers without a record.

    exchange: keys of that table of the manifest, and further tables. watch: of slow peers. `newcomers`: peers on trial.
    `convicted`: evidence against peers.
    """

    def __init__(
        self,
        members=ALL,
        *,
        unknown=(),
        exchange="",
        codec='"fp32"',
        method="diloco",
        sequence=5_000,
        owner_residuals=None,
        watch=None,
        fragment=0,
        pending_frames=None,
        **options,
    ):
        self.now, self.events, self.queue, self.newcomers, self.convicted = 0.0, [], Queue(), set(), []
        manifest = parse(f"[exchange]\ncodec = {codec}\n{exchange}")
        method = METHODS[method]
        codec = method.codec(manifest, LAYOUT)
        cut = method.cut(manifest, LAYOUT, codec)
        self.replica = method.replica.begin(manifest, LAYOUT, codec, cut, np.zeros(100, np.float32), members)
        if owner_residuals is not None:
            self.replica.owner_residuals = owner_residuals
        peers = SimpleNamespace(
            banned=(),
            key_of=lambda peer: None if peer in unknown else KEYS[peer].public_key,
            is_live=lambda peer: True,
            others=(ANN, BEN, CAT),
        )
        roster = SimpleNamespace(
            peers=peers,
            ban_items=(),
            record=PeerRecord(ME, bytes(32), b"", b"", (), 0, sequence, issued=1, ttl=1, wire=b"", item=b""),
            on_trial=lambda peer: peer in self.newcomers,
            token_of=lambda peer: b"",
            is_admitted=lambda peer, token: True,
            is_excluded=lambda peer, token: False,
            protect=lambda peers, failed: None,
            progress=0,
        )
        presence = SimpleNamespace(
            rationed=RationedWork(lambda: self.now),
            chains=ChainMemory(),
            roster=roster,
            live={ANN, BEN, CAT},
            send_queue=self.queue,
            transport=SimpleNamespace(totals=lambda: (0, 0)),
            watch=watch,
            convict=self.convicted.append,
            site="",
            aside=at_once,
            spans=tuple,
        )
        self.session = RoundSession(
            SessionContext(
                identity=KEYS[ME],
                manifest=manifest,
                run_id=RUN,
                presence=presence,
                now=lambda: self.now,
                emit=lambda name, fields: self.events.append((name, fields)),
                **{"votes": lambda fragment: MemoryVoteStore(random.Random(fragment)), **options},
            ),
            self.replica,
            fragment,
            pending_frames=pending_frames,
        )

    def on_message(self, sender, message, payload=b""):
        """Deliver a signed frame."""
        self.session.on_frame(sender, Frame(message, payload, sign_message(message, payload, KEYS[sender], RUN)))

    def sent(self, kind, to=ANN):
        """Return the messages of one kind to a peer since the last call."""
        return [message for peer, message, _ in self.queue.of(kind) if peer == to]

    def announce(self):
        """Announce a contribution in the worker-less way of `average`; return its Ready."""
        self.session.current.announce([bytes(400)], weight=10, loss=1.0, speed=1.0)
        return self.sent(Ready)[-1]

    def deliver_round(self, keys=()):
        """Deliver the round in progress: ANN leads, contributes alone and owns the chunk, and BEN votes with it.

        keys: of the peers whose promises the proposal carries.
        """
        session, terms, values = self.session, self.session.current.agreement.terms, np.ones(100, np.float32).tobytes()
        ballot, number, said = Ballot(2, ANN), session.current.round, {}
        for peer in (ANN, BEN):
            hashes = hashes_of([values]) if peer == ANN else b""
            norms = session.current.data_plane.summarize([values]).norms if peer == ANN else b""
            given = terms.base, terms.plan, 10 if peer == ANN else 0, hashes
            said[peer] = Ready(number, 0, 1, *given, True, 1.0, 1.0, life=life_of(peer), norms=norms)
            self.on_message(peer, said[peer])
        idle = tuple(sorted((ME, BEN)))
        group = tuple(sorted(ALL))
        proposal = Proposal(
            number, 0, ballot, group, group, (Contribution(ANN, 1, 10, said[ANN].digest),), (), None, (), idle
        )
        lives = b"".join(session.votes.life if peer == ME else life_of(peer) for peer in group)
        proposal = msgspec.structs.replace(proposal, lineage=terms.lineage, electorate=terms.electorate, lives=lives)
        proposal = msgspec.structs.replace(proposal, member_proofs=member_proofs(proposal, terms))
        self.on_message(ANN, Prepare(number, 0, ballot, terms.lineage))
        proposal = msgspec.structs.replace(proposal, seal=sign_message(statement(proposal), b"", KEYS[ANN], RUN))
        sign = lambda peer, message: sign_message(message, b"", KEYS[peer], RUN)  # noqa: E731
        self.on_message(ANN, msgspec.structs.replace(freely(proposal, (ANN, BEN), sign), keys=keys))
        basis = blake3.blake3(msgspec.msgpack.encode(proposal.contributors)).digest()
        self.on_message(ANN, ResultRecord(number, 0, ballot, (0,), hashes_of([values]), terms.lineage, basis))
        self.on_message(ANN, Result(number, 0, ballot, 0, terms.lineage), values)
        digest = digest_of([blake3.blake3(values).digest()])
        vote = vote_for(proposal, digest)
        proofs = tuple(Proof(peer, sign_message(vote, b"", KEYS[peer], RUN)) for peer in sorted((ANN, BEN)))
        self.on_message(ANN, Commit(proposal, digest, proofs))

    async def finish_round(self):
        """Commit the round, apply it, and begin the next one; return its outcome."""
        self.announce()
        self.deliver_round()
        outcome = await self.session.outcome(give_up=1.0)
        assert outcome.commit is not None
        await self.session.change(at_once, lambda: self.replica.commit(outcome, ME))
        self.session.advance()
        return outcome


def member_proofs(proposal, terms):
    """Return the announcements of the new lives in a proposal."""
    place = proposal.round, proposal.fragment, 1
    said = {peer: Announced(*place, life, terms.base, bytes(32)) for peer, life in new_lives(proposal, terms).items()}
    return tuple(
        MemberProof(1, one.digest, KEYS[peer].public_key, sign_message(one, b"", KEYS[peer], RUN))
        for peer, one in said.items()
    )


def first_fork(*founders):
    """Return the fork of a run that these peers founded together, rightly signed; see `life_of`."""
    members, base = tuple(sorted(founders)), bytes(32)
    found = [Found(0, 0, base, members, life_of(peer)) for peer in members]
    signatures = tuple(sign_message(one, b"", KEYS[peer], RUN) for peer, one in zip(members, found, strict=True))
    return Fork(0, base, (), members, b"".join(map(life_of, members)), signatures, tokens=(b"",) * len(members))


def life_of(peer):
    """Return the life of another peer in these tests."""
    return peer[:16]


def lone_fork(scene, peer, life, base=None):
    """Return a fork of the scene's state that this peer founded alone, rightly signed."""
    base = scene.replica.digest if base is None else base
    found = Found(scene.replica.round, 0, base, (peer,), life)
    signature = sign_message(found, b"", KEYS[peer], RUN)
    fork = Fork(scene.replica.round, base, scene.replica.members, (peer,), life, (signature,))
    return msgspec.structs.replace(fork, tokens=(b"",) * len(new_founders(fork)))
