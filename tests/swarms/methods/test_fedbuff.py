"""Swarms of asynchronous methods with peers of very different speeds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit.scenarios import asynchronous, events_of, play, violated
from thinwire.node.methods.asynchronous.fedbuff import FedBuffReplica


def test_peer_beyond_staleness_bound_restarts_from_swarm_state():
    """The last peer makes a round of four steps while the others make twenty rounds: its work is too old."""
    step = (0.25, 0.25, 0.25, 1.5)
    run = play(asynchronous("buffered-async", peers=4, outer="staleness = 2", step=step, seconds=24.0))
    assert len(events_of(run, "unsent", 3)) > 1 and not events_of(run, "unsent", 0, 1, 2)
    assert not any(event.fields["tokens"] for event in events_of(run, "round", 3) if event.fields["round"] > 8)


@pytest.mark.trial
def test_steps_by_power_put_slow_peers_into_most_rounds():
    """Peers eight times apart: with H steps each the slow are in few rounds, with steps by power in most."""

    def share(outer):
        """Return the mean over three runs: leaders depend on the id of the run."""
        found = []
        for name in ("first", "second", "third"):
            scenario = asynchronous("delayed-nesterov", peers=4, outer=outer, step=(0.1, 0.2, 0.4, 0.8), seconds=24.0)
            run = play(replace(scenario, manifest=f'[run]\nname = "{name}"\n{scenario.manifest}'))
            found += [event for event in events_of(run, "round", 0) if event.fields["round"] > 8]
        return np.mean([event.fields["contributors"] for event in found]) / 4

    equal, by_power = share(""), share('step_balancing = "by-speed"\nmax_step_ratio = 8')
    assert by_power > equal + 0.2


def test_first_pseudo_gradient_of_joiner_has_usual_length(monkeypatch):
    sent = []
    contribution = FedBuffReplica.contribution

    def spy(self, read, **told):
        theta = np.empty(self.size, np.float32)
        read(0, self.size, theta)
        sent.append((self, self.round, float(np.linalg.norm(self.start - theta))))
        return contribution(self, read, **told)

    monkeypatch.setattr(FedBuffReplica, "contribution", spy)
    play(asynchronous("delayed-nesterov", peers=4, seconds=16.0, step=(0.3, 0.35)))
    firsts = {}
    for replica, number, norm in sent:
        firsts.setdefault(id(replica), (number, norm))
    late = [one for one in firsts.values() if one[0] > 3]
    assert late
    for number, norm in late:
        others = [length for _, at, length in sent if abs(at - number) <= 2]
        assert 0.5 * np.median(others) <= norm <= 2 * np.median(others)


def test_agreement_invariant_finds_private_values_in_fedbuff_step(monkeypatch):
    commit = FedBuffReplica.commit

    def leaking(self, *given):
        stepped = commit(self, *given)
        self.theta[:] += np.float32(1e-3) * self.age
        self.seal()
        return stepped

    monkeypatch.setattr(FedBuffReplica, "commit", leaking)
    assert "agreement" in violated(asynchronous("buffered-async", peers=4, seconds=14.0))
