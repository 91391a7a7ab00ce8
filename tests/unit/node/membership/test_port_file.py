"""The port of a run's gate, stored for the next start."""

import pytest
from thinwire.node.membership.port_file import PortFile
from thinwire.node.runtime.disk import RealDisk


def test_stored_port_is_loaded_by_the_next_process(tmp_path):
    path = tmp_path / "run" / "port"
    assert PortFile(path, RealDisk()).load() == 0
    PortFile(path, RealDisk()).save(7400)
    PortFile(path, RealDisk()).save(65_535)
    assert PortFile(path, RealDisk()).load() == 65_535


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"-1", b"65536", b"7400 x", b"9" * 100])
def test_damaged_file_has_no_port(tmp_path, content):
    path = tmp_path / "port"
    path.write_bytes(content)
    assert PortFile(path, RealDisk()).load() == 0


def test_full_disk_does_not_stop_a_peer(tmp_path):
    (tmp_path / "run").write_text("a file where the directory should be")
    PortFile(tmp_path / "run" / "port", RealDisk()).save(7400)
