"""Checks of the machine, each with a fault that it must find."""

import errno
import itertools
import os
import resource

import pytest
from thinwire.node.doctor import machine
from thinwire.node.doctor.check import Check, failed, passed
from thinwire.node.runtime.open_files import PLENTY


def results(checks):
    return {check.name: check.result for check in checks}


def clock(step):
    return map(lambda count: count * step, itertools.count()).__next__


def test_disk_has_room_and_is_fast_enough(tmp_path):
    assert results(machine.check_disk(tmp_path / "new" / "state", clock(0.01))) == {"disk": "OK", "sync": "OK"}
    assert list((tmp_path / "new" / "state").iterdir()) == [], "the check leaves nothing"


def test_slow_full_or_closed_disk_fails(tmp_path, monkeypatch):
    assert results(machine.check_disk(tmp_path, clock(0.5)))["sync"] == "FAIL"
    monkeypatch.setattr(machine, "LEAST_FREE", 1 << 62)
    assert results(machine.check_disk(tmp_path, clock(0.01)))["disk"] == "FAIL"
    (tmp_path / "file").touch()
    [check] = machine.check_disk(tmp_path / "file" / "state", clock(0.01))
    assert check.result == "FAIL" and "--home" in check.fix

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    [check] = machine.check_disk(tmp_path, clock(0.01))
    assert check.result == "FAIL" and check.fix.startswith("make room on that disk"), "another home has another key"


@pytest.mark.parametrize(("limit", "result"), [(PLENTY, "OK"), (PLENTY // 2, "FAIL"), (41, "FAIL")])
def test_limit_of_open_files(monkeypatch, limit, result):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    check = machine.check_files()
    assert check.result == result and ("ulimit" in check.fix) is (result == "FAIL")


@pytest.mark.parametrize(
    ("device", "present", "result"),
    [
        ("cpu", True, "SKIP"),
        ("auto", False, "SKIP"),
        ("cuda:99", False, "FAIL"),
    ],
)
def test_gpu_of_the_settings(device, present, result):
    assert machine.check_gpu(device, present=present).result == result


def test_gpu_that_torch_does_not_see_fails(monkeypatch):
    monkeypatch.setattr("thinwire.node.runtime.device.devices", lambda: ["cpu"])
    assert machine.check_gpu("auto", present=True).result == "FAIL"
    monkeypatch.setattr("thinwire.node.runtime.device.devices", lambda: ["cpu", "cuda:0"])
    assert machine.check_gpu("auto", present=True) == passed("gpu", "cuda:0")


@pytest.mark.parametrize(("granted", "result"), [(True, "OK"), (False, "FAIL")])
def test_congestion_control(monkeypatch, granted, result):
    monkeypatch.setattr(machine, "has_congestion_control", lambda: granted)
    monkeypatch.setattr(machine.sys, "platform", "linux")
    check = machine.check_congestion()
    assert check.result == result and ("modprobe" in check.fix) is not granted
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert machine.check_congestion().result == "SKIP"


def test_kernels_are_stored_in_the_first_cache_that_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    closed, cache = tmp_path / "file" / "cache", tmp_path / "cache"
    empty = machine.check_kernels(closed, cache)
    assert empty.result == "OK" and "first start compiles" in empty.detail and str(cache) in empty.detail
    (cache / "sub").mkdir()
    (cache / "sub" / "kernel.nbi").touch()
    assert "are stored" in machine.check_kernels(closed, cache).detail
    assert machine.check_kernels(closed).result == "FAIL"


def test_kernel_caches_are_those_of_numba(monkeypatch, tmp_path):
    import numba

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    own = machine.kernel_caches()[0]
    assert own.name == "__pycache__" and (own.parent / "block_dct.py").exists()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert machine.kernel_caches() == (tmp_path,) and hasattr(numba.config, "CACHE_DIR")


def test_lines_align_and_name_the_fix():
    assert str(Check("nat", "SKIP", "no peer")) == "SKIP nat         no peer"
    assert str(failed("disk", "full", "make room")) == "FAIL disk        full\n                 fix: make room"
