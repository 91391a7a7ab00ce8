import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.swarm.identity.identity import Identity, IdentityError, RecentHashes, peer_id_of, short, verify

ME = Identity.generate(b"1" * 32)


def test_keys_of_a_seed_are_frozen():
    assert ME.peer_id == Identity.generate(b"1" * 32).peer_id == peer_id_of(ME.public_key)
    assert short(ME.peer_id) == "635e47dd"
    assert ME.transport_secret == Identity.generate(b"1" * 32).transport_secret
    assert Identity.generate(b"2" * 32).public_key != ME.public_key
    assert Identity.generate().peer_id != Identity.generate().peer_id
    assert len({ME.public_key, ME.transport_public, ME.transport_secret, ME.peer_id}) == 4
    with pytest.raises(ValueError):
        Identity.generate(b"short")


def test_transport_keys_are_a_curve_pair():
    zmq = pytest.importorskip("zmq")
    from zmq.utils import z85

    assert zmq.curve_public(z85.encode(ME.transport_secret)) == z85.encode(ME.transport_public)


@given(st.lists(st.binary(max_size=9), max_size=4), st.lists(st.binary(max_size=9), max_size=4))
@settings(max_examples=50)
def test_signature_covers_exactly_its_parts(parts, others):
    signature = ME.sign("test", *parts)
    assert len(signature) == 64 and verify(ME.public_key, "test", signature, *parts)
    assert verify(ME.public_key, "test", signature, *others) == (parts == others)


def test_signature_is_bound_to_domain_and_key_and_not_malleable():
    signature = ME.sign("vote", b"ab", b"c")
    assert verify(ME.public_key, "vote", signature, b"ab", b"c")
    assert not verify(ME.public_key, "vote", signature, b"a", b"bc")
    assert not verify(ME.public_key, "open", signature, b"ab", b"c")
    assert not verify(Identity.generate().public_key, "vote", signature, b"ab", b"c")
    for i in range(0, 512, 7):
        bent = bytearray(signature)
        bent[i // 8] ^= 1 << i % 8
        assert not verify(ME.public_key, "vote", bytes(bent), b"ab", b"c")


@pytest.mark.parametrize("key", [b"", b"k" * 31, b"\xff" * 32, b"k" * 33])
@pytest.mark.parametrize("signature", [b"", b"s" * 63, b"s" * 64, b"s" * 65])
def test_malformed_keys_and_signatures_verify_false(key, signature):
    assert not verify(key, "test", signature, b"x")
    assert not verify(ME.public_key, "test", signature, b"x")


def test_secrets_do_not_appear_in_repr():
    assert ME.transport_secret.hex() not in repr(ME) and repr(ME) == f"Identity({short(ME.peer_id)})"


def test_key_file_is_private_and_reused(tmp_path):
    path = tmp_path / "deep" / "identity"
    made = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    again = Identity.load_or_create(path)
    assert (again.peer_id, again.transport_secret) == (made.peer_id, made.transport_secret)
    assert verify(made.public_key, "test", again.sign("test", b"x"), b"x")
    assert [entry.name for entry in path.parent.iterdir()] == ["identity"]


def test_key_file_is_private_under_wide_umask(tmp_path):
    old = os.umask(0)
    try:
        Identity.load_or_create(tmp_path / "identity")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "identity").stat().st_mode) == 0o600


def test_concurrent_starts_get_the_same_keys(tmp_path):
    barrier, found = threading.Barrier(8), []

    def start():
        barrier.wait()
        found.append(Identity.load_or_create(tmp_path / "identity").peer_id)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_key_file_readable_by_others_is_refused(tmp_path, mode):
    path = tmp_path / "identity"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match="other users") as caught:
        Identity.load_or_create(path)
    assert caught.value.hint == f"chmod 600 {path}" and caught.value.exit_code == 3


def _cuts(good):
    yield from (b"", b"\xff" * 100, b"hello\n", good[:-2], good + b"00\n", good * 100, good.replace(b"-1", b"-2"))
    yield good.replace(good[30:31], b"g")


def test_garbage_key_file_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "identity"
    Identity.load_or_create(path)
    good = path.read_bytes()
    for bad in _cuts(good):
        path.write_bytes(bad)
        with pytest.raises(IdentityError) as caught:
            Identity.load_or_create(path)
        assert caught.value.hint and caught.value.__cause__ is None
        assert path.read_bytes() == bad
    path.write_bytes(good)
    Identity.load(path)


def test_missing_or_irregular_key_file_is_an_error(tmp_path):
    with pytest.raises(IdentityError) as caught:
        Identity.load(tmp_path / "absent")
    assert caught.value.hint
    with pytest.raises(IdentityError, match="not a regular file|cannot read"):
        Identity.load_or_create(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(IdentityError, match="regular"):
        Identity.load_or_create(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    with pytest.raises(IdentityError):
        Identity.load_or_create(tmp_path / "dangling")
    (tmp_path / "plain").write_text("x")
    with pytest.raises(IdentityError, match="Not a directory"):
        Identity.load_or_create(tmp_path / "plain" / "identity")


def test_full_disk_leaves_no_partial_key_file(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(IdentityError, match="No space"):
        Identity.load_or_create(tmp_path / "identity")
    assert list(tmp_path.iterdir()) == []


def test_cached_signature_verifies_nothing_else():
    """The second verification uses the cache: other divisions of the bytes, or changed bytes, are still refused."""
    signature = ME.sign("vote", b"ab", b"c")
    for _ in range(2):
        assert verify(ME.public_key, "vote", signature, b"ab", b"c")
    whole = ME.public_key + signature
    for cut in (31, 33):
        assert not verify(whole[:cut], "vote", whole[cut:], b"ab", b"c")
    assert not verify(ME.public_key, "vote", signature, b"ab", b"d")
    assert not verify(ME.public_key, "vote", signature[:-1] + bytes([signature[-1] ^ 1]), b"ab", b"c")


def test_signature_made_by_another_process_is_checked():
    """A process caches the signatures that it makes; these bytes come from elsewhere, with the key of ME."""
    made = bytes.fromhex(
        "5bf163ad49849fbd1ee9ab8b2dd720f30d9443c0f48ea7b4b94e2476de2b4c67"
        "2056265cc69d6c99156984201d61d6c04b89440708d8d6a294525cd120fb1404"
    )
    for _ in range(2):
        assert not verify(ME.public_key, "vote", made, b"made", b"here")
        assert not verify(Identity.generate(b"2" * 32).public_key, "vote", made, b"made", b"elsewhere")
        assert not verify(ME.public_key, "open", made, b"made", b"elsewhere")
        assert verify(ME.public_key, "vote", made, b"made", b"elsewhere")


class SlowHash(bytes):
    """Hash of a signature; other threads run whenever a set or a dictionary looks for it."""

    def __hash__(self):
        time.sleep(0.001)
        return super().__hash__()


def test_cache_of_hashes_is_bounded_and_shared_by_threads():
    """Certificates are checked in threads, so two threads may remember signatures at the same time."""
    recent = RecentHashes(4)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: recent.add(SlowHash([n])), range(40)))
    assert 1 <= len(recent) <= 4 + 4, "four threads may each add one more"


def test_cache_of_hashes_keeps_the_newest():
    recent = RecentHashes(4)
    for n in range(40):
        recent.add(bytes([n]))
        assert bytes([n]) in recent and (not n or bytes([n - 1]) in recent) and len(recent) <= 4
    assert bytes([30]) not in recent
