"""Line with the progress of a daemon, from its statuses."""

import pytest
from thinwire.node.daemon.progress_line import ProgressLine
from thinwire.node.peer.status import PeerStatus, Status

OTHER = PeerStatus(peer="bb" * 32, state="alive")


WIDE = 200


def status(wall, round, **more):
    facts = {"process": 1, "process_started": 0.0, "peer": "aa" * 32, "run_name": "demo", "phase": "training"}
    return Status(**{**facts, "wall": wall, "round": round, **more})


def test_progress_line_has_an_end_only_if_the_run_has_one():
    line = ProgressLine()
    assert line.text(status(0.0, 0, run_name=""), 100, WIDE) == "round 0 of 100 · training · 1 peer"
    assert line.text(status(10.0, 40), 100, WIDE) == "round 40 of 100 · training · 1 peer"
    assert "ETA" not in line.text(status(30.0, 41), 0, WIDE)
    # 59 rounds of 20 s, which began when the last one ended
    assert " · ETA 19:40 · " in line.text(status(31.0, 41), 100, WIDE)
    assert " · ETA 0:00 · " in line.text(status(31.0, 100), 100, WIDE)


def test_progress_line_has_loss_and_saved_bytes():
    told = status(1.0, 9000, loss=3.21449, fp32_bytes=424_000_000_000, bytes_up=2_000_000_000, peers=(OTHER,))
    line = ProgressLine().text(told, 0, WIDE)
    assert line == "round 9000 · loss 3.214 · saved 422 GB (×212) · training · 2 peers"
    assert "saved" not in ProgressLine().text(status(1.0, 1, fp32_bytes=10, bytes_up=20), 0, WIDE)


def test_progress_line_of_a_joiner_has_the_transfer_of_the_state_if_there_is_room():
    told = status(1.0, 0, phase="joining", fetching="3.1 MB of 17 MB of the state of round 5 from 1 peer, for 9 s")
    line = ProgressLine()
    assert line.text(told, 0, WIDE) == f"round 0 · joining · {told.fetching}"
    assert line.text(told, 0, 40) == "round 0 · joining · 1 peer"


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (40, "1200/4000 3.20 ETA 11h40 saved 422 GB"),
        (60, "round 1200/4000 · loss 3.20 · ETA 11:40:00 · saved 422 GB"),
        (80, "round 1200 of 4000 · loss 3.200 · ETA 11:40:00 · saved 422 GB (×212)"),
        (120, "round 1200 of 4000 · loss 3.200 · ETA 11:40:00 · saved 422 GB (×212) · exchanging · 2 peers"),
    ],
)
def test_progress_line_has_round_loss_eta_and_saved_bytes_at_any_width(columns, shown):
    line = ProgressLine()
    line.text(status(0.0, 1000), 4000, WIDE)
    told = status(
        3000.0, 1200, phase="exchanging", loss=3.2, fp32_bytes=424_000_000_000, bytes_up=2_000_000_000, peers=(OTHER,)
    )
    assert line.text(told, 4000, columns - 1) == shown and len(shown) < columns


def test_progress_line_without_room_is_the_shortest_one():
    told = status(1.0, 9000, loss=3.2, fp32_bytes=424_000_000_000, bytes_up=2_000_000_000)
    assert ProgressLine().text(told, 9999, 10) == "9000 3.20 saved 422 GB"
