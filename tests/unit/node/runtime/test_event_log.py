import errno
import gzip
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.node.peer.report_sinks import ReportSinks
from thinwire.node.peer.status import PeerStatus, Status, alive, read_status, write_status
from thinwire.node.runtime import event_log
from thinwire.node.runtime.event_log import EventLog, end_of_events, read_events
from thinwire.node.runtime.load_settings import load
from thinwire.node.runtime.process_lock import InUseError, hold, holder, this_process


def kinds(path):
    return [event["kind"] for event in read_events(path).events]


def test_text_of_an_event_names_its_numbers():
    texts = (
        event_log.event_text("reach", {"nat": "none", "address": "45.0.2.1:7400", "reached": True}),
        event_log.event_text(
            "synced", {"round": 3, "bytes": 0, "sources": ["2749d6a3", "11aa22bb"], "digest": "ab" * 32}
        ),
        event_log.event_text("joined", {"peer": "ab" * 32, "detail": "45.0.2.1:7400", "at": 1.0}),
        event_log.event_text("phase", {"round": 3, "phase": "open"}),
        event_log.event_text("trial", {"score": -0.050000000000000044, "assigned": 0.0029201507568359375}),
        event_log.event_text("held_out", {"loss": 3.478062, "seconds": 123456.7}),
    )
    assert texts == (
        "reach nat none · address 45.0.2.1:7400 · reached yes",
        "synced round 3 · bytes 0 · sources 2749d6a3, 11aa22bb",
        "joined peer abababab · 45.0.2.1:7400",
        "phase round 3 · open",
        "trial score -0.05 · assigned 0.00292",
        "held out loss 3.478 · seconds 123457",
    )


def test_status_on_a_full_disk_is_written_into_the_blocks_that_it_has(tmp_path, monkeypatch):
    path, real = tmp_path / "status.json", os.replace
    assert write_status(path, status(alarm="x" * 50))

    with open(path, "rb") as file:
        os.fsync(file.fileno())  # some file systems count blocks late

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert write_status(path, status(alarm="no checkpoint"))
    assert read_status(path).alarm == "no checkpoint" and list(tmp_path.iterdir()) == [path]
    assert not write_status(path, status(alarm="x" * 100_000)), "it needs more blocks"
    assert read_status(path).alarm == "no checkpoint"
    with monkeypatch.context() as short:
        short.setattr(os, "pwrite", lambda descriptor, content, offset: 7)
        assert not write_status(path, status(alarm="no checkpoint")), "it is not written whole"
    monkeypatch.setattr(os, "replace", real)
    assert write_status(path, status(alarm="y" * 100_000))


def test_events_are_read_in_order(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    log = EventLog(path)
    assert log.append("round", {"round": 3, "loss": 2.5, "peers": ["a", "b"]}, at=1.5, wall=1000.25)
    assert log.append("kill", {"loss": float("nan")}, at=2.0, wall=1001.0)
    tail = read_events(path)
    assert tail.events == [
        {"at": 1.5, "wall": 1000.25, "kind": "round", "round": 3, "loss": 2.5, "peers": ["a", "b"]},
        {"at": 2.0, "wall": 1001.0, "kind": "kill", "loss": None},
    ]
    assert tail.damaged == 0 and tail.offset == path.stat().st_size
    log.append("later", {}, at=3.0, wall=1.0)
    assert [event["kind"] for event in read_events(path, tail.offset).events] == ["later"]
    log.close()


def test_removed_event_log_begins_again(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    log = EventLog(path)
    for kind in ("before", "after", "later"):
        log.append(kind, {}, at=0, wall=0)
        if kind == "before":
            path.unlink()
    assert kinds(path) == ["after", "later"] and not log.lost
    path.unlink()
    path.parent.rmdir()
    assert log.append("nowhere", {}, at=0, wall=0), "training continues without its folder"
    log.close()


def test_event_field_names_are_kept(tmp_path):
    log = EventLog(tmp_path / "e")
    with pytest.raises(ValueError, match="kind"):
        log.append("x", {"kind": 1}, at=0, wall=0)
    with pytest.raises(TypeError):
        log.append("x", {"what": object()}, at=0, wall=0)
    assert read_events(tmp_path / "e").events == []


@given(cut=st.integers(0, 200), old=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_torn_last_line_is_cut_on_reopen(tmp_path_factory, cut, old):
    path = tmp_path_factory.mktemp("torn") / "e"
    log = EventLog(path)
    for index in range(old):
        log.append(f"old{index}", {}, at=index, wall=0)
    whole = path.stat().st_size
    log.append("torn", {"text": "x" * 100}, at=9, wall=0)
    log.close()
    length = path.stat().st_size
    os.truncate(path, min(length, whole + cut))
    expected = [f"old{index}" for index in range(old)] + (["torn"] if whole + cut >= length else [])
    assert kinds(path) == expected  # a concurrent reader
    log = EventLog(path)
    log.append("new", {}, at=10, wall=0)
    log.close()
    assert kinds(path) == [*expected, "new"] and read_events(path).damaged == 0


def test_long_torn_line_is_cut_on_reopen(tmp_path):
    path = tmp_path / "e"
    path.write_bytes(b'{"at":0,"wall":0,"kind":"a"}\n' + b"x" * 200_000)
    log = EventLog(path)
    log.append("b", {}, at=0, wall=0)
    assert kinds(path) == ["a", "b"]


def test_full_disk_loses_events_but_no_partial_lines(tmp_path, monkeypatch):
    path = tmp_path / "e"
    log = EventLog(path)
    log.append("a", {}, at=0, wall=0)
    real = os.write

    def half(descriptor, data):
        real(descriptor, data[: len(data) // 2])
        return len(data) // 2

    def full(descriptor, data):
        real(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "full")

    for broken in (half, full):
        monkeypatch.setattr(event_log.os, "write", broken)
        assert log.append("lost", {}, at=1, wall=0) is False
        monkeypatch.setattr(event_log.os, "write", real)
    assert log.lost == 2
    assert log.append("b", {}, at=2, wall=0)
    assert kinds(path) == ["a", "b"] and read_events(path).damaged == 0


def test_reader_counts_damaged_lines(tmp_path):
    path = tmp_path / "e"
    path.write_bytes(b'{"at":0,"wall":0,"kind":"a"}\nnot json\n[1]\n{"at":1}\n\xff\n{"at":0,"wall":0,"kind":"b"}\n')
    tail = read_events(path)
    assert [event["kind"] for event in tail.events] == ["a", "b"] and tail.damaged == 4


def test_reader_handles_missing_and_new_file(tmp_path):
    assert read_events(tmp_path / "none").events == []
    path = tmp_path / "e"
    path.write_bytes(b'{"at":0,"wall":0,"kind":"a"}\n')
    assert [event["kind"] for event in read_events(path, 10_000).events] == ["a"]


def test_restarted_peer_appends_to_its_log(tmp_path):
    path = tmp_path / "e"
    for life in range(2):
        log = EventLog(path)
        log.append(f"life{life}", {}, at=0, wall=0)
        log.close()
    assert kinds(path) == ["life0", "life1"]


def status(**changes):
    process, started = this_process()
    return Status(**{"process": process, "process_started": started, "wall": 5.0, "peer": "ab" * 32, **changes})


def test_status_file_round_trips(tmp_path):
    said = status(loss=2.5, bytes_up=10, fp32_bytes=2120, peers=(PeerStatus(peer="cd" * 32, state="alive", age=0.5),))
    path = tmp_path / "state" / "status.json"
    assert write_status(path, said) and read_status(path) == said and said.saved_factor == 212
    assert write_status(path, status(round=7)) and read_status(path).round == 7
    assert os.listdir(path.parent) == ["status.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"process": "x"}', b"\xff", b"[" * 100_000])
def test_unreadable_status_is_none(tmp_path, content):
    path = tmp_path / "status.json"
    path.write_bytes(content)
    assert read_status(path) is None
    assert read_status(tmp_path / "absent") is None


def test_status_that_cannot_be_written_returns_false(tmp_path):
    (tmp_path / "file").write_text("")
    assert write_status(tmp_path / "file" / "status.json", status()) is False
    (tmp_path / "status.json").mkdir()
    assert write_status(tmp_path / "status.json", status()) is False
    assert sorted(os.listdir(tmp_path)) == ["file", "status.json"]


HOLDER = """
import sys, time
from pathlib import Path
from thinwire.node.runtime.process_lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_alive_is_true_only_while_the_process_of_the_status_holds_the_lock(tmp_path):
    lock = tmp_path / "state" / "daemon.lock"
    assert not alive(status(), lock)
    with hold(lock):
        assert alive(status(), lock)
        assert not alive(status(process_started=status().process_started - 60), lock)  # that of an earlier process
        assert alive(status(), lock), "a look at the lock does not release it"
    assert not alive(status(), lock)


def test_alive_needs_no_process_number_of_the_reader(tmp_path):
    """In a container the daemon has a number that outside belongs to no process, or to another one."""
    lock = tmp_path / "daemon.lock"
    with hold(lock):
        lock.write_text("1 12.5\n")
        assert alive(status(process=1, process_started=12.5), lock)


def test_alive_is_false_once_the_process_is_killed_also_while_it_is_a_zombie(tmp_path):
    lock = tmp_path / "daemon.lock"
    child = subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"held\n"
    process, started = holder(lock)
    assert process == child.pid and alive(status(process=process, process_started=started), lock)
    child.kill()
    assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) is not None
    assert not alive(status(process=process, process_started=started), lock)
    child.wait()
    child.stdout.close()


def test_unopenable_event_log_is_named(tmp_path):
    config = load({"home": tmp_path}, {})
    events = config.directories.run(b"r" * 32).events
    events.mkdir(parents=True)
    with pytest.raises(InUseError, match="events.jsonl") as error:
        ReportSinks(config, b"r" * 32, b"p" * 32)
    assert error.value.exit_code == 3 and "--home" in error.value.hint


def numbered(log, first, last):
    for number in range(first, last):
        assert log.append("n", {"n": number, "text": "x" * 100}, at=0.0, wall=0.0)


def numbers(tail):
    return [event["n"] for event in tail.events]


@pytest.fixture
def short_segments(monkeypatch):
    monkeypatch.setattr(event_log, "SEGMENT", 2000)


def test_divided_log_is_read_as_one(tmp_path, short_segments):
    path = tmp_path / "events.jsonl"
    log, offset, seen = EventLog(path), 0, []
    for number in range(100):
        numbered(log, number, number + 1)
        if number % 7 == 0:  # a reader that looks now and then
            tail = read_events(path, offset)
            offset, seen = tail.offset, seen + numbers(tail)
    tail = read_events(path, offset)
    assert seen + numbers(tail) == list(range(100)) == numbers(read_events(path)) and not tail.damaged
    assert tail.offset == end_of_events(path) == read_events(path).offset
    segments = sorted(one.name for one in (tmp_path / "events").iterdir())
    assert len(segments) > 5 and all(name.endswith(".jsonl.gz") for name in segments) and path.stat().st_size < 2300
    log.close()
    log = EventLog(path)  # a restart
    numbered(log, 100, 130)
    assert numbers(read_events(path, offset)) == [*numbers(tail), *range(100, 130)]


def test_oldest_segments_are_removed_above_the_limit(tmp_path, short_segments):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, 8000)
    for number in range(2000):
        log.append("n", {"n": number, "text": os.urandom(40).hex()}, at=0.0, wall=0.0)
        files = [path, *(tmp_path / "events").glob("*")]
        assert sum(file.stat().st_size for file in files) <= 8000 + 200
    tail = read_events(path)
    first = numbers(tail)[0]
    assert 1500 < first < 2000 and numbers(tail) == list(range(first, 2000)) and tail.damaged == 0
    assert tail.offset == end_of_events(path)
    assert read_events(path, tail.offset).events == []


def test_segment_that_a_kill_left_is_compressed_at_the_next_start(tmp_path, short_segments):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    numbered(log, 0, 60)
    log.close()
    *_, newest = sorted((tmp_path / "events").iterdir())
    plain = newest.with_suffix("")
    plain.write_bytes(gzip.decompress(newest.read_bytes()))  # killed after the compressed one had its name
    assert numbers(read_events(path)) == list(range(60))
    EventLog(path).close()
    assert not plain.exists()
    plain.write_bytes(gzip.decompress(newest.read_bytes()))  # killed while it was compressed
    newest.unlink()
    path.unlink()  # and before the new file was there
    whole = numbers(read_events(path))
    assert whole == list(range(len(whole))) and len(whole) > 40
    EventLog(path).close()
    assert newest.exists() and not plain.exists() and numbers(read_events(path)) == whole


def test_log_continues_in_one_file_if_the_disk_refuses_a_division(tmp_path, short_segments):
    path = tmp_path / "events.jsonl"
    (tmp_path / "events").write_text("no folder")
    log = EventLog(path)
    numbered(log, 0, 100)
    assert numbers(read_events(path)) == list(range(100)) and path.stat().st_size > 10_000 and log.lost == 0


def test_log_continues_in_one_file_if_no_new_one_can_be_opened(tmp_path, short_segments, monkeypatch):
    path = tmp_path / "events.jsonl"
    log, usual = EventLog(path), os.open

    def refuse(*arguments):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(event_log.os, "open", refuse)
    numbered(log, 0, 60)
    monkeypatch.setattr(event_log.os, "open", usual)
    assert numbers(read_events(path)) == list(range(60)) and log.lost == 0 and path.stat().st_size > 6000
    numbered(log, 60, 100)
    assert numbers(read_events(path)) == list(range(100)) and any((tmp_path / "events").iterdir())


def test_damaged_segment_costs_its_events_only(tmp_path, short_segments):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    numbered(log, 0, 60)
    log.close()
    whole, end = numbers(read_events(path)), end_of_events(path)
    first, second, *_ = sorted((tmp_path / "events").iterdir())
    first.write_bytes(first.read_bytes()[:40])
    second.write_bytes(b"")
    tail = read_events(path)
    assert tail.damaged == 2 and tail.offset == end and 0 < len(tail.events) < 60
    assert numbers(tail) == whole[-len(tail.events) :]


def test_oldest_segments_are_removed_although_the_disk_takes_no_compressed_ones(tmp_path, short_segments, monkeypatch):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, 8000)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(event_log.gzip, "GzipFile", full)
    numbered(log, 0, 500)
    assert sum(file.stat().st_size for file in [path, *(tmp_path / "events").iterdir()]) <= 8000 + 2200
    assert all(file.suffix == ".jsonl" for file in (tmp_path / "events").iterdir()), "no drafts are left"
    assert numbers(read_events(path))[-1] == 499


def segments(path):
    return sorted(one.name for one in (path.parent / "events").iterdir())


def test_division_leaves_compression_to_another_thread_one_at_a_time(tmp_path, short_segments):
    path, waiting = tmp_path / "events.jsonl", []
    log = EventLog(path, aside=lambda work: waiting.append(work) or True)
    waiting.pop()()
    numbered(log, 0, 100)
    assert len(waiting) == 1 and len(segments(path)) > 4 and not any(name.endswith(".gz") for name in segments(path))
    assert numbers(read_events(path)) == list(range(100))
    waiting.pop()()
    assert all(name.endswith(".gz") for name in segments(path)) and numbers(read_events(path)) == list(range(100))
    numbered(log, 100, 120)
    assert len(waiting) == 1, "the next division asks again"
    refusing = EventLog(path, aside=lambda work: waiting.append(work) is not None)
    numbered(refusing, 120, 160)
    assert len(waiting) > 2, "a refused work is offered again"


def test_compression_ends_soon_after_the_log_is_closed(tmp_path, short_segments, monkeypatch):
    """A log of an older version may be large."""
    path, waiting = tmp_path / "events.jsonl", []
    path.write_bytes(b'{"at": 0.0, "wall": 0.0, "kind": "n", "n": -1}\n' * 500)
    log = EventLog(path, aside=lambda work: waiting.append(work) or True)
    waiting.pop()()
    numbered(log, 0, 2)
    log.close()
    waiting.pop()()
    (segment,) = (tmp_path / "events").iterdir()
    assert segment.suffix == ".jsonl" and numbers(read_events(path)) == [-1] * 500 + [0, 1]
    EventLog(path).close()
    (segment,) = (tmp_path / "events").iterdir()
    assert segment.suffix == ".gz" and numbers(read_events(path)) == [-1] * 500 + [0, 1]


WRITER = """
import sys
from pathlib import Path
from thinwire.node.runtime import event_log
from thinwire.node.peer.reports.background_thread import Background
from thinwire.node.peer.reports.background_thread import Background
event_log.SEGMENT = 2000
path, number = Path(sys.argv[1]), int(sys.argv[2])
log = event_log.EventLog(path, aside=Background("reports").run)
while True:
    assert log.append("n", {"n": number, "text": "x" * 100}, at=0.0, wall=0.0)
    number += 1
    print(number, flush=True)
"""


def test_no_event_is_lost_if_processes_end_while_they_compress(tmp_path):
    path, first = tmp_path / "events.jsonl", 0
    for least in (31, 60, 87, 200):
        child = subprocess.Popen([sys.executable, "-c", WRITER, path, str(first)], stdout=subprocess.PIPE, text=True)
        for line in child.stdout:
            if int(line) >= first + least:
                child.kill()
                break
        told = int(line)
        child.wait()
        child.stdout.close()
        found = numbers(read_events(path))
        assert found == list(range(len(found))) and len(found) >= told
        first = len(found)
    (tmp_path / "events" / f".{0:015d}-{5:015d}.jsonl.gz").write_bytes(b"a draft")
    EventLog(path).close()
    assert all(name.endswith(".jsonl.gz") and not name.startswith(".") for name in segments(path))
    assert numbers(read_events(path)) == list(range(first))


def test_status_of_another_user_is_an_error_and_not_the_absence_of_a_daemon(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "status.json")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(PermissionError):
        read_status(tmp_path / "status.json")
