"""Files that a user names are read only if they are regular, and up to a limit."""

import os

import pytest
from thinwire.swarm.identity.regular_file import content_of


def test_content_of_a_file_up_to_the_limit_is_returned(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to("a")
    assert content_of(tmp_path / "link", 1000) == content_of(tmp_path / "a", None) == b"x" * 1000


def test_larger_file_is_refused_before_it_is_in_memory(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError) as error:
        content_of(tmp_path / "sparse", 2048)
    assert error.value.strerror == "larger than 2 KiB" and error.value.filename == str(tmp_path / "sparse")


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "absent"])
def test_special_file_is_refused_at_once(tmp_path, kind):
    """Without the check, reading the device would not end, nor opening a pipe that no process writes."""
    path = tmp_path / kind
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(OSError) as error:
        content_of(path)
    said = {"folder": "Is a directory", "absent": "No such file or directory"}
    assert error.value.strerror == said.get(kind, "not a regular file")
