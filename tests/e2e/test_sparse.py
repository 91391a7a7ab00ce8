"""Daemons of a run whose payloads are sparse: from its beginning to its end, with a kill -9, and back from checkpoints."""

from __future__ import annotations

import signal


def test_a_sparse_run_with_a_kill_and_a_way_back(machine):
    here = machine(steps=20, method="sparseloco")
    founder = here.found("founder", "--wait-for", 2, "--rounds", 4)
    other = here.join("other", founder.invite(), "--rounds", 4)
    assert (founder.exit(), other.exit()) == (0, 0)
    for daemon in (founder, other):
        assert [event["round"] for event in daemon.of("round")] == [1, 2, 3, 4]
        assert all(event["contributors"] == 2 for event in daemon.of("round") if event["round"] > 1)
        assert not daemon.of("alarm") and daemon.of("round")[-1]["loss"] < 5.2  # from 5.5
    assert here.check() >= 4

    here.turn_page()
    founder = here.found("founder", "--wait-for", 2)
    assert founder.wait("restored")["round"] == 4 and not founder.of("checkpoint")
    other = here.join("other", founder.invite())
    other.wait("round", least=6, contributors=2)
    other.kill()
    other.exit()
    founder.wait("round", least=founder.round + 1, contributors=1)
    other = here.join("other", founder.invite())
    other.wait("ready")
    for daemon in (founder, other):
        if daemon.process.poll() is None:
            daemon.signal(signal.SIGTERM)
        assert daemon.exit(60) in (0, 143)
    assert here.check() > 0


def test_a_codec_that_cannot_be_is_refused(machine):
    here = machine(method="sparseloco")
    here.manifest.write_text(here.manifest.read_text() + 'codec = "topk(k=0,chunk=4096)|2bit|rice"\n')
    founder = here.found("founder")
    assert founder.exit() == 2
    error, _ = founder.complaint()
    assert "exchange.codec" in error and "k must be" in error
