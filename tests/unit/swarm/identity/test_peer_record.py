import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.swarm.identity import peer_record
from thinwire.swarm.identity.address import join_address, split_address
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord, RecordError
from thinwire.swarm.membership.self_record import OwnRecord

RUN = b"r" * 32
NOW = 1_700_000_000
ME = Identity.generate(b"1" * 32)
ADDRESSES = ("203.0.113.7:7700", "[2001:db8::1]:7700", "peer.example.org:1")


def make(**changes):
    values = {"run_id": RUN, "addresses": ADDRESSES, "sequence": 7, "issued": NOW, **changes}
    return PeerRecord.create(ME, **values)


def signed(body, identity=ME):
    data = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return data + identity.sign("record", data)


def body(**changes):
    values = {
        "format": 1,
        "run_id": RUN,
        "public_key": ME.public_key,
        "transport_key": ME.transport_public,
        "addresses": list(ADDRESSES),
        "capabilities": 0,
        "sequence": 7,
        "issued": NOW,
        "ttl": 3600,
        "token": b"",
    }
    assert set(changes) <= set(values)
    return list({**values, **changes}.values())


def test_peer_record_round_trips():
    record = make(capabilities=3, ttl=60)
    read = PeerRecord.parse(record.wire, run_id=RUN, now=NOW)
    assert read == record
    assert read.peer_id == ME.peer_id and read.transport_key == ME.transport_public and read.addresses == ADDRESSES
    assert (read.capabilities, read.sequence, read.issued, read.ttl) == (3, 7, NOW, 60)
    assert PeerRecord.parse(signed(body()), run_id=RUN, now=NOW) == make()
    assert make(addresses=()).addresses == ()


def test_peer_record_validity_allows_for_clock_error():
    wire = make(ttl=600).wire
    for now in (NOW - 120, NOW, NOW + 720):
        PeerRecord.parse(wire, run_id=RUN, now=now)
    for now, reason in ((NOW - 121, "future"), (NOW + 721, "expired"), (0, "future"), (2**63, "expired")):
        with pytest.raises(RecordError, match=reason):
            PeerRecord.parse(wire, run_id=RUN, now=now)


@pytest.mark.parametrize("field", ["sequence", "issued", "ttl"])
@pytest.mark.parametrize("value", [0, -1, 2**53, 2**63, 2**64 - 1, 1.0, True, None])
def test_peer_record_refuses_times_and_sequences_out_of_bounds(field, value):
    with pytest.raises(RecordError, match="malformed"):
        PeerRecord.parse(signed(body(**{field: value})), run_id=RUN, now=NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"ttl": 3601},
        {"issued": 2**32},
        {"format": 2},
        {"format": 0},
        {"capabilities": 2**32},
        {"capabilities": -1},
        {"public_key": b"k" * 31},
        {"transport_key": b"k" * 33},
        {"run_id": b""},
        {"addresses": ["1.2.3.4:5"] * 1000},
        {"addresses": [f"1.2.3.4:{i}" for i in range(1, 10)]},
        {"addresses": ["a." * 40 + "a:1"]},
        {"addresses": "1.2.3.4:5"},
        {"addresses": [b"1.2.3.4:5"]},
        {"token": bytes(601)},
        {"token": "text"},
    ],
)
def test_peer_record_refuses_values_out_of_bounds(changes):
    with pytest.raises(RecordError):
        PeerRecord.parse(signed(body(**changes)), run_id=RUN, now=NOW)


BAD_ADDRESSES = [
    "1.2.3.4",
    "1.2.3.4:0",
    "1.2.3.4:65536",
    "1.2.3.4:08",
    "1.2.3.4:5 ",
    "1.2.3.4:\u0665",
    "224.0.0.1:5",
    "255.255.255.255:5",
    "0.0.0.0:5",
    "169.254.169.254:80",
    "240.0.0.1:5",
    "2130706433:80",
    "0x7f.1:80",
    "127.1:80",
    "1.2.3:4",
    "[::]:5",
    "[ff02::1]:5",
    "[fe80::1]:5",
    "[::ffff:224.0.0.1]:5",
    "[::ffff:169.254.169.254]:5",
    "[1.2.3.4]:5",
    "::1:5",
    "[::1%eth0]:5",
    "a..b:5",
    "-a.example:5",
    "a_b:5",
    "peer@host:5",
    "a/b:5",
    ":5",
    "",
    "b\u00fccher.example:5",
    "a:5\n",
]


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_peer_record_refuses_unsafe_addresses(address):
    with pytest.raises(RecordError):
        PeerRecord.parse(signed(body(addresses=[address])), run_id=RUN, now=NOW)


def test_peer_record_accepts_valid_addresses():
    assert split_address("[2001:db8::1]:7") == ("2001:db8::1", 7) and split_address("node-1:65535") == ("node-1", 65535)
    assert join_address("::1", 7) == "[::1]:7" and join_address("1.2.3.4", 5) == "1.2.3.4:5"


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "172.16.0.1", "192.168.1.5", "100.64.0.1", "127.0.0.1", "[fd00::1]", "[::1]"]
)
def test_peer_record_accepts_addresses_of_local_networks_and_this_machine(host):
    address = f"{host}:7400"
    assert PeerRecord.parse(signed(body(addresses=[address])), run_id=RUN, now=NOW).addresses == (address,)


def test_peer_record_refuses_duplicate_address():
    with pytest.raises(RecordError, match="repeats"):
        make(addresses=("1.2.3.4:5", "1.2.3.4:5"))


def test_peer_record_refuses_wrong_run_key_or_bit():
    record = make()
    with pytest.raises(RecordError, match="another run"):
        PeerRecord.parse(record.wire, run_id=b"s" * 32, now=NOW)
    with pytest.raises(RecordError, match="signature"):
        PeerRecord.parse(signed(body(), Identity.generate(b"2" * 32)), run_id=RUN, now=NOW)
    other_use = msgspec.msgpack.encode(body())
    with pytest.raises(RecordError, match="signature"):
        PeerRecord.parse(other_use + ME.sign("message", other_use), run_id=RUN, now=NOW)
    for i in range(len(record.wire) * 8):
        bent = bytearray(record.wire)
        bent[i // 8] ^= 1 << i % 8
        with pytest.raises(RecordError):
            PeerRecord.parse(bytes(bent), run_id=RUN, now=NOW)


def test_peer_record_has_one_encoding():
    data = msgspec.msgpack.encode(body())
    assert data[:2] == b"\x9a\x01"
    for other in (
        b"\xdc\x00\x0a" + data[1:],
        b"\x9a\xcc\x01" + data[2:],
        data + b"\xc0",
        data[:-5] + b"\xce\x00\x00\x0e\x10\xc4\x00",
    ):
        with pytest.raises(RecordError, match="canonical|malformed"):
            PeerRecord.parse(signed(other), run_id=RUN, now=NOW)
    with pytest.raises(RecordError, match="malformed"):
        PeerRecord.parse(signed([*body(), 0]), run_id=RUN, now=NOW)
    with pytest.raises(RecordError, match="malformed"):
        PeerRecord.parse(signed(body()[:-1]), run_id=RUN, now=NOW)


@pytest.mark.parametrize("size", [0, 1, 64, 1280 + 65, 10**6])
def test_peer_record_checks_size_first(size):
    with pytest.raises(RecordError, match=f"{size} bytes"):
        PeerRecord.parse(b"\x99" * size, run_id=RUN, now=NOW)


@given(st.binary(min_size=65, max_size=400))
@settings(max_examples=100)
def test_random_bytes_are_no_peer_record(data):
    with pytest.raises(RecordError):
        PeerRecord.parse(data, run_id=RUN, now=NOW)


def test_peer_record_signature_is_verified_once(monkeypatch):
    calls = []
    real = peer_record.verify
    monkeypatch.setattr(peer_record, "verify", lambda *args: calls.append(args) or real(*args))
    wire = signed(body(sequence=123_456))
    for _ in range(3):
        PeerRecord.parse(bytearray(wire), run_id=RUN, now=NOW)
    assert len(calls) == 1
    with pytest.raises(RecordError, match="another run"):
        PeerRecord.parse(wire, run_id=b"s" * 32, now=NOW)
    bad = wire[:-1] + bytes([wire[-1] ^ 1])
    for _ in range(2):
        with pytest.raises(RecordError, match="signature"):
            PeerRecord.parse(bad, run_id=RUN, now=NOW)


@pytest.mark.parametrize(
    "changes", [{"sequence": 0}, {"sequence": 2**70}, {"ttl": 0}, {"addresses": ("nonsense",)}, {"run_id": b""}]
)
def test_peer_record_refuses_invalid_arguments(changes):
    with pytest.raises(ValueError):
        make(**changes)


def test_name_is_signed_renewed_and_bounded():
    record = make(name="the attic · 屋根裏")
    assert PeerRecord.parse(record.wire, run_id=RUN, now=NOW) == record and record.name == "the attic · 屋根裏"
    own = OwnRecord(ME, record, 1.0, lambda: NOW)
    own.renew(0.0, ADDRESSES[:1])
    assert own.record.name == record.name and own.record.addresses == ADDRESSES[:1]
    for name in ("x" * 65, "屋" * 22):
        with pytest.raises(RecordError, match="name|length"):
            make(name=name)
        with pytest.raises(RecordError, match="name|length"):
            PeerRecord.parse(signed([*body(), name]), run_id=RUN, now=NOW)
    with pytest.raises(RecordError, match="malformed"):
        PeerRecord.parse(signed([*body(), ""]), run_id=RUN, now=NOW)  # one record has one encoding
    assert make().wire[0] + 1 == record.wire[0], "a record without a name has no field for one"
