"""The file of known peers that survives a restart."""

from thinwire.collectives.transport.interface import Contact
from thinwire.node.membership.known_peers_file import FEW, MOST, KnownPeersFile
from thinwire.node.runtime.disk import RealDisk

HERE, THERE = Contact("10.0.0.1:7000", bytes(32)), Contact("[::1]:7001", bytes([1]) * 32)


def test_known_peers_keep_their_order(tmp_path):
    file = KnownPeersFile(tmp_path / "run" / "anchors.json", RealDisk())
    assert file.load() == ()
    file.save([THERE, HERE])
    assert KnownPeersFile(tmp_path / "run" / "anchors.json", RealDisk()).load() == (THERE, HERE)


def test_known_peers_survive_an_empty_save(tmp_path):
    file = KnownPeersFile(tmp_path / "anchors.json", RealDisk())
    file.save([HERE])
    file.save([])
    assert file.load() == (HERE,)
    file.save([THERE])
    assert file.load() == (THERE,)


def test_known_peers_file_remembers_agreed_solitude(tmp_path):
    path = tmp_path / "anchors.json"
    file = KnownPeersFile(path, RealDisk())
    file.save([HERE])
    file.save([], alone=True)
    again = KnownPeersFile(path, RealDisk())
    assert again.load() == (HERE,) and again.alone
    again.save([THERE])
    last = KnownPeersFile(path, RealDisk())
    assert last.load() == (THERE,) and not last.alone
    last.save([], alone=False)
    assert last.load() == (THERE,)


def test_absent_peers_are_stored_beside_the_others(tmp_path):
    path = tmp_path / "anchors.json"
    KnownPeersFile(path, RealDisk()).save([HERE], absent=[THERE])
    file = KnownPeersFile(path, RealDisk())
    assert file.load() == (HERE,) and file.absent == (THERE,)
    file.save([THERE])
    assert KnownPeersFile(path, RealDisk()).load() == (THERE,) and file.absent == ()


def test_file_without_absent_peers_is_that_of_earlier_versions(tmp_path):
    """A founder that could not read its file would not return to its run."""
    path = tmp_path / "anchors.json"
    KnownPeersFile(path, RealDisk()).save([HERE])
    assert b"absent" not in path.read_bytes()


def test_unchanged_known_peers_are_not_written_again(tmp_path):
    file = KnownPeersFile(tmp_path / "anchors.json", RealDisk())
    file.save([HERE])
    (tmp_path / "anchors.json").unlink()
    file.save([HERE])
    assert file.load() == ()


def test_damaged_known_peers_file_loads_empty(tmp_path):
    path = tmp_path / "anchors.json"
    path.write_bytes(b'[{"address": 1}]')
    file = KnownPeersFile(path, RealDisk())
    assert file.load() == () and file.damaged
    path.unlink()
    assert file.load() == () and not file.damaged
    path.mkdir()
    file.save([HERE])
    assert file.load() == () and file.damaged
    path.rmdir()
    file.save([HERE])
    assert file.load() == (HERE,) and not file.damaged


def test_any_flipped_bit_leaves_known_peers_readable(tmp_path):
    path = tmp_path / "anchors.json"
    KnownPeersFile(path, RealDisk()).save([HERE, THERE], alone=True)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        file = KnownPeersFile(path, RealDisk())
        assert file.load() == (HERE, THERE) and file.alone and not file.damaged
    path.write_bytes(whole[:5] + b"?" + whole[6:])
    assert file.load() == (HERE, THERE)
    file.save([HERE, THERE], alone=True)
    assert path.read_bytes() == whole, "the same again, but the damaged half is made anew"
    for length in (0, 10, len(whole) // 2):
        path.write_bytes(whole[:length])
        assert file.load() == () and file.damaged


def test_known_peers_are_bounded_by_file_size(tmp_path):
    file = KnownPeersFile(tmp_path / "anchors.json", RealDisk())
    file.save(Contact("h" * 60 + f":{number}", bytes(32)) for number in range(1, 4097))
    assert len(KnownPeersFile(tmp_path / "anchors.json", RealDisk()).load()) == MOST


def test_known_peers_are_few_below_threshold(tmp_path):
    file = KnownPeersFile(tmp_path / "anchors.json", RealDisk())
    for number in range(1, FEW + 1):
        assert file.few
        file.save(Contact(f"10.0.0.1:{one}", bytes(32)) for one in range(1, number + 1))
    assert not file.few
