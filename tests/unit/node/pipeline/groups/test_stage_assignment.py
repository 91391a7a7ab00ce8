"""Assignment of stages to weak peers, and stages that fit their memory."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.node.pipeline.groups.stage_assignment import assign, fitting, gaps, home, memory, share
from thinwire.node.pipeline.groups.stage_join import crowded, unseated
from thinwire.node.pipeline.groups.stage_join import seat as take
from thinwire.node.pipeline.model.held_stage import HeldStage
from thinwire.node.pipeline.model.staged_model import StagedModel
from thinwire.node.state.fragments import fragments_of
from thinwire.node.state.layout import layout_of
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.swarm.identity.stage_claim import Seat, Seating
from thinwire.swarm.manifest.manifest import ManifestError
from thinwire.swarm.manifest.parser import parse

IDS = [bytes([i]) * 32 for i in range(40)]
RUN = parse(
    "[model]\nlayers = 5\nwidth = 16\nheads = 2\ncontext = 8\n"
    '[outer]\nmethod = "streaming"\nsync_every = 12\n[pipeline]\nstages = 3\n'
)
MODEL = StagedModel(RUN, 50)
A, B, C, D, E = IDS[:5]


def seats(groups=None, orphans=None, waiting=()):
    return Seating(groups or {}, orphans or {}, tuple(waiting))


def test_missing_stage_of_most_complete_group_is_filled_first():
    groups = {A: {1: (), 2: ()}, B: {1: (), 2: (C,)}}
    found = assign(seats(groups, waiting=IDS[10:13]), 3)
    assert found == {IDS[10]: Seat(1, B), IDS[11]: Seat(1, A), IDS[12]: Seat(2, A)}


def test_waiting_peers_found_a_group_only_if_enough():
    full = {A: {1: (B,), 2: (C,)}}
    assert assign(seats(full, waiting=IDS[10:12]), 3) == {IDS[10]: Seat(2, A), IDS[11]: Seat(1, A)}
    found = assign(seats(full, waiting=IDS[10:13]), 3)
    assert found == {IDS[10]: Seat(0, IDS[10]), IDS[11]: Seat(1, IDS[10]), IDS[12]: Seat(2, IDS[10])}
    assert assign(seats(waiting=IDS[10:11]), 3) == {IDS[10]: Seat(0, IDS[10])}


def test_group_fills_holders_per_stage_before_new_group():
    full = {A: {1: (B,), 2: (C,)}}
    found = assign(seats(full, waiting=IDS[10:13]), 3, holders=2)
    assert found == {IDS[10]: Seat(2, A), IDS[11]: Seat(1, A), IDS[12]: Seat(2, A)}
    alone = assign(seats(waiting=IDS[10:18]), 3, holders=2)
    assert {seat.origin for seat in alone.values()} == {IDS[10], IDS[15]}
    assert fitting(seats(full, waiting=IDS[10:13]), 3, (0, 1, 2), IDS[10], 2) == Seat(2, A)
    assert fitting(seats(full, waiting=IDS[10:13]), 3, (0, 1, 2), IDS[10]) == Seat(0, IDS[10])


def test_hosts_without_origin_get_one():
    assert assign(seats({A: {1: (B,), 2: (C,)}}, {1: (D,)}, [E]), 3) == {E: Seat(0, E)}
    assert home(seats({A: {1: (B,), 2: ()}, E: {1: (), 2: ()}}), 1) == E
    assert home(seats(), 1) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(0, 3), st.data())
def test_assignment_completes_all_groups_but_the_last(stages, complete, data):
    """All groups but the last are complete, and no stage has two peers while another one is empty."""
    groups = {IDS[i]: {stage: (IDS[i] + bytes([stage]),) for stage in range(1, stages)} for i in range(complete)}
    count = data.draw(st.integers(1, 20))
    found = assign(seats(groups, waiting=IDS[20 : 20 + count]), stages)
    assert sorted(found) == IDS[20 : 20 + count]
    held = {origin: {stage: len(peers) for stage, peers in stages_.items()} for origin, stages_ in groups.items()}
    for seat in found.values():
        held.setdefault(seat.origin, dict.fromkeys(range(1, stages), 0))
    for seat in found.values():
        if seat.stage:
            held[seat.origin][seat.stage] += 1
    empty = [origin for origin, stages_ in held.items() if not all(stages_.values())]
    assert len(empty) <= 1
    if empty:
        assert not complete and max(max(stages_.values()) for stages_ in held.values()) <= 1
    assert len(held) == max(complete + count // stages, 1)


def test_peer_that_does_not_fit_takes_another_stage():
    groups = {A: {1: (), 2: (B,)}}
    assert fitting(seats(groups, waiting=[D]), 3, (1, 2), D) == Seat(1, A)
    assert fitting(seats(groups, waiting=[D]), 3, (2,), D) == Seat(2, A)
    assert fitting(seats(waiting=[D]), 3, (1, 2), D) is None
    assert fitting(seats(waiting=[D]), 3, (0,), D) == Seat(0, D)


def test_doubled_stage_is_crowded_while_another_is_empty():
    groups = {A: {1: (B, C), 2: ()}}
    empty = gaps(seats(groups), (0, 1, 2), C)
    assert empty == [Seat(2, A)] and gaps(seats(groups), (1,), C) == []
    assert crowded(seats(groups), Seat(1, A), C, empty) and not crowded(seats(groups), Seat(1, A), B, empty)
    assert not crowded(seats(groups), Seat(1, A), C, ())
    assert crowded(seats({}), Seat(1, A), C, ())  # its origin is gone
    assert unseated(seats(groups, waiting=[E]), C) == seats({A: {1: (B,), 2: ()}}, waiting=[C, E])


def test_origin_without_hosts_looks_for_place_in_earlier_groups():
    groups = {A: {1: (), 2: ()}, B: {1: (), 2: (E,)}, C: {1: (), 2: ()}}
    everything = (0, 1, 2)
    assert gaps(seats(groups), everything, B) == []
    assert gaps(seats(groups), everything, A) == [Seat(1, B)]
    assert gaps(seats(groups), everything, C) == [Seat(1, B), Seat(1, A), Seat(2, A)]
    assert crowded(seats(groups), Seat(0, A), A, [Seat(1, B)]) and not crowded(seats(groups), Seat(0, B), B, ())
    assert not crowded(seats(groups), Seat(0, B), B, [Seat(1, A)])  # it has a host
    assert unseated(seats(groups), C).groups == {A: groups[A], B: groups[B]}


def test_stage_memory_follows_its_parameters():
    held = [sum(p.numel() for p in HeldStage(MODEL, stage).section.module.parameters()) for stage in range(3)]
    assert held == [MODEL.parameters(stage) for stage in range(3)]
    assert sum(held) == MODEL.parameters(None) == layout_of(Transformer(ModelConfig(50, 5, 16, 2, 8))).total
    needs = [memory(MODEL, stage) for stage in range(3)]
    assert memory(MODEL, None) > max(needs)
    # Both have two layers; one stores a copy of two more, the other of one and the ends.
    assert needs[1] - needs[2] == 16 * (held[2] - held[0]) > 0
    run = msgspec.structs.replace(RUN, pipeline=msgspec.structs.replace(RUN.pipeline, backup_every=0))
    lean = StagedModel(run, 50)
    assert memory(lean, 1) == memory(lean, 2) == needs[1] - 16 * held[2]
    assert share(MODEL, needs[1]) == (False, tuple(s for s in range(3) if needs[s] <= needs[1]))
    assert share(MODEL, 1e9) == (True, (0, 1, 2)) and share(MODEL, 10.0) == (False, ())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stage_layout_is_its_part_of_the_whole(stage):
    holding = HeldStage(MODEL, stage)
    whole = Transformer(ModelConfig(50, 5, 16, 2, 8), RUN.run.seed)
    layout = layout_of(whole)
    assert holding.layout == layout
    theta = layout.split(holding.parameters())
    mine = {name for name, _ in holding.section.module.named_parameters()}
    for name, value in whole.named_parameters():
        assert (theta[name] == (value.detach().numpy() if name in mine else 0)).all()
    part = fragments_of(RUN, layout)[stage]
    assert part.size == sum(p.numel() for p in holding.section.module.parameters())
    for start, stop in part.spans:
        holding.write(2 * holding.parameters()[start:stop], start)
    assert (holding.parameters() == 2 * layout.flat(theta)).all()


def test_too_small_peer_is_told_when_run_has_no_stages():
    whole = StagedModel(parse("[model]\nlayers = 5\nwidth = 16\nheads = 2\ncontext = 8\n"), 100)
    needed = memory(StagedModel(RUN, 100), None)
    assert asyncio.run(take(None, whole, limit=needed)) is None
    with pytest.raises(ManifestError, match="MiB"):
        asyncio.run(take(None, whole, limit=needed / 2))
    with pytest.raises(ManifestError, match="holds a stage"):
        asyncio.run(take(None, whole, limit=needed, stage=1))
