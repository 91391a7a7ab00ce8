"""Chains that other peers send, decoded and checked once for all of them."""

from kit.outer.chains import certificate, fork_of, result_of
from thinwire.collectives.consensus.chain import Configuration, encode
from thinwire.collectives.state_sync import state_offers
from thinwire.collectives.state_sync.state_offers import OVERHEAD, ChainMemory, ReceivedChains, unchecked
from thinwire.swarm.lineage import name_of_fork
from thinwire.swarm.messages.registry import ChainEntry

ANN = bytes(32)
LIVES = {ANN: bytes(16)}
FORK = fork_of(0, bytes(32), (), LIVES)


def encoded(rounds):
    made = (certificate(round, name_of_fork(FORK), LIVES, [ANN], LIVES) for round in range(1, rounds + 1))
    return encode((ChainEntry(FORK, tuple(made)),))


class Checks:
    """Received chains whose check has `parts` parts and proves them `right`."""

    def __init__(self, parts=4, *, right=True):
        self.parts, self.right, self.done = parts, right, 0
        self.memory = ChainMemory()
        self.chains = ReceivedChains(self._check, self.memory)

    def _check(self, chain, fragment, trusted):
        for _ in range(self.parts):
            yield 7
            self.done += 1
        return Configuration(b"", fragment, (), {}) if self.right else None

    def jobs(self, data, count, trusted=lambda fork: True, fragment=0):
        def job():
            received = self.chains.find(data, fragment)
            if (yield from received.decode()) is None:
                return "no chain"
            return (yield from received.prove(trusted))

        return [job() for _ in range(count)]


def test_peers_that_send_one_chain_share_its_check_part_by_part():
    checks, done = Checks(), []
    jobs = checks.jobs(encoded(3), 256)
    while len(done) < len(jobs):
        for job in [one for one in jobs if one.gi_frame is not None]:
            try:
                next(job)
            except StopIteration as end:
                done.append(end.value)
    assert checks.done == 4 and set(map(type, done)) == {Configuration}
    (later,) = checks.jobs(encoded(3), 1)
    assert result_of(later) == done[0] and checks.done == 4


def test_cost_of_a_part_that_another_job_has_done_is_that_of_the_next_one():
    checks = Checks()
    first, second = checks.jobs(b"", 1), checks.jobs(encoded(1), 2)
    assert result_of(first[0]) is None, "an empty chain proves nothing"
    part = next(second[0])
    assert next(second[1]) is part and part.cost > 0
    assert result_of(second[0]) == result_of(second[1])
    assert part.cost == 0


def test_beginning_is_judged_by_each_receiver_and_other_fragments_are_checked_apart():
    checks, data = Checks(), encoded(2)
    assert result_of(checks.jobs(data, 1)[0]).round == 0
    assert result_of(checks.jobs(data, 1, trusted=lambda fork: False)[0]) is None
    assert result_of(checks.jobs(data, 1, fragment=5)[0]).round == 5 and checks.done == 8


def test_refuted_chain_is_checked_again_because_keys_may_be_known_later():
    checks, data = Checks(right=False), encoded(2)
    assert result_of(checks.jobs(data, 1)[0]) is None and checks.done == 4
    checks.right = True
    assert result_of(checks.jobs(data, 1)[0]) is not None and checks.done == 8


def test_few_bytes_of_chains_are_remembered(monkeypatch):
    size = len(encoded(3)) + OVERHEAD
    monkeypatch.setattr(state_offers, "PROVED", 3 * size)
    monkeypatch.setattr(state_offers, "UNPROVED", 2 * size)
    checks = Checks()
    for fragment in (1, 2, 3, 1, 3, 3):
        result_of(checks.jobs(encoded(3), 1, fragment=fragment)[0])
    assert checks.done == 4 * 3
    for rounds in range(4, 9):
        result_of(checks.jobs(encoded(rounds), 1, trusted=lambda fork: False)[0])
    assert checks.memory.held <= 5 * size, "chains that are not proved push no other ones out"
    for fragment in (1, 2, 3):
        result_of(checks.jobs(encoded(3), 1, fragment=fragment)[0])
    assert checks.done == 4 * 3
    for fragment in (4, 3, 1):
        result_of(checks.jobs(encoded(3), 1, fragment=fragment)[0])
    assert checks.done == 4 * 5, "the oldest one is forgotten"


def test_bytes_that_are_no_chain_cost_little():
    checks = Checks()
    costs = []
    job = checks.jobs(bytes(4 << 20), 1)[0]
    try:
        while True:
            costs.append(next(job).cost)
    except StopIteration as end:
        assert end.value == "no chain"
    assert sum(costs) <= 100 and not checks.done
    assert result_of(ReceivedChains(unchecked).find(encoded(2)[:-1], 0).decode()) is None


def test_useless_chains_are_forgotten():
    checks = Checks(right=False)
    for data in (encoded(3), bytes(1000), encoded(2)[:-1]):
        result_of(checks.jobs(data, 1)[0])
        assert not checks.memory.held
