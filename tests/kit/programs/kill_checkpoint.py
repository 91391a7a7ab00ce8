"""Kill a writer of checkpoints repeatedly: `kill_checkpoint.py DIRECTORY TIMES`.

After each kill a checkpoint must load, be complete, and be no older than the last acknowledged one. Prints the number of
checked kills, and how many of them left an unfinished draft.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.state.checkpoint_store import CheckpointStore, Saved
from thinwire.node.state.snapshot import FragmentState, PrivateState, Snapshot
from thinwire.swarm.identity.identity import Identity

RUN = b"\x01" * 32
IDENTITY = Identity.generate(b"\x07" * 32)
ELEMENTS = 50_000


def snapshot(number):
    values = {"w": np.full(ELEMENTS, number, np.float32)}
    fragments = {index: FragmentState(values, values) for index in range(3)}
    return Snapshot(RUN, number, b"\x02" * 32, (), fragments, PrivateState(values, {"cursor": number}))


def write_for_ever(store, number, acknowledge):
    while True:
        assert isinstance(store.save(snapshot(number), now=time.time(), suffix=f"{os.getpid()}-{number}"), Saved)
        os.write(acknowledge, number.to_bytes(8, "big"))
        number += 1


def main(directory, times):
    store = CheckpointStore(directory, RealDisk(), IDENTITY)
    chance = random.Random(1)
    newest, drafts = 0, 0
    for _ in range(times):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            write_for_ever(store, newest + 1, writer)
        os.close(writer)
        if newest == 0:
            newest = int.from_bytes(os.read(reader, 8), "big")
        time.sleep(chance.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while data := os.read(reader, 8):
            newest = int.from_bytes(data, "big")
        os.close(reader)
        drafts += any(".tmp-" in name for name in os.listdir(directory))
        loaded = store.load(RUN)
        assert loaded.snapshot is not None, loaded.remarks
        assert newest <= loaded.snapshot.round <= newest + 1, (newest, loaded)
        newest = loaded.snapshot.round
        for fragment in loaded.snapshot.fragments.values():
            assert (fragment.weights["w"] == newest).all() and (fragment.momentum["w"] == newest).all()
        assert len(loaded.snapshot.fragments) == 3 and loaded.snapshot.private.values["cursor"] == newest
    print(times, drafts)


main(Path(sys.argv[1]), int(sys.argv[2]))
