import threading
from functools import partial

from thinwire.node.peer.reports.background_thread import Background


def test_background_runs_in_order_refuses_what_is_too_much_and_waits_at_the_end():
    background, gate, done = Background("test", most=3), threading.Event(), []
    assert background.run(gate.wait)
    assert [background.run(partial(done.append, number)) for number in range(4)] == [True, True, False, False]
    assert background.refused == 2 and not done
    gate.set()
    background.close()
    assert done == [0, 1]
