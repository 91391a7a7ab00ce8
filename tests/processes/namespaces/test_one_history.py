"""One history of real daemons: under random churn, and behind firewalls in network namespaces.

Only safety and an agreement at the end are asserted in `make trial`, because time bounds depend on the machine. `make
soak` prints the times and asserts three times the bounds.
"""

from __future__ import annotations

import statistics
import time

import pytest
from kit.daemons import Machine
from kit.real.churn import NEXT_COMMIT, ONE_DIGEST
from kit.real.namespaces import Namespaces, obstacle
from kit.real.one_history import Span, commits, lineages, reunion, timeline, two_digests
from tools.one_history import GRACE, STEPS, churned

SLOWER = 3.0
"""Factor of the time bounds for machines that other work keeps busy."""

NEVER = 150.0
"""Seconds after which daemons that have not met count as separate for ever."""

ALONE = {"killed": 15.0, "vanished": 45.0}
"""Seconds until survivors of a lost majority commit a round: `exchange.orphan`, and 30 s if no connection is refused."""

needs_namespaces = pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "-")


@pytest.mark.trial
def test_swarm_under_short_churn_keeps_one_history(tmp_path):
    found = churned(tmp_path, seconds=30.0, seed=2, every=3.0)
    print(found)
    assert found.rounds > 3 and not found.violations, found


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [1])
def test_swarm_under_ten_minutes_of_churn_keeps_one_history(tmp_path, seed):
    found = churned(tmp_path, seconds=600.0, seed=seed, say=print)
    print(found)
    assert not found.violations, found
    assert found.silence <= SLOWER * NEXT_COMMIT, found
    assert found.one_digest_ready <= SLOWER * ONE_DIGEST, found


class Walled:
    """Daemons that have a namespace each."""

    def __init__(self, machine: Machine, spaces: Namespaces) -> None:
        self.machine, self.spaces = machine, spaces
        self.daemons = []
        self.actions: list[tuple[float, str]] = []
        self.zero = time.monotonic()

    @property
    def logs(self):
        return {daemon.name: daemon.poll() for daemon in self.daemons}

    def begin(self) -> None:
        """Start all daemons and wait until a round has all contributions."""
        count = len(self.spaces.addresses)
        for index, address in enumerate(self.spaces.addresses):
            daemon = self.machine.daemon(f"peer{index}")
            daemon.host, daemon.network = address, self.spaces.network(index)
            if not index:
                self.machine.found(daemon.name, "--wait-for", count)
                invite = daemon.invite()
            else:
                self.machine.join(daemon.name, invite)
            self.daemons.append(daemon)
        for daemon in self.daemons:
            daemon.wait("round", contributors=count, least=6)

    def note(self, text: str) -> float:
        """Record a fault; return its time."""
        now = time.monotonic()
        self.actions.append((now, text))
        return now

    def meet(self, daemons, since: float) -> float:
        """Wait until these have committed one round after `since`; return the seconds from `since` on."""
        names = [daemon.name for daemon in daemons]
        while (met := reunion(self.logs, names, since)) is None:
            assert time.monotonic() < since + NEVER, self.explain(since, f"{names} do not meet")
            assert all(daemon.process.poll() is None for daemon in daemons), [one.stderr[-500:] for one in daemons]
            time.sleep(0.05)
        return met[0] - since

    def usual_round(self, daemon) -> float:
        """Return the usual duration of its newest rounds in seconds."""
        times = [event["at"] for event in daemon.of("round")[-12:]]
        return statistics.median(b - a for a, b in zip(times, times[1:], strict=False))

    def lineage(self, daemon) -> str:
        """Return the lineage of its newest round."""
        return daemon.of("round")[-1].get("lineage", "")

    def rounds(self, daemon, span: Span) -> int:
        """Return how many rounds it committed in a span of time."""
        return sum(span.since < event["at"] < span.until for _, event, _ in commits({"": daemon.of("round")}))

    def check(self) -> None:
        """Check that no slot has two digests."""
        two = two_digests(self.logs)
        assert not two, self.explain(time.monotonic() - 60.0, str(two))

    def explain(self, since: float, text: str) -> str:
        span = Span(since - 10.0, time.monotonic())
        return "\n".join([text, *timeline(self.logs, self.actions, span, zero=self.zero)])


@pytest.fixture
def walled(machine):
    """Makes swarms of daemons in namespaces; ends them."""
    made: list[Namespaces] = []

    def make(count: int) -> Walled:
        made.append(Namespaces(count).__enter__())
        swarm = Walled(machine(steps=STEPS, grace=GRACE), made[-1])
        swarm.begin()
        return swarm

    yield make
    for spaces in made:
        spaces.__exit__()


SIDES = {"2|2": (4, (2, 3)), "2|3": (5, (3, 4)), "1|6": (7, (6,))}
TRIAL = ("2|2", "reset")


@needs_namespaces
@pytest.mark.parametrize(
    ("sides", "kind", "spans", "slower"),
    [
        pytest.param(*TRIAL, (1.0, 10.0), NEVER, marks=pytest.mark.trial, id="trial"),
        *(
            pytest.param(sides, kind, (1.0, 10.0, 60.0), SLOWER, marks=pytest.mark.soak, id=f"{sides}-{kind}")
            for sides in SIDES
            for kind in ("reset", "prohibit", "drop")
        ),
    ],
)
def test_swarm_split_by_a_firewall_has_one_lineage_five_rounds_after_healing(walled, sides, kind, spans, slower):
    count, side = SIDES[sides]
    swarm = walled(count)
    inside = [swarm.daemons[index] for index in side]
    outside = [daemon for daemon in swarm.daemons if daemon not in inside]
    for seconds in spans:
        before, bound = swarm.lineage(outside[0]), 5 * swarm.usual_round(outside[0]) + 10.0
        cut = swarm.note(f"{sides} {kind}")
        swarm.spaces.cut(side, kind)
        time.sleep(seconds)
        healed = swarm.note("healed")
        swarm.spaces.heal()
        took = swarm.meet(swarm.daemons, healed)
        during = [max(swarm.rounds(daemon, Span(cut, healed)) for daemon in part) for part in (outside, inside)]
        founded = len(lineages(swarm.logs))
        kept = swarm.lineage(outside[0]) == before
        print(
            f"{sides} {kind} {seconds:.0f} s: rounds {during[0]} and {during[1]}, one history after {took:.1f} s "
            f"(bound {bound:.1f} s), lineages so far {founded}, lineage {'kept' if kept else 'changed'}",
            flush=True,
        )
        swarm.check()
        assert kept, swarm.explain(cut, "the lineage with a quorum did not prevail")
        assert took <= slower * bound, swarm.explain(cut, f"{took:.1f} s")
        for daemon in swarm.daemons:
            daemon.wait("round", after=healed, contributors=count)
    swarm.check()


@needs_namespaces
@pytest.mark.soak
@pytest.mark.parametrize("how", ALONE)
def test_two_survivors_of_five_continue_as_a_lineage(walled, how):
    swarm = walled(5)
    dead, survivors = swarm.daemons[:3], swarm.daemons[3:]
    before = swarm.lineage(survivors[0])
    at = swarm.note("3 of 5 killed")
    if how == "vanished":
        swarm.spaces.cut((0, 1, 2), "drop")
    for daemon in dead:
        daemon.kill()
    for daemon in dead:
        daemon.exit()
    for daemon in survivors:
        daemon.wait("lineage", after=at)
    founded = time.monotonic()
    swarm.meet(survivors, founded)
    took = min(event["at"] for daemon in survivors for event in daemon.of("round") if event["at"] > founded) - at
    print(f"3 of 5 {how}: first round of the survivors' lineage after {took:.1f} s", flush=True)
    assert took <= SLOWER * ALONE[how], swarm.explain(at, f"{took:.1f} s")
    assert swarm.lineage(survivors[0]) == swarm.lineage(survivors[1]) != before
    for _ in range(5):
        swarm.meet(survivors, time.monotonic())
    swarm.check()
