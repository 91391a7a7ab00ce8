"""Bounded storage of early frames with a fair part for each sender."""

from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Behind

ANN, BEN, CAT = (bytes([n]) * 32 for n in (1, 2, 3))


def test_pending_frames_keep_order_of_arrival():
    stash = PendingFrames(10, 10)
    for at, peer in enumerate((ANN, BEN, ANN, CAT)):
        stash.put(peer, Frame(Behind(at)))
    assert [(peer, frame.message.round) for peer, frame in stash.take()] == [(ANN, 0), (BEN, 1), (ANN, 2), (CAT, 3)]
    assert stash.take() == [] and len(stash) == 0


def test_pending_frames_taken_by_filter_leave_the_rest_in_order():
    stash = PendingFrames(4, 3)
    for at, peer in enumerate((ANN, BEN, ANN, ANN, ANN)):
        stash.put(peer, Frame(Behind(at, at % 2), bytes(at)))
    even = stash.take(lambda frame: not frame.message.fragment)
    assert [(peer, frame.message.round) for peer, frame in even] == [(ANN, 0), (ANN, 2)] and len(stash) == 2
    stash.put(BEN, Frame(Behind(9, 1)))
    stash.put(BEN, Frame(Behind(10, 1)))
    assert [(peer, frame.message.round) for peer, frame in stash.take()] == [(BEN, 1), (ANN, 3), (BEN, 9), (BEN, 10)]


@given(st.lists(st.tuples(st.sampled_from([ANN, BEN, CAT]), st.integers(0, 50))), st.integers(1, 200))
def test_pending_frames_bound_bytes_and_keep_small_senders(frames, most):
    stash = PendingFrames(1000, 1000, most)
    for at, (peer, size) in enumerate(frames):
        stash.put(peer, Frame(Behind(at), bytes(size)))
    found = stash.take()
    assert sum(len(frame.payload) for _, frame in found) <= most
    for peer in (ANN, BEN, CAT):
        said = [size for one, size in frames if one == peer]
        if sum(said) <= (most - 50) // 3:
            assert [len(frame.payload) for one, frame in found if one == peer] == said
    stash.put(ANN, Frame(Behind(0), bytes(most)))
    assert len(stash) == 1 and not PendingFrames(1, 1, most).put(ANN, Frame(Behind(0), bytes(most + 1)))


@given(st.lists(st.sampled_from([ANN, BEN, CAT])), st.integers(1, 12), st.integers(1, 12))
def test_pending_frames_bound_count_and_keep_small_senders(senders, total, each):
    stash = PendingFrames(total, each)
    for at, peer in enumerate(senders):
        stash.put(peer, Frame(Behind(at)))
    found = stash.take()
    assert len(found) <= total and all(sum(one == peer for one, _ in found) <= each for peer in (ANN, BEN, CAT))
    for peer in set(senders):
        said = [at for at, one in enumerate(senders) if one == peer]
        fair = min(each, total // 3)
        assert [frame.message.round for one, frame in found if one == peer][:fair] == said[:fair]
