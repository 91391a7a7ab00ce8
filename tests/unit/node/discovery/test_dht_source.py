"""The daemon's side of the DHT process, with a child that speaks the same protocol (tests/kit/programs/fake_dht.py)."""

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import kit
import pytest
from kit.planted.cards import NOW, RUN, card
from thinwire.node.discovery import dht_process, dht_source
from thinwire.node.discovery.dht_source import CARDS_KEY, DhtSource, child_command, run_key
from thinwire.node.discovery.public_runs import DirectoryError
from thinwire.node.runtime.disk import RealDisk
from thinwire.swarm.identity.errors import NotInstalled

CHILD = str(Path(*kit.__path__) / "programs" / "fake_dht.py")


BOOTSTRAP = "/ip4/192.0.2.1/tcp/1/p2p/first"


class Scene:
    def __init__(
        self,
        tmp_path,
        fault="",
        command=None,
        listen=("/ip4/127.0.0.1/tcp/0",),
        now=time.monotonic,
        bootstrap=(BOOTSTRAP,),
    ):
        self.folder, self.known = tmp_path / "starts", tmp_path / "home" / "dht-nodes.json"
        self.folder.mkdir(exist_ok=True)
        self.opened = []
        self.source = DhtSource(
            command or (sys.executable, CHILD, str(self.folder), *([fault] if fault else [])),
            bootstrap=bootstrap,
            listen=listen,
            known=self.known,
            disk=RealDisk(),
            rng=random.Random(1),
            now=now,
            opened=lambda addresses, begun: self.opened.append((addresses, begun)),
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
    assert first.opened == [(("/ip4/127.0.0.1/tcp/1/p2p/me",), False)]
    second = Scene(tmp_path, listen=())
    second.run(lambda source: source.cards())
    one, two = second.starts()
    assert one["bootstrap"] == one["again"] == two["again"] == [BOOTSTRAP] and not one["client"]
    assert two["bootstrap"] == [*one["bootstrap"], "/ip4/192.0.2.9/tcp/9/p2p/other"] and two["client"]
    second.known.write_bytes(b"\xff damaged")
    third = Scene(tmp_path)
    third.run(lambda source: source.cards())
    assert third.starts()[2]["bootstrap"] == one["bootstrap"]


def test_node_without_nodes_to_start_from_begins_a_directory(tmp_path):
    first, second = (Scene(tmp_path, bootstrap=()) for _ in range(2))
    for scenery in (first, second):  # The second one starts from the nodes that the first one has stored.
        scenery.run(lambda source: source.publish(card()))
    assert [begun for _, begun in first.opened + second.opened] == [True, False]
    assert [start["bootstrap"] for start in first.starts()] == [[], ["/ip4/192.0.2.9/tcp/9/p2p/other"]]


@pytest.mark.parametrize(
    ("bootstrap", "known", "hint"),
    [((BOOTSTRAP,), True, "check the bootstrap"), ((), True, "dht-nodes.json"), ((), False, "started again")],
)
def test_hint_names_the_source_of_the_addresses_where_no_node_answers(tmp_path, bootstrap, known, hint):
    scenery = Scene(tmp_path, "always-error", bootstrap=bootstrap)
    if known:
        scenery.known.parent.mkdir()
        scenery.known.write_text(json.dumps(["/ip4/192.0.2.9/tcp/9/p2p/other"]))
    with pytest.raises(DirectoryError) as caught:
        scenery.run(lambda source: source.publish(card()))
    assert hint in caught.value.hint


@pytest.mark.parametrize("fault", ["dies", "noise", "oversized", "nested", "error", "failing", "silent"])
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


def test_nodes_of_the_last_start_are_dialled_again_and_may_be_gone(tmp_path):
    """They were neighbours, and are no bootstrap addresses of the settings."""
    first = Scene(tmp_path, "lost", bootstrap=())
    first.known.parent.mkdir()
    first.known.write_text(json.dumps([BOOTSTRAP]))

    async def scene(source):
        await source.publish(card(1))
        first.known.write_text(json.dumps([BOOTSTRAP]))
        await source.publish(card(2))
        assert await source.find(b"o" * 32) == []
        assert first.known.read_text() != json.dumps([BOOTSTRAP]), "the next start has the present nodes"

    first.run(scene)
    (start,) = first.starts()
    assert start["again"] == [BOOTSTRAP]


def test_bootstrap_nodes_are_dialled_again_until_they_answer(tmp_path):
    first = Scene(tmp_path, "lost", bootstrap=(BOOTSTRAP,))
    first.known.parent.mkdir()
    first.known.write_text(json.dumps([BOOTSTRAP]))

    async def scene(source):
        await source.publish(card(1))
        known = first.known.read_text()
        first.known.write_text(json.dumps([BOOTSTRAP]))
        with pytest.raises(DirectoryError, match="no bootstrap node answers"):
            await source.publish(card(2))
        with pytest.raises(DirectoryError, match="no bootstrap node answers"):
            await source.find(b"o" * 32)  # An empty answer of a directory that works raises nothing.
        assert len(await source.cards()) == 2, "other nodes of the DHT have answered"
        assert first.known.read_text() == json.dumps([BOOTSTRAP]) != known
        await source.publish(card(2))
        assert json.loads(first.known.read_text()) == json.loads(known)
        return await source.cards()

    assert sorted(first.run(scene)) == sorted(card(number).wire for number in (1, 2))
    (start,) = first.starts()  # The process is not replaced.
    assert start["again"] == [BOOTSTRAP]


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


class Unreachable(Exception):
    """Error of hivemind."""


class Text(str):
    """Multiaddress of hivemind."""

    def __getitem__(self, name):
        return self.partition(f"/{name}/")[2]

    def decapsulate(self, end):
        return self.removesuffix(end)


@pytest.mark.parametrize(
    ("dialled", "answer", "reached"),
    [
        (None, b"id of a node", True),
        (None, None, False),
        (None, ValueError("nonsense"), False),
        (Unreachable(), b"id of a node", False),
        (ConnectionRefusedError(), b"id of a node", None),
    ],
)
def test_node_is_reached_if_it_can_be_dialled_and_answers(monkeypatch, dialled, answer, reached):
    """An error of our own daemon of libp2p is no answer about a node: it ends the process."""
    hivemind = SimpleNamespace(Multiaddr=Text, P2PDaemonError=Unreachable, PeerID=SimpleNamespace(from_base58=str))
    for name in ("hivemind", "hivemind.dht", "hivemind.dht.node", "hivemind.p2p"):
        monkeypatch.setitem(sys.modules, name, hivemind)
    seen = []

    def given(value):
        async def call(*arguments):
            seen.append(arguments)
            if isinstance(value, Exception):
                raise value
            return value

        return call

    client = SimpleNamespace(connect=given(dialled))
    node = dht_process.Node(
        SimpleNamespace(p2p=SimpleNamespace(_client=client), protocol=SimpleNamespace(call_ping=given(answer))),
        [BOOTSTRAP],
    )
    asked = node.answer({"do": "reach"})
    if reached is None:
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(asked)
    else:
        assert asyncio.run(asked) == {"reached": reached}
    assert seen == [("first", ["/ip4/192.0.2.1/tcp/1"]), *([] if dialled else [("first",)])]


@pytest.mark.parametrize(
    ("accepted", "found", "stored"),
    [(True, None, True), (False, {"mine": 1, "other": 1}, True), (False, {"other": 1}, False), (False, b"mine", False)],
)
def test_refused_value_counts_as_stored_if_it_can_be_read(accepted, found, stored):
    """A node with two ids in our tables refuses it the second time; a plain value with a later end hides it."""

    async def store(key, value, expires, subkey):
        return accepted

    async def get(key, latest):
        return found and SimpleNamespace(value=found)

    request = {"do": "store", "key": "key", "subkey": "mine", "value": "", "expires": 1}
    answer = dht_process.Node(SimpleNamespace(store=store, get=get), []).answer(request)
    assert asyncio.run(answer) == {"stored": stored}


def test_first_node_of_a_directory_has_no_nodes_to_reach():
    assert asyncio.run(dht_process.Node(None, []).answer({"do": "reach"})) == {"reached": True}


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
