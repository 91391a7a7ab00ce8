"""Requests to a running daemon."""

import pytest
from thinwire.node.peer.recover_command_file import RECENT, RecoverRequest, take_request, withdraw, write_request

PROCESS = (12, 34.5)


@pytest.mark.parametrize(
    ("process", "wall", "valid"),
    [
        (PROCESS, 100.0, True),
        (PROCESS, 100.0 + RECENT, False),
        (PROCESS, 100.0 - RECENT, False),
        ((13, 34.5), 100.0, False),
        ((12, 34.6), 100.0, False),
    ],
)
def test_request_is_taken_once_by_its_process_and_only_while_it_is_recent(tmp_path, process, wall, valid):
    path = tmp_path / "recover.json"
    write_request(path, RecoverRequest(*PROCESS, 100.0))
    assert path.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [path]
    assert take_request(path, process, wall) == valid
    assert not path.exists() and not take_request(path, PROCESS, 100.0)


@pytest.mark.parametrize("garbage", [b"", b"{", b"\xff\xfe", b"[" * 5000, b'{"process": "x"}'])
def test_garbage_is_removed_and_has_no_effect(tmp_path, garbage):
    path = tmp_path / "recover.json"
    path.write_bytes(garbage)
    assert not take_request(path, PROCESS, 0.0) and not path.exists()


def test_request_that_was_not_taken_can_be_withdrawn_once(tmp_path):
    path = tmp_path / "recover.json"
    write_request(path, RecoverRequest(*PROCESS, 100.0))
    assert withdraw(path) and not withdraw(path) and not take_request(path, PROCESS, 100.0)
