"""Where a lost stage comes from, and what it is made of."""

import numpy as np
import pytest
from thinwire.node.pipeline.rescue import Rescue, average, plus, rescue


def lost(stage, *others, **more):
    return rescue(stage, 6, lost=(stage, *others), recent=2, **more)


def test_sources_come_in_order():
    assert lost(2, holders=1, checkpoint=0) == Rescue("holder")
    assert lost(2, checkpoint=2) == Rescue("checkpoint")
    assert lost(2, checkpoint=3) == Rescue("average", (1, 3))
    assert lost(2) == Rescue("average", (1, 3))
    assert lost(1, checkpoint=3, swapped=True) == Rescue("twin", (2,))
    assert [source.anew for source in (lost(2), lost(2, checkpoint=1))] == [True, False]


@pytest.mark.parametrize(("stage", "others"), [(0, ()), (5, ()), (2, (3,)), (2, (1,))])
def test_ends_and_neighbours_lost_together_need_a_checkpoint(stage, others):
    assert lost(stage, *others, checkpoint=9) == Rescue("old checkpoint")
    assert lost(stage, *others) == Rescue("nothing")


def test_twins_stand_in_for_each_other():
    assert (
        plus(6) == (0, 2, 1, 3, 5, 4) and plus(4) == (0, 2, 1, 3) and plus(2) == (0, 1) and plus(5) == (0, 2, 1, 4, 3)
    )
    assert lost(5, swapped=True) == Rescue("twin", (4,))
    assert lost(1, 2, swapped=True) == Rescue("nothing")
    assert lost(3, swapped=True) == Rescue("average", (2, 4))
    assert lost(0, swapped=True) == Rescue("nothing")
    with pytest.raises(ValueError):
        lost(6)


def test_who_still_learns_counts_more():
    one, two = np.ones(5, np.float32), np.full(5, 4.0, np.float32)
    assert average(one, two, 1.0, 1.0) == pytest.approx(np.full(5, 2.5))
    assert average(one, two, 2.0, 1.0) == pytest.approx(np.full(5, 2.0), abs=1e-3)
    assert average(one, two, 0.0, 0.0) == pytest.approx(np.full(5, 2.5))
    assert average(one, two, 0.0, 1.0) == pytest.approx(two, abs=1e-3)
    assert average(one, two, 1.0, 1.0).dtype == np.float32


@pytest.mark.parametrize(("size", "norm"), [(4, 1.0), (5, -1.0), (5, float("nan")), (5, float("inf"))])
def test_what_cannot_be_averaged_is_an_error(size, norm):
    with pytest.raises(ValueError):
        average(np.ones(5, np.float32), np.ones(size, np.float32), norm, 1.0)
