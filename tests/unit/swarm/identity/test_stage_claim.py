import pytest
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.identity.stage_claim import WAITING, Seat, Seating, seating

PEERS = sorted((Identity.generate(bytes([i]) * 32) for i in range(1, 9)), key=lambda one: one.peer_id)
IDS = [one.peer_id for one in PEERS]


def record(index, capabilities):
    return PeerRecord.create(
        PEERS[index], run_id=b"r" * 32, addresses=(), capabilities=capabilities, sequence=1, issued=1_700_000_000
    )


def test_stage_claims_are_read_from_records():
    said = [
        record(0, 0),
        record(3, Seat(2, IDS[1]).code()),
        record(1, Seat(0, IDS[1]).code()),
        record(4, Seat(2, IDS[1]).code()),
        record(5, Seat(1, b"\x01" * 32).code()),
        record(6, WAITING),
    ]
    found = seating(said, 3)
    assert found.groups == {IDS[1]: {1: (), 2: (IDS[3], IDS[4])}}
    assert found.orphans == {1: (IDS[5],)} and found.waiting == (IDS[6],)
    assert found.of(IDS[1]) == Seat(0, IDS[1]) and found.of(IDS[4]) == Seat(2, IDS[1])
    assert [found.of(IDS[i]) for i in (0, 5, 6)] == [None] * 3
    told = [found.describe(one) for one in IDS[:7]]
    assert told[0] == told[2] == "" and told[3] == f"stage 2 of group {IDS[1].hex()[:8]}"
    assert told[5] == "stage 1 without a group" and told[6] == "no stage yet"


def test_inconsistent_stage_claims_are_ignored():
    """A stage that does not exist, and an origin in another peer's group."""
    said = [record(0, Seat(3, IDS[0]).code()), record(1, Seat(0, IDS[2]).code()), record(2, 2**32 - 1)]
    assert seating(said, 3) == Seating()


@pytest.mark.parametrize("stage", [-1, 64])
def test_stage_claim_out_of_range_is_refused(stage):
    with pytest.raises(ValueError, match="stage"):
        Seat(stage, IDS[0]).code()


def test_every_stage_claim_fits_a_record():
    for stage in range(64):
        assert 0 < Seat(stage, b"\xff" * 32).code() < 2**32 and Seat(stage, b"\xff" * 32).code() != WAITING
        assert Seat(stage, bytes(32)).code() != WAITING
