"""Gate of a member that has restarted and searches for its swarm, on a simulated network."""

import asyncio
import random

import pytest
from thinwire.collectives.transport.interface import Contact
from thinwire.node.membership.join import NoSwarm
from thinwire.node.membership.known_peers_file import KnownPeersFile
from thinwire.node.peer.admission import Admission
from thinwire.node.peer.known_peers import BACK_SECONDS, KnownPeers
from thinwire.node.runtime.directories import RunDirectory
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment
from thinwire.node.state.checkpoint_store import LATEST
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.network import EPOCH, SimNet
from thinwire.sims.network.translator import Translator
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.manifest.parser import SignedManifest, sign
from thinwire.swarm.membership.presets import LOCAL
from thinwire.swarm.messages.registry import VERSION, Hello, Refuse, Welcome

FOUNDER, MEMBER, FORMER, STRANGER = PEERS = [Identity.generate(bytes([seed]) * 32) for seed in range(1, 5)]
CONTACTS = {peer: Contact(f"10.0.0.{index}:7000", peer.transport_public) for index, peer in enumerate(PEERS)}
SIGNED, PAIRS, NO_LINEAGES = (
    sign(b'[admission]\nmode = "open"\ntrial_rounds = 0\n' + more, FOUNDER)
    for more in (b"", b'[outer]\nmethod = "noloco"', b"[exchange]\norphan = 0.0")
)
SEARCH = 60.0
BUSY = Refuse("busy", "still looking for the swarm; knock again")


class World:
    """A simulated network, and peers on it whose run folders are in `path`."""

    def __init__(self, path, manifest=SIGNED):
        self.path, self.net = path, SimNet(1, deadline=0.5)
        self.run = manifest.verify().run_id(FOUNDER.public_key)

    def admission(self, peer):
        loop, folder = virtual_loop.current(), RunDirectory(self.path / CONTACTS[peer].address)
        environment = Environment(loop.time, lambda: EPOCH + loop.time(), random.Random(1), RealDisk())
        known_peers = KnownPeers(folder.path / "anchors.json", environment)
        return Admission(peer, self.run, environment, folder, known_peers, LOCAL, lambda kind, fields: None, "")

    def opener(self, peer):
        async def opened(admit):
            return self.net.transport(peer, self.run, admit, CONTACTS[peer].address)

        return opened

    async def arrive(self, peer):
        """Return the admission of a peer with an invite of the founder."""
        admission, seed = self.admission(peer), CONTACTS[FOUNDER]
        try:
            await admission.arrive(
                Invite(self.run, (Seed(seed.address, seed.transport_key),)), self.opener(peer), SEARCH
            )
        except NoSwarm:
            await admission.close()
            raise
        return admission

    async def knock(self, peer):
        """Return the answer of the member to a peer, which cannot be dialled and stays there."""
        if peer.peer_id in self.net.peers:
            self.net.peers[peer.peer_id].vanish()
        transport = self.net.transport(peer, self.run, lambda hello, record, source: BUSY, CONTACTS[peer].address)
        transport.translator = Translator("symmetric")
        wall = self.net.wall()
        record = PeerRecord.create(peer, run_id=self.run, addresses=transport.addresses(), sequence=wall, issued=wall)
        return await transport.meet(CONTACTS[MEMBER], Hello(VERSION, self.run, record.wire))


@pytest.mark.parametrize(
    "damaged", ["", "run.toml", "run.toml.signature", pytest.param("-run.toml.signature", id="no signature")]
)
def test_returning_member_admits_former_peers_while_it_searches(tmp_path, damaged):
    """The founder is gone. A former peer that knocks gets the manifest of the run and ends the search.

    A stranger waits until then. So do all if the member cannot prove which run it is in: `damaged` names a stored file.
    """

    async def main():
        world = World(tmp_path)
        founder = world.admission(FOUNDER)
        assert not await founder.found(SIGNED, world.opener(FOUNDER))
        for admission in (await world.arrive(MEMBER), founder):
            await admission.close()
        folder = tmp_path / CONTACTS[MEMBER].address
        KnownPeersFile(folder / "anchors.json", RealDisk()).save([CONTACTS[FOUNDER], CONTACTS[FORMER]])
        if damaged:
            file = folder / damaged.strip("-")
            data = file.read_bytes()
            file.unlink() if damaged.startswith("-") else file.write_bytes(data + b"\n")
        search = asyncio.create_task(world.arrive(MEMBER))
        await asyncio.sleep(3.0)
        assert await world.knock(STRANGER) == BUSY
        told = await world.knock(FORMER)
        if damaged:
            assert told == BUSY
            with pytest.raises(NoSwarm):
                await search
            return
        assert SignedManifest(told.manifest, told.author, told.manifest_signature) == SIGNED
        returned = await search
        assert virtual_loop.current().time() < 6.0 and returned.known.signed == SIGNED
        assert isinstance(await world.knock(STRANGER), Welcome)
        await returned.close()

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize(
    ("manifest", "alone", "saved", "seconds"),
    [
        (NO_LINEAGES, True, True, BACK_SECONDS),  # it needs no lineage
        (SIGNED, True, True, BACK_SECONDS),  # the only member is the swarm
        (PAIRS, False, True, BACK_SECONDS),  # rounds of pairs need no other peer
        (SIGNED, False, True, SEARCH),  # one that has lost all links founds a lineage
        (SIGNED, True, False, None),  # without a state there is nothing to continue
        (NO_LINEAGES, False, True, None),
    ],
)
def test_returning_member_that_finds_no_other_peer_continues_from_its_checkpoint(
    tmp_path, manifest, alone, saved, seconds
):
    """`seconds`: of the search; None: it ends without a swarm."""

    async def main():
        world = World(tmp_path, manifest)
        founder = world.admission(FOUNDER)
        await founder.found(manifest, world.opener(FOUNDER))
        for admission in (await world.arrive(MEMBER), founder):
            await admission.close()
        folder = tmp_path / CONTACTS[MEMBER].address
        KnownPeersFile(folder / "anchors.json", RealDisk()).save([CONTACTS[FOUNDER]], alone=alone)
        if saved:
            (folder / "checkpoints").mkdir()
            (folder / "checkpoints" / LATEST).write_text("step-00000001")
        began = virtual_loop.current().time()
        if seconds is None:
            with pytest.raises(NoSwarm):
                await world.arrive(MEMBER)
            return
        returned = await world.arrive(MEMBER)
        assert seconds <= virtual_loop.current().time() - began < seconds + 3.0
        assert returned.known.signed == manifest and isinstance(await world.knock(STRANGER), Welcome)
        await returned.close()

    virtual_loop.run(main(), seed=1)


def test_founder_asks_the_absent_peers_of_its_book_too(tmp_path):
    """Those that were present refuse, so only the absent one can admit it."""

    async def main():
        world = World(tmp_path)
        founder = world.admission(FOUNDER)
        await founder.found(SIGNED, world.opener(FOUNDER))
        member = await world.arrive(MEMBER)
        await founder.close()
        book = KnownPeersFile(tmp_path / CONTACTS[FOUNDER].address / "anchors.json", RealDisk())
        book.save([CONTACTS[FORMER]], absent=[CONTACTS[MEMBER]])
        returned = world.admission(FOUNDER)
        assert await returned.found(SIGNED, world.opener(FOUNDER))
        for admission in (returned, member):
            await admission.close()

    virtual_loop.run(main(), seed=1)


def test_claims_of_a_welcome_are_not_passed_on(tmp_path):
    """A Welcome is not signed, so a false address would stay in the swarm for ever."""

    async def main():
        world, lost = World(tmp_path), CONTACTS[FORMER]
        book = KnownPeersFile(tmp_path / CONTACTS[FOUNDER].address / "anchors.json", RealDisk())
        book.save([lost], alone=True)
        founder = world.admission(FOUNDER)
        assert not await founder.found(SIGNED, world.opener(FOUNDER))
        assert founder.absent == [lost]
        member = await world.arrive(MEMBER)
        assert member.absent == []
        for admission in (member, founder):
            await admission.close()

    virtual_loop.run(main(), seed=1)
