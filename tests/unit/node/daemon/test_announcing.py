"""Publication of a run: messages to its owner, and the search for other publishers."""

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.collectives.transport.interface import Contact
from thinwire.node.daemon import announcing
from thinwire.node.discovery.public_runs import DirectoryError
from thinwire.node.peer.reporter import Reporter
from thinwire.swarm.manifest.parser import parse


@pytest.mark.parametrize(("mode", "invite"), [("open", False), ("invited", True), ("closed", True)])
def test_owner_is_told_that_an_entry_of_a_directory_is_no_invite(monkeypatch, mode, invite):
    told = []

    async def announce(directory, card, published, addresses):
        await published(True)
        await published(True)

    async def main():
        monkeypatch.setattr(announcing, "open_directory", lambda config, **settings: SimpleNamespace())
        monkeypatch.setattr(announcing, "announce", announce)
        report = SimpleNamespace(emit=lambda name, fields: told.append((name, fields["detail"])))
        run = announcing.Announcing(None, report, public=False, lan=True)
        run.begin(lambda: SimpleNamespace(ready=False, manifest=parse(f'[admission]\nmode = "{mode}"')))
        await asyncio.sleep(0)

    asyncio.run(main())
    ((name, detail),) = told
    assert name == "published" and detail.startswith("the run is in the directory")
    assert ("invite" in detail) == invite == (f"admission.mode = '{mode}'" in detail)


@pytest.mark.parametrize("begun", [False, True])
def test_owner_is_told_that_others_need_the_address_of_a_directory_that_this_peer_has_begun(monkeypatch, begun):
    told = []
    report = Reporter(lambda kind, fields: told.append((kind, fields["detail"])), wall=lambda: 0.0)

    async def main():
        given = {}
        monkeypatch.setattr(announcing, "open_directory", lambda config, **settings: given.update(settings))

        async def announce(directory, card, published, addresses):
            given["opened"](("/ip4/192.0.2.1/tcp/1/p2p/me",), begun)
            await published(True)

        monkeypatch.setattr(announcing, "announce", announce)
        run = announcing.Announcing(None, report, public=True, lan=False)
        run.begin(lambda: SimpleNamespace(ready=False, manifest=parse('[admission]\nmode = "open"')))
        await asyncio.sleep(0)

    asyncio.run(main())
    assert [(kind, "--bootstrap" in detail) for kind, detail in told] == [("directory", begun), ("published", begun)]


def test_addresses_of_the_next_card_are_unknown_while_the_peer_changes_its_stage(monkeypatch):
    """Then there is another peer, which has no session and no links yet."""
    seen = []

    async def announce(directory, card, published, addresses):
        nonlocal peer
        seen.append(addresses())
        peer = SimpleNamespace(ready=False)
        seen.extend((card(), addresses()))

    roster = SimpleNamespace(record=SimpleNamespace(addresses=("192.0.2.1:7400",)))
    peer = SimpleNamespace(ready=True, session=SimpleNamespace(roster=roster))

    async def main():
        directory = SimpleNamespace(wall=lambda: 1_750_000_000.0)
        monkeypatch.setattr(announcing, "open_directory", lambda config, **settings: directory)
        monkeypatch.setattr(announcing, "announce", announce)
        run = announcing.Announcing(None, SimpleNamespace(loss=None), public=False, lan=True)
        run.begin(lambda: peer)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == [("192.0.2.1:7400",), None, ()]


def test_directory_that_fails_and_works_again_is_told_once_each(monkeypatch):
    """It is told again for another reason; the status has the alarm until the end."""
    said, shown = [], []
    report = Reporter(lambda kind, fields: said.append((kind, fields["detail"])), wall=lambda: 0.0)

    async def main():
        given = {}
        monkeypatch.setattr(announcing, "open_directory", lambda config, **settings: given.update(settings))

        async def announce(directory, card, published, addresses):
            for reason in ("", "cold", "cold", "wet", "cold", "", "", "cold"):
                if reason:
                    given["warn"](f"DHT: {reason}")
                await published(not reason)
                shown.append(report.alarm)

        monkeypatch.setattr(announcing, "announce", announce)
        announcing.Announcing(None, report, public=True, lan=False).begin(
            lambda: SimpleNamespace(ready=False, manifest=parse('[admission]\nmode = "open"'))
        )
        await asyncio.sleep(0)

    asyncio.run(main())
    cold, wet = (f"the directory fails: DHT: {reason}" for reason in ("cold", "wet"))
    assert said == [
        ("published", "the run is in the directory"),
        ("directory", "unreachable"),
        ("alarm", cold),
        ("alarm", wet),
        ("directory", "reachable again"),
        ("alarm_over", "the directory can be reached again"),
        ("alarm_over", "the directory can be reached again"),
        ("directory", "unreachable"),
        ("alarm", cold),
    ]
    assert shown == ["", cold, cold, wet, wet, "", "", cold]


@pytest.mark.parametrize("live", [(), (b"other",)])
@pytest.mark.parametrize("fails", [False, True])
def test_peer_without_links_dials_the_other_publishers_of_its_run(monkeypatch, live, fails):
    """They, or this peer, may have another address than before."""
    dialled, run_id = [], bytes([9]) * 32
    records = [
        SimpleNamespace(peer_id=bytes([n]) * 32, addresses=(f"192.0.2.{n}:7400",), transport_key=b"k") for n in (1, 2)
    ]

    async def find(wanted):
        assert wanted == run_id
        if fails:
            raise DirectoryError("no directory can be read")
        return [SimpleNamespace(record=record) for record in records]

    async def dial(contacts):
        dialled.extend(contacts)

    async def announce(directory, card, published, addresses):
        await published(False)

    async def main():
        directory = SimpleNamespace(find=find)
        monkeypatch.setattr(announcing, "open_directory", lambda config, **settings: directory)
        monkeypatch.setattr(announcing, "announce", announce)
        peer = SimpleNamespace(
            ready=True,
            run_id=run_id,
            presence=SimpleNamespace(live=live),
            identity=SimpleNamespace(peer_id=records[0].peer_id),
            admission=SimpleNamespace(dial=dial),
        )
        announcing.Announcing(None, SimpleNamespace(), public=False, lan=True).begin(lambda: peer)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert dialled == ([] if live or fails else [Contact("192.0.2.2:7400", b"k")])
