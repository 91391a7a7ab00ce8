"""Fixture of the tests that train with the scripts of benchmarks/, which pytest has on its path."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports a benchmark by its name; torch has one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module
    torch.set_num_threads(threads)
