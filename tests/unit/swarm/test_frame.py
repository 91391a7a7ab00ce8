import math
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect
from thinwire.collectives.consensus.certificates import compact
from thinwire.swarm.frame import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Frame,
    FrameError,
    UnknownType,
    VersionError,
    decode,
    encode,
    parse_header,
    sign_message,
    verify_message,
)
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages import wire_form
from thinwire.swarm.messages.registry import (
    LIFE,
    MAX_CHUNKS,
    MAX_FAREWELLS,
    MAX_GROUP,
    MAX_PROPOSALS,
    MAX_TOKEN,
    NUMBERS,
    TYPES,
    VERSION,
    Ballot,
    Base,
    Chunk,
    Commit,
    Contribution,
    Exclusion,
    Farewell,
    Found,
    Gossip,
    Head,
    Hello,
    Leave,
    MemberProof,
    Message,
    Nack,
    Ping,
    Promise,
    Proof,
    Proposal,
    Propose,
    Ready,
    Report,
    ResultRecord,
    StateChunk,
    StateOffer,
    Vote,
)

RUN = b"r" * 32
ME, OTHER = Identity.generate(b"1" * 32), Identity.generate(b"2" * 32)
KINDS = list(TYPES.values())
SIGNED = [kind for kind in KINDS if kind.signed]
BALLOT = Ballot(1, b"l" * 32)


def tidy_proposal(proposal: Proposal) -> Proposal:
    """Return a proposal with sorted peers, of which each contributor has an announcement."""
    entries = {entry.peer: msgspec.structs.replace(entry, announced=bytes(32)) for entry in proposal.contributors}
    lists = ("group", "alive", "sources", "idle", "kept")
    return msgspec.structs.replace(
        proposal,
        contributors=tuple(entries[peer] for peer in sorted(entries)),
        excluded=tuple(
            sorted({entry.peer: entry for entry in proposal.excluded}.values(), key=lambda entry: entry.peer)
        ),
        **{name: tuple(sorted(set(getattr(proposal, name)))) for name in lists},
    )


def tidy_commit(commit: Commit) -> Commit:
    """Return a commit with votes of peers that its proposal names."""
    named = zip(commit.proposal.packed.table, commit.votes, strict=False)
    votes = tuple(msgspec.structs.replace(vote, peer=peer) for peer, vote in named)
    return msgspec.structs.replace(commit, votes=votes)


def values(info: inspect.Type) -> st.SearchStrategy:
    """Small values of a field, as its schema allows them."""
    match info:
        case inspect.IntType():
            return st.integers(info.ge, info.le)
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.StrType():
            return st.text(max_size=min(info.max_length, 8))
        case inspect.BytesType():
            least = info.min_length or 0
            return st.binary(min_size=least, max_size=max(least, min(info.max_length, 32)))
        case inspect.VarTupleType():
            return st.lists(values(info.item_type), min_size=info.min_length or 0, max_size=3).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(values, info.item_types))
        case inspect.UnionType():
            return st.one_of(*map(values, info.types))
        case inspect.StructType():
            tidy = {Proposal: tidy_proposal, Commit: tidy_commit}.get(info.cls, lambda value: value)
            return st.builds(info.cls, *(values(field.type) for field in info.fields)).map(tidy)
    raise AssertionError(f"no strategy for {info}")


def messages(kind: type[Message]) -> st.SearchStrategy:
    return values(inspect.type_info(kind))


any_message = st.one_of(*map(messages, KINDS))


def read(wire, payload=b"", public_key=ME.public_key, run_id=RUN):
    header = parse_header(wire[:HEADER_BYTES])
    return decode(header, wire[HEADER_BYTES:], payload, public_key=public_key, run_id=run_id)


def wire_of(kind, body, payload=b"", identity=ME, run_id=RUN):
    """Return a frame of a liar: any body under an honest header, correctly signed."""
    head = HEADER.pack(MAGIC, VERSION, NUMBERS[kind], 0, len(body), len(payload))
    try:
        stated = wire_form.decode(kind, body).statement()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        stated = None
    if stated is not None and type(stated) is not kind:
        kind_said, said = type(stated), msgspec.msgpack.encode(stated)
    else:
        kind_said, said = kind, body
    parts = run_id, NUMBERS[kind_said].to_bytes(2, "big"), said, blake3(payload).digest()
    return head + body + (identity.sign("message", *parts) if kind.signed else b"")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_frame_round_trips(kind, data):
    message = data.draw(messages(kind))
    payload = data.draw(st.binary(max_size=64)) if kind.payload else b""
    wire = encode(Frame(message, payload), ME, RUN)
    header = parse_header(wire[:HEADER_BYTES])
    assert header.kind is kind and header.payload == len(payload)
    assert len(wire) == HEADER_BYTES + header.rest and header.rest == header.body + 64 * kind.signed
    frame = read(wire, payload)
    assert frame.message == message and frame.payload is payload and len(frame.signature) == 64 * kind.signed
    assert wire == wire_of(kind, wire[HEADER_BYTES:][: header.body], payload)
    bulk = bool(kind.payload) and not kind.signed
    assert frame.digest == (blake3(payload).digest() if bulk else b"") and frame.hashed() == blake3(payload).digest()
    assert encode(frame, None, RUN) == wire, "a relay passes on the same bytes"


@given(any_message, st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_bytes_raise_only_frame_error(message, data):
    wire = bytearray(encode(Frame(message), ME, RUN))
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(wire) - 1))
        change = data.draw(st.sampled_from(["set", "cut", "add"]))
        if change == "set":
            wire[i] = data.draw(st.integers(0, 255))
        elif change == "cut":
            del wire[i]
        else:
            wire.insert(i, data.draw(st.integers(0, 255)))
        if not wire:
            break
    try:
        frame = read(bytes(wire))
    except FrameError:
        return
    assert encode(frame, None, RUN) == wire, "what is accepted is some message's one encoding"


@given(any_message, st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_signed_bodies_raise_only_frame_error(message, data):
    body = bytearray(wire_form.encode(message))
    i = data.draw(st.integers(0, len(body) - 1))
    body[i : i + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        frame = read(wire_of(type(message), bytes(body)))
    except FrameError:
        return
    assert wire_form.encode(frame.message) == body


@given(st.sampled_from(KINDS), st.binary(min_size=1, max_size=100))
@settings(max_examples=150, deadline=None)
def test_random_bodies_raise_only_frame_error(kind, body):
    try:
        frame = read(wire_of(kind, body))
    except FrameError:
        return
    assert wire_form.encode(frame.message) == body


@given(st.binary(max_size=32))
def test_random_headers_raise_only_frame_error(data):
    with pytest.raises(FrameError):
        parse_header(data)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_length_above_type_limit_is_refused(kind):
    def header(body, payload):
        return HEADER.pack(MAGIC, VERSION, NUMBERS[kind], 0, body, payload)

    assert parse_header(header(kind.limit, kind.payload)) == (kind, kind.limit, kind.payload)
    for body, payload in [(0, 0), (kind.limit + 1, 0), (2**32 - 1, 0), (1, kind.payload + 1), (1, 2**32 - 1)]:
        with pytest.raises(FrameError, match="limit"):
            parse_header(header(body, payload))


def test_header_of_other_protocol_version_or_type_is_refused():
    with pytest.raises(FrameError, match="not a thinwire"):
        parse_header(b"GET / HTTP/1.1\r\n")
    with pytest.raises(VersionError, match=f"version {VERSION + 1}, we use {VERSION}") as version:
        parse_header(HEADER.pack(MAGIC, VERSION + 1, 1, 0, 1, 0))
    assert version.value.theirs == VERSION + 1
    for flags, optional in ((0, False), (1, True)):
        with pytest.raises(UnknownType) as unknown:
            parse_header(HEADER.pack(MAGIC, VERSION, 250, flags, 1, 0))
        assert unknown.value.optional is optional
    for flags in (1, 2, 255):
        with pytest.raises(FrameError, match="flags"):
            parse_header(HEADER.pack(MAGIC, VERSION, 1, flags, 1, 0))


def test_length_claims_do_not_allocate():
    bombs = [
        struct.pack("!BI", 0xDD, 2**32 - 1),
        struct.pack("!BI", 0xDF, 2**32 - 1),
        struct.pack("!BI", 0xDB, 2**32 - 1),
        struct.pack("!BI", 0xC6, 2**32 - 1),
        struct.pack("!BI", 0xC9, 2**32 - 1),
        b"\x91" + struct.pack("!BI", 0xDD, 2**31),
    ]
    wires = [wire_of(kind, bomb) for bomb in bombs for kind in (Gossip, Chunk, Hello)]
    huge = HEADER.pack(MAGIC, VERSION, NUMBERS[Chunk], 0, 64, 2**32 - 1)
    tracemalloc.start()
    try:
        for wire in wires:
            with pytest.raises(FrameError):
                read(wire)
        with pytest.raises(FrameError):
            parse_header(huge)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


NESTED_EXT = b""
for _ in range(200):
    NESTED_EXT = struct.pack("!BHB", 0xC8, len(NESTED_EXT), 1) + NESTED_EXT


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 1024,
        b"\x91" * 1100 + b"\xc0",
        b"\x81\xa1a" * 300 + b"\xc0",
        b"\x91" * 9 + b"\xc0",
        NESTED_EXT,
        b"\x91" + NESTED_EXT,
        b"\xdc\x04\x00" * 400,
        b"\x91\xdc\x04\x01" + b"\xc0" * 1025,
        b"\x91\xdc\x04\x00" + b"\x80" * 1024,
        b"\x91\x81\x01\x02",
        b"\x91\x82\xa1a\x01\xa1a\x02",
        b"\x91\xa2\xff\xfe",
        b"\x91\x91\xc4\x05abcd",
        b"\x90\x00",
        b"\xc1",
        b"\x91\xd4\x01\x00",
        b"\x91\xd6\xff\x00\x00\x00\x00",
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", [Gossip, Ping, Hello, Propose, Commit, Chunk], ids=lambda kind: kind.__name__)
def test_structure_bombs_are_refused(kind, body):
    body = body[: kind.limit]
    with pytest.raises(FrameError):
        read(wire_of(kind, body))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x91" * 9 + b"\xc0", "deeper than 8"),
        (b"\x91" * 8 + b"\xc0", "malformed Gossip"),
        (b"\x91\x91\xdc\x04\x01" + b"\xc0" * 1025, "max_array_len"),
        (b"\x91\x81\xa1a\x01", "max_map_len"),
        (b"\x91\xda\x04\x01" + b"a" * 1025, "max_str_len"),
        (b"\x91\xc7\x01\x05a", "max_ext_len"),
        (b"\x91\xd4\x05a", "max_ext_len"),
        (b"\x91\xc6\x00\x01\x00\x01" + b"a" * 99, "No more data"),
        (b"\x91\x90\x00", "after the message"),
        (b"\x91\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00", "not finite"),
        (b"\x91\xa2\xff\xfe", "utf-8"),
    ],
    ids=repr,
)
def test_structure_is_checked_before_decoding(body, reason):
    with pytest.raises(FrameError, match=reason):
        read(wire_of(Gossip, body))


def test_full_size_depth_bombs_are_refused():
    for unit in (b"\x91", b"\x81\xa1a", b"\xdc\x04\x00", b"\x9f", b"\xc7\xff\x01"):
        with pytest.raises(FrameError):
            read(wire_of(Commit, (unit * Commit.limit)[: Commit.limit]))


def test_ten_megabytes_of_empty_maps_are_refused_by_length():
    body = b"\xdd" + struct.pack("!I", 10_000_000) + b"\x80" * 10_000_000
    for kind in KINDS:
        with pytest.raises(FrameError, match="limit"):
            parse_header(HEADER.pack(MAGIC, VERSION, NUMBERS[kind], 0, len(body), 0))


def test_message_has_one_encoding():
    body = msgspec.msgpack.encode(Nack(7))
    assert body == b"\x91\x07"
    for other in (
        b"\xdc\x00\x01\x07",
        b"\x91\xcc\x07",
        b"\x91\xcd\x00\x07",
        b"\x91\xd0\x07",
        b"\x91\xca\x40\xe0\x00\x00",
    ):
        with pytest.raises(FrameError):
            read(wire_of(Nack, other))
    short = msgspec.msgpack.encode([1, 0, 0, RUN, RUN, 1, b"", True, 2.0, 3.0])
    with pytest.raises(FrameError, match="canonical"):
        read(wire_of(Ready, short))
    for wrong in ([7, 7], [], [None], ["7"], [-1], [2**32], [7.0], [True], {"sequence": 7}, 7):
        with pytest.raises(FrameError):
            read(wire_of(Nack, msgspec.msgpack.encode(wrong)))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_refused(loss):
    good = Ready(1, 0, 0, RUN, RUN, 1, b"", True, 2.0, 3.0)
    read(encode(Frame(good), ME, RUN))
    bad = msgspec.structs.replace(good, loss=loss)
    with pytest.raises(FrameError, match="finite"):
        read(wire_of(Ready, msgspec.msgpack.encode(bad)))
    with pytest.raises(ValueError, match="finite"):
        encode(Frame(bad), ME, RUN)


@pytest.mark.parametrize("kind", SIGNED, ids=lambda kind: kind.__name__)
def test_frame_signature_is_checked(kind):
    payload = b"p" * 9 if kind.payload else b""
    message = _smallest(kind)
    wire = encode(Frame(message, payload), ME, RUN)
    read(wire, payload)
    with pytest.raises(FrameError, match="stranger"):
        read(wire, payload, public_key=None)
    with pytest.raises(FrameError, match="signature"):
        read(wire, payload, public_key=OTHER.public_key)
    with pytest.raises(FrameError, match="signature"):
        read(wire, payload, run_id=b"s" * 32)
    with pytest.raises(FrameError, match="signature"):
        read(wire[:-1] + bytes([wire[-1] ^ 1]), payload)
    with pytest.raises(FrameError, match="lengths"):
        read(wire[:-64], payload)
    if payload:
        with pytest.raises(FrameError, match="signature"):
            read(wire, b"q" * 9)
    with pytest.raises(ValueError, match="identity"):
        encode(Frame(message, payload), None, RUN)


def _smallest(kind):
    def least(info):
        match info:
            case inspect.IntType():
                return 0
            case inspect.BoolType():
                return False
            case inspect.FloatType():
                return 0.0
            case inspect.StrType():
                return ""
            case inspect.BytesType():
                return bytes(info.min_length or 0)
            case inspect.VarTupleType():
                return (least(info.item_type),) * (info.min_length or 0)
            case inspect.UnionType():
                return None
            case inspect.StructType():
                return info.cls(*(least(field.type) for field in info.fields))

    return least(inspect.type_info(kind))


def test_signature_is_bound_to_message_type():
    ping, ack = (next(number for number, kind in TYPES.items() if kind.__name__ == name) for name in ("Ping", "Ack"))
    wire = bytearray(encode(Frame(Ping(1, 2, ())), ME, RUN))
    assert wire[5] == ping
    wire[5] = ack
    with pytest.raises(FrameError, match="signature"):
        read(bytes(wire))


def test_vote_proof_verifies_for_others():
    vote = Vote(3, 0, BALLOT, RUN, RUN)
    frame = read(encode(Frame(vote), ME, RUN))
    rebuilt = Vote(3, 0, Ballot(1, b"l" * 32), RUN, RUN)
    assert verify_message(rebuilt, frame.signature, ME.public_key, RUN)
    assert frame.signature == sign_message(vote, b"", ME, RUN)
    assert not verify_message(Vote(4, 0, BALLOT, RUN, RUN), frame.signature, ME.public_key, RUN)
    assert not verify_message(vote, frame.signature, OTHER.public_key, RUN)
    assert not verify_message(vote, frame.signature, ME.public_key, b"s" * 32)
    assert not verify_message(vote, frame.signature, ME.public_key, RUN, b"payload")
    assert not verify_message(vote, b"", ME.public_key, RUN)
    offer = StateOffer(1, RUN, RUN, 5, ())
    signature = sign_message(offer, b"hashes", ME, RUN)
    assert verify_message(offer, signature, ME.public_key, RUN, bytearray(b"hashes"))
    assert not verify_message(offer, signature, ME.public_key, RUN)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_payloads_are_not_copied(make):
    payload = make(b"p" * 1000)
    for message in (Chunk(1, 2, 3, 4), StateOffer(1, RUN, RUN, 5, ())):
        wire = encode(Frame(message, payload), ME, RUN)
        assert len(wire) < 1000 and read(make(wire), payload).payload is payload


def test_non_byte_payloads_raise():
    for payload in (np.zeros(4, np.float32), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2]):
        with pytest.raises(ValueError, match="contiguous"):
            encode(Frame(Chunk(1, 2, 3, 4), payload), None, RUN)


def test_lengths_must_match_the_header():
    wire = encode(Frame(StateChunk(1, 2), b"ppp"), None, RUN)
    for payload in (b"pp", b"pppp", b""):
        with pytest.raises(FrameError, match="lengths"):
            read(wire, payload)
    for rest in (wire[:-1], wire + b"x"):
        with pytest.raises(FrameError, match="lengths"):
            read(rest, b"ppp")


def test_invalid_outgoing_frames_raise():
    for frame in (
        Frame(Nack(1), b"payload"),
        Frame(Chunk(1, 2, 3, 4), bytes(Chunk.payload + 1)),
        Frame(Ping(1, 0, (b"x" * 1600,))),
        Frame(Nack(-1)),
        Frame(Gossip((b"x",) * 33)),
        Frame(Vote(1, 2, Ballot(1, b"short"), RUN, RUN)),
    ):
        with pytest.raises(ValueError):
            encode(frame, ME, RUN)


def test_largest_round_fits_in_a_frame():
    group = tuple(bytes([i % 256, i // 256]) * 16 for i in range(MAX_GROUP))
    everyone = tuple(Contribution(peer, 2**32 - 1, 2**53 - 1) for peer in group)
    proposal = Proposal(
        2**32 - 1,
        2**16 - 1,
        Ballot(2**32 - 1, RUN),
        group,
        group,
        everyone,
        (),
        None,
        (),
        shares=(2**16 - 1,) * MAX_GROUP,
        sites=tuple(range(MAX_GROUP)),
    )
    whole = bytes(32 * MAX_CHUNKS)
    announced = Ready(2**32 - 1, 2**16 - 1, 2**32 - 1, RUN, RUN, 2**53 - 1, whole, True, 1.0, 1.0, site="ü" * 64)
    announced = msgspec.structs.replace(announced, up=2**53 - 1, down=2**53 - 1)
    early = Base(2**32 - 1, 2**16 - 1, 2**32 - 1, RUN, whole)
    out = tuple(Exclusion(peer, "r" * 64) for peer in group)
    adopted = msgspec.structs.replace(proposal, excluded=out, adopted=RUN, sources=group, idle=group[1:], kept=group)
    adopted = msgspec.structs.replace(adopted, order=tuple(range(2**16 - MAX_GROUP, 2**16)))
    lives, lineage = bytes(LIFE * MAX_GROUP), bytes(LIFE)
    proofs_of_members = (MemberProof(2**32 - 1, RUN, RUN, b"s" * 64, b"t" * MAX_TOKEN),) * MAX_GROUP
    said = tuple(Farewell(peer, BALLOT, RUN, RUN, b"s" * 64) for peer in group[:MAX_FAREWELLS])
    adopted = msgspec.structs.replace(
        adopted, lives=lives, member_proofs=proofs_of_members, lineage=lineage, farewells=said, electorate=RUN
    )
    proofs = tuple(Proof(peer, b"s" * 64) for peer in group)
    for message in (
        announced,
        early,
        Propose(proposal),
        Propose(adopted),
        Promise(2**32 - 1, 2**16 - 1, BALLOT, adopted, RUN),
        Commit(adopted, RUN, proofs),
        Leave(2**32 - 1, 2**16 - 1, lineage, said[0], adopted),
        ResultRecord(2**32 - 1, 2**16 - 1, BALLOT, tuple(range(MAX_CHUNKS)), bytes(32 * MAX_CHUNKS)),
    ):
        assert read(encode(Frame(message), ME, RUN)).message == message


def test_limits_of_proposals_are_the_sizes_of_the_largest_ones():
    """The sets of a proposal name as many different peers as its form allows, and every field has its largest value."""
    every = tuple(at.to_bytes(2, "big") * 16 for at in range(4 * MAX_GROUP))
    group, kept, out, sources = (every[at : at + MAX_GROUP] for at in range(0, len(every), MAX_GROUP))
    high, most = Ballot(2**32 - 1, RUN), (2**16 - 1,) * MAX_GROUP
    proposal = Proposal(
        2**32 - 1,
        2**16 - 1,
        high,
        group,
        group,
        tuple(Contribution(peer, 2**32 - 1, 2**53 - 1, RUN) for peer in kept),
        tuple(Exclusion(peer, "r" * 64) for peer in out),
        RUN,
        sources,
        group,
        kept,
        most,
        most,
        most,
        bytes(LIFE * MAX_GROUP),
        (MemberProof(2**32 - 1, RUN, RUN, bytes(64), bytes(MAX_TOKEN)),) * MAX_GROUP,
        bytes(LIFE),
        *[tuple(Farewell(peer, high, RUN, RUN, bytes(64)) for peer in group[:MAX_FAREWELLS])] * 2,
        RUN,
        bytes(64),
    )
    reports = tuple(Report(peer, MAX_PROPOSALS, RUN, bytes(64)) for peer in group)
    keys = (RUN,) * (MAX_GROUP + MAX_FAREWELLS)
    commit = Commit(proposal, RUN, tuple(Proof(peer, bytes(64)) for peer in group))
    for message in (
        Promise(2**32 - 1, 2**16 - 1, high, proposal, RUN, bytes(LIFE)),
        Leave(2**32 - 1, 2**16 - 1, bytes(LIFE), proposal.farewells[0], proposal),
        Propose(proposal, reports, (proposal,) * MAX_PROPOSALS, keys),
        commit,
        compact(commit),
    ):
        size = len(encode(Frame(message), ME, RUN)) - HEADER_BYTES - 64
        assert 0.99 * message.limit < size <= message.limit, (type(message).__name__, size)


@pytest.mark.parametrize(
    "change",
    [
        {"group": b"\x06"},  # a peer that is not in the table, in an unused bit
        {"group": b"\x02\x00"},
        {"alive": b""},
        {"peers": b"b" * 32 + b"a" * 32},  # not sorted
        {"peers": b"a" * 64, "group": b"\x03"},  # twice
        {"peers": b"a" * 32 + b"b" * 32 + b"c" * 32},  # named by no set
        {"peers": b"a" * 32 + b"b" * 31},
        {"attempts": (1, 2)},
        {"weights": ()},
        {"announced": bytes(31)},
        {"announced": bytes(64)},
        {"contributors": b"\x03"},
        {"reasons": ("late",)},
        {"excluded": b"\x01"},
    ],
    ids=str,
)
def test_proposal_has_one_wire_form(change):
    entries = (Contribution(b"a" * 32, 1, 2, bytes(32)),)
    proposal = Proposal(1, 0, BALLOT, (b"a" * 32, b"b" * 32), (b"a" * 32,), entries, (), None, ())
    assert read(wire_of(Propose, msgspec.msgpack.encode((proposal.packed, (), (), ())))).message == Propose(proposal)
    with pytest.raises(FrameError):
        changed = msgspec.structs.replace(proposal.packed, **change)
        read(wire_of(Propose, msgspec.msgpack.encode((changed, (), (), ()))))


def test_unsorted_proposal_has_no_wire_form():
    proposal = Proposal(1, 0, BALLOT, (b"b" * 32, b"a" * 32), (), (), (), None, ())
    with pytest.raises(ValueError, match="not sorted"):
        encode(Frame(Propose(proposal)), ME, RUN)
    votes = tuple(Proof(peer * 32, bytes(64)) for peer in (b"a", b"c"))
    with pytest.raises(ValueError, match="not in the table"):
        encode(Frame(Commit(msgspec.structs.replace(proposal, group=(b"a" * 32,)), RUN, votes)), ME, RUN)


@pytest.mark.parametrize("change", [{"voters": b"\x07"}, {"voters": b""}, {"signatures": bytes(63)}], ids=str)
def test_commit_has_one_wire_form(change):
    group = (b"a" * 32, b"b" * 32)
    commit = Commit(Proposal(1, 0, BALLOT, group, group, (), (), None, ()), RUN, (Proof(group[1], bytes(64)),))
    packed = wire_form.packed_commit(commit)
    assert read(wire_of(Commit, msgspec.msgpack.encode(packed))).message == commit
    with pytest.raises(FrameError):
        read(wire_of(Commit, msgspec.msgpack.encode(msgspec.structs.replace(packed, **change))))


def test_largest_lineage_fits_in_a_frame():
    group = tuple(bytes([i % 256, i // 256]) * 16 for i in range(MAX_GROUP))
    for message in (
        Found(2**32 - 1, 2**16 - 1, RUN, group, bytes(LIFE)),
        Head(2**32 - 1, 2**16 - 1, bytes(LIFE)),
        StateOffer(2**32 - 1, RUN, RUN, 2**53 - 1, group, 2**16 - 1, bytes(LIFE * MAX_GROUP), bytes(LIFE)),
    ):
        assert read(encode(Frame(message), ME, RUN)).message == message
