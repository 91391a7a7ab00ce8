"""Admission of a peer to its run, up to the answers of the peers that it knows; tests/swarms run whole peers."""

import asyncio
import errno
import random
from types import SimpleNamespace

import pytest
from thinwire.collectives.transport.interface import Contact
from thinwire.node.membership.ban_file import BanFile
from thinwire.node.membership.join import NoPlace, NoSwarm, Refused
from thinwire.node.membership.known_peers_file import KnownPeersFile
from thinwire.node.peer.admission import Admission
from thinwire.node.peer.known_peers import KnownPeers
from thinwire.node.runtime.directories import RunDirectory
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.identity.admission_token import AdmissionPolicy, Inviter
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.manifest.manifest import ManifestMismatch
from thinwire.swarm.manifest.parser import sign
from thinwire.swarm.membership.presets import LOCAL
from thinwire.swarm.messages.registry import Refuse, Welcome

AUTHOR = Identity.generate(b"1" * 32)


class Knocking(Admission):
    """Admission through `transport`, which needs no network; None: the transport must not be opened."""

    def __init__(self, signed, folder, *, transport=None):
        environment = Environment(lambda: virtual_loop.current().time(), lambda: 1e9, random.Random(1), RealDisk())
        known_peers = KnownPeers(folder / "anchors.json", environment)
        run_id = signed.verify().run_id(AUTHOR.public_key)
        directory = RunDirectory(folder)
        super().__init__(AUTHOR, run_id, environment, directory, known_peers, LOCAL, lambda kind, fields: None, "")
        self._scripted, self.book = transport, known_peers
        self.members, self.tasks, self.learned = {}, [], []
        """Peer id -> record in the roster; tasks that run beside the presence; what the roster learns, with its options."""
        self.used = []
        """Tokens that this peer has announced after its first one."""

    async def _open(self, open_transport):
        assert self._scripted is not None, "the manifest comes first"
        self.transport = self._scripted
        self._former = {contact.transport_key for contact in self.book.known()}
        peers = SimpleNamespace(
            records=lambda: self.members.values(),
            others=self.members,
            record_of=self.members.get,
            authenticated=lambda peer: peer != "told",
        )
        roster = SimpleNamespace(
            peers=peers,
            record=SimpleNamespace(wire=b""),
            learn=lambda record, now, **how: self.learned.append((record.peer_id, how)),
            use_token=lambda token, now: self.used.append(token),
        )
        self.presence = SimpleNamespace(roster=roster, attend=self.tasks.append)

    def _welcome(self, told):
        pass


@pytest.mark.parametrize(
    "codec", ["topk(k=5000,chunk=4096)|2bit|rice", "topk(k=64,chunk=4000)|2bit|rice", "topk(rank=4)"]
)
def test_manifest_with_impossible_codec_is_another_version(tmp_path, codec):
    signed = sign(f'[outer]\nmethod = "sparseloco"\n[exchange]\ncodec = "{codec}"'.encode(), AUTHOR)
    admission = Knocking(signed, tmp_path)
    with pytest.raises(ManifestMismatch, match="the swarm's manifest: exchange.codec: ") as error:
        asyncio.run(admission.found(signed, None))
    assert "another version" in error.value.hint and admission.terms is None


def searched(admission, signed, later=(0.0, lambda: None)):
    """Return whether a founder joins a swarm, and its seconds of search; `later`: seconds and a call at that time."""

    async def main():
        loop = virtual_loop.current()
        loop.call_later(*later)
        return await admission.found(signed, None), loop.time()

    return virtual_loop.run(main(), seed=1)


ADDRESSES = [Contact(f"10.0.0.{index}:7000", bytes([index]) * 32) for index in range(3)]


@pytest.mark.parametrize(
    ("answers", "alone", "seconds", "found"),
    [
        ((None, None, "refused"), False, 60.0, NoSwarm),  # they may continue elsewhere
        ((None, None, "refused"), True, 5.0, False),
        (("refused", "refused", "run"), False, 5.0, False),  # there are none any more, and none comes to the gate
        (("refused", "refused", "run"), True, 0.0, False),
        (("refused", "refused", "version"), False, 5.0, Refused),
        ((None, "full", "run"), False, 60.0, NoPlace),  # they are there
        ((None, "busy", "welcome"), False, 0.0, True),
    ],
)
def test_restarted_founder_searches_for_its_swarm(tmp_path, answers, alone, seconds, found):
    """Answers at the three addresses that it knows; None: no answer within the second of a contact here."""
    said = dict(zip(ADDRESSES, answers, strict=True))

    class Transport:
        async def meet(self, contact, hello):
            await asyncio.sleep(1.0)
            answer = said[contact]
            if answer == "welcome":
                return Welcome(b"", b"", bytes(32), bytes(64), (), "", "", bytes(32))
            return Refuse(answer or "unreachable", "")

    KnownPeersFile(tmp_path / "anchors.json", RealDisk()).save(ADDRESSES, alone=alone)
    signed = sign(b"", AUTHOR)
    admission = Knocking(signed, tmp_path, transport=Transport())
    if isinstance(found, bool):
        joins, took = searched(admission, signed)
        assert joins == found and seconds <= took < seconds + 4
    else:
        with pytest.raises(found):
            searched(admission, signed)
    assert len(admission.tasks) == isinstance(found, bool)
    for task in admission.tasks:
        task.close()


class Returning(Knocking):
    """Admission of a peer that may continue the run alone."""

    _continues = True


def test_peer_that_returns_alone_keeps_its_expired_token(tmp_path):
    """The addresses of the others have another run now; later the others may come back, and refuse it without a token."""
    signed, files = sign(b"", AUTHOR), RunDirectory(tmp_path)
    files.manifest.write_bytes(signed.toml)
    files.signature.write_bytes(signed.author + signed.signature)
    run_id = signed.verify().run_id(AUTHOR.public_key)
    seeds = tuple(Seed(contact.address, contact.transport_key) for contact in ADDRESSES)
    inviter = Inviter(AUTHOR, b"", AdmissionPolicy(run_id, AUTHOR.public_key, 2))
    invite = inviter.invite(Invite(run_id, seeds), AUTHOR.peer_id, expires=int(1e9) - 10)

    class Transport:
        learn = staticmethod(lambda record: None)

        async def meet(self, contact, hello):
            return Refuse("run", "")

    admission = Returning(signed, tmp_path, transport=Transport())
    joins = virtual_loop.run(admission.arrive(invite, None, 5.0), seed=1)
    assert not joins and admission.used[0] == b""
    assert admission.used[-1] == files.token.read_bytes() == invite.token
    for task in admission.tasks:
        task.close()


FORMER = ADDRESSES[1].transport_key


@pytest.mark.parametrize("code", ["unreachable", "refused"])
@pytest.mark.parametrize(
    ("name", "key", "joins"), [("visitor", FORMER, True), ("visitor", b"s" * 32, False), ("told", FORMER, False)]
)
def test_restarted_founder_joins_a_former_peer_that_comes_to_its_gate(tmp_path, name, key, joins, code):
    """No peer can be dialled, and one comes after 4 s.

    A stranger that comes is no sign of the swarm, nor is the record of a former peer. Without any, the founder founds the
    run again if no process listens at the addresses.
    """

    class Transport:
        async def meet(self, contact, hello):
            await asyncio.sleep(8.0 if code == "unreachable" else 0.1)
            return Refuse(code, "")

    KnownPeersFile(tmp_path / "anchors.json", RealDisk()).save(ADDRESSES)
    signed = sign(b"", AUTHOR)
    admission = Knocking(signed, tmp_path, transport=Transport())
    comes = (4.0, lambda: admission.members.update({name: SimpleNamespace(transport_key=key)}))
    if joins or code == "refused":
        found, took = searched(admission, signed, comes)
        assert found == joins and took == pytest.approx(8.0 if code == "unreachable" else 5.0, abs=1.0)
        admission.tasks[0].close()
    else:
        with pytest.raises(NoSwarm):
            searched(admission, signed, comes)


@pytest.mark.parametrize("come", [2, 1])
def test_peer_dials_those_that_it_knew_until_its_roster_knows_them_or_for_a_day(tmp_path, come):
    """The others do not answer the search; `come`: number of those that the roster learns of after an hour."""
    dialled = {contact: [] for contact in ADDRESSES}

    class Transport:
        async def meet(self, contact, hello):
            dialled[contact].append(virtual_loop.current().time())
            return Refuse("refused", "")

    async def main():
        admission = Knocking(sign(b"", AUTHOR), tmp_path, transport=Transport())
        assert not await admission.found(sign(b"", AUTHOR), None)
        assert all(len(times) == 1 for times in dialled.values())
        began = virtual_loop.current().time()
        seeks = asyncio.create_task(admission.tasks[0])
        await asyncio.sleep(1.5 * LOCAL.probe_period)  # All are dialled at once before they are dialled in turns.
        assert [times[1:] for times in dialled.values()] == [[began + LOCAL.probe_period]] * len(ADDRESSES)
        await asyncio.sleep(3600.0)
        for contact in ADDRESSES[:come]:
            admission.members[contact.address] = SimpleNamespace(transport_key=contact.transport_key)
        await asyncio.sleep(3600.0)
        if come == 2:
            admission.members["late"] = SimpleNamespace(transport_key=ADDRESSES[2].transport_key)
        await seeks
        return virtual_loop.current().time() - began

    KnownPeersFile(tmp_path / "anchors.json", RealDisk()).save(ADDRESSES)
    ended = virtual_loop.run(main(), seed=1, limit=1e6)
    period, late = LOCAL.reconnect_period, ADDRESSES[come:]
    for contact, times in dialled.items():
        last = 7200.0 if come == 2 else LOCAL.tombstone
        assert times[-1] == pytest.approx(last if contact in late else 3600.0, abs=3 * period + 1)
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        assert max(gaps) <= 3 * period + 1e-6
    assert ended == pytest.approx(7200.0 if come == 2 else LOCAL.tombstone, abs=3 * period + 1)


def test_peer_that_finds_another_part_of_the_swarm_knows_which_peer_admits_it(tmp_path):
    """The roster exchanges tables with that one."""
    signed = sign(b"", AUTHOR)
    run_id = signed.verify().run_id(AUTHOR.public_key)
    host, told = (
        PeerRecord.create(
            Identity.generate(key * 32), run_id=run_id, addresses=("10.0.0.9:7000",), sequence=1, issued=int(1e9)
        )
        for key in (b"2", b"3")
    )

    class Transport:
        admits = False

        async def meet(self, contact, hello):
            if not self.admits:
                return Refuse("refused", "")
            return Welcome(host.wire, b"", bytes(32), bytes(64), (told.wire,), "", "", bytes(32))

    async def main():
        transport = Transport()
        admission = Knocking(signed, tmp_path, transport=transport)
        assert not await admission.found(signed, None)
        transport.admits = True
        seeks = asyncio.create_task(admission.tasks[0])
        await asyncio.sleep(1.5 * LOCAL.probe_period)
        seeks.cancel()
        return admission.learned

    KnownPeersFile(tmp_path / "anchors.json", RealDisk()).save(ADDRESSES[:1])
    learned = virtual_loop.run(main(), seed=1)
    assert learned == [
        (host.peer_id, {"authenticated": True, "admits": True}),
        (told.peer_id, {"authenticated": False, "admits": False}),
    ]


def test_founder_with_unreadable_known_peers_does_not_restart_run(tmp_path):
    signed = sign(b"", AUTHOR)
    admission = Knocking(signed, tmp_path, transport=SimpleNamespace())
    (tmp_path / "anchors.json").write_bytes(b"not what was written")
    with pytest.raises(NoSwarm, match="cannot be read") as error:
        virtual_loop.run(admission.found(signed, None), seed=1)
    assert "invite" in error.value.hint and "remove" in error.value.hint


def test_bans_are_stored_at_once_and_then_at_intervals(tmp_path, monkeypatch):
    """Strangers can cause any number of bans, and each save waits for the disk."""
    signed, writes = sign(b"", AUTHOR), []

    async def main():
        loop, admission = virtual_loop.current(), Knocking(signed, tmp_path, transport=SimpleNamespace())
        monkeypatch.setattr(BanFile, "save", lambda file, items: writes.append((loop.time(), len(items))))
        assert not await admission.found(signed, None)
        began = loop.time()
        for number in range(1, 101):
            admission.presence.roster.ban_items = tuple(map(bytes, range(number)))
            admission.save_bans()
            admission.save_bans()
            await asyncio.sleep(0.05)
        assert writes == [(began, 1)]
        while admission.tasks:
            await admission.tasks.pop()

    virtual_loop.run(main(), seed=1)
    assert [count for _, count in writes] == [1, 100] and writes[1][0] - writes[0][0] == pytest.approx(15.0)


def test_bans_that_could_not_be_written_are_written_later(tmp_path, monkeypatch):
    signed, full, writes = sign(b"", AUTHOR), [True], []

    def save(file, items):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        writes.append(items)

    async def main():
        admission = Knocking(signed, tmp_path, transport=SimpleNamespace())
        monkeypatch.setattr(BanFile, "save", save)
        await admission.found(signed, None)
        admission.presence.roster.ban_items = (b"one",)
        admission.save_bans()
        assert not writes
        full[0] = False
        await admission.tasks.pop()
        assert writes == [(b"one",)]
        admission.tasks.pop().close()

    virtual_loop.run(main(), seed=1)
