"""Fixture of the tests that train with the scripts of benchmarks/, which pytest finds from the root of the repository."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports a module of benchmarks by its dotted name; torch has one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module
    torch.set_num_threads(threads)
