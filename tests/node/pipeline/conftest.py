"""The published instances."""

from pathlib import Path

import pytest
from thinwire.node.pipeline.instance import load

FOLDER = Path(__file__).parents[3] / "examples" / "pipelines"


@pytest.fixture
def published():
    return lambda name: load((FOLDER / f"{name}.json").read_bytes())
