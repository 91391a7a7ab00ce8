"""Whom a peer knew, kept for its next life."""

from thinwire.collectives.transport import Contact
from thinwire.node.disk import RealDisk
from thinwire.node.memory import FEW, MOST, AnchorFile

HERE, THERE = Contact("10.0.0.1:7000", bytes(32)), Contact("[::1]:7001", bytes([1]) * 32)


def test_contacts_come_back_in_their_order(tmp_path):
    file = AnchorFile(tmp_path / "run" / "anchors.json", RealDisk())
    assert file.load() == ()
    file.save([THERE, HERE])
    assert AnchorFile(tmp_path / "run" / "anchors.json", RealDisk()).load() == (THERE, HERE)


def test_who_is_alone_forgets_nobody(tmp_path):
    file = AnchorFile(tmp_path / "anchors.json", RealDisk())
    file.save([HERE])
    file.save([])
    assert file.load() == (HERE,)
    file.save([THERE])
    assert file.load() == (THERE,)


def test_who_was_alone_by_common_decision_is_known_afterwards(tmp_path):
    path = tmp_path / "anchors.json"
    file = AnchorFile(path, RealDisk())
    file.save([HERE])
    file.save([], alone=True)
    again = AnchorFile(path, RealDisk())
    assert again.load() == (HERE,) and again.alone
    again.save([THERE])
    last = AnchorFile(path, RealDisk())
    assert last.load() == (THERE,) and not last.alone
    last.save([], alone=False)
    assert last.load() == (THERE,)


def test_the_same_again_is_not_written_again(tmp_path):
    file = AnchorFile(tmp_path / "anchors.json", RealDisk())
    file.save([HERE])
    (tmp_path / "anchors.json").unlink()
    file.save([HERE])
    assert file.load() == ()


def test_a_damaged_file_and_a_full_disk_cost_nothing(tmp_path):
    path = tmp_path / "anchors.json"
    path.write_bytes(b'[{"address": 1}]')
    file = AnchorFile(path, RealDisk())
    assert file.load() == () and file.damaged
    path.unlink()
    assert file.load() == () and not file.damaged
    path.mkdir()
    file.save([HERE])
    assert file.load() == () and file.damaged
    path.rmdir()
    file.save([HERE])
    assert file.load() == (HERE,) and not file.damaged


def test_no_bit_that_flips_makes_it_forget_or_believe_something_else(tmp_path):
    path = tmp_path / "anchors.json"
    AnchorFile(path, RealDisk()).save([HERE, THERE], alone=True)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        file = AnchorFile(path, RealDisk())
        assert file.load() == (HERE, THERE) and file.alone and not file.damaged
    path.write_bytes(whole[:5] + b"?" + whole[6:])
    assert file.load() == (HERE, THERE)
    file.save([HERE, THERE], alone=True)
    assert path.read_bytes() == whole, "the same again, but the damaged half is made anew"
    for length in (0, 10, len(whole) // 2):
        path.write_bytes(whole[:length])
        assert file.load() == () and file.damaged


def test_so_many_are_kept_as_can_be_read_again(tmp_path):
    file = AnchorFile(tmp_path / "anchors.json", RealDisk())
    file.save(Contact("h" * 60 + f":{number}", bytes(32)) for number in range(1, 4097))
    assert len(AnchorFile(tmp_path / "anchors.json", RealDisk()).load()) == MOST


def test_a_few_may_all_be_gone(tmp_path):
    file = AnchorFile(tmp_path / "anchors.json", RealDisk())
    for number in range(1, FEW + 1):
        assert file.few
        file.save(Contact(f"10.0.0.1:{one}", bytes(32)) for one in range(1, number + 1))
    assert not file.few
