"""Memory that is left to a process."""

import ctypes
import sys

import numpy as np
import psutil
import pytest
from thinwire.node.runtime.device import return_freed_memory, spare_memory, whole_memory

CACHED = "anon 900\ninactive_file 96\nactive_file 50\n"


@pytest.mark.parametrize(
    ("limit", "used", "stat", "left"),
    [
        ("4096\n", "1000\n", CACHED, 3192),
        ("4096\n", "1000\n", "anon 900\n", 3096),
        ("4096\n", "5000\n", CACHED, 0),
        ("max\n", "1000\n", CACHED, None),
        ("4096\n", None, CACHED, None),
    ],
)
def test_memory_left_is_that_of_the_container_if_it_has_a_limit(tmp_path, limit, used, stat, left):
    for name, text in (("max", limit), ("current", used), ("stat", stat)):
        if text is not None:
            (tmp_path / f"memory.{name}").write_text(text)
    own = tmp_path / "cgroup"
    own.write_text("0::/\n")
    found = spare_memory(tmp_path, own)
    assert found == left if left is not None else 1 << 20 < found < psutil.virtual_memory().total


def test_memory_left_is_the_least_of_all_groups_above_this_process(tmp_path):
    (service := tmp_path / "system.slice" / "thinwire.service").mkdir(parents=True)
    own = tmp_path / "cgroup"
    own.write_text("1:name=systemd:/elsewhere\n0::/system.slice/thinwire.service\n")
    for group, limit in ((service, "9000"), (service.parent, "5000")):
        for name, text in (("max", limit), ("current", "1000"), ("stat", "inactive_file 0")):
            (group / f"memory.{name}").write_text(text)
    assert spare_memory(tmp_path, own) == 4000
    (service / "memory.max").write_text("1500")
    assert spare_memory(tmp_path, own) == 500
    assert spare_memory(tmp_path, tmp_path / "none") > 1 << 20


def test_whole_memory_is_that_of_the_machine_or_the_limit_of_a_group_whatever_is_used(tmp_path):
    own, swap = tmp_path / "cgroup", psutil.swap_memory().total
    own.write_text("0::/service\n")
    (tmp_path / "service").mkdir()
    assert whole_memory(tmp_path, own) == psutil.virtual_memory().total + swap
    (tmp_path / "service" / "memory.max").write_text("4096\n")
    assert whole_memory(tmp_path, own) == 4096 + swap
    (tmp_path / "service" / "memory.max").write_text("max\n")
    assert whole_memory(tmp_path, own) == psutil.virtual_memory().total + swap


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_memory_returns_to_the_system():
    process = psutil.Process()
    pieces = [np.ones(64 << 10, np.uint8) for _ in range(1024)]
    del pieces[:-1]  # the last one is above them in the heap, so the C library retains their memory
    before = process.memory_info().rss
    return_freed_memory()
    assert process.memory_info().rss < before - (32 << 20)
