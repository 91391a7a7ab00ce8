"""Real daemons that cannot reach each other, and one that relays between them, in network namespaces."""

import time

import pytest
from kit.real.namespaces import obstacle
from kit.real.rooms import Rooms
from kit.real.translators import Translators
from kit.real.waiting import until
from thinwire.node.peer.status import read_status
from thinwire.node.runtime.directories import directories

pytestmark = [
    pytest.mark.trial,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "-"),
]


TOGETHER_SECONDS = 15.0
"""Most seconds from the last start to a round of all; about two are usual."""


@pytest.fixture
def daemons(machine, tmp_path, monkeypatch):
    """Starts the daemon of each namespace; the first one founds the run."""
    monkeypatch.chdir(tmp_path)
    made = []

    def make(spaces, *founder):
        made.append(spaces.__enter__())
        shared = machine(rounds=500, steps=4, grace=5.0)
        found = []
        for index, address in enumerate(spaces.addresses):
            daemon = shared.daemon(f"peer{index}")
            daemon.host, daemon.network = address, spaces.network(index)
            if found:
                shared.join(daemon.name, found[0].invite(), "--port", 7400)
            else:
                shared.found(daemon.name, "--wait-for", len(spaces.addresses), "--port", 7400, *founder)
            found.append(daemon)
        return shared, found

    yield make
    for spaces in made:
        spaces.__exit__()


def relays(daemon):
    """Return the peers to which the daemon has a link through another one, and those in between."""
    said = read_status(directories(daemon.home).status)
    return {peer.peer: peer.relay for peer in said.peers if peer.relay} if said is not None else {}


def last_start(*daemons):
    return max(daemon.of("start")[0]["at"] for daemon in daemons)


def wait_for_circuit(one, other, relay):
    until("the relay", lambda: relays(one).get(other.id) == relay.id, state=lambda: relays(one))


def test_two_peers_without_a_route_train_with_a_third_that_relays(daemons):
    shared, (public, first, second) = daemons(Rooms(2))
    # From the third round on, each peer has sent its data to all others.
    ends = [daemon.wait("round", contributors=3, least=3)["at"] for daemon in (public, first, second)]
    print(f"three rounds of three peers within {max(ends) - last_start(public, first, second):.1f} s of the last start")
    wait_for_circuit(first, second, public)
    wait_for_circuit(second, first, public)
    assert not relays(public)
    assert shared.check()
    shown = first.command("status").stdout
    assert f"relayed by {public.id[:8]}" in shown, shown


def test_a_peer_that_does_not_relay_leaves_the_two_without_a_link(daemons):
    _, (public, first, second) = daemons(Rooms(2), "--no-relay")
    public.wait("round", contributors=2)
    time.sleep(6.0)  # longer than a direct dial lasts
    assert not relays(first) and not relays(second)


def test_two_peers_behind_translators_train_with_a_public_one(daemons):
    spaces = Translators(("public", "symmetric", "symmetric"))
    shared, (public, first, second) = daemons(spaces)
    ends = [daemon.wait("round", contributors=3)["at"] for daemon in (public, first, second)]
    assert max(ends) - last_start(public, first, second) <= TOGETHER_SECONDS
    for daemon in (public, first, second):
        daemon.wait("round", contributors=3, least=3)
    wait_for_circuit(first, second, public)
    assert shared.check()
