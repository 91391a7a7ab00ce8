"""Real daemons behind address translators, in network namespaces."""

import importlib.util
import json
import signal
import subprocess

import pytest
from kit.daemons import COMMAND
from kit.real.namespaces import obstacle
from kit.real.translators import INSIDE, Translators
from kit.real.waiting import CAP, until
from thinwire.node.peer.status import read_status
from thinwire.node.runtime.directories import directories
from thinwire.swarm.identity.invite import Invite

pytestmark = [
    pytest.mark.trial,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "-"),
]
WITH_UPNP = pytest.mark.skipif(importlib.util.find_spec("miniupnpc") is None, reason="it needs the extra [nat]")


@pytest.fixture
def world(machine):
    """Makes namespaces of these kinds and a function that starts the daemon of one of them."""
    made = []

    def make(*kinds):
        spaces = Translators(kinds).__enter__()
        made.append(spaces)
        shared = machine(rounds=500, steps=4, grace=5.0)

        def start(index, invite=None, *more):
            daemon = shared.daemon(f"peer{index}")
            daemon.host, daemon.network = spaces.addresses[index], spaces.network(index)
            more = (*more, "--port", 7400)
            return shared.join(daemon.name, invite, *more) if invite else shared.found(daemon.name, *more)

        return spaces, start

    yield make
    for spaces in made:
        spaces.__exit__()


def seeds(code):
    return [seed.address for seed in Invite.parse(code).seeds]


def checks(spaces, index, invite):
    """Return the checks of `thinwire doctor` in a namespace, by name; no daemon runs there."""
    words = [
        *spaces.inside(index),
        COMMAND,
        "doctor",
        *([invite] if invite else []),
        "--host",
        spaces.addresses[index],
        "--port",
        "7400",
    ]
    home = ["--home", f"/proc/self/cwd/doctor{index}", "--json"]
    done = subprocess.run([*words, *home], capture_output=True, text=True, timeout=CAP)
    return {check["name"]: check for check in json.loads(done.stdout)}


def reachable_code(daemon, address):
    """Wait until the daemon's invite begins with this address; return it."""

    def code():
        said = read_status(directories(daemon.home).status)
        return said is not None and said.invite and seeds(said.invite)[0] == address and said.invite

    return until("an invite with the address", code, state=lambda: read_status(directories(daemon.home).status))


def test_peer_behind_a_forwarding_router_announces_its_outside_address(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spaces, start = world("public", "public", "cone", "public")
    first = start(0, None, "--wait-for", 2)
    second = start(1, first.invite())
    first.wait("round", contributors=2)
    found = checks(spaces, 2, second.newest_invite())
    assert found["nat"]["detail"].startswith("cone") and found["clock"]["result"] == found["rate"]["result"] == "OK"
    assert found["reached"]["result"] == "OK", found
    behind = start(2, first.newest_invite())
    outside = f"{spaces.outside[2]}:7400"
    seen = behind.wait("reach", address=outside, reached=True, nat="cone")
    assert seen["at"] > 0
    first.wait("round", contributors=3)
    # Its invite leads a stranger to it, and from there into the swarm.
    invite = reachable_code(behind, outside)
    alone = Invite.parse(invite)
    last = start(3, Invite(alone.run_id, alone.seeds[:1], alone.token, alone.secret).code())
    assert last.wait("round", contributors=4)


MODES = ["nat-pmp", pytest.param("upnp", marks=WITH_UPNP)]


@pytest.mark.parametrize("mode", MODES)
def test_founder_behind_a_router_that_maps_ports_invites_a_stranger(world, tmp_path, monkeypatch, mode):
    """Its invite begins with the router's address, a peer outside joins there, and the mapping goes with the founder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THINWIRE_MAP_PORT", "true")
    spaces, start = world("mapping", "public")
    router = spaces.serve(0, mode, INSIDE)
    outside = f"{spaces.outside[0]}:7400"
    found = checks(spaces, 0, None)["mapping"]
    assert found["result"] == "OK" and outside in found["detail"]
    first = start(0, None, "--wait-for", 2)
    assert first.wait("mapped")["address"] == outside
    invite = Invite.parse(reachable_code(first, outside))
    stranger = start(1, Invite(invite.run_id, invite.seeds[:1], invite.token, invite.secret).code())
    stranger.wait("round", contributors=2)
    first.signal(signal.SIGTERM)
    assert first.exit() == 0 and not first.alarms()
    router.kill()
    said = router.stdout.read().split("\n")
    assert [line for line in said if line.startswith("unmap")].count("unmap 7415") == 1


def test_founder_behind_a_router_that_maps_nothing_starts_with_one_alarm(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THINWIRE_MAP_PORT", "true")
    spaces, start = world("mapping", "public")
    spaces.serve(0, "garbage", INSIDE)
    first = start(0, None, "--rounds", 10**6)  # The alarm comes after some seconds.
    assert "the router maps no ports" in first.wait("alarm")["detail"]
    first.wait("round", least=3)
    assert checks(spaces, 0, None)["mapping"]["result"] == "FAIL"
    assert ["maps no ports" in event["detail"] for event in first.alarms()] == [True]


def test_peer_behind_a_symmetric_translator_trains_over_the_links_that_it_opened(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spaces, start = world("public", "public", "symmetric")
    first = start(0, None, "--wait-for", 3)
    second = start(1, first.invite())
    second.wait("ready")
    found = checks(spaces, 2, second.newest_invite())
    assert found["nat"]["detail"].startswith("symmetric") and found["reached"]["result"] == "FAIL"
    behind = start(2, second.newest_invite())
    behind.wait("reach", address=f"{spaces.outside[2]}:7400", reached=False, nat="symmetric")
    for daemon in (first, second, behind):
        daemon.wait("round", contributors=3, least=3)
    # It comes back after a crash, too: the others cannot dial it.
    behind.kill()
    behind.exit()
    left = first.wait("round", contributors=2)["at"]
    start(2, second.newest_invite())
    first.wait("round", contributors=3, after=left)
