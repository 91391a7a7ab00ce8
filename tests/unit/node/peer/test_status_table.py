"""Status of a daemon for people."""

import pytest
from thinwire.node.peer.status import Status
from thinwire.node.peer.status_table import summary


@pytest.mark.parametrize("stalled", ["", "no quorum for 4 s: waiting for 3f9ab210; a lineage continues in 6 s"])
@pytest.mark.parametrize("lineage", ["", "77aa3f9a"])
def test_status_tells_why_no_round_commits_and_the_lineage(stalled, lineage):
    status = Status(process=1, process_started=0.0, wall=0.0, peer="ab" * 32, stalled=stalled, lineage=lineage)
    lines = summary(status, 0.0).plain.splitlines()
    assert [line.split(None, 1)[1] for line in lines if line.startswith("waits")] == [stalled] * bool(stalled)
    assert [line.split(None, 1)[1] for line in lines if line.startswith("lineage")] == [lineage] * bool(lineage)


@pytest.mark.parametrize("why", ["", "/dev/shm/thinwire-7: must belong to user 7 alone, with mode 0700"])
def test_status_tells_why_no_memory_is_shared(why):
    status = Status(process=1, process_started=0.0, wall=0.0, peer="ab" * 32, no_sharing=why)
    lines = summary(status, 0.0).plain.splitlines()
    assert [line.split(None, 1)[1] for line in lines if line.startswith("memory")] == [f"not shared: {why}"] * bool(why)
