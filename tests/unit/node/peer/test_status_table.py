"""Status of a daemon for people."""

import msgspec
import pytest
from thinwire.node.cli.top.screen import Rates, section
from thinwire.node.doctor.doctor import check_daemon
from thinwire.node.peer.status import PeerStatus, Status
from thinwire.node.peer.status_table import show, show_peers, summary


@pytest.mark.parametrize("stalled", ["", "no quorum for 4 s: waiting for 3f9ab210; a lineage continues in 6 s"])
@pytest.mark.parametrize("lineage", ["", "77aa3f9a"])
def test_status_tells_why_no_round_commits_and_the_lineage(stalled, lineage):
    status = Status(process=1, process_started=0.0, wall=0.0, peer="ab" * 32, stalled=stalled, lineage=lineage)
    lines = summary(status, 0.0).plain.splitlines()
    assert [line.split(None, 1)[1] for line in lines if line.startswith("waits")] == [stalled] * bool(stalled)
    assert [line.split(None, 1)[1] for line in lines if line.startswith("lineage")] == [lineage] * bool(lineage)


@pytest.mark.parametrize("fetching", ["", "3.1 MB of 17 MB of the state of round 5 from 1 peer, for 9 s"])
def test_status_and_screen_show_the_transfer_of_a_state(fetching):
    status = Status(process=1, process_started=0.0, wall=0.0, peer="ab" * 32, fetching=fetching)
    lines = summary(status, 0.0).plain.splitlines()
    assert [line.split(None, 1)[1] for line in lines if line.startswith("fetches")] == [fetching] * bool(fetching)
    state = {"status": msgspec.to_builtins(status), "running": True, "rounds": [], "saved_factor": 0.0}
    shown = [line.plain for line in section(state, Rates(), "swarm", 100, 20, utf8=True)]
    assert [line for line in shown if line.startswith("fetches")] == [f"fetches {fetching}"] * bool(fetching)


@pytest.mark.parametrize(("age", "stuck"), [(2.0, False), (69.0, True)])
def test_status_and_doctor_tell_that_a_daemon_does_not_respond(capsys, age, stuck):
    status = Status(process=71, process_started=0.0, wall=100.0, peer="ab" * 32, alarm="disk full")
    show(status, 100.0 + age)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("alarm")]
    assert said[0] == "alarm: disk full" and len(said) == 1 + stuck
    assert not stuck or "process 71 has written no status for 69 s: it is suspended" in said[1]
    checks = check_daemon(status, 100.0 + age)
    assert [check.result for check in checks] == ["FAIL"] * stuck and all("kill -CONT 71" in one.fix for one in checks)


@pytest.mark.parametrize("why", ["", "/dev/shm/thinwire-7: must belong to user 7 alone, with mode 0700"])
def test_status_tells_why_no_memory_is_shared(why):
    status = Status(process=1, process_started=0.0, wall=0.0, peer="ab" * 32, no_sharing=why)
    lines = summary(status, 0.0).plain.splitlines()
    assert [line.split(None, 1)[1] for line in lines if line.startswith("memory")] == [f"not shared: {why}"] * bool(why)


def test_table_of_peers_has_every_reason_in_full_and_nothing_else(capsys):
    reasons = {
        "banned": "banned: two signed votes for one ballot " + "x" * 300 + " end",
        "alive": "on trial: 2 rounds, score 0.31, at least 3 needed",
        "suspect": "",
    }
    peers = tuple(
        PeerStatus(
            peer=f"{number:x}" * 64, name=f"n{number}", state=state, reason=reason, age=7.0, diagnosis="slow upload"
        )
        for number, (state, reason) in enumerate(reasons.items(), 1)
    )
    show_peers(Status(process=1, process_started=0.0, wall=0.0, peer="ab" * 32, peers=peers))
    shown = capsys.readouterr().out
    letters = "".join(shown.split())
    assert all("".join(reason.split()) in letters for reason in reasons.values())
    assert all(state in shown for state in reasons) and "no message for 7 s" in shown and "1" * 16 in shown
    assert "digest" not in shown and "process" not in shown and shown.count("slow upload") == 3
    show_peers(Status(process=1, process_started=0.0, wall=0.0, peer="ab" * 32))
    assert capsys.readouterr().out == "no other peers\n"
