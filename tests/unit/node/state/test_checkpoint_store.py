import copy
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.state import checkpoint_manifest
from thinwire.node.state.checkpoint_store import KEEP, CheckpointStore, Saved, SaveFailed
from thinwire.node.state.snapshot import FragmentState, PrivateState, Snapshot
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages.registry import LIFE, ChainEntry, Fork

RUN = bytes(range(32))
IDENTITY = Identity.generate(b"\x07" * 32)
HOME = Path("store")
DAY = 86_400.0


class Killed(BaseException):
    """Kill of the process: no later code runs, not even a clean-up."""


class MemoryFile:
    def __init__(self, disk):
        self.disk, self.live, self.durable = disk, b"", b""

    def write(self, data):
        # A kill or an error in the middle of a write leaves a part of it.
        self.live += bytes(data[: len(data) // 2])
        self.disk.operation("write")
        self.live += bytes(data[len(data) // 2 :])

    def sync(self):
        self.disk.operation("sync")
        self.durable = self.live

    def close(self):
        pass


class Folder:
    def __init__(self):
        self.live, self.durable = {}, {}


class MemoryDisk:
    """A disk with a write-back cache, so that a power cut shows every missing sync. Fails on request."""

    def __init__(self):
        self.root = Folder()
        self.count = 0
        self.kill_at = None
        self.fail_at = range(0)
        self.error = errno.ENOSPC

    def operation(self, name):
        self.count += 1
        if self.kill_at is not None and self.count >= self.kill_at:
            raise Killed
        if self.count in self.fail_at:
            raise OSError(self.error, os.strerror(self.error))

    def _folder(self, path):
        node = self.root
        for part in path.parts:
            node = node.live.get(part)
            if not isinstance(node, Folder):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return node

    def file(self, path):
        node = self._folder(path.parent).live.get(path.name)
        if not isinstance(node, MemoryFile):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return node

    def make_directory(self, path):
        self.operation("make_directory")
        node = self.root
        for part in path.parts:
            if part not in node.live:
                node.live[part] = node.durable[part] = Folder()
            node = node.live[part]

    def create(self, path):
        self.operation("create")
        folder = self._folder(path.parent)
        if path.name in folder.live:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        folder.live[path.name] = MemoryFile(self)
        return folder.live[path.name]

    def size(self, path):
        return len(self.file(path).live)

    def read(self, path, nbytes):
        return self.file(path).live[:nbytes]

    def names(self, path):
        try:
            return sorted(self._folder(path).live)
        except FileNotFoundError:
            return []

    def rename(self, old, new):
        self.operation("rename")
        target = self._folder(new.parent).live.get(new.name)
        if isinstance(target, Folder) and target.live:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        self._folder(new.parent).live[new.name] = self._folder(old.parent).live.pop(old.name)

    def sync_directory(self, path):
        self.operation("sync_directory")
        folder = self._folder(path)
        folder.durable = dict(folder.live)

    def remove(self, path):
        self.operation("remove")
        self.file(path)
        del self._folder(path.parent).live[path.name]

    def remove_directory(self, path):
        self.operation("remove_directory")
        if self._folder(path).live:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        del self._folder(path.parent).live[path.name]

    def after_power_cut(self, entries, content):
        """Return the remaining disk; `entries`, `content`: "durable" (only synced ones) or "live" (all)."""
        after = MemoryDisk()

        def kept(node):
            if isinstance(node, MemoryFile):
                file = MemoryFile(after)
                file.live = file.durable = getattr(node, content)
                return file
            folder = Folder()
            folder.live = {name: kept(child) for name, child in getattr(node, entries).items()}
            folder.durable = dict(folder.live)
            return folder

        after.root = kept(self.root)
        return after


def snapshot(round, *, run=RUN, seed=None, private=True):
    random = np.random.default_rng(round if seed is None else seed)
    shapes = {"embed.weight": (7, 5), "norm.weight": (5,), "scale": ()}
    fragments = {
        index: FragmentState(
            {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
            {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
        )
        for index in (0, 3)
    }
    tensors = {
        "adam/embed.weight": random.standard_normal((7, 5)).astype(np.float32),
        "rng": np.arange(9, dtype=np.uint8),
    }
    state = PrivateState(tensors, {"cursor": 12_345_678_901, "epoch": 1.5, "shard": "a", "done": False, "last": None})
    members = tuple(bytes([k]) * 32 for k in range(3))
    digest = bytes([round % 256]) * 32
    fork = Fork(round, digest, members, members[:1], bytes([round % 256]) * LIFE, (bytes(64),))
    chain = (ChainEntry(fork),) * (round % 3)
    return Snapshot(run, round, digest, members, fragments, state if private else None, lives=b"l" * 48, chain=chain)


def same_tensors(a, b):
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a
    )


def same(a, b):
    plain = [(s.run_id, s.round, s.digest, s.members, s.fragments.keys(), s.lives, s.chain) for s in (a, b)]
    private = (a.private is None and b.private is None) or (
        a.private is not None
        and b.private is not None
        and same_tensors(a.private.tensors, b.private.tensors)
        and a.private.values == b.private.values
    )
    return (
        plain[0] == plain[1]
        and private
        and all(
            same_tensors(a.fragments[i].weights, b.fragments[i].weights)
            and same_tensors(a.fragments[i].momentum, b.fragments[i].momentum)
            for i in a.fragments
        )
    )


def store(disk, directory=HOME, identity=IDENTITY):
    return CheckpointStore(directory, disk, identity)


def filled(rounds, disk=None):
    disk = disk or MemoryDisk()
    for round in rounds:
        assert isinstance(store(disk).save(snapshot(round), now=round * 1.0, suffix=f"s{round}"), Saved)
    disk.count = 0
    return disk


@pytest.mark.parametrize("private", [True, False])
def test_checkpoint_round_trips_on_real_disk(tmp_path, private):
    one = store(RealDisk(), tmp_path / "a" / "b")
    outcome = one.save(snapshot(12, private=private), now=5.0, suffix="x")
    assert isinstance(outcome, Saved) and outcome.path == tmp_path / "a" / "b" / "step-00000012"
    assert outcome.nbytes == sum(f.stat().st_size for f in outcome.path.glob("*.safetensors"))
    loaded = one.load(RUN)
    assert loaded.remarks == () and loaded.path == outcome.path
    assert same(loaded.snapshot, snapshot(12, private=private))
    assert (tmp_path / "a" / "b" / "LATEST").read_text() == "step-00000012\n"
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == ["LATEST", "step-00000012"]


def test_empty_checkpoint_store_loads_nothing(tmp_path):
    loaded = store(RealDisk(), tmp_path / "none").load()
    assert loaded.snapshot is None and loaded.remarks == ()


def test_large_file_has_a_hash_per_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_manifest, "CHUNK_BYTES", 256)
    disk = filled([1])
    manifest = checkpoint_manifest.unseal(disk.read(HOME / "step-00000001" / "manifest.json", 1 << 20), IDENTITY)
    entry = manifest.files[0]
    assert len(entry.chunks) == -(-entry.nbytes // 256) > 1
    data = bytearray(disk.read(HOME / "step-00000001" / entry.name, 1 << 20))
    entry.check(bytes(data))
    data[300] ^= 1
    with pytest.raises(checkpoint_manifest.CheckpointManifestError, match=r"chunk 2 of "):
        entry.check(bytes(data))


def operations_of_a_save(rounds):
    disk = filled(rounds)
    assert isinstance(store(disk).save(snapshot(9), now=9.0, suffix="n"), Saved)
    return disk.count


@pytest.mark.parametrize("rounds", [[1], [1, 2, 3]])  # the second prunes as well
def test_kill_at_any_operation_leaves_old_or_new_checkpoint(rounds):
    before = filled(rounds)
    total = operations_of_a_save(rounds)
    assert total > 15
    seen = set()
    for kill_at in range(1, total + 2):
        disk = copy.deepcopy(before)
        disk.kill_at = kill_at
        try:
            acknowledged = isinstance(store(disk).save(snapshot(9), now=9.0, suffix="n"), Saved)
        except Killed:
            acknowledged = False
        for entries in ("durable", "live"):
            for content in ("durable", "live"):
                after = disk.after_power_cut(entries, content)
                loaded = store(after).load(RUN)
                assert loaded.snapshot is not None, (kill_at, entries, content, loaded.remarks)
                newest = loaded.snapshot.round
                assert newest == 9 if acknowledged else newest in (rounds[-1], 9)
                assert same(loaded.snapshot, snapshot(newest))
                assert not [r for r in loaded.remarks if not r.startswith("LATEST")], loaded.remarks
                assert after.read(HOME / "LATEST", 99).decode().strip() in after.names(HOME)
                seen.add(newest)
                # Later saves remove the remains of the kill.
                assert isinstance(store(after).save(snapshot(10), now=10.0, suffix="m"), Saved)
                assert store(after).load(RUN).snapshot.round == 10
                assert not [name for name in after.names(HOME) if ".tmp-" in name]
    assert seen == {rounds[-1], 9}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("lasting", [False, True])
def test_save_on_full_or_broken_disk_returns_failure(error, lasting):
    before = filled([1, 2, 3])
    failed = 0
    for fail_at in range(1, operations_of_a_save([1, 2, 3]) + 1):
        disk = copy.deepcopy(before)
        disk.error, disk.fail_at = error, range(fail_at, 10**6 if lasting else fail_at + 1)
        outcome = store(disk).save(snapshot(9), now=9.0, suffix="n")
        if isinstance(outcome, SaveFailed):
            failed += 1
            assert os.strerror(error) in outcome.reason
        loaded = store(disk).load(RUN)
        assert loaded.snapshot.round in ((3, 9) if isinstance(outcome, SaveFailed) else (9,))
        assert same(loaded.snapshot, snapshot(loaded.snapshot.round))
        disk.fail_at = range(0)
        assert isinstance(store(disk).save(snapshot(10), now=10.0, suffix="m"), Saved)
    assert failed > 10


def test_non_finite_tensor_is_not_saved():
    disk = filled([1])
    bad = snapshot(2)
    bad.fragments[3].weights["scale"][...] = np.nan
    outcome = store(disk).save(bad, now=2.0, suffix="x")
    assert isinstance(outcome, SaveFailed) and "weights/scale: not all values are finite" in outcome.reason
    assert store(disk).load().snapshot.round == 1
    assert disk.names(HOME) == ["LATEST", "step-00000001"]


def test_shared_state_must_be_float32():
    bad = snapshot(2)
    bad.fragments[0].weights["scale"] = np.zeros((), np.float64)
    outcome = store(MemoryDisk()).save(bad, now=2.0, suffix="x")
    assert isinstance(outcome, SaveFailed) and "float64, not float32" in outcome.reason


SHARED = ("fragment-00000.safetensors", "fragment-00003.safetensors")


def damaged(name, change):
    disk = filled([1, 2])
    file = disk.file(HOME / "step-00000002" / name)
    file.live = change(file.live)
    return store(disk).load(RUN)


@given(st.sampled_from([*SHARED, "manifest.json"]), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_flipped_bit_is_detected_and_previous_checkpoint_loads(name, place, bit):
    def flip(data):
        at = int(place * len(data))
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]

    loaded = damaged(name, flip)
    assert same(loaded.snapshot, snapshot(1)), loaded.remarks
    assert any(remark.startswith("step-00000002: ") for remark in loaded.remarks)
    assert [remark[:13] for remark in loaded.damaged] == ["step-00000002"]


def test_older_damaged_checkpoint_is_no_newer_one_that_was_skipped():
    disk = filled([1, 2])
    disk.file(HOME / "step-00000001" / "manifest.json").live = b""
    loaded = store(disk).load(RUN)
    assert same(loaded.snapshot, snapshot(2)) and len(loaded.remarks) == 1 and loaded.damaged == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-1], "bytes instead of"),
        (lambda data: b"", "has 0 bytes instead of"),
        (lambda data: data + b"\0", "bytes instead of"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "chunk 1 of 1 differs from its hash"),
    ],
)
def test_checkpoint_damage_is_named(change, reason):
    loaded = damaged(SHARED[1], change)
    assert same(loaded.snapshot, snapshot(1))
    assert loaded.remarks[0].startswith(f"step-00000002: {SHARED[1]}") and reason in loaded.remarks[0]


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda data: b"[" * 100_000])
def test_damaged_checkpoint_manifest_is_detected(change):
    loaded = damaged("manifest.json", change)
    assert same(loaded.snapshot, snapshot(1)) and "the manifest is damaged" in loaded.remarks[0]


def test_missing_checkpoint_file_is_detected():
    disk = filled([1, 2])
    disk.remove(HOME / "step-00000002" / SHARED[0])
    loaded = store(disk).load(RUN)
    assert same(loaded.snapshot, snapshot(1)) and "No such file" in loaded.remarks[0]


def test_damaged_private_state_loses_only_itself():
    loaded = damaged("private.safetensors", lambda data: data[:-3])
    assert loaded.snapshot.round == 2 and loaded.snapshot.private is None
    assert same(loaded.snapshot, snapshot(2, private=False))
    assert "private state is lost: private.safetensors has" in loaded.remarks[0]


@pytest.mark.parametrize("pointer", [None, b"", b"step-00000001\n", b"../../elsewhere\n", b"\xff\xfe"])
def test_missing_or_wrong_latest_pointer_is_tolerated(pointer):
    disk = filled([1, 2])
    if pointer is None:
        disk.remove(HOME / "LATEST")
    else:
        disk.file(HOME / "LATEST").live = pointer
    loaded = store(disk).load(RUN)
    assert same(loaded.snapshot, snapshot(2))
    assert len(loaded.remarks) == 1 and loaded.remarks[0].startswith("LATEST: ")


def test_all_damaged_checkpoints_report_every_reason():
    disk = filled([1, 2])
    for round in (1, 2):
        disk.file(HOME / f"step-0000000{round}" / SHARED[0]).live += b"x"
    loaded = store(disk).load(RUN)
    assert loaded.snapshot is None and loaded.path is None and len(loaded.remarks) == 2


def replaced(files):
    """Return a checkpoint whose shared file has other, correctly hashed and signed content."""
    disk = filled([1, 2])
    place = HOME / "step-00000002"
    body = checkpoint_manifest.unseal(disk.read(place / "manifest.json", 1 << 20), IDENTITY)
    hasher = checkpoint_manifest.Hasher()
    hasher.update(files)
    entries = tuple(hasher.entry(f.name) if f.name == SHARED[0] else f for f in body.files)
    body = checkpoint_manifest.msgspec.structs.replace(body, files=entries)
    disk.file(place / SHARED[0]).live = files
    disk.file(place / "manifest.json").live = checkpoint_manifest.seal(body, IDENTITY)
    return store(disk).load(RUN)


def header(text, data):
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x02os\x94." + b"\0" * 20, "pickle"),
        (b"PK\x03\x04" + b"\0" * 50, "pickle"),
        (
            header(
                b'{"weights/a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                b'"weights/a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
                b"\0" * 4,
            ),
            "twice",
        ),
        (header(b'{"weights/a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0\0\xc0\x7f"), "finite"),
        (header(b'{"other/a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4), "does not belong"),
        (header(b'{"weights/a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4), "does not belong"),
    ],
)
def test_signed_but_invalid_content_is_refused(content, reason):
    loaded = replaced(content)
    assert same(loaded.snapshot, snapshot(1))
    assert reason in loaded.remarks[0]


def test_checkpoint_of_another_peer_is_refused():
    disk = filled([1, 2])
    other = Identity.generate(b"\x08" * 32)
    loaded = store(disk, identity=other).load(RUN)
    assert loaded.snapshot is None
    assert all("signed by peer" in remark for remark in loaded.remarks) and len(loaded.remarks) == 2


def test_checkpoint_of_another_run_is_skipped():
    disk = filled([1])
    store(disk).save(snapshot(2, run=b"\xaa" * 32), now=2.0, suffix="b")
    loaded = store(disk).load(RUN)
    assert same(loaded.snapshot, snapshot(1)) and "belongs to run aaaaaaaa" in loaded.remarks[0]
    assert store(disk).load().snapshot.round == 2


def test_other_checkpoint_format_is_refused_with_both_versions():
    disk = filled([1, 2])
    _in_format_7(disk, 2)
    loaded = store(disk).load()
    assert "format 7; this version reads format 5" in loaded.remarks[0] and loaded.snapshot.round == 1


def test_user_with_checkpoints_of_another_format_is_not_told_to_remove_them():
    """They are whole: the version that wrote them reads them, and any version reads the weights."""
    disk = filled([1, 2])
    _in_format_7(disk, 1, 2)
    loaded = store(disk).load()
    assert loaded.snapshot is None and loaded.other_format == HOME / "step-00000002"
    advice = loaded.advice(HOME)
    assert f"--from {HOME / 'step-00000002'}" in advice and "version" in advice and "restore" not in advice


def _in_format_7(disk, *rounds):
    for round in rounds:
        manifest = disk.file(HOME / f"step-{round:08d}" / "manifest.json")
        body = checkpoint_manifest.unseal(manifest.live, IDENTITY)
        manifest.live = checkpoint_manifest.seal(checkpoint_manifest.msgspec.structs.replace(body, format=7), IDENTITY)


def test_checkpoints_accept_repeated_and_lower_rounds():
    disk = filled([5])
    for seed, round, name in ((1, 5, "step-00000005.1"), (2, 5, "step-00000005.2"), (3, 4, "step-00000004")):
        outcome = store(disk).save(snapshot(round, seed=seed), now=9.0, suffix=f"x{seed}")
        assert outcome.path == HOME / name
        # The last saved state is the newest, with any round: the swarm may have set a peer back.
        assert same(store(disk).load(RUN).snapshot, snapshot(round, seed=seed))


def test_checkpoint_manifests_are_chained():
    disk = filled([1, 2])
    first = disk.read(HOME / "step-00000001" / "manifest.json", 1 << 20)
    second = checkpoint_manifest.unseal(disk.read(HOME / "step-00000002" / "manifest.json", 1 << 20), IDENTITY)
    assert second.previous == checkpoint_manifest.blake3(first).hexdigest() and second.serial == 2
    assert checkpoint_manifest.unseal(first, IDENTITY).previous == ""


def test_store_keeps_three_checkpoints_and_last_of_each_day():
    disk = MemoryDisk()
    for round in range(1, 13):  # four a day, for three days
        store(disk).save(snapshot(round), now=(round - 1) // 4 * DAY + round, suffix=f"s{round}")
    kept = [name for name in disk.names(HOME) if name.startswith("step-")]
    assert kept == [f"step-{round:08d}" for round in (4, 8, 10, 11, 12)]
    assert KEEP == 3
    for name in kept:
        assert "manifest.json" in disk.names(HOME / name)


def test_foreign_files_in_store_are_left_alone():
    disk = filled([1])
    disk.make_directory(HOME / "notes")
    disk.make_directory(HOME / "step-mine")
    filled(range(2, 8), disk)
    assert {"notes", "step-mine"} <= set(disk.names(HOME))


def killed(times, tmp_path):
    """Run the killer in a process without torch: it forks writers and kills them at random moments."""
    script = Path(__file__).parents[3] / "kit" / "programs" / "kill_checkpoint.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(times)], capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_checkpoints_survive_25_sigkills(tmp_path):
    checked, drafts = killed(25, tmp_path)
    assert int(checked) == 25 and int(drafts) > 0  # some kills did hit a half-written checkpoint


@pytest.mark.soak
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_checkpoints_survive_1000_sigkills(tmp_path):
    checked, drafts = killed(1000, tmp_path)
    assert int(checked) == 1000 and int(drafts) > 100


@pytest.mark.parametrize("chain", ["00", "91", "9103", "dc", "c0", "91" + "92" + "00" * 2])
def test_signed_checkpoint_with_damaged_chain_is_skipped(chain):
    disk = filled([1, 2])
    place = HOME / "step-00000002"
    body = checkpoint_manifest.unseal(disk.read(place / "manifest.json", 1 << 20), IDENTITY)
    body = checkpoint_manifest.msgspec.structs.replace(body, chain=chain)
    disk.file(place / "manifest.json").live = checkpoint_manifest.seal(body, IDENTITY)
    loaded = store(disk).load(RUN)
    assert same(loaded.snapshot, snapshot(1)) and "not a chain" in loaded.remarks[0]
