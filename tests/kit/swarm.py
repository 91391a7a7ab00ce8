"""Whole swarms in virtual time with real sessions, codecs and frames; only the training is made up."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import blake3
import numpy as np
from thinwire.collectives.blocking_work import Work, at_once
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.round import Round
from thinwire.collectives.rounds.round_factory import RoundFactory
from thinwire.collectives.topology.shards import Grid
from thinwire.node.membership.handler import Topic
from thinwire.node.membership.presence import Presence
from thinwire.node.methods.registry import METHODS
from thinwire.node.outer.session import SessionContext
from thinwire.node.state.layout import Layout, Piece
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.link import Latency
from thinwire.sims.network.network import SimNet
from thinwire.swarm.frame import sign_message
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.membership.presets import LOCAL, Preset
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import Digest, Fork, Found, Hello, PeerId, Proposal, Refuse, Welcome

RUN = bytes(range(32))
LAYOUT = blake3.blake3(b"layout").digest()
STEP = 1.0
"""Virtual seconds of one round's inner steps."""


def layout_of(size: int) -> Layout:
    """Return a layout with a matrix and a vector that have this number of parameters together."""
    rows = size // 128
    pieces = (
        Piece("matrix", (rows, 100), "float32", 0, rows * 100),
        Piece("vector", (size - rows * 100,), "float32", rows * 100, size),
    )
    return Layout(pieces, size, LAYOUT)


def identity_of(index: int) -> Identity:
    """Return the identity of a node."""
    return Identity.generate(bytes([index]) * 32)


def votes_of(index: int, life: int = 0, fragment: int = 0) -> MemoryVoteStore:
    """Return the vote store of a node. life: number of its starts before."""
    return MemoryVoteStore(random.Random(f"votes/{index}/{life}/{fragment}"))


class Node:
    """One peer of a simulated swarm; `train` runs from its start to its end."""

    def __init__(self, swarm: Swarm, index: int, life: int = 0) -> None:
        self.swarm, self.index = swarm, index
        self.identity = identity_of(index)
        self.id = self.identity.peer_id
        self.log: list[tuple[float, str, Mapping[str, object]]] = []
        self.digests: dict[int, bytes] = {}
        self.history: dict[tuple[bytes, int], bytes] = {}
        """Digests by lineage and round; `digests` has the latest of each round."""
        self.committed_at: dict[int, float] = {}
        self.missing: dict[int, dict[PeerId, str]] = {}
        self.contributors: dict[int, list[PeerId]] = {}
        self.spoil: Callable[[int, np.ndarray], np.ndarray] = lambda round, delta: delta
        self.pace = STEP * (1.0 + 0.05 * index)
        loop = virtual_loop.current()
        self.rng = random.Random(1000 * index + life)
        address = f"10.0.0.{index}:7000"
        self.transport = swarm.net.transport(self.identity, RUN, self._admit, address)
        self.record = PeerRecord.create(
            self.identity,
            run_id=RUN,
            addresses=(address,),
            sequence=1 + int(loop.time() * 1000),  # higher than the sequences of earlier processes
            issued=swarm.net.wall(),
        )
        self.transport.learn(self.record)
        roster = Roster(
            self.identity,
            self.record,
            run_id=RUN,
            preset=swarm.preset,
            rng=self.rng,
            now=loop.time(),
            wall=swarm.net.wall,
        )
        method = METHODS[swarm.manifest.outer.method]
        layout = swarm.layout
        codec = method.codec(swarm.manifest, layout)
        theta = np.random.default_rng(7).standard_normal(swarm.size).astype(np.float32)
        known = [identity_of(i).peer_id for i in range(swarm.founders)] if index < swarm.founders and not life else []
        cut = Grid(codec.bound, swarm.piece) if swarm.piece else method.cut(swarm.manifest, layout, codec)
        self.replica = method.replica.begin(swarm.manifest, layout, codec, cut, theta, known)
        if known and self.replica.alike:
            self.replica.found(swarm.first_fork(self.replica.digest))
        self.theta = theta.copy()
        self.presence = Presence(
            self.transport, roster, now=loop.time, emit=self._emit, site=swarm.site(index), aside=swarm.aside
        )
        self.stop = asyncio.Event()
        self.session = method.session(
            SessionContext(
                identity=self.identity,
                manifest=swarm.manifest,
                run_id=RUN,
                presence=self.presence,
                now=loop.time,
                emit=self._emit,
                entered=not life,
                votes=lambda fragment: votes_of(index, life, fragment),
                patience=swarm.patience,
                on_commit=lambda: self.stop.set(),
            ),
            self.replica,
        )
        self.presence.attach(Topic.ROUNDS, self.session)
        self.rounds = method.rounds(self.session, swarm.manifest, read=self._read, write=self._write, work=at_once)
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def round_factory(self) -> RoundFactory:
        """Factory of the rounds of this node's session."""
        return self.session.factory

    def _admit(self, hello: Hello, record: PeerRecord, source: str) -> Welcome | Refuse:
        self.session.roster.learn(record, virtual_loop.current().time())
        return Welcome(self.record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))

    def _emit(self, name: str, fields: Mapping[str, object]) -> None:
        self.log.append((virtual_loop.current().time(), name, fields))
        if name == "phase":
            self.swarm.reached(self, int(str(fields["round"])), str(fields["phase"]))

    def _read(self, start: int, stop: int, out: np.ndarray) -> None:
        out[:] = self.theta[start:stop]

    def _write(self, theta: np.ndarray, start: int = 0, keep: float = 0.0) -> None:
        part = self.theta[start : start + theta.size]
        part[:] = keep * part + (1 - keep) * theta if keep else theta

    def start(self, *, joins: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self.presence.run()), loop.create_task(self.live(joins))]

    async def live(self, joins: bool) -> None:
        for peer in self.swarm.nodes.values():
            if peer is not self:
                self.session.roster.learn(peer.record, virtual_loop.current().time())
                self.transport.learn(peer.record)
        await asyncio.sleep(0.5)
        if joins:
            await self.rounds.enter()
        while self.replica.round < self.swarm.rounds:
            number = self.replica.round + 1
            await self.train(number)
            delta = np.random.default_rng((self.index, number)).standard_normal(self.swarm.size) * 0.01
            self.theta -= self.spoil(number, delta.astype(np.float32))
            outcome = await self.rounds.sync(weight=100, loss=1.0, speed=1.0)
            if outcome.commit is not None:
                self.missing[self.replica.round] = dict(outcome.missing)
                self.contributors[self.replica.round] = list(outcome.contributors)
                self.note()
                np.testing.assert_array_equal(self.theta, self.replica.theta)
                self.swarm.reached(self, self.replica.round, "applied")
        await self.rounds.settled()

    async def train(self, number: int) -> None:
        self.stop = asyncio.Event()
        try:
            async with asyncio.timeout(self.pace):
                await self.stop.wait()
        except TimeoutError:
            pass

    def forge(self, number: int, change: Callable[[list[memoryview]], list[memoryview]]) -> None:
        """In round `number` send the encoded chunks after `change`, correctly announced."""
        average = self.session.average

        async def forged(source, *, summary=None, **rest):
            if self.session.current.round == number and source:
                source, summary = change(list(source)), None
            return await average(source, summary=summary, **rest)

        self.session.average = forged

    def note(self) -> None:
        self.digests[self.replica.round] = self.replica.digest
        self.history[self.replica.lineage, self.replica.round] = self.replica.digest
        self.committed_at.setdefault(self.replica.round, virtual_loop.current().time())

    def kill(self) -> None:
        self.swarm.net.kill(self.id)
        for task in self.tasks:
            task.cancel()


class Swarm:
    """Up to 250 nodes on one SimNet. `fail_at` scripts what happens when a node reaches a phase of a round."""

    def __init__(
        self,
        founders: int,
        *,
        seed: int = 0,
        rounds: int = 6,
        size: int = 100_000,
        patience: float = 1.0,
        bandwidth: float | None = 12.5e6,
        latency: float | Latency = 0.02,
        outer: str = "",
        piece: int = 0,
        sites: Sequence[str] = (),
        preset: Preset = LOCAL,
        aside: Work = at_once,
        jitter: float = 0.1,
        **exchange: str | float,
    ) -> None:
        """Create the nodes. `outer`: lines of that table of the manifest. `exchange`: keys of that table."""
        self.net = SimNet(seed, latency=latency, bandwidth=bandwidth, jitter=jitter)
        self.piece, self.layout, self.sites, self.preset, self.aside = piece, layout_of(size), sites, preset, aside
        self.founders, self.rounds, self.size, self.patience = founders, rounds, size, patience
        given = {"codec": "int8(block=256)", "straggler_timeout": 2.0, "max_weight": 1000} | exchange
        # Values of dense contributions name their peers, and a plain mean shows which are in it.
        clipped = str(given["codec"]).startswith(("topk", "demo")) and "noloco" not in outer
        given.setdefault("aggregation", "clip" if clipped else "mean")
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
        self.manifest = parse(f"[exchange]\n{lines}[outer]\n{outer}")
        self.scripts: dict[tuple[int, int, str], Callable[[Node], None]] = {}
        self._fork: Fork | None = None
        self.nodes: dict[int, Node] = {}
        for index in range(founders):
            self.nodes[index] = Node(self, index)

    def first_fork(self, base: Digest) -> Fork:
        """Return the fork that begins the run with this state: all founders have signed it, each with its life."""
        if self._fork is None:
            founders = sorted((identity_of(index).peer_id, index) for index in range(self.founders))
            members, lives = tuple(peer for peer, _ in founders), [votes_of(index).life for _, index in founders]
            identities = [identity_of(index) for _, index in founders]
            signatures = tuple(
                sign_message(Found(0, 0, base, members, life), b"", identity, RUN)
                for identity, life in zip(identities, lives, strict=True)
            )
            keys = tuple(identity.public_key for identity in identities)
            tokens = (b"",) * len(members)
            self._fork = Fork(0, base, (), members, b"".join(lives), signatures, keys, tokens)
        return self._fork

    def site(self, index: int) -> str:
        """Return the announced site of a node: each of `sites` in turn."""
        return self.sites[index % len(self.sites)] if self.sites else ""

    def fail_at(self, index: int, round: int, phase: str, what: Callable[[Node], None] | None = None) -> None:
        self.scripts[(index, round, phase)] = what or Node.kill

    def reached(self, node: Node, round: int, phase: str) -> None:
        action = self.scripts.pop((node.index, round, phase), None)
        if action is not None and self.nodes.get(node.index) is node:
            node.log.append((virtual_loop.current().time(), "script", {"phase": phase}))
            action(node)

    def start(self) -> None:
        for node in self.nodes.values():
            node.start()

    def join(self, index: int, life: int = 0) -> Node:
        node = self.nodes[index] = Node(self, index, life)
        node.start(joins=True)
        return node

    async def finish(self, indices: list[int] | None = None, limit: float = 300.0) -> None:
        """Wait until the named nodes (default: all) have finished; re-raise their errors."""
        async with asyncio.timeout(limit):
            for index in indices if indices is not None else sorted(self.nodes):
                await self.nodes[index].tasks[1]

    def check(
        self, indices: list[int] | None = None, *, dead_lineages: bool = False, floods: Collection[PeerId] = ()
    ) -> None:
        """Check that each round has one digest on all nodes, and that the named ones reached the last round.

        No node but those of `floods` may have sent more small frames than a peer may.
        `dead_lineages`: rounds that only killed nodes have committed may differ. If all holders of a commit die, the
        others cannot learn it and continue without it.
        """
        by_round: dict[tuple[bytes, int], set[bytes]] = {}
        for node in self.nodes.values():
            assert node.id in floods or set(node.transport.pauses()) <= set(floods)
            for place, digest in node.history.items():
                if node.transport.alive or not dead_lineages:
                    by_round.setdefault(place, set()).add(digest)
        for (lineage, number), digests in by_round.items():
            assert len(digests) == 1, f"round {number} of lineage {lineage.hex()!r} has {len(digests)} different states"
        for index in indices if indices is not None else sorted(self.nodes):
            assert self.nodes[index].replica.round == self.rounds


def committed_ballots(swarm: Swarm) -> dict[int, list[Proposal]]:
    """Return round -> the committed ballot, once for each present node; filled while the swarm runs."""
    found: dict[int, list[Proposal]] = {}
    for node in swarm.nodes.values():
        node.round_factory.outcome = _noted(node.round_factory.outcome, found)  # type: ignore[method-assign]
    return found


def _noted(
    outcome: Callable[..., Awaitable[Outcome]], found: dict[int, list[Proposal]]
) -> Callable[..., Awaitable[Outcome]]:
    """Return `outcome` of a RoundFactory, which adds each committed ballot to `found`, once."""
    rounds: set[int] = set()

    async def noted(current: Round, *, give_up: float | None = None) -> Outcome:
        result = await outcome(current, give_up=give_up)
        if result.commit is not None and current.round not in rounds:
            rounds.add(current.round)
            found.setdefault(current.round, []).append(result.commit.proposal)
        return result

    return noted
