"""Bounded storage of early frames with a fair part for each sender."""

from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Behind

ANN, BEN, CAT = (bytes([n]) * 32 for n in (1, 2, 3))


def test_pending_frames_keep_order_of_arrival():
    pending = PendingFrames(10, 10)
    for at, peer in enumerate((ANN, BEN, ANN, CAT)):
        pending.put(peer, Frame(Behind(at)))
    assert [(peer, frame.message.round) for peer, frame in pending.take()] == [(ANN, 0), (BEN, 1), (ANN, 2), (CAT, 3)]
    assert pending.take() == [] and len(pending) == 0


def test_pending_frames_taken_by_filter_leave_the_rest_in_order():
    pending = PendingFrames(4, 3)
    for at, peer in enumerate((ANN, BEN, ANN, ANN, ANN)):
        pending.put(peer, Frame(Behind(at, at % 2), bytes(at)))
    even = pending.take(lambda frame: not frame.message.fragment)
    assert [(peer, frame.message.round) for peer, frame in even] == [(ANN, 0), (ANN, 2)] and len(pending) == 2
    pending.put(BEN, Frame(Behind(9, 1)))
    pending.put(BEN, Frame(Behind(10, 1)))
    assert [(peer, frame.message.round) for peer, frame in pending.take()] == [(BEN, 1), (ANN, 3), (BEN, 9), (BEN, 10)]


@given(st.lists(st.tuples(st.sampled_from([ANN, BEN, CAT]), st.integers(0, 50))), st.integers(1, 200))
def test_pending_frames_bound_bytes_and_keep_small_senders(frames, most):
    pending = PendingFrames(1000, 1000, most)
    for at, (peer, size) in enumerate(frames):
        pending.put(peer, Frame(Behind(at), bytes(size)))
    found = pending.take()
    assert sum(len(frame.payload) for _, frame in found) <= most
    for peer in (ANN, BEN, CAT):
        said = [size for one, size in frames if one == peer]
        if sum(said) <= (most - 50) // 3:
            assert [len(frame.payload) for one, frame in found if one == peer] == said
    pending.put(ANN, Frame(Behind(0), bytes(most)))
    assert len(pending) == 1 and not PendingFrames(1, 1, most).put(ANN, Frame(Behind(0), bytes(most + 1)))


@given(st.lists(st.sampled_from([ANN, BEN, CAT])), st.integers(1, 12), st.integers(1, 12))
def test_pending_frames_bound_count_and_keep_small_senders(senders, total, each):
    pending = PendingFrames(total, each)
    for at, peer in enumerate(senders):
        pending.put(peer, Frame(Behind(at)))
    found = pending.take()
    assert len(found) <= total and all(sum(one == peer for one, _ in found) <= each for peer in (ANN, BEN, CAT))
    for peer in set(senders):
        said = [at for at, one in enumerate(senders) if one == peer]
        fair = min(each, total // 3)
        assert [frame.message.round for one, frame in found if one == peer][:fair] == said[:fair]
