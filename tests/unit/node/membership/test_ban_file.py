"""Evidence against banned peers on disk."""

from thinwire.node.membership.ban_file import BanFile
from thinwire.node.runtime.disk import RealDisk


def test_items_are_loaded_as_they_were_saved(tmp_path):
    file = BanFile(tmp_path / "run" / "bans", RealDisk())
    assert file.load() == ()
    file.save((b"one", b"two"))
    file.save((b"one", b"two", b"three"))
    assert BanFile(tmp_path / "run" / "bans", RealDisk()).load() == (b"one", b"two", b"three")


def test_damaged_file_has_no_items(tmp_path):
    path = tmp_path / "bans"
    for content in (b"", b"\x93", b"\xc0", bytes(100), b"\x91\xc3"):
        path.write_bytes(content)
        assert BanFile(path, RealDisk()).load() == ()
