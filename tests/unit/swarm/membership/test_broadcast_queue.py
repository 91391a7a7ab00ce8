"""The broadcast queue against a simple model: least sent first, then the newest."""

from hypothesis import given
from hypothesis import strategies as st
from thinwire.swarm.membership.broadcast_queue import SKIPS, UNLIMITED, BroadcastQueue

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9), st.integers(1, 60)),
        st.tuples(st.just("add for two sends"), st.integers(0, 9), st.integers(1, 60)),
        st.tuples(st.just("forget"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("take"), st.integers(0, 120), st.integers(1, 4)),
    ),
    max_size=120,
)


@given(STEPS)
def test_broadcast_queue_orders_by_fewest_sends_then_newest(steps):
    queue, model = BroadcastQueue(), []  # in the model: [transmissions, age, subject, item, most transmissions]
    for count, (what, number, size) in enumerate(steps):
        subject = ("record", bytes([number]), b"")
        if what != "take":
            model = [entry for entry in model if entry[2] != subject]
        if what.startswith("add"):
            item, most = bytes([number]) * size, UNLIMITED if what == "add" else 2
            queue.add(subject, item, most)
            model.append([0, -count, subject, item, most])
        elif what == "forget":
            queue.forget(subject)
        else:
            budget, expected, looked = number, [], []
            for entry in sorted(model):
                if len(expected) == 3 or len(looked) - len(expected) == SKIPS:
                    break
                looked.append(entry)
                if len(entry[3]) <= budget:
                    budget -= len(entry[3])
                    expected.append(entry[3])
                    entry[0] += 1
            assert queue.take(number, 3, size) == expected
            model = [entry for entry in model if entry[0] < entry[4] and (entry[0] < size or entry not in looked)]
        assert len(queue) == len(model)
