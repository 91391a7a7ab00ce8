"""Every outer method and collective with real processes: one late, one restarted, one stopped."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass

import psutil
import pytest
from thinwire.node.methods.registry import METHODS
from thinwire.swarm.method_specs.registry import METHODS as SPECS


@dataclass(frozen=True)
class Run:
    """Lines of the manifest. `killed`: index of the killed peer; `phase`: its phase at that time."""

    method: str = "diloco"
    steps: int = 12
    outer: str = ""
    exchange: str = ""
    grace: float = 2.0
    killed: int = 1
    phase: str = "open"

    @property
    def together(self) -> bool:
        """True if a round has all present peers."""
        return METHODS[self.method].replica.alike and not SPECS[self.method].asynchronous


RING, HIERARCHY = 'topology = "ring"', 'topology = "hierarchy"'
RUNS = {
    "diloco": Run(killed=0, phase="vote"),
    "ring": Run(exchange=RING),
    "ring-int4": Run(exchange=f'{RING}\ncodec = "int4(block=256)"', phase="record", killed=0),
    "hierarchy": Run(exchange=HIERARCHY, phase="record"),
    "muloco": Run("muloco", phase="announce"),
    "noloco": Run("noloco", phase="announce"),
    "noloco-owners": Run("noloco", exchange="gossip_group_size = 9", killed=0, phase="announce"),
    "noloco-sparse": Run(
        "noloco", outer="slow_weight_parts = 4", exchange='codec = "topk(k=64,chunk=4096)|2bit|rice"', phase="announce"
    ),
    "sparseloco": Run("sparseloco", killed=0),
    "sparse-butterfly": Run("sparseloco", exchange='collective = "sparse-butterfly"', phase="record"),
    "demo": Run("demo", steps=1, phase="vote"),
    "powersgd": Run("powersgd"),
    "powersgd-ring": Run("powersgd", exchange=RING, killed=0),
    "streaming": Run("streaming", outer="fragments = 3\noverlap = 2", phase="vote"),
    "fragments": Run("streaming", outer="fragments = 3\noverlap = 9"),
    "sparse-fragments": Run(
        "streaming", outer="fragments = 3\noverlap = 6", exchange='codec = "topk(k=64,chunk=4096)|2bit|rice"'
    ),
    "eager": Run("eager", killed=0),
    "eager-hierarchy": Run("eager", exchange=HIERARCHY),
    "co2": Run("co2", phase="announce"),
    "co2-ring": Run("co2", exchange=RING, phase="vote"),
    "buffered-async": Run("buffered-async", grace=0.3),
    "delayed-nesterov": Run("delayed-nesterov", grace=0.3, killed=0, phase="record"),
}  # fmt: skip
OFTEN = ("co2-ring",)
"""Methods that `make trial` runs."""

SITES = ("home", "home", "lab", "lab")


def take_part(run, living, after):
    """Wait for a contribution of each daemon to a round after `after`; to the same one if rounds have all."""
    if run.together:
        return [daemon.wait("round", after=after, contributors=len(living)) for daemon in living]
    return [wait_for_own(daemon, after) for daemon in living]


def wait_for_own(daemon, after):
    """Wait for a round with a contribution of this peer and of others."""
    while True:
        found = daemon.wait("round", after=after)
        if found["tokens"] and found["contributors"] > 1:
            return found
        after = found["at"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.trial if name in OFTEN else pytest.mark.soak) for name in RUNS]
)
def test_swarm_with_late_killed_and_stopped_peer_keeps_one_state(machine, name):
    run = RUNS[name]
    here = machine(method=run.method, steps=run.steps, outer=run.outer, exchange=run.exchange, grace=run.grace)

    def join(index, friend):
        return here.join(f"peer{index}", friend.newest_invite(), "--site", SITES[index])

    founder = here.found("peer0", "--wait-for", 3, "--site", SITES[0])
    living = [founder, join(1, founder), join(2, founder)]
    begun = take_part(run, living, 0.0)

    # A peer joins during the run.
    late = join(3, living[1])
    living.append(late)
    ready = late.wait("ready")
    assert ready["round"] > 0
    take_part(run, living, ready["at"])

    # kill -9 in the middle of a round: the others continue.
    victim = living.pop(run.killed)
    when = living[0].of("round")[-1]["at"]
    at = victim.wait("phase", phase=run.phase, after=when)["at"]
    victim.kill()
    assert victim.exit() == -signal.SIGKILL
    take_part(run, living, at)
    # Asynchronous rounds do not wait for it. With two members away, two of four would be no quorum.
    living[0].wait("round", after=at, peers=len(living))

    # One peer is stopped for longer than any patience, while the killed one returns.
    sleeper = living.pop()
    stopped = sleeper.signal(signal.SIGSTOP)
    take_part(run, living, stopped + 1.0)
    back = join(run.killed, living[0])
    living.append(back)
    take_part(run, living, back.wait("ready")["at"])
    woken = sleeper.signal(signal.SIGCONT)
    living.append(sleeper)
    ended = take_part(run, living, woken)

    for daemon in living:
        daemon.signal(signal.SIGTERM)
    for daemon in living:
        assert daemon.exit() == 0, daemon.stderr
        assert not daemon.alarms() and "Traceback" not in daemon.stderr
        losses = [event["loss"] for event in daemon.of("round") if event["loss"] is not None]
        assert losses and all(math.isfinite(loss) for loss in losses)
    assert min(event["loss"] for event in ended) < min(event["loss"] for event in begun)
    assert not _running(here.path)
    if METHODS[run.method].replica.alike:
        assert here.check() > 4


@pytest.mark.soak
def test_merge_run_with_churn_ends_with_one_average(machine):
    """Run of one average: it waits for the live members, and all present peers end with it."""
    here = machine(method="merge", rounds=2, steps=1000, grace=100.0)
    founder = here.found("peer0", "--wait-for", 3)
    others = [here.join(f"peer{n}", founder.newest_invite()) for n in (1, 2)]
    for daemon in (founder, *others):
        daemon.wait("round", round=1, steps=0)
    victim, sleeper = others
    victim.kill()
    assert victim.exit() == -signal.SIGKILL
    stopped = sleeper.signal(signal.SIGSTOP)
    back = here.join("peer1", founder.newest_invite())
    late = here.join("peer3", founder.newest_invite())
    for daemon in (back, late):
        assert daemon.wait("ready", after=stopped)["round"] == 1
    sleeper.signal(signal.SIGCONT)
    for daemon in (founder, back, sleeper, late):
        last = daemon.wait("round", round=2)
        assert {founder.id[:8], sleeper.id[:8]} <= set(last["members"])
        assert not {founder.id[:8], sleeper.id[:8]} & set(last["missing"])
        assert daemon.exit() == 0 and not daemon.alarms() and "Traceback" not in daemon.stderr
    assert founder.of("round")[-1]["loss"] < 4.0  # 5.5 at first
    assert here.check() >= 2


def _running(path):
    """Return the processes with this directory on their command line."""
    return [p.info for p in psutil.process_iter(["pid", "cmdline"]) if str(path) in " ".join(p.info["cmdline"] or ())]
