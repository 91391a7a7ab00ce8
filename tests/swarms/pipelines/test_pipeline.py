"""A replica in stages: peers die, stall and refuse in every phase, and no gradient counts twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import cache

import pytest
import torch
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression.boundary_codec import Boundary
from thinwire.node.pipeline.model.section import ModelSection, cut
from thinwire.node.pipeline.model.stage import Stage
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.model.subspace_model import confine
from thinwire.node.pipeline.step.host import Host
from thinwire.node.pipeline.step.origin import Origin
from thinwire.node.pipeline.step.stage_holders import StageHolders
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.node.pipeline.step.timeouts import Timeouts
from thinwire.node.training.inner_loop import Trainer
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.network import SimNet
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import Activation, Gossip, GradientSummary, Passed, Welcome

from benchmarks.pipeline import skipping

RUN = b"r" * 32
SEED, MICROS, LR = 3, 6, 0.25
CONFIG = ModelConfig(vocab=23, layers=4, width=16, heads=2, context=12)
SPANS = cut(4, (1, 1, 1, 1))
PLAIN = InnerConfig(optimizer="sgd", lr=LR, betas=(0.0, 0.0), weight_decay=0.0, warmup=0, clip=0.0)


def batches(count=MICROS, seed=5, size=2):
    rows = torch.randint(0, CONFIG.vocab, (count, size, 9), generator=torch.Generator().manual_seed(seed))
    return [(row[:, :-1], row[:, 1:]) for row in rows]


@cache
def gradients(ways=()):
    """Return loss and gradients of each micro-batch alone, in one process.

    `ways`: pairs of micro-batch and visited stages behind the origin's, of one layer each; by default all in order.
    """
    found = []
    for micro, (tokens, targets) in enumerate(batches()):
        model = Transformer(CONFIG, SEED)
        x, length = model.embedding(tokens), tokens.shape[1]
        for layer in (0, *dict(ways).get(micro, (1, 2, 3))):
            x = model.blocks[layer](x, model.cos[:length], model.sin[:length])
        loss = torch.nn.functional.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())
        loss.backward()
        names = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
        found.append((float(loss.detach()), names))
    return found


class Peer:
    """One process: a transport, the consumer of its frames, and a worker in virtual time."""

    def __init__(self, replica, index):
        self.replica, self.index, self.alive = replica, index, True
        self.identity = Identity.generate(bytes([index]) * 32)
        self.id, self.log, self.applied = self.identity.peer_id, [], {}
        self.transport = replica.net.transport(self.identity, RUN, self.admit, f"10.0.0.{index}:4000")
        self.record = PeerRecord.create(
            self.identity, run_id=RUN, addresses=self.transport.addresses(), sequence=1, issued=replica.net.wall()
        )
        self.send_queue = SendQueue(self.transport, self.unreachable)
        self.lock, self.pace, self.tasks = asyncio.Lock(), 0.1, []
        self.runs = None

    def admit(self, hello, record, source):
        return Welcome(self.record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))

    def unreachable(self, peer):
        self.runs.on_link_down(peer, gone=False)

    async def work(self, function):
        async with self.lock:
            await asyncio.sleep(self.pace)
            return function()

    def context(self, now):
        return StepContext(self.id, self.send_queue, now, self.work, self.emit)

    def emit(self, name, fields):
        self.log.append((name, dict(fields)))
        self.replica.saw(self, name)

    async def receive(self):
        while True:
            arrival = await self.transport.recv()
            if arrival.frame is None:
                self.send_queue.drop(arrival.peer)
                self.runs.on_link_down(arrival.peer, gone=arrival.gone)
            else:
                self.runs.on_link_up(arrival.peer)
                self.runs.on_frame(arrival.peer, arrival.frame)

    async def probe(self):
        """Dial lost peers again, as a roster does."""
        while True:
            await asyncio.sleep(1.0)
            for peer in sorted(self.runs.stage_holders.lost):
                if await self.transport.send(peer, Frame(Gossip(()))):
                    self.runs.on_link_up(peer)

    def start(self):
        loop, runs = asyncio.get_running_loop(), self.runs
        also = runs.run() if isinstance(runs, Host) else self.probe()
        self.tasks = [loop.create_task(self.receive()), loop.create_task(also)]

    def kill(self):
        self.alive = False
        self.replica.net.kill(self.id)
        for task in self.tasks:
            task.cancel()


class Replica:
    """Origin and `twins` hosts for each of stages 1, 2, 3. `scripts`: (host, event, nth) -> action.

    `full`: numbers of hosts, from 1 on, that have no room for a micro-batch.
    """

    def __init__(
        self, seed, *, twins=2, spec="fp32", inner=PLAIN, bandwidth=None, scripts=None, clip=0.0, window=4, full=(),
        **options,
    ):  # fmt: skip
        self.net = SimNet(seed, latency=0.02, jitter=0.1, bandwidth=bandwidth)
        self.by_visits = options.get("by_visits", False)
        self.scripts, self.seen = dict(scripts or {}), Counter()
        boundary = Boundary(spec, CONFIG.width, CONFIG.vocab, SEED)
        now = virtual_loop.current().time
        self.origin = Peer(self, 0)
        self.hosts = []
        for stage in (1, 2, 3):
            for _ in range(twins):
                peer = Peer(self, len(self.hosts) + 1)
                peer.stage, peer.section = stage, self.section(stage, boundary)
                peer.update = StageOptimizer(peer.section.module, inner)
                peer.runs = Host(
                    peer.context(now), self.origin.id, stage, Stage(peer.section), peer.update, boundary,
                    length=CONFIG.context, room=0 if peer.index in full else 16,
                )  # fmt: skip
                self.hosts.append(peer)
        holders = {stage: [peer.id for peer in self.hosts if peer.stage == stage] for stage in (1, 2, 3)}
        self.origin.section = self.section(0, boundary)
        self.origin.update = StageOptimizer(self.origin.section.module, inner)
        self.origin.runs = Origin(
            self.origin.section, self.origin.update, boundary, StageHolders(holders), self.origin.context(now),
            patience=Timeouts(now, first=10.0, least=2.0), window=window, clip=clip, **options,
        )  # fmt: skip
        for peer in (self.origin, *self.hosts):
            for other in (self.origin, *self.hosts):
                peer.transport.learn(other.record)
            peer.start()

    @staticmethod
    def section(stage, boundary):
        made = ModelSection(Transformer(CONFIG, SEED), SPANS[stage], ends=not stage)
        if boundary.confined:
            confine(made.module, boundary.confined, SEED)
        return made

    @property
    def peers(self):
        return {peer.id: peer for peer in (self.origin, *self.hosts)}

    def saw(self, peer, name):
        self.seen[peer.index, name] += 1
        action = self.scripts.pop((peer.index, name, self.seen[peer.index, name]), None)
        if action is not None:
            action(peer)

    async def step(self, seed=5, **options):
        return await self.origin.runs.step(batches(seed=seed), **options)

    async def settled(self):
        """Wait until all live peers have applied the last step."""
        await asyncio.sleep(5)


def run(main, seed=1):
    return virtual_loop.run(main, seed=seed, limit=2000)


@cache
def first_values():
    return {name: parameter.detach() for name, parameter in Transformer(CONFIG, SEED).named_parameters()}


def moved(module):
    """Return the distance of each parameter of a section from its first value, in learning rates."""
    first = first_values()
    return {name: (first[name] - parameter).detach() / LR for name, parameter in module.named_parameters()}


def check(replica, outcome, ways=()):
    """Check that each peer made the step of the outcome, and each micro-batch counts once per stage."""
    reference = gradients(ways)
    computed = len(outcome.losses)
    for micro, loss in outcome.losses.items():
        assert loss == pytest.approx(reference[micro][0], abs=1e-5)
    for stage, peers in outcome.counted.items():
        visits = Counter(micro for micros in peers.values() for micro in micros)
        assert set(visits.values()) <= {1}, f"stage {stage} counts twice: {visits}"
    for peer in replica.hosts:
        mine = outcome.counted.get(peer.stage, {}).get(peer.id, frozenset())
        if not peer.alive:
            continue
        visits = sum(len(micros) for micros in outcome.counted.get(peer.stage, {}).values())
        for name, far in moved(peer.section.module).items():
            expected = sum((reference[micro][1][name] for micro in sorted(mine)), torch.zeros_like(far))
            if mine:
                expected = expected * visits / (len(mine) * (visits if replica.by_visits else computed))
            torch.testing.assert_close(far, expected, atol=2e-5, rtol=1e-3)
        assert peer.update.tokens == 16 * len(mine)
    if outcome.finished == set(range(MICROS)):
        for name, far in moved(replica.origin.section.module).items():
            expected = sum(reference[micro][1][name] for micro in range(MICROS)) / MICROS
            torch.testing.assert_close(far, expected, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("window", [1, 4, MICROS])
@pytest.mark.parametrize("twins", [1, 2])
def test_pipeline_step_equals_step_of_one_process(window, twins):
    async def main():
        replica = Replica(1, twins=twins, window=window)
        outcome = await replica.step()
        await replica.settled()
        assert outcome.finished == set(range(MICROS)) and outcome.attempts == MICROS
        assert not outcome.lost and not outcome.skipped and outcome.step == 0
        for stage in (1, 2, 3):
            assert sum(len(micros) for micros in outcome.counted[stage].values()) == MICROS
            assert len(outcome.counted[stage]) == twins, "both holders work"
        check(replica, outcome)
        assert (
            [peer.runs.step for peer in replica.hosts] == [1] * 3 * twins == [replica.origin.runs.next_step] * 3 * twins
        )

    run(main())


PHASES = ["routed", "forward", "passed", "backward", "counted", "closed"]
MORE = [pytest.param(seed, marks=pytest.mark.soak if seed % 3 else pytest.mark.trial) for seed in range(2, 9)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", [1, *MORE])
def test_host_killed_in_any_phase_loses_at_most_its_own_gradient(phase, seed):
    async def main():
        victim, nth = 1 + (3 * seed + seed // 6) % 6, 1 if phase == "closed" else 1 + seed % 2
        replica = Replica(seed, scripts={(victim, phase, nth): Peer.kill})
        outcome = await replica.step()
        await replica.settled()
        assert not replica.hosts[victim - 1].alive
        assert outcome.finished == set(range(MICROS)) and not outcome.skipped
        check(replica, outcome)
        dead = replica.hosts[victim - 1]
        for peer, (stage, _, _) in outcome.lost:
            assert peer == dead.id and stage == dead.stage, outcome.lost
        others = [peer for peer in replica.hosts if peer.alive]
        assert all(peer.runs.step == 1 for peer in others)
        for stage in (1, 2, 3):
            if stage != dead.stage:
                assert set().union(*outcome.counted[stage].values()) == set(range(MICROS)), "others lose nothing"
        again = await replica.step(seed=6)
        assert again.finished == set(range(MICROS)) and not again.lost and again.attempts == MICROS
        await replica.settled()
        assert all(peer.runs.step == 2 for peer in others)

    run(main(), seed)


@pytest.mark.parametrize("phase", ["forward", "counted"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.trial) for seed in (0, 2))])
def test_step_without_holder_of_a_stage_skips_it(phase, seed):
    async def main():
        victim = 1 + seed
        replica = Replica(seed, twins=1, scripts={(victim, phase, 2): Peer.kill})
        outcome = await replica.step()
        await replica.settled()
        assert outcome.finished == set(range(MICROS))
        past = {micro for micro, stages in outcome.skipped.items() if stages == (victim,)}
        assert past and set(outcome.skipped) == past
        again = await replica.step(seed=7)
        assert set(again.skipped) == again.finished == set(range(MICROS))
        assert set(again.counted) == {1, 2, 3} - {victim}

    run(main(), seed)


@pytest.mark.parametrize("by_visits", [False, True])
def test_gradients_follow_the_planned_paths(by_visits):
    async def main():
        replica = Replica(2, twins=1, by_visits=by_visits)
        ways = {0: (1, 3), 1: (2,), 3: (2, 1, 3), 4: (), 5: (1, 3, 2)}
        visits = [[(stage, None) for stage in ways.get(micro, (1, 2, 3))] for micro in range(MICROS)]
        outcome = await replica.step(visits=visits)
        await replica.settled()
        assert outcome.finished == set(range(MICROS)) and not outcome.skipped and not outcome.lost
        assert outcome.counted[2][replica.hosts[1].id] == {1, 2, 3, 5}
        check(replica, outcome, tuple(ways.items()))

    run(main())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", [0, *MORE])
def test_stalled_host_is_bypassed_and_returns(phase, seed):
    async def main():
        def stop(peer):
            replica.net.pause(peer.id)
            peer.stalls = asyncio.get_running_loop().create_task(peer.lock.acquire())

        victim = 1 + seed % 6
        replica = Replica(seed, scripts={(victim, phase, 1): stop})
        outcome = await replica.step()
        assert outcome.finished == set(range(MICROS)) and not outcome.skipped
        slow = replica.hosts[victim - 1]
        assert slow.runs.step == 0
        replica.net.resume(slow.id)
        await slow.stalls
        slow.lock.release()
        await replica.settled()
        check(replica, outcome)
        again = await replica.step(seed=6)
        await replica.settled()
        assert again.finished == set(range(MICROS)) and not again.skipped
        third = await replica.step(seed=7)
        await replica.settled()
        assert third.finished == set(range(MICROS)) and not third.lost
        assert [peer.runs.step for peer in replica.hosts] == [3] * 6
        assert slow.id in third.counted[slow.stage], "it works again"

    run(main(), seed)


def test_refusing_host_is_bypassed():
    async def main():
        replica = Replica(1, full=(3,))  # of stage 2
        outcome = await replica.step()
        await replica.settled()
        assert outcome.finished == set(range(MICROS)) and not outcome.skipped and not outcome.lost
        assert set(outcome.counted[2]) == {replica.hosts[3].id}
        assert {fields["reason"] for name, fields in replica.origin.log if name == "micro_batch_failed"} == {"full"}
        check(replica, outcome)

    run(main())


def test_sender_of_non_finite_values_is_bypassed():
    async def main():
        replica = Replica(1)
        with torch.no_grad():
            for parameter in replica.hosts[2].section.module.parameters():
                parameter.fill_(float("nan"))
        outcome = await replica.step()
        assert outcome.finished == set(range(MICROS)) and not outcome.skipped
        assert set(outcome.counted[2]) == {replica.hosts[3].id}
        reasons = {fields["reason"] for name, fields in replica.origin.log if name == "micro_batch_failed"}
        assert reasons == {"not finite"}

    run(main())


@pytest.mark.parametrize("seed", [1, *MORE])
def test_broken_link_between_hosts_is_bypassed(seed):
    async def main():
        replica = Replica(seed)
        first, second = replica.hosts[seed % 2], replica.hosts[2 + seed % 2]

        def cut_off(peer):
            replica.net.cut(first.id, second.id)
            replica.net.sever(first.transport, second.transport, "reset")

        replica.scripts[first.index, "passed", 1 + seed % 3] = cut_off
        outcome = await replica.step()
        await replica.settled()
        assert outcome.finished == set(range(MICROS)) and not outcome.skipped
        check(replica, outcome)
        for stage in (1, 2, 3):
            counts = set().union(*outcome.counted[stage].values())
            assert counts == set(range(MICROS)) or (stage < 3 and len(counts) >= 3), "what failed on its way back"
        assert not outcome.lost

    run(main(), seed)


@pytest.mark.parametrize("spec", ["bf16", "rows(bits=8)", "tah", "subspace(k=4)"])
def test_training_works_with_every_boundary_codec(spec):
    async def main():
        replica = Replica(1, twins=1, spec=spec, inner=InnerConfig(lr=0.01, warmup=0, clip=1.0), clip=1.0)
        losses = [(await replica.step()).loss for _ in range(4)]
        assert losses[0] == pytest.approx(3.14, abs=0.02) and losses[-1] < losses[0] - 0.08, losses

    run(main())


@pytest.mark.parametrize("confined", [0, 4])
def test_pipeline_equals_full_replica_step_for_step(confined):
    """AdamW, a schedule and clipping by the whole model's norm."""
    inner = InnerConfig(lr=0.02, warmup=3, schedule="cosine", steps=9, clip=0.3, accumulate=MICROS)
    whole = Transformer(CONFIG, SEED)
    if confined:
        confine(whole, confined, SEED)

    class Repeated:
        batch = 2

        def __init__(self):
            self.all = [batch for seed in range(5, 8) for batch in batches(seed=seed)]

        def next(self, size):
            return self.all.pop(0)

    trainer = Trainer(whole, inner, Repeated(), clock=lambda: 0.0)

    async def main():
        replica = Replica(1, twins=1, inner=inner, clip=inner.clip)
        if confined:
            for peer in (replica.origin, *replica.hosts):
                confine(peer.section.module, confined, SEED)
                peer.update.__init__(peer.section.module, inner)
        for seed in range(5, 8):
            outcome = await replica.step(seed=seed)
            assert outcome.loss == pytest.approx(trainer.run_steps(1).loss, abs=1e-5)
        await replica.settled()
        for peer in (replica.origin, *replica.hosts):
            for name, parameter in peer.section.module.named_parameters():
                torch.testing.assert_close(parameter, whole.get_parameter(name), atol=2e-4, rtol=1e-3)

    run(main())


def test_messages_from_other_members_change_nothing():
    """Messages of a member without a stage, and of a host about other stages, are ignored."""

    async def main():
        replica = Replica(1, full=(1,))  # the liar is on no route
        origin, liar = replica.origin.runs, replica.hosts[0]
        stranger = bytes(32)

        def lie(peer):
            for micro in range(MICROS):
                for backward in (False, True):
                    for who in (stranger, liar.id):
                        payload = bytes(2 * 8 * 16 * 4)
                        origin.on_frame(who, Frame(Activation(0, micro, 0, backward, 0), payload))
                    origin.on_frame(stranger, Frame(Passed(0, micro, 0, backward, 0.0, "full")))
            origin.on_frame(stranger, Frame(GradientSummary(0, 1e30, 5, "")))

        replica.scripts[3, "forward", 1] = lie
        replica.scripts[5, "backward", 2] = lie
        outcome = await replica.step()
        await replica.settled()
        assert not replica.scripts and outcome.finished == set(range(MICROS)) and not outcome.lost
        check(replica, outcome)

    run(main())


@pytest.mark.parametrize(
    "seed",
    [1, *(pytest.param(seed, marks=pytest.mark.soak if seed > 6 else pytest.mark.trial) for seed in range(2, 20))],
)
def test_hosts_apply_step_outcomes_under_random_faults(seed):
    """Five steps with at most one kill per stage, paused peers, and links that break or are cut for a while."""

    async def main():
        rng, replica = random.Random(seed), Replica(seed, window=1 + seed % MICROS, scripts={})
        net, hosts = replica.net, replica.hosts
        expected, stop = Counter(), asyncio.Event()

        async def misfortune():
            doomed = {host.index for host in (rng.choice(hosts[at : at + 2]) for at in (0, 2, 4))}
            while not stop.is_set():
                await asyncio.sleep(rng.uniform(0.2, 3.0))
                host, other = rng.choice(hosts), rng.choice([replica.origin, *hosts])
                what = rng.choice(["kill", "pause", "sever", "cut", "one way"])
                if not host.alive or not other.alive or host is other:
                    continue
                if what == "kill" and host.index in doomed and rng.random() < 0.3:
                    host.kill()
                elif what == "pause":
                    net.pause(host.id)
                    await host.lock.acquire()
                    await asyncio.sleep(rng.uniform(0.1, 8.0))
                    host.lock.release()
                    net.resume(host.id)
                elif what == "sever":
                    net.sever(host.transport, other.transport, "reset")
                elif what in ("cut", "one way"):
                    net.cut(host.id, other.id, one_way=what == "one way")
                    await asyncio.sleep(rng.uniform(0.1, 8.0))
                    net.mend(host.id, other.id, one_way=what == "one way")

        fate = asyncio.get_running_loop().create_task(misfortune())
        for step in range(5):
            outcome = await replica.step(seed=step)
            assert outcome.finished == set(range(MICROS)) == set(outcome.losses)
            for stage, peers in outcome.counted.items():
                visits = Counter(micro for micros in peers.values() for micro in micros)
                assert set(visits.values()) == {1}
                for peer, micros in peers.items():
                    assert replica.peers[peer].stage == stage
                    expected[peer] += 16 * len(micros)
            for peer, (stage, micros, _) in outcome.lost:
                assert replica.peers[peer].stage == stage and micros
        stop.set()
        await fate
        net.heal()
        await asyncio.sleep(30)  # until all live peers are connected again
        for number in (90, 91, 92):
            last = await replica.step(seed=number)
            for peers in last.counted.values():
                for peer, micros in peers.items():
                    expected[peer] += 16 * len(micros)
        await replica.settled()
        alive = [host for host in hosts if host.alive]
        assert {host.runs.step for host in alive} == {8} and not last.lost, last.lost
        assert all(sum(map(len, last.counted[stage].values())) == MICROS for stage in {host.stage for host in alive})
        assert {host.index: host.update.tokens for host in alive} == {host.index: expected[host.id] for host in alive}
        assert all(not task.done() for host in alive for task in host.tasks)

    run(main(), seed)


@pytest.mark.parametrize("by_visits", [False, True])
def test_skipping_steps_equal_those_of_the_benchmark(by_visits):
    """benchmarks/pipeline/skipping.py makes the same steps in one process: AdamW, clipping, both divisors."""
    inner = InnerConfig(lr=0.02, warmup=2, clip=0.3)
    whole = Transformer(CONFIG, SEED)
    sections = [ModelSection(whole, span, ends=not stage) for stage, span in enumerate(SPANS)]
    updates = [StageOptimizer(part.module, inner) for part in sections]
    plans = [[(0, 1, 2), (0, 2, 3), (0, 2, 1), (0, 1, 2), (0, 3), (0, 2, 3)], [(0, 2, 3)] * 5 + [(0, 1)]]

    async def main():
        replica = Replica(1, twins=1, inner=inner, clip=inner.clip, by_visits=by_visits)
        for turn, paths in enumerate(plans * 2):
            visits = [[(stage, None) for stage in path[1:]] for path in paths]
            outcome = await replica.step(seed=turn, visits=visits)
            assert outcome.loss == pytest.approx(skipping.gradient(sections, batches(seed=turn), paths), abs=1e-5)
            skipping.apply(updates, turn, paths, 16, inner.clip, by_visits)
        await replica.settled()
        for peer in (replica.origin, *replica.hosts):
            for name, parameter in peer.section.module.named_parameters():
                torch.testing.assert_close(parameter, whole.get_parameter(name), atol=2e-4, rtol=1e-3)

    run(main())
