"""The file of votes on a real disk, and on a simulated disk that crashes, tears writes, fills up and breaks."""

import errno
import itertools
import os
import random
import tempfile
import time
from pathlib import Path

import blake3
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore, VoteRecord
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.state.vote_file import ABSENT, AHEAD, MAGIC, SIZE, VoteFile
from thinwire.sims.engine.disk import PAGE, SimDisk
from thinwire.swarm.messages.registry import (
    LIFE,
    MAX_FAREWELLS,
    MAX_GROUP,
    MAX_TOKEN,
    Ballot,
    Contribution,
    Exclusion,
    Farewell,
    MemberProof,
    Proposal,
)

PATH = Path("/run/votes")
A, B = b"a" * 32, b"b" * 32


class Killed(BaseException):
    """End of the process, or of the power."""


def proposal_of(round=7, peers=2, term=1):
    ids = tuple(bytes([index % 256, index // 256]) * 16 for index in range(peers))
    contributors = tuple(Contribution(peer, 1, 100) for peer in ids)
    return Proposal(round, 0, Ballot(term, A), ids, ids, contributors, (), None, (), lives=bytes(LIFE * peers))


def record(round=7, term=1, peers=2):
    return VoteRecord(b"", round, Ballot(term, A), proposal_of(round, peers, term), bytes([term]) * 32)


def largest_open():
    """Return a proposal with the longest encoding."""
    farewells = tuple(Farewell(B, Ballot(2**32 - 1, B), B, B, b"s" * 64) for _ in range(MAX_FAREWELLS))
    ids = tuple(bytes([255]) * 31 + bytes([index]) for index in range(MAX_GROUP))
    return Proposal(
        2**32 - 1,
        2**16 - 1,
        Ballot(2**32 - 1, B),
        ids,
        ids,
        tuple(Contribution(peer, 2**32 - 1, 2**53 - 1, B) for peer in ids),
        tuple(Exclusion(peer, "r" * 64) for peer in ids),
        bytes(32),
        ids,
        ids,
        ids,
        *((2**16 - 1,) * MAX_GROUP for _ in range(3)),
        lives=b"l" * LIFE * MAX_GROUP,
        member_proofs=(MemberProof(2**32 - 1, B, B, b"s" * 64, b"t" * MAX_TOKEN),) * MAX_GROUP,
        lineage=b"l" * LIFE,
        farewells=farewells,
        left=farewells,
        electorate=B,
        seal=bytes(64),
    )


def sim_disk(seed=0):
    return SimDisk(random.Random(f"{seed}/disk"))


def vote_file(disk, seed=0, path=PATH):
    return VoteFile(path, disk, random.Random(f"{seed}/lives"), lambda: 1.7e9)


def used(disk, path=PATH):
    """Return the file's content and the number of its bytes that are in use."""
    data = disk.read(path, SIZE)
    return data, len(MAGIC) + LIFE + 8 + int.from_bytes(data[28:32], "little") + 16


def replaced(disk, data, path=PATH):
    disk.remove(path)
    disk.create(path).write(data)


def changed(**fields):
    """Return the encoding of a record with some fields replaced."""
    return msgspec.msgpack.encode({**msgspec.to_builtins(record(), builtin_types=(bytes,)), **fields})


def signed(life, body):
    data = MAGIC + life + bytes(4) + len(body).to_bytes(4, "little") + body
    return (data + blake3.blake3(data).digest(16)).ljust(SIZE, b"\0")


ballots = st.builds(Ballot, st.integers(0, 2**32 - 1), st.binary(min_size=32, max_size=32))
records = st.builds(
    lambda lineage, round, promised, vote, left: VoteRecord(lineage, round, promised, *vote(round), left),
    st.sampled_from((b"", b"l" * LIFE)),
    st.integers(0, 2**32 - 1),
    ballots,
    st.sampled_from(
        (lambda round: (None, None), lambda round: (proposal_of(round), A), lambda round: (proposal_of(round, 90), B))
    ),
    st.booleans(),
)


@settings(max_examples=50)
@given(st.lists(records, min_size=1, max_size=4))
def test_vote_file_loads_last_saved_record_and_life(saved):
    disk = sim_disk()
    first = vote_file(disk)
    assert first.lost == ABSENT and first.record is None and len(first.life) == LIFE
    for one in saved:
        first.save(one)
        assert first.record == one
        again = vote_file(disk, seed=1)
        assert (again.lost, again.life, again.record) == ("", first.life, one)
    assert disk.size(PATH) == SIZE


def test_vote_file_on_real_disk_survives_processes_in_turn(tmp_path):
    path = tmp_path / "new" / "votes"
    lives, last = set(), None
    for turn in range(1, 6):
        store = vote_file(RealDisk(), seed=turn, path=path)
        assert store.record == last
        last = record(turn, peers=60 // turn)
        store.save(last)
        lives.add(store.life)
    assert len(lives) == 1 and path.stat().st_size == SIZE
    store.renew()
    again = vote_file(RealDisk(), seed=9, path=path)
    assert (again.life, again.record, again.lost) == (store.life, None, "") and store.life not in lives
    assert os.listdir(path.parent) == ["votes"]


def test_vote_file_holds_largest_open_and_refuses_longer_record():
    largest = largest_open()
    assert len(msgspec.msgpack.encode(largest)) + 1000 < SIZE
    disk = sim_disk()
    store = vote_file(disk)
    one = VoteRecord(b"l" * LIFE, 2**32 - 1, Ballot(2**32 - 1, B), largest, B, True)
    store.save(one)
    assert vote_file(disk).record == one
    exclusions = tuple(Exclusion(A, "x" * 64) for _ in range(4000))
    with pytest.raises(OSError, match="too long"):
        store.save(VoteRecord(b"", 2**32 - 1, Ballot(1, A), msgspec.structs.replace(largest, excluded=exclusions), B))
    assert vote_file(disk).record == one


def test_vote_file_with_any_flipped_bit_has_a_new_life():
    source = sim_disk()
    store = vote_file(source)
    store.save(record())
    data, end = used(source)
    disk, found = sim_disk(), set()
    disk.make_directory(PATH.parent)
    disk.create(PATH).write(data)
    for bit in range(8 * end):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        replaced(disk, flipped)
        damaged = vote_file(disk, seed=bit + 1)
        assert damaged.lost and damaged.record is None and damaged.life != store.life
        found.add(damaged.lost)
        assert vote_file(disk, seed=-1).life == damaged.life, "the new life is stored"
    assert found == {"unknown format", "wrong checksum"}
    for at in (end, end + 1, SIZE - 1):
        replaced(disk, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert vote_file(disk, seed=1).record == record(), "the rest is not used"


def test_vote_file_truncated_or_extended_has_a_new_life():
    source = sim_disk()
    store = vote_file(source)
    store.save(record())
    data, end = used(source)
    disk = sim_disk()
    disk.make_directory(PATH.parent)
    disk.create(PATH).write(data)
    for size in (*range(end + 2), end + PAGE, SIZE - 1, SIZE + 1):
        replaced(disk, data.ljust(size, b"\0")[:size])
        damaged = vote_file(disk, seed=1)
        assert damaged.lost == "wrong size" and damaged.record is None and damaged.life != store.life
        assert disk.size(PATH) == SIZE


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0\xc0",
        b"\x91" * 5000,
        msgspec.msgpack.encode({"round": 1}),
        msgspec.msgpack.encode([1, 2, 3]),
        changed(round=2**32),
        changed(round=8),
        changed(digest=None),
        changed(digest=b"short"),
        changed(lineage=b"short"),
        changed(promised=[-1, A]),
        changed(unknown=1),
    ],
)
def test_vote_file_with_valid_checksum_and_invalid_record_has_a_new_life(body):
    disk = sim_disk()
    disk.make_directory(PATH.parent)
    disk.create(PATH).write(signed(A[:LIFE], msgspec.msgpack.encode(record())))
    assert vote_file(disk).record == record(), "otherwise this test proves nothing"
    replaced(disk, signed(A[:LIFE], body))
    store = vote_file(disk)
    assert store.lost and store.record is None and store.life != A[:LIFE]


def test_vote_file_without_a_life_has_a_new_life():
    disk = sim_disk()
    disk.make_directory(PATH.parent)
    disk.create(PATH).write(signed(bytes(LIFE), msgspec.msgpack.encode(None)))
    store = vote_file(disk)
    assert store.lost and any(store.life)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.sampled_from((b"", MAGIC)), st.booleans())
def test_vote_file_with_arbitrary_content_never_raises(content, start, padded):
    disk = sim_disk()
    disk.make_directory(PATH.parent)
    disk.create(PATH).write((start + content).ljust(SIZE if padded else 0, b"\0"))
    store = vote_file(disk)
    assert store.lost and store.record is None
    store.save(record())
    assert vote_file(disk).record == record()


def killed_at(disk, count):
    """Let the disk stop the process before its operation number `count`, counted from 0."""
    counter = itertools.count()

    def before(operation):
        if next(counter) >= count:
            raise Killed

    disk.before = before


@pytest.mark.parametrize("size", [2, 40, 200])
def test_vote_file_after_crash_during_save_has_either_record_or_a_new_life(size):
    """Sizes: one page, some pages, and an old record that is longer than the new one."""
    old, new = record(term=1, peers=60), record(term=2, peers=size)
    outcomes = set()
    for at, seed in itertools.product(range(3), range(100)):
        disk = sim_disk(seed)
        store = vote_file(disk, seed)
        store.save(old)
        killed_at(disk, at)
        returned = False
        try:
            store.save(new)
            returned = True
        except Killed:
            pass
        assert returned == (at == 2)
        disk.before = lambda operation: None
        disk.crash()
        after = vote_file(disk, seed + 1000)
        if after.life == store.life:
            assert after.record == new or (after.record == old and not returned) and not after.lost
            outcomes.add((at, "new" if after.record == new else "old"))
        else:
            assert after.record is None and after.lost and not returned
            outcomes.add((at, "lost"))
        if after.life == store.life and after.record == new:
            disk.crash()
            assert vote_file(disk).record == new, "a loaded record is durable"
    assert outcomes == {(0, "old"), (1, "old"), (1, "new"), (1, "lost"), (2, "new")}


def test_vote_file_after_crash_during_creation_has_its_life_or_a_new_one():
    found = set()
    for at, seed in itertools.product(range(6), range(40)):
        disk = sim_disk(seed)
        killed_at(disk, at)
        life, one = None, None
        try:
            store = vote_file(disk, seed)
            life = store.life
            store.save(record())
            one = record()
        except Killed:
            pass
        disk.before = lambda operation: None
        disk.crash()
        after = vote_file(disk, seed + 1000)
        if one:
            assert (after.life, after.record) == (life, one)
        elif after.record is not None:
            assert after.record == record()
        elif life is not None:
            assert after.life == life or after.lost
        after.save(record(term=3))
        assert vote_file(disk).record == record(term=3), "a draft is in no way"
        found.add((at, after.lost))
    assert {lost for _, lost in found} == {"", ABSENT, "wrong size"}


def test_vote_file_record_loaded_after_kill_survives_power_cut():
    """A kill between write and sync leaves the record in the cache; the next process may send what it loads."""
    for seed in range(40):
        disk = sim_disk(seed)
        store = vote_file(disk, seed)
        store.save(record(term=1))
        killed_at(disk, 1)
        with pytest.raises(Killed):
            store.save(record(term=2))
        disk.before = lambda operation: None
        loaded = vote_file(disk, seed + 1)
        assert (loaded.life, loaded.record) == (store.life, record(term=2))
        disk.crash()
        assert vote_file(disk, seed + 2).record == record(term=2)


@pytest.mark.parametrize("at", [0, 1])
def test_vote_file_failed_save_raises_and_does_not_count(at):
    disk = sim_disk()
    store = vote_file(disk)
    store.save(record(term=1))
    count = itertools.count()

    def before(operation):
        disk.broken = errno.EIO if next(count) == at else 0

    disk.before = before
    first = store.life
    with pytest.raises(OSError, match="error"):
        store.save(record(term=2))
    assert store.record is None and store.life != first, "a life in memory follows"
    disk.before, disk.broken = lambda operation: None, 0
    store.save(record(term=3))
    assert store.record == record(term=3)
    again = vote_file(disk, seed=9)
    assert again.life == first and again.record in (record(term=1), record(term=2)), "no other record was stored"


def test_vote_file_on_full_disk_saves_in_its_allocated_space():
    disk = sim_disk()
    store = vote_file(disk)
    disk.capacity = disk.used()
    store.save(record(peers=200))
    assert vote_file(disk).record == record(peers=200)


def test_vote_file_without_space_has_a_life_in_memory_that_no_later_process_knows():
    disk = sim_disk()
    disk.capacity = SIZE // 2
    told = []
    store = VoteFile(PATH, disk, random.Random(1), time.time, told.append)
    assert store.lost == ABSENT and len(told) == 1 and "cannot be written: No space" in told[0]
    store.save(record())
    assert store.record == record()
    disk.capacity = None
    store.save(record(term=2))
    again = vote_file(disk, seed=1)
    assert again.record is None and again.life != store.life


def test_vote_file_that_cannot_be_made_durable_gives_a_life_for_this_process_only():
    disk = sim_disk()
    first = vote_file(disk, seed=1)
    first.save(record())
    disk.broken = errno.EROFS
    second = vote_file(disk, seed=2)
    assert "Read-only" in second.lost and second.record is None and second.life != first.life
    second.save(record(term=2))
    disk.broken = 0
    third = vote_file(disk, seed=3)
    assert (third.life, third.record) == (first.life, record())


def test_vote_file_renewed_on_broken_disk_has_a_new_life_and_the_old_one_stays_on_disk():
    disk, told = sim_disk(), []
    store = VoteFile(PATH, disk, random.Random(1), time.time, told.append)
    store.save(record())
    life = store.life
    disk.broken = errno.EIO
    store.renew()
    assert store.life != life and store.record is None and "cannot be written" in told[0]
    disk.broken = 0
    assert (vote_file(disk).life, vote_file(disk).record) == (life, record())


def test_vote_file_saves_an_equal_record_only_once():
    disk = sim_disk()
    store = vote_file(disk)
    store.save(record())
    disk.broken = errno.EIO
    store.save(record())
    assert store.record == record()


def test_vote_file_at_a_directory_reports_it_and_votes_in_memory():
    with tempfile.TemporaryDirectory() as folder:
        told = []
        store = VoteFile(Path(folder), RealDisk(), random.Random(1), time.time, told.append)
        assert store.lost and len(told) == 2 and store.record is None
        store.save(record())
        assert store.record == record()


def test_memory_vote_store_keeps_its_record_until_it_is_renewed():
    store = MemoryVoteStore(random.Random(1))
    life = store.life
    assert store.record is None and len(life) == LIFE
    store.save(record())
    assert store.record == record()
    store.renew()
    assert store.record is None and store.life != life


@pytest.mark.parametrize(
    "fields",
    [
        (b"short", 7, Ballot(1, A), None, None),
        (b"", 7, Ballot(1, A), proposal_of(), None),
        (b"", 7, Ballot(1, A), None, A),
        (b"", 8, Ballot(1, A), proposal_of(7), A),
    ],
)
def test_vote_record_with_contradicting_fields_is_refused(fields):
    with pytest.raises(ValueError, match="lineage|vote"):
        VoteRecord(*fields)


def test_numbers_of_announcements_are_never_used_twice_in_a_life():
    disk = sim_disk()
    first = vote_file(disk)
    assert first.numbers == 0
    first.use_number(1000)
    saved = disk.read(PATH, SIZE)
    for number in range(1001, 1001 + AHEAD):
        first.use_number(number)
    assert disk.read(PATH, SIZE) == saved, "one save allows many numbers"
    disk.crash()
    second = vote_file(disk)
    assert second.life == first.life and second.numbers >= 1000 + AHEAD, "a process that begins above repeats none"
    second.use_number(second.numbers + 1)
    second.save(record())
    assert vote_file(disk).numbers == second.numbers > first.numbers
    second.renew()
    assert second.numbers == vote_file(disk).numbers == 0, "another life has its own numbers"


def test_number_that_cannot_be_stored_ends_the_life():
    disk = sim_disk()
    store = vote_file(disk)
    life = store.life
    disk.broken = errno.EIO
    with pytest.raises(OSError):
        store.use_number(1)
    assert store.life != life
