"""Swarms with concurrent rounds of several fragments, partial holders and faults."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from kit.scenarios import (
    CHURN,
    INT8,
    TOPK,
    events_of,
    identity_of,
    last_round,
    one_state,
    play,
    rounds_of,
    streaming,
    violated,
)
from thinwire.collectives.rounds.data_planes.butterfly import Butterfly
from thinwire.collectives.rounds.round_factory import MAX_PENDING_EACH
from thinwire.node.methods.fragments.fragment_schedule import FragmentSchedule
from thinwire.node.methods.fragments.fragment_sessions import FragmentSessions
from thinwire.node.peer import checkpoint_schedule
from thinwire.node.state.replica import Replica
from thinwire.sims.engine import virtual_loop
from thinwire.sims.peers.learners import StubLearner
from thinwire.sims.scenario.faults import LIES, Fault
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials.trial import PACE, STALL
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Ready

FAR = {"region": ("Oregon", "Australia", "London")}
"""Peers far from each other, by turns."""

HELD = (None, None, (0,), (0, 2), (1,), (1, 2), (2,))
"""Fragments that each peer holds; None: all."""


@pytest.mark.parametrize("codec", [INT8, pytest.param(TOPK, marks=pytest.mark.trial)])
def test_peers_with_some_fragments_join_only_their_rounds(codec):
    """Two peers hold all; late and returning peers fetch only what they hold."""
    run = play(streaming(3, 8, peers=7, faults=CHURN[:4], spread={"held": HELD}, codec=codec))
    for peer, digests in one_state(rounds_of(run, "round")).items():
        # Each fragment has every third turn.
        had = {(turn - 1) % 3 for turn in digests}
        assert had == set(HELD[peer] or range(3)) or (peer == 3 and had < {0, 2})  # which was killed early
    synced = events_of(run, "synced")
    assert all(event.fields["fragment"] in (HELD[event.peer] or range(3)) for event in synced)
    vectors = 1 if codec == TOPK else 2
    late = Counter()
    for event in synced:
        if event.peer in (5, 6) and event.at < 10.0:
            late[event.peer] += event.fields["bytes"]
    assert late == {5: 2 * vectors * 4 * 3_000, 6: vectors * 4 * 3_000}
    together = {event.fields["contributors"] for event in events_of(run, "round")}
    assert max(together) >= 4


def test_more_overlap_hides_round_time_of_distant_peers():
    """Distant peers with short inner steps: rounds last longer than a turn."""
    busy = {}
    for overlap in (5, 12):
        step = [0.05 * (1 + 0.02 * part) for part in range(4)]
        run = play(streaming(3, overlap, peers=3, late=0, seconds=10.0, step=step, spread=FAR))
        late = [event for event in events_of(run, "round") if event.at > 5.0]
        waits = [event.fields["sync_seconds"] for event in late]
        busy[overlap] = len({event.fields["round"] for event in late}), sum(waits) / len(waits)
    assert busy[12][0] > 1.15 * busy[5][0] and busy[12][1] < 0.25 * busy[5][1], busy


@pytest.mark.trial
@pytest.mark.parametrize("overlap", [12])
@pytest.mark.parametrize("lag", [0.5])
def test_peer_late_by_part_of_a_turn_is_on_time_after_two_turns(monkeypatch, overlap, lag):
    """A late peer skips steps once, and is on time again, in most runs.

    A round lasts as long as a turn, and rounds do not wait for late peers. The order of leaders follows from the run id: in
    some runs peers that lead far from the late one continue to exclude it, so the test plays several run ids.
    """
    assert sum(_late_rounds(monkeypatch, overlap, lag, f"run-{number}") <= 2 for number in range(6)) >= 3


def _late_rounds(monkeypatch, overlap, lag, name):
    """Return the number of rounds from the first to the last absence of peer 2, which loses `lag` seconds."""
    held, second, make, steps = [], [], StubLearner.__init__, StubLearner.steps

    def made(self, manifest, parameters, seed, step_seconds):
        make(self, manifest, parameters, seed, step_seconds)
        if seed == 2:
            second.append(self)

    async def held_up(self, n, stop):
        if self in second and not held and virtual_loop.current().time() > 6.0:
            held.append(virtual_loop.current().time())
            await asyncio.sleep(lag)
        return await steps(self, n, stop)

    monkeypatch.setattr(StubLearner, "__init__", made)
    monkeypatch.setattr(StubLearner, "steps", held_up)
    tables = f'[run]\nname = "{name}"\n'
    run = play(streaming(3, overlap, grace=0.1, peers=5, late=0, seconds=20.0, step=0.2, spread=FAR, tables=tables))
    monkeypatch.setattr(StubLearner, "__init__", make)
    monkeypatch.setattr(StubLearner, "steps", steps)
    assert len(held) == 1
    me = identity_of(2).peer_id.hex()[:8]
    events = [event for event in events_of(run, "round", 0) if event.at > held[0]]
    late = [event.fields["round"] for event in events if me in dict(event.fields["missing"])]
    first, last = min(late), max(event.fields["round"] for event in events)
    assert last > first + 8, (late, last)
    return max(late) - first + 1


@pytest.mark.trial
@pytest.mark.parametrize(("fragments", "overlap"), [(6, 5), pytest.param(24, 2, marks=pytest.mark.soak)])
def test_swarm_restarted_at_once_resumes_every_fragment(monkeypatch, fragments, overlap):
    """No peer has a state but from its checkpoint; the entry finds this out for all fragments in parallel.

    Afterwards no peer remembers its promises in any of them.
    """
    monkeypatch.setattr(checkpoint_schedule, "SAVE_SECONDS", 2.0)
    monkeypatch.setattr(checkpoint_schedule, "SAVE_ROUNDS", 1)
    faults = tuple(Fault(12.0, "restart", (index,), seconds=1.0) for index in range(4))
    scenario = streaming(fragments, overlap, steps=24, peers=4, seconds=40.0 + 3 * fragments, faults=faults)
    run = simulate(scenario, preset=PACE)
    assert run.violations == ()
    back = {event.peer: event.at for event in events_of(run, "ready") if event.at > 13.0}
    assert len(back) == 4 and max(back.values()) < 22.0
    later = [event for event in events_of(run, "round") if event.at > 22.0]
    again = {(event.fields["round"] - 1) % fragments for event in later}
    assert again == set(range(fragments))


@pytest.mark.parametrize(
    "topology", ["butterfly", *(pytest.param(name, marks=pytest.mark.trial) for name in ("ring", "hierarchy"))]
)
def test_one_chunk_fragments_have_different_owners(monkeypatch, topology):
    """As many peers as fragments, each of one chunk."""
    owned, finish = {}, Butterfly.finish

    def booked(self):
        finish(self)
        owned.setdefault((self.fragment, self.round), set()).update(self.owners)

    monkeypatch.setattr(Butterfly, "finish", booked)
    play(streaming(4, 6, peers=4, seconds=14.0, exchange=f'topology = "{topology}"'))
    rounds = [[owned[number, round] for number in range(4)] for _, round in owned if (3, round) in owned]
    assert all(len(one) == 1 for found in rounds for one in found)
    assert max(len(set.union(*found)) for found in rounds) >= 2


SAID = {"hash": ("hash",), "nan": ("not finite", "encoding"), "huge": ("norm",)}
"""Reasons that the others report for an excluded contribution."""

RUNS = [(kind, codec) for codec in (TOPK, INT8) for kind in sorted(LIES)]
OFTEN = {("flip", TOPK): (), ("huge", TOPK): pytest.mark.trial, ("equivocate", TOPK): pytest.mark.trial}


@pytest.mark.parametrize(
    ("kind", "codec"), [pytest.param(*lie, marks=OFTEN.get(lie, pytest.mark.soak)) for lie in RUNS]
)
def test_liar_in_every_fragment_violates_only_allowed_invariants(kind, codec):
    scenario = streaming(3, 6, peers=6, seconds=32.0, codec=codec, faults=(Fault(4.0, "liar", (3,), 20.0, 0.0, kind),))
    run = simulate(scenario, preset=PACE, stall=STALL)
    # If a liar owns the only chunk, no other peer computes its contribution again.
    assert {violation.oracle for violation in run.violations} <= ({"bound"} if kind in SAID else set())
    liar = identity_of(3).peer_id.hex()[:8]
    rounds = [event for event in events_of(run, "round") if 5.0 < event.at < 24.0]
    said = Counter(dict(event.fields["missing"]).get(liar) for event in rounds if event.peer != 3)
    assert {event.peer for event in rounds} >= {0, 1, 2, 4, 5}
    if codec == TOPK and kind in SAID:
        assert any(said[reason] for reason in SAID[kind])


def _other_momentum(patch):
    """Change one element of the momentum."""
    commit = Replica.commit

    def sloppy(self, *given, **told):
        stepped = commit(self, *given, **told)
        self.momentum[0] = np.nextafter(self.momentum[0], np.float32(9))
        self.seal()
        return stepped

    patch.setattr(Replica, "commit", sloppy)


def _counted_twice(patch):
    """Count tokens again that were sent already."""
    conclude = FragmentSchedule.conclude

    def forgetful(self, kept):
        owed = self.owed
        conclude(self, kept)
        self.owed = max(owed, self.owed)

    patch.setattr(FragmentSchedule, "conclude", forgetful)


@pytest.mark.parametrize(("plant", "oracle"), [(_other_momentum, "aggregate"), (_counted_twice, "weight")])
def test_invariants_find_planted_bugs_in_concurrent_fragments(monkeypatch, plant, oracle):
    plant(monkeypatch)
    assert oracle in violated(streaming(3, 8, peers=4, seconds=14.0))


@pytest.mark.trial
def test_concurrent_fragments_train_a_real_model():
    model = "[model]\nlayers = 3\nwidth = 8\nheads = 2\ncontext = 8\n[inner]\nbatch = 1\n"
    run = play(streaming(3, 8, tables=model, peers=3, seconds=12.0, compute="torch"))
    assert last_round(rounds_of(run, "round")) >= 4


def test_last_round_leaves_all_peers_with_one_state():
    run = play(streaming(3, 8, tables="[run]\nrounds = 10\n", peers=4, seconds=32.0))
    left = [event for event in events_of(run, "left") if "digest" in event.fields]
    assert len(left) == 4 and {event.fields["round"] for event in left} == {10}
    assert len({event.fields["digest"] for event in left}) == 1


def test_concurrent_fragments_rerun_has_the_same_trace():
    scenario = streaming(3, 8, faults=CHURN[:2], peers=5, seconds=12.0)
    assert simulate(scenario, preset=PACE).trace == simulate(scenario, preset=PACE).trace


def test_early_frames_of_one_peer_are_bounded_over_all_fragments(monkeypatch):
    """One peer sends frames for the next round of each of 12 fragments."""
    kept, ticked = [], FragmentSessions.on_tick

    def flood(self):
        ticked(self)
        if not kept and self.live and self.replica.round > 12:
            liar = min(self.live)
            for attempt in range(40):
                for number, session in self.sessions.items():
                    ready = Ready(
                        session.current.round + 1, number, attempt, bytes(32), bytes(32), 1, b"", True, 0.0, 0.0
                    )
                    self.on_frame(liar, Frame(ready, b"", bytes(64)))
            buffers = {
                id(session.factory.pending_frames): session.factory.pending_frames for session in self.sessions.values()
            }
            kept.append(sum(map(len, buffers.values())))

    monkeypatch.setattr(FragmentSessions, "on_tick", flood)
    simulate(streaming(12, 4, steps=12, peers=2, seconds=12.0), preset=PACE)
    assert 0 < kept[0] <= MAX_PENDING_EACH + 2 * 11
