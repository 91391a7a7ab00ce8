"""Fixtures of the tests with real daemons (tests/kit/daemons.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.daemons import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Makes machines; ends all their daemons."""
    made: list[Machine] = []

    def make(**settings: Any) -> Machine:
        made.append(Machine(tmp_path / f"m{len(made)}", **settings))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture(scope="module")
def shared_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """One machine for all tests of a module."""
    one = Machine(tmp_path_factory.mktemp("shared"))
    yield one
    one.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Loading torch takes its time on a busy machine, six times over."""
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
