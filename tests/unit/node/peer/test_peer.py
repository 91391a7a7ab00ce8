"""Parts of a peer without a swarm; tests/swarms and tests/processes run whole peers."""

import asyncio
import random
import threading
from types import SimpleNamespace

import pytest
from thinwire.collectives.transport.interface import Contact
from thinwire.node.membership.join import NoSwarm, Refused
from thinwire.node.membership.known_peers_file import KnownPeersFile
from thinwire.node.peer.bootstrap import founding
from thinwire.node.peer.peer import Peer
from thinwire.node.runtime.config import load
from thinwire.node.runtime.directories import RunDirectory
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.manifest import ManifestMismatch
from thinwire.swarm.manifest.parser import parse, sign
from thinwire.swarm.membership.presets import LOCAL
from thinwire.swarm.messages.registry import Refuse, Welcome

ME, OTHER, THIRD = (bytes([n]) * 32 for n in (1, 2, 3))


def place(round, members, alike=True):
    view = SimpleNamespace(peers=(ME, OTHER, THIRD))
    peer = SimpleNamespace(
        replica=SimpleNamespace(round=round, members=members, alike=alike),
        manifest=SimpleNamespace(pipeline=SimpleNamespace(stages=0)),
        identity=SimpleNamespace(peer_id=ME),
        session=SimpleNamespace(roster=SimpleNamespace(view=view)),
    )
    return Peer.place(peer)


@pytest.mark.parametrize(
    "round, members, group",
    [
        (0, (ME,), (ME, OTHER, THIRD)),  # the founder shares the data from the first round on
        (3, (ME, OTHER), (ME, OTHER)),
        (3, (OTHER, THIRD), (ME, OTHER, THIRD)),  # not yet a member: as if we were already counted
    ],
)
def test_data_is_divided_among_members_and_self(round, members, group):
    assert place(round, members) == group


def test_data_is_divided_among_all_live_peers_when_replicas_differ():
    assert place(3, (ME, OTHER), alike=False) == (ME, OTHER, THIRD)


@pytest.mark.parametrize(
    "codec", ["topk(k=5000,chunk=4096)|2bit|rice", "topk(k=64,chunk=4000)|2bit|rice", "topk(rank=4)"]
)
def test_manifest_with_impossible_codec_is_another_version(tmp_path, codec):
    author = Identity.generate(b"1" * 32)
    signed = sign(f'[outer]\nmethod = "sparseloco"\n[exchange]\ncodec = "{codec}"'.encode(), author)
    run_id = signed.verify().run_id(author.public_key)
    environment = Environment(lambda: 0.0, lambda: 1e9, random.Random(1), RealDisk())
    peer = Peer(author, run_id, environment, RunDirectory(tmp_path), LOCAL, lambda kind, fields: None)

    async def opened(admit):
        raise AssertionError("the manifest comes first")

    with pytest.raises(ManifestMismatch, match="the swarm's manifest: exchange.codec: ") as error:
        asyncio.run(peer.found(signed, opened))
    assert "another version" in error.value.hint and not hasattr(peer, "manifest")


ADDRESSES = [Contact(f"10.0.0.{index}:7000", bytes(32)) for index in range(3)]


@pytest.mark.parametrize(
    ("answers", "alone", "seconds", "found"),
    [
        ((None, None, "refused"), False, 60.0, NoSwarm),  # they may continue elsewhere
        ((None, None, "refused"), True, 5.0, False),
        (("refused", "refused", "run"), False, 0.0, False),  # there are none any more
        (("refused", "refused", "version"), False, 0.0, Refused),
        ((None, "busy", "welcome"), False, 0.0, True),
    ],
)
def test_restarted_founder_searches_for_its_swarm(tmp_path, answers, alone, seconds, found):
    """Answers at the three addresses that it knows; None: no answer within the second of a contact here."""
    said, time = dict(zip(ADDRESSES, answers, strict=True)), [0.0]

    class Transport:
        async def meet(self, contact, hello):
            time[0] += 1.0
            answer = said[contact]
            if answer == "welcome":
                return Welcome(b"", b"", bytes(32), bytes(64), (), "", "", bytes(32))
            return Refuse(answer or "unreachable", "")

    author = Identity.generate(b"1" * 32)
    signed = sign(b"", author)
    environment = Environment(lambda: time[0], lambda: 1e9, random.Random(1), RealDisk())
    peer = Peer(
        author,
        signed.verify().run_id(author.public_key),
        environment,
        RunDirectory(tmp_path),
        LOCAL,
        lambda *said: None,
    )
    KnownPeersFile(tmp_path / "anchors.json", RealDisk()).save(ADDRESSES, alone=alone)

    async def opened(open_transport):
        peer.transport = Transport()
        peer.presence = SimpleNamespace(roster=SimpleNamespace(record=SimpleNamespace(wire=b"")))

    peer._open, peer._welcome = opened, lambda welcome: None
    if isinstance(found, bool):
        assert virtual_loop.run(peer.found(signed, None), seed=1) == found
    else:
        with pytest.raises(found):
            virtual_loop.run(peer.found(signed, None), seed=1)
    assert seconds <= time[0] < seconds + 4


def test_founder_with_unreadable_known_peers_does_not_restart_run(tmp_path):
    author = Identity.generate(b"1" * 32)
    signed = sign(b"", author)
    environment = Environment(lambda: 0.0, lambda: 1e9, random.Random(1), RealDisk())
    run_id = signed.verify().run_id(author.public_key)
    peer = Peer(author, run_id, environment, RunDirectory(tmp_path), LOCAL, lambda *said: None)
    (tmp_path / "anchors.json").write_bytes(b"not what was written")

    async def opened(open_transport):
        pass

    peer._open = opened
    with pytest.raises(NoSwarm, match="cannot be read") as error:
        virtual_loop.run(peer.found(signed, None), seed=1)
    assert "invite" in error.value.hint and "remove" in error.value.hint


def working(outer, *, round=4, stats=(), members=(ME, OTHER), alive=()):
    peer = SimpleNamespace(
        manifest=parse(outer),
        replica=SimpleNamespace(round=round, members=members, ledger=None),
        identity=SimpleNamespace(peer_id=ME),
        session=SimpleNamespace(stats=dict(enumerate(stats)), roster=SimpleNamespace(alive=lambda peer: peer in alive)),
        _cut=0,
    )
    peer.gathers = Peer.gathers.fget(peer)
    return peer


def test_inner_steps_follow_the_manifest_and_speed():
    power = "[outer]\nsync_every = 12\nstep_balancing = 'by-speed'"
    stats = [(1.0, 400.0, 4), (1.0, 400.0, 4), (1.0, 7.0, 1)]  # the last one has been silent for too long
    assert Peer.steps(working("[outer]\nsync_every = 12", stats=stats), 100.0) == 12
    assert Peer.steps(working(power, stats=stats), 100.0) == 3
    assert Peer.steps(working(power, stats=stats), 0.0) == 3  # not measured yet: a quarter
    assert Peer.steps(working(power), 100.0) == 12
    merge = "[outer]\nmethod = 'merge'\nsync_every = 9"
    assert (Peer.steps(working(merge, round=0), 100.0), Peer.steps(working(merge, round=1), 100.0)) == (0, 9)


def test_untrained_peer_contributes_only_where_needed():
    weight = Peer.idle_weight.fget
    merge, once = "[outer]\nmethod = 'merge'", "[data]\nexactly_once = true"
    assert (weight(working(merge, round=0)), weight(working(merge, round=1)), weight(working(""))) == (1, 0, 0)
    stranger = working(once, members=(OTHER, THIRD), alive=(THIRD,))
    orphan = working(once, members=(OTHER, THIRD))
    stranger.replica.ledger = orphan.replica.ledger = object()
    assert (weight(stranger), weight(orphan)) == (0, 1)


def test_peer_announces_site_of_its_settings(tmp_path):
    entry = founding(b"", load({"home": tmp_path, "site": "loft"}, {}), "run.toml")
    assert entry.peer(lambda kind, fields: None)._site == "loft"


def test_daemon_executor_runs_in_a_thread(tmp_path):
    peer = founding(b"", load({"home": tmp_path}, {}), "run.toml").peer(lambda kind, fields: None)
    assert asyncio.run(peer.environment.aside(threading.get_ident)) != threading.get_ident()
