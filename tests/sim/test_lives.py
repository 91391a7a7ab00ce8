"""Whole lives in virtual time: knock, state, rounds, checkpoint, goodbye; only the inner steps are made up."""

import asyncio
import random

import blake3
import numpy as np
import pytest
from thinwire.collectives.butterfly import Butterfly
from thinwire.collectives.statesync import state_digest
from thinwire.node import duties, session, stateserver
from thinwire.node.checkpoint import CheckpointStore
from thinwire.node.directories import RunDirectory
from thinwire.node.disk import RealDisk
from thinwire.node.duties import DuplicateKey
from thinwire.node.fragments import Layout, Piece
from thinwire.node.keep import Keep
from thinwire.node.learner import StepReport
from thinwire.node.life import Life
from thinwire.node.outer import Replica
from thinwire.node.peer import Doors, NoSwarm, Peer
from thinwire.node.report import Reporter
from thinwire.node.snapshot import PrivateState
from thinwire.node.stateserver import StateServer
from thinwire.node.waiting import at_once
from thinwire.sims import clock
from thinwire.sims.network import SimNet
from thinwire.swarm import manifest as manifests
from thinwire.swarm.identity import Identity
from thinwire.swarm.invite import Invite
from thinwire.swarm.preset import LOCAL

SIZE = 5000
LAYOUT = Layout((Piece("flat", (SIZE,), "float32", 0, SIZE),), SIZE, blake3.blake3(b"flat").digest())
AUTHOR = Identity.generate(bytes(32))


class Drift:
    """A learner that moves its parameters by chance of its own, `pace` virtual seconds a step."""

    layout = LAYOUT

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

    def private(self):
        return PrivateState({"made": np.array([self.made])}, {"made": self.made})

    def restore(self, private):
        self.restored = private.values["made"]
        return True

    def skip_to(self, round, peers):
        self.skipped = (round, peers)


class One:
    """A life with its doors. `life` numbers the lives of one key."""

    def __init__(self, world, index, *, invite=None, life=0, pace=0.25, work=at_once, **options):
        self.world, self.index = world, index
        self.identity = AUTHOR if index == 0 else Identity.generate(bytes([index]) * 32)
        self.events, self.learner, self.invites = [], Drift(100 * index + life, pace), []
        loop = clock.current()
        doors = Doors(
            loop.time, lambda: world.net.wall() + loop.time() % 1, random.Random(index + 50 * life), RealDisk()
        )
        self.report = Reporter(lambda kind, fields: self.events.append((loop.time(), kind, fields)), wall=doors.wall)
        directory = RunDirectory(world.path / str(index))
        self.peer = Peer(self.identity, world.run_id, doors, directory, LOCAL, self.report.emit)

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

        self.life = Life(
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
        toml = f'[run]\nrounds = {rounds}\n[outer]\nsteps = {steps}\n[exchange]\ncodec = "fp32"\ngrace = 2.0\n'
        self.signed = manifests.sign(toml.encode(), AUTHOR)
        self.run_id = self.signed.verify().run_id(AUTHOR.public_key)

    async def swarm(self, count, **options):
        """A founder and the joiners that it waits for."""
        founder = One(self, 0, wait_for=count, **options)
        await founder.until(lambda: founder.invites)
        return [founder, *(One(self, index, invite=founder.invites[0], **options) for index in range(1, count))]


def live(tmp_path, scene, *, seed=1, **options):
    async def main():
        await scene(World(tmp_path, **options))

    clock.run(main(), seed=seed, limit=1000.0)


def test_a_run_from_beginning_to_end(tmp_path):
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
            assert one.learner.group == tuple(sorted(other.identity.peer_id for other in ones))
            assert not one.of("lost"), "nobody is missed while others still want something of it"

    live(tmp_path, scene, rounds=5)


def test_slow_steps_end_when_the_others_commit(tmp_path):
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


def test_stop_leaves_well(tmp_path):
    async def scene(world):
        ones = await world.swarm(2)
        await ones[0].reach(2)
        began = clock.current().time()
        ones[1].life.stop()
        await ones[1].task
        assert clock.current().time() - began < 6.0
        assert ones[1].report.checkpoint
        await ones[0].until(lambda: ones[0].of("left"))
        assert ones[0].of("left")[0]["peer"] == ones[1].identity.peer_id.hex()
        await stop(ones[:1])

    live(tmp_path, scene)


def test_killed_it_saves_nothing_and_says_nothing(tmp_path):
    async def scene(world):
        ones = await world.swarm(2)
        await ones[0].reach(2)
        ones[1].kill()
        with pytest.raises(asyncio.CancelledError):
            await ones[1].task
        assert not ones[1].of("left") and not ones[1].report.checkpoint
        reached = ones[0].peer.replica.round
        await ones[0].reach(reached + 2)
        back = One(world, 1, invite=ones[0].invites[0], life=1)
        await back.reach(reached + 3)
        assert back.learner.skipped is not None and back.learner.restored is None
        await stop([ones[0], back])

    live(tmp_path, scene)


def test_a_founder_goes_on_from_its_checkpoint(tmp_path):
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
def test_a_founder_that_founds_its_run_again_hands_out_an_invite(tmp_path, state):
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
        assert len(again.invites) == len(again.of("founded again")) == (not state) and not other.invites
        if not state:
            assert again.invites == [again.peer.invite().code()] != first.invites
        for one in (again, other):
            one.kill()

    live(tmp_path, scene)


def test_checkpoints_on_the_way(tmp_path):
    async def scene(world):
        one = One(world, 0, pace=10.0)
        await one.until(lambda: one.report.checkpoint, limit=400.0)
        assert 3 <= one.peer.replica.round <= 4
        await stop([one])

    live(tmp_path, scene)


def test_who_is_waited_for_in_vain(tmp_path):
    async def scene(world):
        one = One(world, 0, wait_for=2)
        await one.reach(1)
        assert clock.current().time() > 60.0 and one.of("waited")
        await stop([one])

    live(tmp_path, scene)


def test_the_same_key_twice(tmp_path):
    async def scene(world):
        ones = await world.swarm(2)
        await ones[0].reach(2)
        double = One(world, 1, invite=ones[0].invites[0], life=1)
        with pytest.raises(DuplicateKey):
            async with asyncio.timeout(2.0):  # before the newer one has the state, or both would vote as one member
                await ones[1].task
        reached = ones[0].peer.replica.round
        await double.reach(reached + 2)
        assert not double.task.done()
        await stop([ones[0], double])

    live(tmp_path, scene)


def test_what_is_heavy_leaves_the_loop(tmp_path, monkeypatch):
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

    for name in ("__init__", "_seal", "encode", "apply", "install"):
        watch(Replica, name)
    watch(CheckpointStore, "load")
    watch(CheckpointStore, "save")
    watch(stateserver, "_finite")

    async def scene(world):
        ones = await world.swarm(2, work=work)
        await ones[0].reach(2)
        await stop(ones)
        again = One(world, 0, life=1, work=work)
        await again.reach(3)
        assert again.of("restored")
        await stop([again])

    live(tmp_path, scene)
    assert len(seen) == 8


def test_a_state_that_is_not_finite_is_not_taken(tmp_path):
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


def test_an_error_of_the_learner_ends_the_life_well(tmp_path):
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


def test_an_error_in_receiving_ends_the_life(tmp_path):
    """Also before there is a round to take part in."""

    async def scene(world):
        one = One(world, 0)
        await one.until(lambda: hasattr(one.peer, "presence"))

        def fail(now):
            raise ArithmeticError("inside")

        one.peer.presence.roster.tick = fail
        with pytest.raises(ExceptionGroup, match="TaskGroup"):
            await one.task

    live(tmp_path, scene)


@pytest.mark.parametrize("count", [1, 2])
def test_the_only_contact_dies_after_the_welcome(tmp_path, count):
    """Who is let in and then left alone gives up: there is no swarm. Others in the same place are none either."""

    async def scene(world):
        founder = One(world, 0)
        await founder.until(lambda: founder.invites)
        joiners = [One(world, 1 + place, invite=founder.invites[0]) for place in range(count)]
        for joiner in joiners:
            await joiner.until(lambda joiner=joiner: hasattr(joiner.peer, "signed"))
            assert not joiner.peer.ready
        founder.kill()
        for joiner in joiners:
            with pytest.raises(NoSwarm, match="went away"):
                async with asyncio.timeout(300.0):
                    await joiner.task
            assert not joiner.report.checkpoint
        assert 30 < clock.current().time() < 250

    live(tmp_path, scene)


def test_same_seed_same_trace(tmp_path):
    def once(seed, path):
        async def main():
            ones = await World(path, rounds=3).swarm(3)
            for one in ones:
                await one.task
            return clock.current().trace

        return clock.run(main(), seed=seed)

    assert once(1, tmp_path / "a") == once(1, tmp_path / "b")
    assert once(1, tmp_path / "c") != once(2, tmp_path / "d")


class Beside:
    """Makes digests beside the inner steps, `seconds` after it was asked to; `spoil(replica)` comes before."""

    waiting: list[Replica]
    """Whose digest is not made yet."""

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
    """What is begun, offered and kept of states: (what, round, whether the digest is that of the state as it is)."""
    told = []
    monkeypatch.setattr(Beside, "waiting", [], raising=False)

    def true(replica):
        hashes = [blake3.blake3(replica.chunk(index)).digest() for index in range(len(replica))]
        named = state_digest(replica.round, replica.layout, replica.members, hashes)
        return replica.newest == (replica.round, named) and replica.digest == named

    def watch(owner, name, look):
        original = getattr(owner, name)

        def watched(*arguments, **rest):
            look(*arguments)
            return original(*arguments, **rest)

        monkeypatch.setattr(owner, name, watched)

    def offered(states, peer):
        if states.entered and not states._held:
            told.append(("offer", states._replica.round, true(states._replica)))

    def sealed(replica, chunks):
        assert not any(replica is one for one in Beside.waiting), "somebody did not wait for the digest"

    watch(session.Session, "advance", lambda one: told.append(("round", one.replica.round, true(one.replica))))
    watch(StateServer, "_offer", offered)
    watch(Keep, "save", lambda keep, replica, *_: told.append(("checkpoint", replica.round, true(replica))))
    watch(Replica, "_seal", sealed)
    return told


@pytest.mark.parametrize("saves", [True, False])
def test_nothing_is_told_of_a_state_before_it_has_its_digest(saves, tmp_path, told, monkeypatch):
    """Steps go on meanwhile. Of the second peer it takes longer than all of them, of the first one as long as two."""
    if saves:
        monkeypatch.setattr(duties, "SAVE_SECONDS", 0.0)
    bases = []
    announce = Butterfly.announce

    def announced(fly, source, **rest):
        bases.append((fly.me, fly.round, fly.agreement.terms.base.hex()))
        announce(fly, source, **rest)

    monkeypatch.setattr(Butterfly, "announce", announced)

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
    assert {number for what, number, _ in told if what == "checkpoint"} == ({1, 2, 3, 4, 5} if saves else {5})


def test_steps_do_not_wait_for_the_digest(tmp_path, told):
    """A second of four steps, and 0.9 s for the digest beside them: a round a second, and not one in two."""

    async def scene(world):
        one = One(world, 0, beside=Beside(0.9))
        await one.task
        at = [when for when, kind, _ in one.events if kind == "round"]
        assert len(at) == 5 and max(after - before for before, after in zip(at, at[1:], strict=False)) < 1.3

    live(tmp_path, scene, rounds=5)


def test_a_state_is_offered_once_it_has_its_digest(tmp_path, told):
    async def scene(world):
        ones = await world.swarm(2, beside=Beside(0.95))
        await ones[0].reach(2)
        await ones[0].until(lambda: len(Beside.waiting) == 2)
        asked, told[:] = clock.current().time(), []
        late = One(world, 2, invite=ones[0].invites[0], beside=Beside(0.95))
        await late.until(lambda: any(one.states._waiting for one in (ones[0].peer.session, ones[1].peer.session)))
        assert Beside.waiting and clock.current().time() < asked + 5.0
        await late.reach(ones[0].peer.replica.round + 2)
        await stop([*ones, late])
        assert late.digests().items() <= ones[0].digests().items()

    live(tmp_path, scene)
    assert any(what == "offer" for what, _, _ in told) and all(right for _, _, right in told), told


def test_who_differs_finds_out_before_it_contributes(tmp_path, told):
    """One bit of a state flips after the step, while the digest is being made."""

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


def test_killed_before_the_digest_nothing_is_lost(tmp_path, told):
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
