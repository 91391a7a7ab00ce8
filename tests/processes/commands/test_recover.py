"""A swarm that has lost most of its members, and continues by hand."""

from __future__ import annotations

import signal
import time

import pytest
from kit.real.waiting import until
from thinwire.node.peer.status import read_status
from thinwire.node.runtime.directories import directories


def status_of(daemon, wanted):
    """Return the first status that is as wanted."""
    read = lambda: read_status(directories(daemon.home).status)  # noqa: E731
    return until("the wanted status", lambda: (said := read()) is not None and wanted(said) and said, state=read)


def refused(done):
    error, hint = done.stderr.splitlines()
    assert done.stdout == "" and error.startswith("error: ") and hint.startswith("hint: "), done.stderr
    return done.returncode, error


@pytest.mark.trial
def test_survivors_without_a_quorum_continue_when_a_person_asks_for_it(machine):
    here = machine(steps=300, exchange="orphan = 0")  # 100 rounds should take longer than the return of the others
    founder = here.found("peer0", "--wait-for", 5)
    swarm = [founder, *(here.join(f"peer{n}", founder.newest_invite()) for n in range(1, 5))]
    for daemon in swarm:
        daemon.wait("round", contributors=5)
    for words in (["recover"], ["recover", "--now"]):
        assert refused(founder.command(*words)) == (
            6, "error: a quorum of the members is here; nothing to recover"
        )  # fmt: skip

    lost, survivors = swarm[:3], swarm[3:]
    for daemon in lost:
        daemon.kill()
    for daemon in lost:
        daemon.exit()
    asked, other = survivors
    for daemon in survivors:
        said = status_of(daemon, lambda said: said.stalls)
        (stall,) = said.stalls
        assert set(stall.absent) == {one.id for one in lost} and stall.until is None
        assert all(one.id[:8] in said.stalled for one in lost) and "thinwire recover" in said.stalled
        assert set(stall.founders) == {one.id for one in survivors}
    shown = asked.command("recover")
    assert shown.returncode == 0 and not shown.stderr
    for words in (
        f"continue   {min(one.id for one in survivors)[:8]}",
        "2 of 5 members",
        "never (exchange.orphan = 0)",
    ):
        assert words in shown.stdout
    assert all(one.id[:8] in shown.stdout for one in swarm)
    assert not asked.of("lineage") and not other.of("lineage"), "it only shows"
    assert refused(asked.command("recover", "other"))[0] == 2

    began = time.monotonic()
    done = asked.command("recover", "e2e", "--now")
    assert done.returncode == 0 and done.stdout.startswith("2 of 5 members continue as lineage "), done.stderr
    assert time.monotonic() - began < 30.0
    alarm = done.stdout.strip()
    for daemon in survivors:
        found = daemon.wait("round", after=began, contributors=2)
        assert found["lineage"] == asked.of("lineage")[0]["lineage"]
        assert status_of(daemon, lambda said: said.continued).alarm == alarm
    assert refused(asked.command("recover", "--now"))[0] == 6

    back = [here.join(one.name, asked.newest_invite()) for one in lost]
    for daemon in survivors:
        daemon.wait("round", after=began, contributors=5)
        daemon.wait("alarm_over")
        assert status_of(daemon, lambda said: not said.alarm).lineage
    for daemon in (*survivors, *back):
        daemon.signal(signal.SIGTERM)
    for daemon in (*survivors, *back):
        assert daemon.exit() == 0
    for daemon in survivors:
        past = alarm.replace("continue", "continued")
        assert f"alarm of this run: {past}; all were together again in round " in daemon.stderr
        assert f"ended in lineage {found['lineage'][:8]}" in daemon.stderr
    digests = {}
    for daemon in swarm:
        for event in daemon.poll():
            if event["kind"] == "round":
                place = event.get("lineage", ""), event["round"]
                assert digests.setdefault(place, event["digest"]) == event["digest"], place


@pytest.mark.trial
def test_recover_without_a_daemon_reports_it(machine):
    assert refused(machine().daemon("nobody").command("recover", "--now"))[0] == 4
