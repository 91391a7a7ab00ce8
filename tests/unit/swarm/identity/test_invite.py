import base64
import string
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.swarm.identity.invite import Invite, InviteError, Seed

INVITE = Invite(
    bytes(range(32)),
    (Seed("203.0.113.7:7700", b"k" * 32), Seed("[2001:db8::1]:7701", b"l" * 32), Seed("a.example:1", b"m" * 32)),
)
keys = st.binary(min_size=32, max_size=32)
hosts = st.one_of(
    st.ip_addresses(v=4, network="192.0.2.0/24").map(str),
    st.ip_addresses(v=6, network="2001:db8::/32").map(lambda ip: f"[{ip}]"),
    st.sampled_from(["localhost", "seed.example.org", "a"]),
)
seeds = st.builds(lambda host, port, key: Seed(f"{host}:{port}", key), hosts, st.integers(1, 65535), keys)


@given(st.builds(Invite, keys, st.lists(seeds, min_size=1, max_size=4).map(tuple)))
@settings(max_examples=50)
def test_invite_round_trips(invite):
    assert Invite.parse(invite.code()) == invite


def test_invite_survives_copying():
    code = INVITE.code()
    assert code.startswith("tw1-") and code == code.lower()
    for copied in [
        code.upper(),
        f"  {code}\n",
        code.replace("-", ""),
        code.replace("-", " "),
        code.replace("-", "\u2013\n"),
    ]:
        assert Invite.parse(copied) == INVITE


def test_invite_checksum_finds_every_wrong_letter():
    code = INVITE.code()
    for i, old in enumerate(code):
        if old != "-":
            for new in set(string.ascii_lowercase + string.digits) - {old}:
                with pytest.raises(InviteError):
                    Invite.parse(code[:i] + new + code[i + 1 :])


def test_invite_checksum_finds_swapped_lost_and_doubled_letters():
    code = INVITE.code().replace("-", "")
    for i in range(len(code)):
        swapped = code[:i] + code[i : i + 2][::-1] + code[i + 2 :]
        for wrong in {swapped, code[:i] + code[i + 1 :], code[:i] + code[i] + code[i:]} - {code}:
            with pytest.raises(InviteError):
                Invite.parse(wrong)


def test_invite_typo_is_distinguished_from_other_text():
    code = INVITE.code()
    with pytest.raises(InviteError, match="typo") as caught:
        Invite.parse(code[:-1] + ("a" if code[-1] != "a" else "b"))
    assert caught.value.hint and caught.value.exit_code == 2
    for other in ["", "tw2-aaaa", "run.toml", "tw1" * 1000, "tw1é"]:
        with pytest.raises(InviteError, match="not an invite"):
            Invite.parse(other)


def _code(data):
    data += zlib.crc32(data).to_bytes(4, "big")
    return "tw1" + base64.b32encode(data).decode().rstrip("=").lower()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"r" * 32,
        b"r" * 32 + b"\0",
        b"r" * 32 + b"\5" + (b"k" * 32 + b"\x04\x04\x01\x02\x03\x04\x00\x07") * 5,
        b"r" * 32 + b"\1" + b"k" * 32 + b"\x04\x04\x01\x02\x03\x04\x00\x00",
        b"r" * 32 + b"\1" + b"k" * 32 + b"\x04\x04\xe0\x02\x03\x04\x00\x07",
        b"r" * 32 + b"\1" + b"k" * 32 + b"\x04\x10" + b"\1" * 16 + b"\x00\x07",
        b"r" * 32 + b"\1" + b"k" * 32 + b"\x07\x04\x01\x02\x03\x04\x00\x07",
        b"r" * 32 + b"\1" + b"k" * 32 + b"\x00\x02\xff\xfe\x00\x07",
        b"r" * 32 + b"\1" + b"k" * 32 + b"\x04\x04\x01\x02\x03\x04\x00\x07rest",
    ],
)
def test_nonsense_with_valid_checksum_is_no_invite(body):
    with pytest.raises(InviteError, match="unknown form"):
        Invite.parse(_code(body))


def test_invite_writer_and_parser_agree():
    body = b"r" * 32 + b"\1" + b"k" * 32 + b"\x04\x04\x01\x02\x03\x04\x00\x07"
    assert Invite.parse(_code(body)).seeds == (Seed("1.2.3.4:7", b"k" * 32),)


@given(st.text(max_size=200))
@settings(max_examples=50)
def test_any_other_text_raises_invite_error(text):
    with pytest.raises(InviteError):
        Invite.parse("tw1" + text)


@pytest.mark.parametrize(
    "seeds", [(), (Seed("1.2.3.4:5", b"k"),), (Seed("1.2.3.4", b"k" * 32),), (Seed("a:1", b"k" * 32),) * 5]
)
def test_invite_refuses_invalid_arguments(seeds):
    with pytest.raises(ValueError):
        Invite(b"r" * 32, seeds).code()


@pytest.mark.parametrize(
    ("addresses", "note"),
    [
        (["127.0.0.1:1"], "this invite works only on this machine"),
        (["[::1]:1", "localhost:2"], "this invite works only on this machine"),
        (["127.0.0.1:1", "10.1.2.3:1"], "this invite works only in this network: its addresses are private"),
        (["100.64.0.1:1"], "this invite works only in this network: its addresses are private"),
        (["[fd00::1]:1"], "this invite works only in this network: its addresses are private"),
        (["10.1.2.3:1", "45.1.2.3:1"], ""),
        (["10.1.2.3:1", "seed.example.org:1"], ""),
    ],
)
def test_invite_says_who_cannot_use_it(addresses, note):
    assert Invite(b"r" * 32, tuple(Seed(address, b"k" * 32) for address in addresses)).note == note
