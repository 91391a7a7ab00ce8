"""Swarms of streaming DiLoCo, which train while parts of the model are being averaged."""

from __future__ import annotations

from statistics import median

from kit.scenarios import CHURN, events_of, last_round, play, rounds_of, streaming
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials.trial import PACE

ALPHA = "local_mix = 0.5"
"""Line of [outer]: local progress during the exchange counts half."""


def test_streaming_trains_a_real_model():
    """Layers in turn, trained for real."""
    model = "[model]\nlayers = 3\nwidth = 8\nheads = 2\ncontext = 8\n[inner]\nbatch = 1\n"
    run = play(streaming(outer=ALPHA, tables=model, peers=3, seconds=12.0, compute="torch"))
    assert last_round(rounds_of(run)) >= 5


def test_streaming_overlap_hides_the_exchange():
    """Peers that would wait for their links have computed all the time."""
    made, waits = {}, {}
    for overlap in (0, 3):
        run = play(streaming(overlap=overlap, outer="local_mix = 0.0", peers=4, late=0, step=0.5, up=24e3))
        made[overlap] = last_round(rounds_of(run))
        complete = [event.fields for event in events_of(run, "round") if event.fields["contributors"] == 4]
        waits[overlap] = [fields["sync_seconds"] for fields in complete]
    assert median(waits[0]) > 0.5 > max(waits[3]) and sum(waits[3]) < 0.1 * sum(waits[0]), waits
    assert made[3] >= 1.15 * made[0], made


def test_streaming_rerun_has_the_same_trace():
    scenario = streaming(overlap=3, outer=ALPHA, faults=CHURN[:2], peers=5, seconds=12.0)
    assert simulate(scenario, preset=PACE).trace == simulate(scenario, preset=PACE).trace
