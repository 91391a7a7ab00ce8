"""Sources of a lost stage, in order of preference."""

import pytest
import torch
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.recovery.recovery_arbiter import arbiter_of
from thinwire.node.pipeline.recovery.stage_source import FASTER, StageSource, rescue
from thinwire.node.training.inner_optimizer import InnerConfig, learning_rate
from thinwire.swarm.identity.stage_claim import Seating


def lost(stage, *others, **more):
    return rescue(stage, 6, lost=(stage, *others), recent=2, **more)


def test_stage_sources_are_tried_in_order():
    assert lost(2, holders=1, checkpoint=0) == StageSource("holder")
    assert lost(2, checkpoint=2) == StageSource("checkpoint")
    assert lost(2, checkpoint=3) == StageSource("average", (1, 3))
    assert lost(2) == StageSource("average", (1, 3))
    assert [source.reconstructed for source in (lost(2), lost(2, checkpoint=1))] == [True, False]


def test_newer_of_copy_and_checkpoint_is_used():
    assert lost(2, copy=2, checkpoint=2) == StageSource("copy") == lost(2, copy=1, checkpoint=9)
    assert lost(2, copy=2, checkpoint=1) == StageSource("checkpoint") == lost(2, copy=9, checkpoint=0)
    assert lost(2, copy=3) == lost(2, copy=4, checkpoint=3) == StageSource("average", (1, 3))
    assert lost(5, copy=3) == lost(5, copy=3, checkpoint=3) == StageSource("old copy")
    assert lost(5, copy=4, checkpoint=3) == StageSource("old checkpoint")
    assert lost(5).reconstructed and not lost(5, copy=3).reconstructed


@pytest.mark.parametrize(("stage", "others"), [(0, ()), (5, ()), (2, (3,)), (2, (1,))])
def test_stage_without_neighbours_needs_a_checkpoint(stage, others):
    assert lost(stage, *others, checkpoint=9) == StageSource("old checkpoint")
    assert lost(stage, *others) == StageSource("nothing")


def test_stage_beyond_the_last_is_refused():
    with pytest.raises(ValueError, match="stage 6 of 6"):
        lost(6)


def test_restored_stage_gets_higher_learning_rate():
    config = InnerConfig(lr=0.01, warmup=0)
    update = StageOptimizer(torch.nn.Linear(2, 2), config)
    rates = []
    for update.faster in (1.0, FASTER):
        update.apply(4, 1.0, 1.0, 0)
        rates.append(update.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([learning_rate(config, 4), 1.1 * learning_rate(config, 4)])


def test_recovery_arbiter_is_the_first_other_origin_or_host():
    """The first origin; for a lost first stage, or without an origin, the first host of another stage."""
    a, b, c, d, e = (bytes([one]) * 32 for one in range(5))
    seats = Seating({d: {1: (a,), 2: ()}, c: {1: (), 2: (b,)}})
    assert arbiter_of(seats, 1, e) == c and arbiter_of(seats, 1, c) == d
    assert arbiter_of(seats, 0, e) == a
    orphans = Seating({}, {1: (a,), 2: (b,)})
    assert arbiter_of(orphans, 1, e) == b and arbiter_of(orphans, 0, e) == a
    assert arbiter_of(Seating({}, {1: (a,)}), 1, e) is None
