"""Progress of a round's data, and the time at which slow senders are late."""

from __future__ import annotations

import math

from thinwire.collectives.rounds.data_planes.transfer_progress import Halfway
from thinwire.collectives.timing import SLOW_FACTOR


def test_peers_are_late_some_time_after_more_than_half_of_all_and_never_before():
    half = Halfway()
    half.begin(100.0)
    half.note(0, 0, 101.0)
    half.note(2, 4, 102.0)
    assert half.late_at(1.0) == math.inf and half.longest == 0.0
    half.note(3, 4, 104.0)
    half.note(3, 4, 190.0)  # the last one does not matter
    assert half.longest == 4.0
    assert half.late_at(1.0) == 104.0 + SLOW_FACTOR * 4.0 and half.late_at(60.0) == 104.0 + 60.0
    half.begin(150.0)  # a ballot that asks for other data
    assert half.late_at(1.0) == math.inf
    half.note(3, 4, 150.5)  # some have it already
    assert half.late_at(1.0) == 150.5 + SLOW_FACTOR * 4.0 and half.longest == 4.0
    half.note(4, 4, 151.0)
    assert half.late_at(1.0) == math.inf
