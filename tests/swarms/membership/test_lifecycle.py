"""Complete peers in virtual time: join, state, rounds, checkpoint, departure; inner steps are artificial."""

import asyncio
import random
from itertools import pairwise

import blake3
import numpy as np
import pytest
from thinwire.collectives.rounds.round import Round
from thinwire.collectives.state_sync.state_offers import state_digest
from thinwire.compression.device import HOST
from thinwire.node.membership.join import DuplicateKey, NoSwarm
from thinwire.node.outer import round_session
from thinwire.node.outer.state_transfer import state_fetcher
from thinwire.node.outer.state_transfer.state_server import StateServer
from thinwire.node.peer import checkpoint_schedule
from thinwire.node.peer.lifecycle import PeerLifecycle
from thinwire.node.peer.peer import Peer
from thinwire.node.peer.reporter import Reporter
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.runtime.directories import RunDirectory
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment
from thinwire.node.state.checkpoint_store import CheckpointStore
from thinwire.node.state.layout import Layout, Piece
from thinwire.node.state.replica import Replica
from thinwire.node.state.snapshot import PrivateState
from thinwire.node.training.learner import StepReport
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.network import SimNet
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite
from thinwire.swarm.lineage import lineage_of
from thinwire.swarm.manifest.parser import sign
from thinwire.swarm.membership.presets import LOCAL
from thinwire.swarm.messages.registry import PeerId, StateAsk

SIZE = 5000
LAYOUT = Layout((Piece("flat", (SIZE,), "float32", 0, SIZE),), SIZE, blake3.blake3(b"flat").digest())
AUTHOR = Identity.generate(bytes(32))


class Drift:
    """Learner with random steps of `pace` virtual seconds."""

    layout, device = LAYOUT, HOST

    def __init__(self, seed, pace):
        self.theta, self.rng, self.pace = np.zeros(SIZE, np.float32), np.random.default_rng(seed), pace
        self.made, self.group, self.restored, self.skipped = 0, (), None, None
        self.short = []

    def parameters(self):
        return self.theta.copy()

    def read(self, start, stop, out):
        out[:] = self.theta[start:stop]

    def write(self, theta):
        self.theta[:] = theta

    def assign(self, share):
        assert share.me in share.group
        self.group = share.group

    async def steps(self, n, stop):
        made = 0
        while made < n and not stop.is_set():
            try:
                async with asyncio.timeout(self.pace):
                    await stop.wait()
            except TimeoutError:
                self.theta += self.rng.standard_normal(SIZE, np.float32) * 0.01
                made += 1
        self.made += made
        if made < n:
            self.short.append(made)
        return StepReport(made, 2.0, 2.0, 10 * made, made * self.pace)

    def score(self, *given):
        return 0.0, 0.0

    def private(self):
        return PrivateState({"made": np.array([self.made])}, {"made": self.made})

    def restore(self, private):
        self.restored = private.values["made"]
        return True

    def skip_to(self, round, peers):
        self.skipped = (round, peers)


class One:
    """Process of a peer with its environment. `life`: number of this process among those of one key."""

    def __init__(self, world, index, *, invite=None, life=0, pace=0.25, work=at_once, write=at_once, **options):
        self.world, self.index = world, index
        self.identity = AUTHOR if index == 0 else Identity.generate(bytes([index]) * 32)
        self.events, self.learner, self.invites = [], Drift(100 * index + life, pace), []
        loop = virtual_loop.current()
        environment = Environment(
            loop.time,
            lambda: world.net.wall() + loop.time() % 1,
            random.Random(index + 50 * life),
            RealDisk(),
            write=write,
        )
        self.report = Reporter(
            lambda kind, fields: self.events.append((loop.time(), kind, fields)), wall=environment.wall
        )
        directory = RunDirectory(world.path / str(index))
        self.peer = Peer(self.identity, world.run_id, environment, directory, LOCAL, self.report.emit)

        async def opener(admit):
            return world.net.transport(self.identity, world.run_id, admit, f"10.0.0.{index}:{7000 + life}")

        async def begin(peer):
            if invite is None:
                return await peer.found(world.signed, opener)
            await peer.arrive(Invite.parse(invite), opener, 20.0)
            return True

        async def learn(manifest):
            await asyncio.sleep(0.5)
            return self.learner

        self.life = PeerLifecycle(
            self.peer, self.report, begin=begin, learn=learn, work=work, invited=self.invites.append, **options
        )
        self.task = loop.create_task(self.life.run())

    def of(self, kind):
        return [fields for _, name, fields in self.events if name == kind]

    def digests(self):
        return {fields["round"]: fields["digest"] for fields in self.of("round")}

    async def until(self, done, limit=120.0):
        async with asyncio.timeout(limit):
            while not done():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.05)

    async def reach(self, round):
        await self.until(lambda: self.peer.ready and self.peer.replica.round >= round)

    def kill(self):
        self.world.net.kill(self.identity.peer_id)
        self.task.cancel()


class World:
    def __init__(self, path, *, rounds=0, steps=4):
        self.path, self.net = path, SimNet(3, latency=0.01)
        toml = f'[run]\nrounds = {rounds}\n[outer]\nsync_every = {steps}\n[exchange]\ncodec = "fp32"\nstraggler_timeout = 2.0\n'
        self.signed = sign(toml.encode(), AUTHOR)
        self.run_id = self.signed.verify().run_id(AUTHOR.public_key)

    async def swarm(self, count, **options):
        """Start a founder and joiners that it waits for."""
        founder = One(self, 0, wait_for=count, **options)
        await founder.until(lambda: founder.invites)
        return [founder, *(One(self, index, invite=founder.invites[0], **options) for index in range(1, count))]


def live(tmp_path, scene, *, seed=1, **options):
    async def main():
        await scene(World(tmp_path, **options))

    virtual_loop.run(main(), seed=seed, limit=1000.0)


def test_peers_join_train_checkpoint_and_leave(tmp_path):
    async def scene(world):
        ones = await world.swarm(3)
        for one in ones:
            await one.task
        first = ones[0].digests()
        assert sorted(first) == [1, 2, 3, 4, 5]
        for one in ones:
            assert one.digests() == first
            assert all(fields["contributors"] == 3 for fields in one.of("round"))
            assert one.of("left")[-1]["digest"] == first[5]
            assert one.report.phase == "done" and one.report.checkpoint.endswith("step-00000005")
            assert sorted(one.learner.group) == sorted(other.identity.peer_id for other in ones)
            assert not one.of("link_lost"), "nobody is missed while others still want something of it"

    live(tmp_path, scene, rounds=5)


def test_slow_inner_steps_end_when_others_commit(tmp_path):
    """A commit without us makes the rest of our steps worthless."""

    async def scene(world):
        ones = await world.swarm(3)
        await ones[0].reach(3)
        ones[2].learner.pace = 20.0
        await ones[0].reach(6)
        await ones[2].reach(6)
        assert ones[2].learner.short
        await stop(ones)
        assert ones[2].digests().items() <= ones[0].digests().items() | ones[1].digests().items()

    live(tmp_path, scene)


async def stop(ones):
    for one in ones:
        one.life.stop()
    for one in ones:
        await one.task


def test_stop_saves_checkpoint_and_says_goodbye(tmp_path):
    async def scene(world):
        ones = await world.swarm(2)
        await ones[0].reach(2)
        began = virtual_loop.current().time()
        ones[1].life.stop()
        await ones[1].task
        assert virtual_loop.current().time() - began < 6.0
        assert ones[1].report.checkpoint
        await ones[0].until(lambda: ones[0].of("left"))
        assert ones[0].of("left")[0]["peer"] == ones[1].identity.peer_id.hex()
        await stop(ones[:1])

    live(tmp_path, scene)


def test_killed_peer_saves_nothing_and_sends_nothing(tmp_path):
    async def scene(world):
        ones = await world.swarm(2)
        await ones[0].reach(2)
        ones[1].kill()
        with pytest.raises(asyncio.CancelledError):
            await ones[1].task
        assert not ones[1].of("left") and ones[1].report.checkpoint.endswith("00000001"), (
            "only the first round is saved"
        )
        reached = ones[0].peer.replica.round
        await ones[0].reach(reached + 2)
        back = One(world, 1, invite=ones[0].invites[0], life=1)
        await back.reach(reached + 3)
        assert back.of("restored")[0]["round"] == 1 and back.learner.restored == 4
        await stop([ones[0], back])

    live(tmp_path, scene)


def test_peer_that_returns_by_the_invite_of_a_member_can_still_invite_others(tmp_path):
    async def scene(world):
        ones = await world.swarm(2)
        other = One(world, 2, invite=ones[0].invites[0])
        await other.reach(2)
        ones[1].kill()
        back = One(world, 1, invite=other.peer.invite().code(), life=1)
        await back.reach(3)
        newcomer = One(world, 3, invite=back.peer.invite().code())
        await newcomer.reach(4)
        await stop([ones[0], other, back, newcomer])

    live(tmp_path, scene)


def test_founder_resumes_from_its_checkpoint(tmp_path):
    async def scene(world):
        first = One(world, 0, rounds=3)
        await first.task
        again = One(world, 0, life=1, rounds=5)
        await again.task
        assert again.of("restored")[0]["round"] == 3
        assert again.learner.restored == first.learner.made == 12 and not again.of("fresh")
        assert sorted(again.digests()) == [4, 5]

    live(tmp_path, scene)


@pytest.mark.parametrize("state", [False, True], ids=["nobody has a state", "others have it"])
def test_founder_that_restarts_its_run_prints_invite(tmp_path, state):
    async def scene(world):
        first = One(world, 0, pace=100.0)
        await first.until(lambda: first.invites)
        other = One(world, 1, invite=first.invites[0], pace=100.0)
        if state:
            await other.until(lambda: other.of("ready"))
        else:
            await first.until(lambda: first.of("joined"))
        first.kill()
        again = One(world, 0, life=1, pace=100.0)
        await again.until(lambda: again.of("ready"))
        await other.until(lambda: other.of("ready"))
        await asyncio.sleep(1.0)
        assert len(again.invites) == len(again.of("refounded")) == (not state) and not other.invites
        if not state:
            assert again.invites == [again.peer.invite().code()] != first.invites
        for one in (again, other):
            one.kill()

    live(tmp_path, scene)


@pytest.mark.parametrize(("pace", "round"), [(10.0, 10), (0.25, 30)], ids=["10 rounds", "30 seconds"])
def test_checkpoint_is_written_after_10_rounds_or_30_seconds_whichever_is_later(pace, round, tmp_path):
    async def scene(world):
        one = One(world, 0, pace=pace)
        await one.until(lambda: one.report.checkpoint.endswith("00000001"), limit=600.0)
        await one.until(lambda: not one.report.checkpoint.endswith("00000001"), limit=600.0)
        saved = int(one.report.checkpoint[-8:])
        assert round + 1 <= saved <= round + 2, "counted from the first one, which had to be written"
        await stop([one])

    live(tmp_path, scene)


@pytest.fixture
def often(monkeypatch):
    """A checkpoint is due after every round."""
    monkeypatch.setattr(checkpoint_schedule, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint_schedule, "SAVE_ROUNDS", 1)


async def slowly(write):
    """Write to a disk that needs half a minute."""
    await asyncio.sleep(30.0)
    return write()


def test_last_checkpoint_waits_for_the_one_that_is_being_written(tmp_path, often):
    """Checkpoints that are due meanwhile are skipped."""

    async def scene(world):
        one = One(world, 0, write=slowly)
        await one.task
        rounds = [when for when, kind, _ in one.events if kind == "round"]
        (left,) = (when for when, kind, _ in one.events if kind == "left")
        assert len(rounds) == 5 and max(after - before for before, after in pairwise(rounds)) < 1.3
        assert rounds[0] + 30.0 <= left < rounds[0] + 31.0
        assert len([fields for fields in one.of("checkpoint") if "skipped" in fields["detail"]]) == 1
        found = sorted(path.name for path in tmp_path.rglob("step-*"))
        assert found == ["step-00000001", "step-00000005"] and one.report.checkpoint.endswith(found[1])

    live(tmp_path, scene, rounds=5)


def test_peer_that_is_killed_while_a_checkpoint_is_written_leaves_no_task(tmp_path, often):
    async def scene(world):
        one = One(world, 0, write=slowly)
        await one.reach(3)
        one.kill()
        with pytest.raises(asyncio.CancelledError):
            await one.task
        await asyncio.sleep(40.0)
        assert not list(tmp_path.rglob("step-*")) and not one.report.checkpoint

    live(tmp_path, scene)


def test_founder_stops_waiting_for_absent_peers(tmp_path):
    async def scene(world):
        one = One(world, 0, wait_for=2)
        await one.reach(1)
        assert virtual_loop.current().time() > 60.0 and one.of("waited")
        await stop([one])

    live(tmp_path, scene)


def test_second_peer_with_same_key_ends_the_older_one(tmp_path):
    async def scene(world):
        ones = await world.swarm(2)
        await ones[0].reach(2)
        double = One(world, 1, invite=ones[0].invites[0], life=1)
        with pytest.raises(DuplicateKey):
            async with asyncio.timeout(2.0):  # the newer process must not vote yet, or both would vote as one member
                await ones[1].task
        async with asyncio.timeout(10.0):
            while not double.of("yielded"):
                await asyncio.sleep(0.1)
        assert "the key was copied" in double.report.alarm and "our key is in use" in ones[1].report.alarm
        reached = ones[0].peer.replica.round
        await double.reach(reached + 2)
        assert not double.task.done()
        await stop([ones[0], double])

    live(tmp_path, scene)


def test_heavy_work_runs_outside_the_event_loop(tmp_path, monkeypatch):
    """Whole states are hashed, copied, looked through and written in `work` only."""
    working, seen = [], set()

    async def work(function):
        await asyncio.sleep(0.01)
        working.append(function)
        try:
            return function()
        finally:
            working.pop()

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*arguments, **rest):
            assert working, f"{name} on the loop's thread"
            seen.add(name)
            return original(*arguments, **rest)

        monkeypatch.setattr(owner, name, watched)

    for name in ("__init__", "_seal", "contribution", "commit", "install"):
        watch(Replica, name)
    watch(CheckpointStore, "load")
    watch(CheckpointStore, "save")
    watch(state_fetcher, "_finite")

    async def scene(world):
        ones = await world.swarm(2, work=work, write=work)
        await ones[0].reach(2)
        await stop(ones)
        again = One(world, 0, life=1, work=work, write=work)
        await again.reach(3)
        assert again.of("restored")
        await stop([again])

    live(tmp_path, scene)
    assert len(seen) == 8


def test_joiner_refuses_non_finite_state(tmp_path):
    async def scene(world):
        founder = One(world, 0)
        await founder.reach(1)
        founder.peer.replica.theta[7] = np.nan
        founder.peer.replica.seal()
        joiner = One(world, 1, invite=founder.invites[0])
        await joiner.until(lambda: joiner.of("alarm"))
        assert "not finite" in joiner.report.alarm and not joiner.of("ready")
        for one in (founder, joiner):
            one.kill()

    live(tmp_path, scene)


def test_learner_error_ends_peer_and_says_goodbye(tmp_path):
    async def scene(world):
        ones = await world.swarm(2)
        await ones[0].reach(2)

        async def fail(n, stop):
            raise ArithmeticError("nan")

        ones[1].learner.steps = fail
        with pytest.raises(ArithmeticError):
            await ones[1].task
        assert ones[1].of("left") and ones[1].report.checkpoint
        await stop(ones[:1])

    live(tmp_path, scene)


def test_receive_error_ends_peer(tmp_path):
    """Also before there is a round to take part in."""

    async def scene(world):
        one = One(world, 0)
        await one.until(lambda: one.peer.admission.running is not None)

        def fail(now):
            raise ArithmeticError("inside")

        one.peer.presence.roster.tick = fail
        with pytest.raises(ExceptionGroup, match="TaskGroup"):
            await one.task

    live(tmp_path, scene)


@pytest.mark.parametrize("count", [1, 2])
def test_joiner_whose_only_contact_dies_gives_up(tmp_path, count):
    """An admitted joiner whose contact dies gives up: no swarm is left, and other joiners do not form one."""

    async def scene(world):
        founder = One(world, 0)
        await founder.until(lambda: founder.invites)
        joiners = [One(world, 1 + place, invite=founder.invites[0]) for place in range(count)]
        for joiner in joiners:
            await joiner.until(lambda joiner=joiner: joiner.peer.admission.terms is not None)
            assert not joiner.peer.ready
        founder.kill()
        for joiner in joiners:
            with pytest.raises(NoSwarm, match="the swarm disappeared"):
                async with asyncio.timeout(300.0):
                    await joiner.task
            assert not joiner.report.checkpoint
        assert 30 < virtual_loop.current().time() < 250

    live(tmp_path, scene)


def test_lifecycle_trace_is_equal_for_equal_seeds(tmp_path):
    def once(seed, path):
        async def main():
            ones = await World(path, rounds=3).swarm(3)
            for one in ones:
                await one.task
            return virtual_loop.current().trace

        return virtual_loop.run(main(), seed=seed)

    assert once(1, tmp_path / "a") == once(1, tmp_path / "b")
    assert once(1, tmp_path / "c") != once(2, tmp_path / "d")


class Beside:
    """Worker that computes digests beside the inner steps after `seconds`; `spoil(replica)` runs first."""

    waiting: list[Replica]
    """Replicas whose digest is not computed yet."""
    asked: list[PeerId]
    """Peers that asked for a state while a digest was missing."""

    def __init__(self, seconds, spoil=lambda replica: None):
        self.seconds, self.spoil = seconds, spoil

    async def __call__(self, settle):
        replica = settle.__self__
        self.waiting.append(replica)
        await asyncio.sleep(self.seconds)
        self.spoil(replica)
        self.waiting.remove(replica)
        settle()


@pytest.fixture
def told(monkeypatch):
    """Events about begun, offered and stored states: (event, round, True if the digest is current)."""
    told, replicas = [], {}
    monkeypatch.setattr(Beside, "waiting", [], raising=False)
    monkeypatch.setattr(Beside, "asked", [], raising=False)

    def true(replica):
        hashes = [blake3.blake3(replica.chunk(index)).digest() for index in range(len(replica))]
        named = state_digest(replica.round, replica.layout, replica.members, hashes, replica.lives, replica.lineage)
        return replica.newest == (replica.round, named) and replica.digest == named

    def watch(owner, name, look):
        original = getattr(owner, name)

        def watched(*arguments, **rest):
            look(*arguments)
            return original(*arguments, **rest)

        monkeypatch.setattr(owner, name, watched)

    def served(states, replica, *rest, **more):
        replicas[states] = replica

    def offered(states, peer):
        if states.entered and not states.held:
            told.append(("offer", replicas[states].round, true(replicas[states])))

    def asked(states, peer, frame):
        if states.held and isinstance(frame.message, StateAsk):
            Beside.asked.append(peer)

    def stored(store, snapshot):
        (fragment,) = snapshot.fragments.values()
        state = np.concatenate([LAYOUT.flat(fragment.weights), LAYOUT.flat(fragment.momentum)])
        hashes, lineage = [blake3.blake3(state.tobytes()).digest()], lineage_of(snapshot.chain)
        named = state_digest(snapshot.round, LAYOUT.digest, snapshot.members, hashes, snapshot.lives, lineage)
        told.append(("checkpoint", snapshot.round, snapshot.digest == named))

    def sealed(replica, chunks):
        assert not any(replica is one for one in Beside.waiting), "somebody did not wait for the digest"

    watch(
        round_session.RoundSession, "advance", lambda one: told.append(("round", one.replica.round, true(one.replica)))
    )
    watch(StateServer, "__init__", served)
    watch(StateServer, "on_frame", asked)
    watch(StateServer, "_offer", offered)
    watch(CheckpointStore, "save", stored)
    watch(Replica, "_seal", sealed)
    return told


@pytest.mark.parametrize("saves", [True, False])
def test_state_is_not_announced_before_its_digest_is_ready(saves, tmp_path, told, monkeypatch):
    """Steps continue meanwhile. The second peer's digest takes longer than all of them, the first's two."""
    if saves:
        monkeypatch.setattr(checkpoint_schedule, "SAVE_SECONDS", 0.0)
        monkeypatch.setattr(checkpoint_schedule, "SAVE_ROUNDS", 1)
    bases = []
    announce = Round.announce

    def announced(current, source, **rest):
        bases.append((current.me, current.round, current.agreement.terms.base.hex()))
        announce(current, source, **rest)

    monkeypatch.setattr(Round, "announce", announced)

    async def scene(world):
        founder = One(world, 0, wait_for=2, beside=Beside(0.6))
        await founder.until(lambda: founder.invites)
        ones = [founder, One(world, 1, invite=founder.invites[0], beside=Beside(1.8))]
        for one in ones:
            await one.task
        for one in ones:
            digests = one.digests()
            assert sorted(digests) == [1, 2, 3, 4, 5] and digests == ones[0].digests()
            assert one.of("left")[-1]["digest"] == digests[5]
            assert one.learner.made == 20 and not one.learner.short, "a round that is in the state ends no steps"
            said = {number: base for me, number, base in bases if me == one.identity.peer_id and 1 < number < 6}
            assert said == {number + 1: digests[number] for number in range(1, 5)}

    live(tmp_path, scene, rounds=5)
    assert all(right for _, _, right in told), told
    assert {number for what, number, _ in told if what == "checkpoint"} == ({1, 2, 3, 4, 5} if saves else {1, 5})


def test_inner_steps_do_not_wait_for_the_digest(tmp_path, told):
    """One second for four steps, and 0.9 s for the digest beside them: one round takes one second, not two."""

    async def scene(world):
        one = One(world, 0, beside=Beside(0.9))
        await one.task
        at = [when for when, kind, _ in one.events if kind == "round"]
        assert len(at) == 5 and max(after - before for before, after in zip(at, at[1:], strict=False)) < 1.3

    live(tmp_path, scene, rounds=5)


def test_state_is_offered_only_with_its_digest(tmp_path, told):
    async def scene(world):
        ones = await world.swarm(2, beside=Beside(0.95))
        await ones[0].reach(2)
        await ones[0].until(lambda: len(Beside.waiting) == 2)
        asked, told[:] = virtual_loop.current().time(), []
        late = One(world, 2, invite=ones[0].invites[0], beside=Beside(0.95))
        await late.until(lambda: late.identity.peer_id in Beside.asked)
        assert Beside.waiting and virtual_loop.current().time() < asked + 5.0
        await late.reach(ones[0].peer.replica.round + 2)
        await stop([*ones, late])
        assert late.digests().items() <= ones[0].digests().items()

    live(tmp_path, scene)
    assert any(what == "offer" for what, _, _ in told) and all(right for _, _, right in told), told


def test_replica_with_flipped_bit_notices_before_contributing(tmp_path, told):
    """One bit of the state flips after the step, while its digest is computed."""

    def spoil(replica):
        if replica.round == 3:
            replica.theta.view(np.uint8)[17] ^= 1

    async def scene(world):
        founder = One(world, 0, wait_for=3, beside=Beside(0.5))
        await founder.until(lambda: founder.invites)
        code = founder.invites[0]
        ones = [founder, One(world, 1, invite=code), One(world, 2, invite=code, beside=Beside(0.5, spoil))]
        for one in ones:
            await one.reach(6)
        await stop(ones)
        digests, spoiled = founder.digests(), ones[2].digests()
        assert [number for number in spoiled if digests.get(number, spoiled[number]) != spoiled[number]] == [3]
        assert any(fields["round"] == 3 and fields["digest"] == digests[3] for fields in ones[2].of("synced"))
        assert len({one.digests()[6] for one in ones}) == 1

    live(tmp_path, scene)


def test_peer_killed_before_its_digest_resumes_without_loss(tmp_path, told):
    async def scene(world):
        ones = await world.swarm(3, beside=Beside(0.5))
        await ones[1].reach(3)
        await ones[1].until(lambda: ones[1].peer.replica in Beside.waiting)
        ones[1].kill()
        again = One(world, 1, invite=ones[0].invites[0], life=1, beside=Beside(0.5))
        await again.reach(ones[0].peer.replica.round + 2)
        await stop([ones[0], ones[2], again])
        assert again.digests().items() <= ones[0].digests().items() and again.digests()
        assert all(one.of("left") for one in (ones[0], ones[2]))

    live(tmp_path, scene)
