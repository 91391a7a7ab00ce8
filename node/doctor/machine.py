"""Checks of this machine: disk, open files, GPU, congestion control, cache of kernels."""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import platformdirs
from thinwire.collectives.transport.tcp_options import CONGESTION, has_congestion_control
from thinwire.node.doctor.check import Check, failed, passed, skipped
from thinwire.node.runtime.console import bytes_text
from thinwire.node.runtime.load_settings import Config
from thinwire.node.runtime.open_files import ADVICE, TooFewFilesError, check_open_files
from thinwire.node.runtime.process_lock import unwritable
from thinwire.swarm.identity.errors import HintedError

LEAST_FREE = 1 << 30
"""Free bytes on the disk: checkpoints of a small model with room for the next one."""

SLOWEST_SYNC = 0.25
"""Seconds of one sync of a small file.

A vote is on the disk before it is sent, so each round waits for some syncs.
"""

SYNCS = 5
_OTHER_HOME = "choose a directory on another disk with --home DIR"
_NVIDIA = ("/dev/nvidia0", "/dev/dxg")
"""Device files of NVIDIA GPUs: of the driver, and of Windows in a Linux guest."""


def check_machine(config: Config, clock: Callable[[], float]) -> Iterable[Check]:
    """Yield the checks that need no network. `clock`: monotonic seconds."""
    yield from check_disk(config.directories.state, clock)
    yield check_files()
    yield check_gpu(config.device)
    yield check_congestion()
    yield check_kernels(*kernel_caches())


def check_disk(folder: Path, clock: Callable[[], float]) -> Iterable[Check]:
    """Yield the checks of the disk with the state: room, and the time of a sync."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:
            seconds = [_sync(file.fileno(), clock) for _ in range(SYNCS)]
    except OSError as error:
        yield failed("disk", f"cannot write in {folder}: {error.strerror}", unwritable(folder, error).hint)
        return
    room = f"{bytes_text(free)} free in {folder}"
    yield passed("disk", room) if free >= LEAST_FREE else failed("disk", room, f"make room, or {_OTHER_HOME}")
    usual = statistics.median(seconds)
    detail = f"a write reaches the disk in {usual * 1000:.1f} ms"
    yield passed("sync", detail) if usual <= SLOWEST_SYNC else failed("sync", detail, _OTHER_HOME)


def _sync(descriptor: int, clock: Callable[[], float]) -> float:
    since = clock()
    os.write(descriptor, bytes(4096))
    os.fsync(descriptor)
    return clock() - since


def check_files() -> Check:
    """Return the check of the limit of open files."""
    try:
        warning = check_open_files(extend=True)
    except TooFewFilesError as error:
        return failed("files", str(error), error.hint)
    return failed("files", warning.partition(";")[0], ADVICE) if warning else passed("files", "enough open files")


def check_gpu(device: str, *, present: bool | None = None) -> Check:
    """Return the check of the device of the settings; torch is imported only if there may be a GPU.

    `present`: whether the machine has a GPU's device file; None: look.
    """
    if present is None:
        present = any(os.path.exists(path) for path in _NVIDIA)
    if device == "cpu" or (device == "auto" and not present):
        return skipped("gpu", "the settings say cpu" if device == "cpu" else "this machine has no NVIDIA GPU")
    from thinwire.node.runtime.device import choose_device

    try:
        found = choose_device(device)
    except HintedError as error:
        return failed("gpu", str(error), error.hint)
    if found == "cpu":
        return failed("gpu", "torch does not see the GPU", "install the NVIDIA driver, and torch with CUDA")
    return passed("gpu", found)


def check_congestion() -> Check:
    """Return the check whether the kernel grants BBR."""
    if sys.platform != "linux":
        return skipped("congestion", "only Linux lets a program choose congestion control")
    if has_congestion_control():
        return passed("congestion", f"{CONGESTION} is granted")
    return failed(
        "congestion",
        f"the kernel does not grant {CONGESTION}: long links with losses are slow",
        f"sudo modprobe tcp_{CONGESTION}, and allow it in net.ipv4.tcp_allowed_congestion_control",
    )


def kernel_caches() -> tuple[Path, ...]:
    """Return the directories where numba stores compiled kernels, in the order in which it tries them."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return (Path(given),)
    found = importlib.util.find_spec("thinwire.compression.kernels")
    places = found.submodule_search_locations if found is not None else None
    own = tuple(Path(place) / "__pycache__" for place in places or ())
    return (*own, platformdirs.user_cache_path("numba", appauthor=False))


def check_kernels(*caches: Path) -> Check:
    """Return the check whether one of `caches` can store compiled kernels, and whether it has some."""
    for cache in caches:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache):
                pass
        except OSError:
            continue
        warm = next(cache.rglob("*.nbi"), None) is not None
        detail = "compiled kernels are stored" if warm else "empty: the first start compiles for about a minute"
        return passed("kernels", f"{detail} in {cache}")
    tried = " and ".join(str(cache) for cache in caches)
    return failed("kernels", f"cannot write in {tried}: each start compiles again", "set NUMBA_CACHE_DIR")
