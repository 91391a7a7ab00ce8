"""The checkpoint store on a simulated disk that crashes, tears writes, flips bits and fills up."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import numpy as np
import pytest
from thinwire.node.runtime.disk import Disk
from thinwire.node.state.checkpoint_store import CheckpointStore, Saved, SaveFailed
from thinwire.node.state.snapshot import FragmentState, PrivateState, Snapshot
from thinwire.sims.engine.disk import PAGE, SimDisk
from thinwire.swarm.identity.identity import Identity

HOME, RUN, IDENTITY = Path("/run/checkpoints"), bytes(32), Identity.generate(b"k" * 32)


class Crash(BaseException):
    """The power is gone."""


def _snapshot(round: int) -> Snapshot:
    values = np.full(3000, round, np.float32)
    fragment = FragmentState({"w": values}, {"w": -values})
    return Snapshot(RUN, round, bytes([round]) * 32, (), {0: fragment}, PrivateState({"m": values}, {"step": round}))


def _store(disk: SimDisk) -> CheckpointStore:
    return CheckpointStore(HOME, disk, IDENTITY)


def _saved(disk: SimDisk, round: int) -> bool:
    return isinstance(_store(disk).save(_snapshot(round), now=1e9 + round, suffix=f"{round:08x}"), Saved)


def _crash_at(disk: SimDisk, count: int) -> None:
    def before(operation: str) -> None:
        nonlocal count
        count -= 1
        if count < 0:
            raise Crash

    disk.before = before


def test_checkpoint_store_crash_at_any_operation_leaves_loadable_checkpoint() -> None:
    probe, operations = SimDisk(random.Random(0)), 0

    def count(operation: str) -> None:
        nonlocal operations
        operations += 1

    for round in range(1, 5):
        assert _saved(probe, round)
    probe.before = count
    assert _saved(probe, 5)
    assert operations > 20
    seen = set()
    for at in range(operations + 1):
        for seed in range(4):
            disk = SimDisk(random.Random(seed))
            for round in range(1, 5):
                assert _saved(disk, round)
            _crash_at(disk, at)
            try:
                assert _saved(disk, 5) and at == operations
            except Crash:
                pass
            disk.before = lambda operation: None
            disk.crash()
            loaded = _store(disk).load(RUN).snapshot
            assert loaded is not None and loaded.round in (4, 5)
            assert loaded.round == 5 or at < operations
            np.testing.assert_array_equal(loaded.fragments[0].weights["w"], np.full(3000, loaded.round, np.float32))
            assert _saved(disk, 6), "and what is left over is in nobody's way"
            newest = _store(disk).load(RUN).snapshot
            assert newest is not None and newest.round == 6
            seen.add(loaded.round)
    assert seen == {4, 5}


def test_crashed_disk_keeps_synced_data_and_may_tear_the_rest() -> None:
    ends = set()
    for seed in range(200):
        disk = SimDisk(random.Random(seed))
        disk.make_directory(Path("/d"))
        safe, unsafe = disk.create(Path("/d/safe")), disk.create(Path("/d/unsafe"))
        safe.write(b"s" * 100)
        safe.sync()
        unsafe.write(b"u" * 3 * PAGE)
        disk.sync_directory(Path("/d"))
        safe.write(b"later" * 2000)
        disk.crash()
        assert disk.read(Path("/d/safe"), 100) == b"s" * 100
        left = disk.read(Path("/d/unsafe"), 4 * PAGE)
        torn = left.rstrip(b"u") != b""
        assert left[: (len(left) - 1) // PAGE * PAGE].strip(b"u") == b"", "only the last page is torn"
        ends.add((len(left) == 0, len(left) > PAGE, torn))
        with pytest.raises(OSError, match="error"):
            unsafe.write(b"x")
    assert {(True, False, False), (False, True, False), (False, True, True)} <= ends


def test_crashed_disk_may_lose_unsynced_names() -> None:
    found = set()
    for seed in range(50):
        disk = SimDisk(random.Random(seed))
        disk.make_directory(Path("/d"))
        disk.create(Path("/d/a")).sync()
        disk.sync_directory(Path("/d"))
        disk.rename(Path("/d/a"), Path("/d/b"))
        disk.crash()
        found.add(tuple(disk.names(Path("/d"))))
    assert found == {("a",), ("b",)}


def test_checkpoint_store_detects_bit_rot_and_loads_previous_checkpoint() -> None:
    older = 0
    for seed in range(40):
        disk = SimDisk(random.Random(seed))
        assert _saved(disk, 1) and _saved(disk, 2)
        path = disk.rot()
        loaded = _store(disk).load(RUN)
        assert loaded.snapshot is not None
        np.testing.assert_array_equal(
            loaded.snapshot.fragments[0].weights["w"], np.full(3000, loaded.snapshot.round, np.float32)
        )
        if "step-00000002" in path:
            assert loaded.remarks, "it says so"
            older += loaded.snapshot.round == 1
    assert older >= 5
    assert SimDisk(random.Random(0)).rot() == ""


@pytest.mark.parametrize("how", ["broken", "capacity"])
def test_checkpoint_save_on_full_disk_fails_and_keeps_previous(how: str) -> None:
    disk = SimDisk(random.Random(1))
    assert _saved(disk, 1)
    if how == "broken":
        disk.broken = errno.EIO
    else:
        disk.capacity = disk.used() + 5000
    assert isinstance(_store(disk).save(_snapshot(2), now=1e9, suffix="2" * 8), SaveFailed)
    loaded = _store(disk).load(RUN).snapshot
    assert loaded is not None and loaded.round == 1
    disk.broken, disk.capacity = 0, None
    assert _saved(disk, 2)


def test_slow_disk_reports_duration() -> None:
    disk = SimDisk(random.Random(1))
    assert _saved(disk, 1) and disk.spent == 0.0
    disk.delay = 0.5
    assert _saved(disk, 2) and disk.spent > 5.0


def test_sim_disk_implements_disk() -> None:
    disk: Disk = SimDisk(random.Random(1))
    assert disk.names(Path("/nothing")) == []
    disk.make_directory(Path("/a/b"))
    disk.create(Path("/a/b/c")).write(b"1")
    for wrong, path in (
        (disk.create, "/a/b/c"),
        (disk.remove, "/a/x"),
        (disk.remove_directory, "/a"),
        (disk.size, "/a"),
    ):
        with pytest.raises(OSError, match=r"\[Errno"):
            wrong(Path(path))
    with pytest.raises(NotADirectoryError):
        disk.make_directory(Path("/a/b/c/d"))


def test_crashed_disk_leaves_each_overwritten_page_old_new_or_torn() -> None:
    path, kinds, states = Path("/d/a"), set(), set()
    for seed in range(200):
        disk = SimDisk(random.Random(seed))
        disk.make_directory(path.parent)
        file = disk.create(path)
        file.write(b"o" * 3 * PAGE)
        file.sync()
        disk.sync_directory(path.parent)
        disk.before = lambda operation: _raise_at_sync(operation)
        with pytest.raises(Crash):
            disk.overwrite(path, b"n" * (2 * PAGE + 10))
        assert disk.read(path, 1) == b"n", "the cache has it"
        disk.before = lambda operation: None
        disk.crash()
        data = disk.read(path, 4 * PAGE)
        assert len(data) == 3 * PAGE and data[2 * PAGE + 10 :].strip(b"o") == b""
        pages = [data[at : at + PAGE] for at in range(0, 2 * PAGE, PAGE)]
        states.add(tuple(page[:1] + page[-1:] for page in pages))
        kinds |= {page[:1] + page[-1:] for page in pages}
    assert kinds == {b"oo", b"nn", b"no"} and len(states) == 9


def _raise_at_sync(operation: str) -> None:
    if operation == "sync":
        raise Crash


def test_overwritten_data_is_durable_and_needs_no_space() -> None:
    path, disk = Path("/d/a"), SimDisk(random.Random(1))
    disk.make_directory(path.parent)
    disk.create(path).write(b"o" * 100)
    disk.sync_directory(path.parent)
    disk.capacity = 100
    disk.overwrite(path, b"n" * 50)
    disk.crash()
    assert disk.read(path, 200) == b"n" * 50 + b"o" * 50
    with pytest.raises(OSError, match="space"):
        disk.overwrite(path, b"m" * 101)
    with pytest.raises(OSError, match="No such"):
        disk.overwrite(Path("/d/b"), b"m")


def test_disk_that_lies_about_syncs_loses_synced_data_in_a_crash() -> None:
    kept = set()
    for seed in range(20):
        disk = SimDisk(random.Random(seed))
        disk.make_directory(Path("/run"))
        for name, lying in (("old", False), ("new", True)):
            disk.lying = lying
            file = disk.create(Path("/run") / name)
            file.write(b"data")
            file.sync()
            disk.sync_directory(Path("/run"))
        disk.crash()
        found = disk.names(Path("/run"))
        assert "old" in found and disk.read(Path("/run/old"), 10) == b"data"
        kept.add("new" in found)
    assert kept == {False, True}, "as another file that was not synced, it remains or not"


def test_disk_that_lies_about_syncs_forgets_what_was_overwritten() -> None:
    path, states = Path("/d/a"), set()
    for seed in range(20):
        disk = SimDisk(random.Random(seed))
        disk.make_directory(path.parent)
        file = disk.create(path)
        file.write(b"o" * PAGE)
        file.sync()
        disk.sync_directory(path.parent)
        disk.lying = True
        disk.overwrite(path, b"n" * PAGE)
        assert disk.read(path, PAGE) == b"n" * PAGE
        disk.crash()
        page = disk.read(path, PAGE)
        states.add(page[:1] + page[-1:])
    assert states == {b"oo", b"nn", b"no"}
