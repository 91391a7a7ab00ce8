"""Daemons of runs that overlap training and exchange: start, kill -9, resume from a checkpoint."""

from __future__ import annotations

import signal

import pytest

BOTH = [pytest.param("streaming", marks=pytest.mark.trial), pytest.param("eager", marks=pytest.mark.soak)]


@pytest.mark.trial
def test_streaming_run_of_two_daemons_finishes(machine):
    here = machine(steps=12, method="streaming")
    founder = here.found("founder", "--wait-for", 2, "--rounds", 6)
    other = here.join("other", founder.invite(), "--rounds", 6)
    assert (founder.exit(), other.exit()) == (0, 0)
    for daemon in (founder, other):
        assert daemon.of("round")[-1]["round"] == 6 and not daemon.alarms()
        assert any(event["contributors"] == 2 for event in daemon.of("round"))
    assert here.check() >= 3


@pytest.mark.trial
def test_delayed_nesterov_run_of_two_daemons_finishes(machine):
    here = machine(steps=12, method="delayed-nesterov", grace=0.2)
    founder = here.found("founder", "--wait-for", 2, "--rounds", 8)
    other = here.join("other", founder.invite(), "--rounds", 8)
    assert (founder.exit(), other.exit()) == (0, 0)
    for daemon in (founder, other):
        assert [event["round"] for event in daemon.of("round")] == [*range(1, 9)] and not daemon.alarms()
        assert any(event["tokens"] for event in daemon.of("round"))
    assert here.check() >= 3


@pytest.mark.parametrize("method", BOTH)
def test_killed_daemon_rejoins_overlapped_run(machine, method):
    here = machine(steps=12, method=method)
    founder = here.found("founder", "--wait-for", 2)
    other = here.join("other", founder.invite())
    for daemon in (founder, other):
        daemon.wait("round", least=4, contributors=2)
    other.kill()
    other.exit()
    alone = founder.wait("round", least=founder.round + 2, contributors=1)["round"]
    other = here.join("other", founder.invite())
    other.wait("ready", least=alone)
    founder.wait("round", least=alone + 1, contributors=2)
    for daemon in (other, founder):
        daemon.signal(signal.SIGTERM)
        assert daemon.exit(60) == 0 and not daemon.alarms()
    assert here.check() >= 4


@pytest.mark.parametrize("method", BOTH)
def test_overlapped_run_resumes_from_checkpoint(machine, method):
    here = machine(steps=12, method=method)
    founder = here.found("founder", "--rounds", 4)
    assert founder.exit() == 0
    here.turn_page()
    last = founder.of("round")[-1]["round"]
    founder = here.found("founder")
    assert founder.wait("restored")["round"] == last and not founder.of("checkpoint")
    founder.wait("round", least=last + 2, contributors=1)
    founder.signal(signal.SIGTERM)
    assert founder.exit(60) == 0


@pytest.mark.trial
def test_killed_daemon_rejoins_run_with_concurrent_fragments(machine):
    """Fragments have separate rounds; one of two peers is killed, and returns to all of them."""
    here = machine(steps=12, method="streaming", outer="overlap = 9")
    founder = here.found("founder", "--wait-for", 2)
    other = here.join("other", founder.invite())
    for daemon in (founder, other):
        daemon.wait("round", least=6, contributors=2)
    other.kill()
    other.exit()
    alone = founder.wait("round", least=founder.round + 4, contributors=1)["round"]
    other = here.join("other", founder.invite())
    other.wait("ready", least=1)
    founder.wait("round", least=alone + 1, contributors=2)
    for daemon in (other, founder):
        daemon.signal(signal.SIGTERM)
        assert daemon.exit(60) == 0 and not daemon.alarms()
    assert here.check() >= 4
