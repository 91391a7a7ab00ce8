"""Daemons of runs with sparse payloads, from start to end and back from a checkpoint, and with int4 payloads."""

from __future__ import annotations

import signal

import pytest


@pytest.mark.trial
def test_sparse_run_finishes_and_resumes_from_checkpoint(machine):
    here = machine(steps=20, method="sparseloco")
    founder = here.found("founder", "--wait-for", 2, "--rounds", 4)
    other = here.join("other", founder.invite(), "--rounds", 4)
    assert (founder.exit(), other.exit()) == (0, 0)
    for daemon in (founder, other):
        assert [event["round"] for event in daemon.of("round")] == [1, 2, 3, 4]
        assert all(event["contributors"] == 2 for event in daemon.of("round") if event["round"] > 1)
        assert not daemon.alarms() and daemon.of("round")[-1]["loss"] < 5.2  # from 5.5
    assert here.check() >= 4

    # Restart from the checkpoint, with the residual of the last round.
    here.turn_page()
    founder = here.found("founder")
    assert founder.wait("restored")["round"] == 4 and not founder.of("checkpoint")
    founder.wait("round", least=5, contributors=1)
    founder.signal(signal.SIGTERM)
    assert founder.exit(60) == 0


@pytest.mark.trial
@pytest.mark.parametrize(("method", "steps"), [("demo", 1), ("powersgd", 10)])
def test_run_of_demo_or_powersgd_finishes(machine, method, steps):
    here = machine(rounds=6, steps=steps, method=method)
    founder = here.found("founder", "--wait-for", 2)
    other = here.join("other", founder.invite())
    assert (founder.exit(), other.exit()) == (0, 0)
    assert founder.of("round")[-1]["round"] == 6 and not founder.alarms()
    assert {event["contributors"] for event in founder.of("round")[1:]} == {2}
    assert here.check() > 0


@pytest.mark.trial
def test_sparse_butterfly_run_finishes(machine):
    here = machine(rounds=4, steps=20, method="sparseloco", exchange='collective = "sparse-butterfly"')
    founder = here.found("founder", "--wait-for", 2)
    other = here.join("other", founder.invite())
    assert (founder.exit(), other.exit()) == (0, 0)
    for daemon in (founder, other):
        assert daemon.of("round")[-1]["round"] == 4 and not daemon.alarms()
        assert daemon.of("round")[-1]["loss"] < 5.2  # from 5.5
    assert {event["contributors"] for event in founder.of("round")[1:]} == {2}
    assert here.check() > 0


def test_start_with_impossible_codec_is_refused(machine):
    here = machine(method="sparseloco", exchange='codec = "topk(k=0,chunk=4096)|2bit|rice"')
    founder = here.found("founder")
    assert founder.exit() == 2
    error, _ = founder.complaint()
    assert f"{here.manifest.name}: exchange.codec" in error and "k must be" in error


@pytest.mark.trial
def test_four_bit_run_finishes_with_equal_states(machine):
    here = machine(steps=10, exchange='codec = "int4(block=256)"')
    founder = here.found("founder", "--wait-for", 2, "--rounds", 3)
    other = here.join("other", founder.invite(), "--rounds", 3)
    assert (founder.exit(), other.exit()) == (0, 0)
    assert [event["round"] for event in other.of("round")] == [1, 2, 3]
    assert other.of("round")[-1]["contributors"] == 2 and not other.alarms()
    assert here.check() >= 3


def test_start_with_invalid_codec_parameters_is_refused(machine):
    here = machine(exchange='codec = "int4(block=20)"')
    founder = here.found("founder")
    assert founder.exit() == 2
    error, _ = founder.complaint()
    assert "exchange.codec" in error and "multiple of 8" in error
