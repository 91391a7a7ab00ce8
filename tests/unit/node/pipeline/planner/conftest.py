"""Fixture that loads the published planning problems."""

from pathlib import Path

import pytest
from thinwire.node.pipeline.planner.problem import load

FOLDER = Path(__file__).parents[5] / "examples" / "pipelines"


@pytest.fixture
def published():
    return lambda name: load((FOLDER / f"{name}.json").read_bytes())
