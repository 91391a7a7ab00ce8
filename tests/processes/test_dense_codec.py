"""Daemons of a run with int4 payloads."""

from __future__ import annotations

import pytest


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
