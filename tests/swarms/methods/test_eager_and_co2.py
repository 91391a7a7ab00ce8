"""Swarms of eager and CO2, whose rounds run during all inner steps of the next round."""

from __future__ import annotations

from kit.scenarios import events_of, one_round_late, play, violated
from thinwire.node.methods.overlapped.eager import EagerReplica


def test_eager_hides_links_as_slow_as_the_inner_steps():
    """Eager updates hide most of the exchange that DiLoCo waits for on the same links."""
    waits = {}
    for method in ("eager", "diloco"):
        run = play(one_round_late(method, peers=4, late=0, up=16e3, seed=4))
        found = [event.fields["sync_seconds"] for event in events_of(run, "round")]
        waits[method] = sum(found) / len(found)
    assert waits["eager"] < 0.5 * waits["diloco"], waits


def test_agreement_invariant_finds_private_values_in_eager_state(monkeypatch):
    commit = EagerReplica.commit

    def leaking(self, *given):
        stepped = commit(self, *given)
        self.theta[:] += self.ahead
        self.seal()
        return stepped

    monkeypatch.setattr(EagerReplica, "commit", leaking)
    assert "agreement" in violated(one_round_late("eager", peers=4, seconds=14.0))
