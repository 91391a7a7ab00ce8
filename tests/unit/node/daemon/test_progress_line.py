"""Line with the progress of a daemon, from its statuses."""

from thinwire.node.daemon.progress_line import ProgressLine
from thinwire.node.peer.status import PeerStatus, Status

OTHER = PeerStatus(peer="bb" * 32, state="alive")


def status(wall, round, **more):
    facts = {"process": 1, "process_started": 0.0, "peer": "aa" * 32, "run_name": "demo", "phase": "training"}
    return Status(**{**facts, "wall": wall, "round": round, **more})


def test_progress_line_has_an_end_only_if_the_run_has_one():
    line = ProgressLine()
    assert line.text(status(0.0, 0, run_name=""), 100) == "round 0 of 100 · training · 1 peer"
    assert line.text(status(10.0, 40), 100) == "round 40 of 100 · training · 1 peer"
    assert "ETA" not in line.text(status(30.0, 41), 0)
    assert " · ETA 19:40 · " in line.text(
        status(31.0, 41), 100
    )  # 59 rounds of 20 s, which began when the last one ended
    assert " · ETA 0:00 · " in line.text(status(31.0, 100), 100)


def test_progress_line_has_loss_and_saved_bytes():
    told = status(1.0, 9000, loss=3.21449, fp32_bytes=424_000_000_000, bytes_up=2_000_000_000, peers=(OTHER,))
    line = ProgressLine().text(told, 0)
    assert line == "round 9000 · loss 3.214 · saved 422 GB (×212) · training · 2 peers"
    assert "saved" not in ProgressLine().text(status(1.0, 1, fp32_bytes=10, bytes_up=20), 0)
    long = ProgressLine()
    long.text(status(0.0, 1000, phase="exchanging", loss=3.2), 4000)
    told = status(3000.0, 1200, phase="exchanging", loss=3.2, fp32_bytes=424_000_000_000, bytes_up=2_000_000_000)
    assert len(long.text(told, 4000).partition(" · exchanging")[0]) < 80
