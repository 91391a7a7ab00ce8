"""The daemon's side of the DHT process, with a child that speaks the same protocol (tests/kit/programs/fake_dht.py)."""

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

import kit
import pytest
from kit.planted.cards import NOW, RUN, card
from thinwire.node.discovery import dht_process, dht_source
from thinwire.node.discovery.dht_source import CARDS_KEY, DhtSource, child_command, run_key
from thinwire.node.discovery.public_runs import DirectoryError, NotInstalled
from thinwire.node.runtime.disk import RealDisk

CHILD = str(Path(*kit.__path__) / "programs" / "fake_dht.py")


class Scene:
    def __init__(self, tmp_path, fault="", command=None, listen=("/ip4/127.0.0.1/tcp/0",), now=time.monotonic):
        self.folder, self.known = tmp_path / "starts", tmp_path / "home" / "dht-nodes.json"
        self.folder.mkdir(exist_ok=True)
        self.opened = []
        self.source = DhtSource(
            command or (sys.executable, CHILD, str(self.folder), *([fault] if fault else [])),
            bootstrap=["/ip4/192.0.2.1/tcp/1/p2p/first"],
            listen=listen,
            known=self.known,
            disk=RealDisk(),
            rng=random.Random(1),
            now=now,
            opened=self.opened.append,
        )

    def starts(self):
        return [json.loads(file.read_text()) for file in sorted(self.folder.iterdir())]

    def run(self, scene):
        async def all_of_it():
            try:
                return await scene(self.source)
            finally:
                await self.source.close()

        return asyncio.run(all_of_it())


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(dht_source, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(dht_source, "ANSWER_SECONDS", 20.0)


def test_card_is_found_under_its_run_and_among_all_cards(tmp_path):
    async def scene(source):
        for number in (1, 2):
            await source.publish(card(number))
        return await source.find(RUN), await source.cards(), await source.find(b"o" * 32)

    of_run, all_of_them, of_other = Scene(tmp_path).run(scene)
    assert sorted(of_run) == sorted(all_of_them) == sorted(card(number).wire for number in (1, 2))
    assert of_other == []
    assert RUN.hex() not in run_key(RUN) != CARDS_KEY


def test_child_gets_bootstrap_addresses_and_nodes_seen_before(tmp_path):
    first = Scene(tmp_path)
    first.run(lambda source: source.publish(card()))
    assert first.opened == [("/ip4/127.0.0.1/tcp/1/p2p/me",)]
    second = Scene(tmp_path, listen=())
    second.run(lambda source: source.cards())
    one, two = second.starts()
    assert one["bootstrap"] == ["/ip4/192.0.2.1/tcp/1/p2p/first"] and not one["client"]
    assert two["bootstrap"] == [*one["bootstrap"], "/ip4/192.0.2.9/tcp/9/p2p/other"] and two["client"]
    second.known.write_bytes(b"\xff damaged")
    third = Scene(tmp_path)
    third.run(lambda source: source.cards())
    assert third.starts()[2]["bootstrap"] == one["bootstrap"]


@pytest.mark.parametrize("fault", ["dies", "noise", "oversized", "nested", "error", "silent"])
def test_broken_child_is_replaced(tmp_path, fault, monkeypatch):
    if fault == "silent":
        monkeypatch.setattr(dht_source, "ANSWER_SECONDS", 0.3)

    async def scene(source):
        with pytest.raises(DirectoryError):
            await source.publish(card())
        monkeypatch.setattr(dht_source, "ANSWER_SECONDS", 20.0)
        await source.publish(card())
        return await source.find(RUN)

    scenery = Scene(tmp_path, fault)
    assert scenery.run(scene) == [card().wire]
    starts = scenery.starts()
    assert len(starts) == 2
    for start in starts:  # neither is left
        with pytest.raises(ProcessLookupError):
            os.kill(start["process"], 0)


def test_child_killed_between_two_requests_is_replaced(tmp_path):
    async def scene(source):
        await source.publish(card())
        child = source.process
        os.kill(child, 9)
        while source.process is not None:
            await asyncio.sleep(0.01)
        await source.publish(card())
        return child, source.process

    before, after = Scene(tmp_path).run(scene)
    assert before != after


def test_waits_between_starts_double_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.undo()
    waits, loops, real = [], [], asyncio.sleep

    async def sleep(seconds):
        if asyncio.get_running_loop() in loops:  # Loops of other tests may still run in other threads.
            waits.append(seconds)
        else:
            await real(seconds)

    monkeypatch.setattr(dht_source.asyncio, "sleep", sleep)

    async def scene(source):
        loops.append(asyncio.get_running_loop())
        for _ in range(12):
            with pytest.raises(DirectoryError, match="cannot start"):
                await source.cards()

    # The clock stands still, so each wait is whole.
    Scene(tmp_path, command=[str(tmp_path / "absent")], now=lambda: 0.0).run(scene)
    whole = [min(60.0, 2.0**count) for count in range(11)]
    assert len(waits) == 11 and all(one / 2 <= wait <= one for one, wait in zip(whole, waits, strict=True))


def test_missing_hivemind_is_told_with_a_hint(monkeypatch):
    real = dht_source.importlib.util.find_spec
    monkeypatch.setattr(dht_source.importlib.util, "find_spec", lambda name: None if name == "hivemind" else real(name))
    with pytest.raises(NotInstalled) as caught:
        child_command("")
    assert "directory_python" in caught.value.hint
    assert child_command("elsewhere") == ("elsewhere", dht_process.__file__)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (b"\xc4\x03abc", True),
        (b"\xc5\x00\x03abc", True),
        (b"\xc5\x08\x00" + b"x" * 2048, True),
        (b"\xc5\x08\x01" + b"x" * 2049, False),
        (b"\xc4\x04abc", False),
        (b"\xc4\x02abc", False),
        (b"\xc4", False),
        (b"\xc5\x00", False),
        (b"", False),
        (b"\xc0", False),
        (b"\xc7\x03\x40abc", False),
        (b"\x91" * 200 + b"\xc0", False),
    ],
)
def test_only_plain_bytes_reach_the_deserializer(value, plain):
    assert dht_process.is_plain(value) is plain


def test_card_is_plain_bytes_of_the_dht():
    import msgspec

    assert dht_process.is_plain(msgspec.msgpack.encode(card().wire)) and card().issued == NOW
