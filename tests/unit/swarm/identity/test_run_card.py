import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.planted.cards import NOW, RUN, card, identity, record
from thinwire.swarm.identity.peer_record import SKEW, RecordError
from thinwire.swarm.identity.run_card import CARD_BYTES, RunCard


def signed(body, number=1):
    data = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return data + identity(number).sign("card", data)


def body(**changes):
    values = {
        "format": 1,
        "run_id": RUN,
        "name": "demo",
        "model": "transformer-4x128",
        "method": "diloco",
        "admission": "open",
        "round": 7,
        "peers": 3,
        "loss": 2.5,
        "issued": NOW,
        "ttl": 180,
        "record": record(1).wire,
    }
    assert set(changes) <= set(values)
    return list({**values, **changes}.values())


def test_card_round_trips():
    made = card()
    assert RunCard.parse(made.wire, now=NOW) == made
    assert RunCard.parse(signed(body()), now=NOW) == made
    assert made.record == record(1) and made.record.addresses == ("192.0.2.1:7001",)
    said = made.description
    assert (made.run_id, said.name, said.round, said.peers, said.loss) == (RUN, "demo", 7, 3, 2.5)
    assert RunCard.parse(card(loss=None).wire, now=NOW).description.loss is None


def test_longest_card_fits():
    addresses = tuple(f"{'a' * 50}.n{number}:65535" for number in range(8))
    longest = card(
        addresses=addresses,
        name="n" * 64,
        model="m" * 32,
        method="m" * 32,
        admission="a" * 32,
        round=2**53 - 1,
        peers=2**20,
    )
    assert len(longest.wire) <= CARD_BYTES


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "malformed"),
        ({"run_id": b"x" * 31}, "malformed"),
        ({"name": ""}, "malformed"),
        ({"name": "a" * 65}, "malformed"),
        ({"name": "a\x1b[2J"}, "malformed"),
        ({"name": "demo\n"}, "malformed"),
        ({"model": "Über"}, "malformed"),
        ({"method": "diloco\n"}, "malformed"),
        ({"admission": "x" * 33}, "malformed"),
        ({"round": -1}, "malformed"),
        ({"round": 2**53}, "malformed"),
        ({"peers": 0}, "malformed"),
        ({"peers": 2**20 + 1}, "malformed"),
        ({"loss": math.nan}, "not finite"),
        ({"loss": -math.inf}, "not finite"),
        ({"loss": 2}, "canonical"),
        ({"ttl": 0}, "malformed"),
        ({"ttl": 3601}, "malformed"),
        ({"issued": 0}, "malformed"),
        ({"record": b""}, "malformed"),
        ({"record": b"x" * 100}, "malformed record"),
        ({"record": b"x" * 1500}, "malformed"),
        ({"run_id": b"q" * 32}, "another run"),
        ({"record": record(2).wire}, "bad signature of a card"),
        ({"record": record(1).wire[:-1] + b"x"}, "bad signature of a record"),
    ],
)
def test_wrong_value_is_refused(changes, said):
    with pytest.raises(RecordError, match=said):
        RunCard.parse(signed(body(**changes)), now=NOW)


def test_card_signed_by_another_peer_is_refused():
    with pytest.raises(RecordError, match="bad signature of a card"):
        card(1, signer=2)
    with pytest.raises(RecordError, match="bad signature of a card"):
        RunCard.parse(card().wire[:-64] + record(1).wire[-64:], now=NOW)  # a signature of another domain


def test_validity_ends_with_the_card_or_with_its_record():
    made = card(ttl=60)
    RunCard.parse(made.wire, now=NOW - SKEW)
    RunCard.parse(made.wire, now=NOW + 60 + SKEW)
    for now, said in ((NOW - SKEW - 1, "in the future"), (NOW + 61 + SKEW, "card expired")):
        with pytest.raises(RecordError, match=said):
            RunCard.parse(made.wire, now=now)
    old = body(issued=NOW + 3600, ttl=3600)
    with pytest.raises(RecordError, match="record expired"):
        RunCard.parse(signed(old), now=NOW + 3601 + SKEW)


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"x" * 64,
        b"x" * (CARD_BYTES + 1),
        signed(body() + [1]),
        signed(body()[:-1]),
        signed({"name": "demo"}),
        signed(b"\x91" * 1500),
        signed(msgspec.msgpack.encode(body()) + b"\xc0"),
        signed(msgspec.msgpack.encode(body()).replace(b"\x9c", b"\xdc\x00\x0c", 1)),  # another form of the length
    ],
)
def test_malformed_card_is_refused(wire):
    with pytest.raises(RecordError):
        RunCard.parse(wire, now=NOW)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=700), st.integers(0, 600), st.booleans())
def test_changed_bytes_are_refused(noise, place, whole):
    wire = card().wire
    changed = noise if whole else wire[:place] + noise[:3] + wire[place + 3 :]
    if changed != wire:
        with pytest.raises(RecordError):
            RunCard.parse(changed, now=NOW)
