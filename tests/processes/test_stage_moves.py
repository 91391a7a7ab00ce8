"""A host moves to a stage that lost its only holder, without restarting its process."""

import time

import pytest

RUN = """
[run]
name = "moves"
[model]
layers = 3
width = 32
heads = 2
context = 32
[inner]
batch = 1
accumulate = 2
warmup = 0
[outer]
method = "streaming"
sync_every = 12
[pipeline]
stages = 3
codec = "fp32"
rebalance = 20.0
[exchange]
straggler_timeout = 3.0
"""
MEMORY = "1300KiB"
"""Of the model's 1.76 MiB; any stage takes less."""


def stage(daemon):
    """Stage in the newest round of this daemon."""
    return (daemon.of("round")[-1]["round"] - 1) % 3


@pytest.mark.soak
def test_host_moves_to_stage_that_lost_its_only_holder(machine):
    here = machine()
    here.manifest.write_text(RUN)
    founder = here.found("founder")
    invite = founder.invite()
    weak = [here.join(f"weak{n}", invite, "--memory", MEMORY) for n in range(3)]
    for daemon in weak:
        daemon.wait("round", steps=4)
    weak.append(here.join("late", invite, "--memory", MEMORY))
    weak[3].wait("round", steps=4)
    held = {daemon: stage(daemon) for daemon in weak}
    assert sorted(held.values()) == [0, 1, 2, 2]
    origin, victim = (next(daemon for daemon in weak if held[daemon] == wanted) for wanted in (0, 1))
    killed = victim.kill()
    asked = origin.wait("host_moved", after=killed)
    mover = next(daemon for daemon in weak if daemon.id == asked["peer"])
    assert asked["detail"] == "from stage 2 to 1" and held[mover] == 2
    back = mover.wait("ready", after=asked["at"])
    while stage(mover) != 1:
        mover.wait("round", after=back["at"])
        time.sleep(0.1)
    mover.wait(
        "round", after=mover.of("round")[-1]["at"], contributors=2
    )  # the founder and this peer: the group trains
    said = {}
    for daemon in (founder, *weak):
        for event in daemon.of("round"):
            said.setdefault(event["round"], set()).add(event["digest"])
    assert len(said) > 6 and all(len(digests) == 1 for digests in said.values())
    assert not mover.alarms()
