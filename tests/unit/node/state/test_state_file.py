"""Files with states that peers read, where memory for a copy is short."""

import errno
import gc
import random
from pathlib import Path

import numpy as np
import psutil
import pytest
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment
from thinwire.node.state.replica import Replica
from thinwire.node.state.state_file import SECONDS
from thinwire.sims.engine.disk import SimDisk
from thinwire.swarm.messages.registry import CHUNK_BYTES

SIZE, ME = 3 * CHUNK_BYTES // 16, bytes(32)
BYTES = 2 * 4 * SIZE  # with momentum


class Machine:
    """A replica with a twin for a peer, on a machine with `spare` bytes of memory."""

    def __init__(self, disk=None, spare=0, directory=Path("/"), seconds=0.0):
        self.now, self.seconds = 0.0, seconds
        self.disk = SimDisk(random.Random(1)) if disk is None else disk
        environment = Environment(self.clock, lambda: 1e9, random.Random(1), self.disk, spare=lambda: spare)
        self.replica = Replica(bytes(32), np.arange(SIZE, dtype=np.float32), [ME])
        self.replica.use_files(environment, directory)
        self.array, self.before = self.replica.state, self.replica.state.tobytes()
        self.twin = self.replica.twin()

    def clock(self):
        self.now += self.seconds
        return self.now

    def change(self):
        self.replica.move_from_twins()
        self.replica.state += 1.0

    @property
    def copied(self):
        return self.replica.state is not self.array

    def read(self):
        return b"".join(self.twin.lent_chunk(index, self.replica) for index in range(len(self.replica)))


def test_state_that_a_peer_reads_is_a_file_where_memory_is_short(tmp_path):
    for disk, directory in ((None, Path("/")), (RealDisk(), tmp_path)):
        here = Machine(disk, 2 * BYTES - 1, directory)
        assert here.read() == here.before
        here.change()
        here.change()
        assert not here.copied and here.read() == here.before != here.replica.state.tobytes()
        assert here.twin.lent_chunk(len(here.replica), here.replica) == b""
        assert not list(tmp_path.iterdir()), "the file has no name, so nothing is left after a crash"


def test_state_is_copied_in_memory_where_there_is_enough():
    here = Machine(spare=2 * BYTES)
    here.change()
    assert here.copied and here.read() == here.before


def test_checkpoint_gets_arrays():
    here = Machine()
    checkpoint = here.replica.twin(private=True)
    here.change()
    assert here.copied and here.read() == here.before == checkpoint.state.tobytes()


@pytest.mark.parametrize("fault", ["full", "filling", "broken", "slow"])
def test_disk_that_fails_breaks_no_round(fault):
    here = Machine(seconds=SECONDS if fault == "slow" else 0.0)

    def fill(operation):
        here.disk.broken = errno.ENOSPC if operation == "write" else 0

    if fault == "full":
        here.disk.capacity = 2 * BYTES - 1
    elif fault == "filling":
        here.disk.before = fill
    elif fault == "broken":
        here.disk.broken = errno.EIO
    here.change()
    assert here.copied and here.read() == here.before


def test_chunk_that_cannot_be_read_any_more_is_not_sent():
    here = Machine()
    here.change()
    assert here.read() == here.before
    here.disk.crash()
    assert here.read() == b""


def test_file_ends_with_its_last_reader(tmp_path):
    gc.collect()  # other tests may have files open
    here, process = Machine(RealDisk(), 0, tmp_path), psutil.Process()
    before = process.num_fds()
    here.change()
    assert process.num_fds() == before + 1
    here.twin = None
    assert process.num_fds() == before
