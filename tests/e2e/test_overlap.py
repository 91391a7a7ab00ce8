"""Daemons of runs that overlap training and exchange: from the beginning, through a kill -9, back from a checkpoint."""

from __future__ import annotations

import signal

import pytest


@pytest.mark.parametrize("method", ["streaming", pytest.param("eager", marks=pytest.mark.trial)])
def test_a_run_that_trains_on(machine, method):
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
    other.signal(signal.SIGTERM)
    assert other.exit(60) == 0
    founder.signal(signal.SIGTERM)
    assert founder.exit(60) == 0
    assert not founder.of("alarm") and not other.of("alarm")
    assert founder.of("round")[-1]["loss"] < 5.4  # from 5.5
    assert here.check() >= 4


@pytest.mark.trial
@pytest.mark.parametrize("method", ["streaming", "eager"])
def test_back_from_a_checkpoint(machine, method):
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
