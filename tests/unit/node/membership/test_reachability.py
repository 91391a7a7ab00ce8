"""Announced addresses of a peer after others have told it how they see it."""

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.collectives.transport.addresses.observed_addresses import Reach, Sighting
from thinwire.node.membership.reachability import AGAIN_SECONDS, CHECK_SECONDS, RETRY_SECONDS, Reachability, chosen
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.messages.registry import Refuse

OWN = ("192.168.0.5:7400",)


def record(number, *addresses):
    return SimpleNamespace(addresses=addresses, transport_key=bytes([number]) * 32)


class World:
    """A roster and a transport whose gates see us at `seen`; None: they do not answer."""

    def __init__(self, own=OWN, seen="198.51.7.9"):
        self.own, self.seen, self.asked, self.events, self.updates = own, seen, [], [], []
        self.peers, self.live, self.known = self, self, {}
        self.record = SimpleNamespace(addresses=own)
        self.left = False

    def addresses(self):
        return self.own

    @property
    def view(self):
        return SimpleNamespace(number=len(self.known))

    @property
    def others(self):
        return list(self.known)

    def changed_since(self, number):
        return list(self.known)[number:] if number >= 0 else None

    def records(self, peers):
        return [self.known[peer] for peer in peers]

    def update(self, addresses, now):
        self.record = SimpleNamespace(addresses=addresses)
        self.updates.append(addresses)

    async def observe(self, contacts, *, port=0, size=0):
        self.asked.append([contact.address for contact in contacts])
        if self.seen is None:
            return [Refuse("unreachable", "")] * len(contacts)
        return [
            Sighting(contact.address, "192.168.0.5:50000", f"{self.seen}:50000", True, 7400) for contact in contacts
        ]

    def run(self, play):
        async def main():
            now = virtual_loop.current().time
            reachability = Reachability(self, self, now=now, emit=lambda kind, fields: self.events.append(kind))
            watch = asyncio.create_task(reachability.watch())
            await play(reachability)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            return watch.cancelled()

        return virtual_loop.run(main(), seed=1)


def test_believed_address_is_announced_first_and_taken_back():
    world = World()

    async def play(reachability):
        await asyncio.sleep(10)
        assert not world.asked and not world.updates, "there is no peer to ask"
        world.known = {1: record(1, "45.1.1.1:7400", "10.0.0.1:7400"), 2: record(2, "45.2.1.1:7400"), 3: record(3)}
        await asyncio.sleep(2 * CHECK_SECONDS)
        assert world.asked == [["45.1.1.1:7400", "45.2.1.1:7400"]]
        assert world.updates == [("198.51.7.9:7400", *OWN)] and world.events == ["reach"]
        assert reachability.reach == Reach("cone", "198.51.7.9:7400", True)
        world.seen = None
        await asyncio.sleep(AGAIN_SECONDS)
        assert len(world.asked) == 2 and len(world.updates) == 1, "silence changes nothing"
        world.seen = "192.168.0.5"
        await asyncio.sleep(AGAIN_SECONDS)
        assert world.updates[1:] == [OWN] and world.events == ["reach", "reach"]

    assert world.run(play)


def test_peer_of_another_subnet_is_asked_at_once():
    world = World()

    async def play(reachability):
        world.known = {1: record(1, "45.1.1.1:7400")}
        await asyncio.sleep(2 * CHECK_SECONDS)
        assert reachability.reach.nat == "unknown"
        world.known[2] = record(2, "45.1.1.2:7400")
        await asyncio.sleep(2 * CHECK_SECONDS)
        assert len(world.asked) == 1
        world.known[3] = record(3, "45.3.1.1:7400")
        await asyncio.sleep(2 * CHECK_SECONDS)
        assert len(world.asked) == 2 and reachability.reach.nat == "cone"

    assert world.run(play)


def test_newcomers_of_known_subnets_are_not_asked_at_once():
    world = World()

    async def play(reachability):
        world.known = {number: record(number, f"45.1.1.{number}:7400") for number in range(1, 6)}
        await asyncio.sleep(2 * CHECK_SECONDS)
        world.known |= {number: record(number, f"45.1.1.{number}:7400") for number in range(6, 9)}
        await asyncio.sleep(2 * CHECK_SECONDS)
        assert len(world.asked) == 1
        world.known[9] = record(9, "45.2.1.1:7400")
        await asyncio.sleep(2 * CHECK_SECONDS)
        assert len(world.asked) == 2 and "45.2.1.1:7400" in world.asked[1]

    world.run(play)


def test_other_peers_are_asked_each_time():
    world = World()

    async def play(reachability):
        world.known = {number: record(number, f"45.{number}.1.1:7400") for number in range(1, 10)}
        await asyncio.sleep(2 * AGAIN_SECONDS + 3 * CHECK_SECONDS)

    world.run(play)
    asked = [[int(address.split(".")[1]) for address in addresses] for addresses in world.asked]
    assert asked == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3]]


def test_swarm_of_one_machine_is_not_asked():
    world = World(own=("127.0.0.1:7400",))

    async def play(reachability):
        world.known = {1: record(1, "127.0.0.1:7401")}
        await asyncio.sleep(1000)

    world.run(play)
    assert not world.asked


def test_new_address_of_this_machine_is_announced_and_the_others_are_asked_about_it():
    """Their earlier answers concern the old address, which stays while there is no network."""
    world, moved = World(), ("10.9.0.7:7400",)

    async def play(reachability):
        world.known = {1: record(1, "45.1.1.1:7400"), 2: record(2, "45.2.1.1:7400")}
        await asyncio.sleep(2 * CHECK_SECONDS)
        assert world.record.addresses == ("198.51.7.9:7400", *OWN)
        world.own, world.seen = ("127.0.0.1:7400",), None
        await asyncio.sleep(2 * CHECK_SECONDS)
        assert world.record.addresses == ("198.51.7.9:7400", *OWN) and len(world.asked) == 1
        world.own = ("10.9.0.8:7400",)
        await asyncio.sleep(CHECK_SECONDS)
        world.own = moved
        await asyncio.sleep(2.5 * CHECK_SECONDS)
        assert world.updates == [("198.51.7.9:7400", *OWN), moved], "an address counts at the second look"
        assert len(world.asked) == 2
        world.seen = "203.0.114.5"
        await asyncio.sleep(RETRY_SECONDS + CHECK_SECONDS)
        assert world.record.addresses == ("203.0.114.5:7400", *moved)

    assert world.run(play)


def test_peer_that_began_without_a_network_announces_the_address_that_it_gets():
    world = World(own=("127.0.0.1:7400",))

    async def play(reachability):
        await asyncio.sleep(10 * CHECK_SECONDS)
        world.own = OWN
        await asyncio.sleep(2.5 * CHECK_SECONDS)
        assert world.updates == [OWN]

    assert world.run(play)


def test_a_peer_that_has_left_announces_nothing():
    world = World()

    async def play(reachability):
        world.known, world.left = {1: record(1, "45.1.1.1:7400")}, True
        await asyncio.sleep(10)

    world.run(play)
    assert world.asked and not world.updates


@pytest.mark.parametrize("most", [1, 2, 4])
def test_one_peer_of_each_subnet_is_chosen(most):
    records = [
        record(1),
        record(2, "45.1.1.1:1"),
        record(3, "45.1.1.2:1"),
        record(4, "[2a00:1::1]:1"),
        record(5, "a.b:1"),
    ]
    addresses = [contact.address for contact in chosen(records, most)]
    assert addresses == ["45.1.1.1:1", "[2a00:1::1]:1", "a.b:1"][:most]


def test_choice_ends_when_it_is_complete():
    records = (record(number, f"45.{number}.1.1:1") for number in range(1, 9))
    assert len(chosen(records, 3)) == 3
    assert len(list(records)) == 5, "the records after the third are not looked at"
