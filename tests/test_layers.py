"""Imports point one way: compression, swarm -> collectives -> node -> sims. docs/architecture.md says why."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "compression": {"compression"},
    "swarm": {"swarm"},
    "collectives": {"compression", "swarm", "collectives"},
    "node": {"compression", "swarm", "collectives", "node"},
    "sims": {"compression", "swarm", "collectives", "node", "sims"},
}
# The command line is the one door to everything: inside a function, so that no daemon ever loads a simulation.
COMMANDS = "node/simcommands.py"
# Sans-IO: who wants the time, chance or the network passes it in.
NOT_IN_SWARM = {"time", "datetime", "socket", "ssl", "select", "selectors", "asyncio", "threading", "zmq"}


def imports(source, package):
    """Absolute dotted names that a module of `package` imports, names imported from a module included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            yield f"random.{node.attr}"  # the class `Random` takes its seed as an argument; the functions are global


def outside_functions(source):
    """The module without the bodies of its functions: what runs when it is imported."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    return ast.unparse(tree)


def violations(source, folder, package, file=""):
    lazy = set(imports(source, package)) - set(imports(outside_functions(source), package)) if file == COMMANDS else ()
    for name in imports(source, package):
        first, _, rest = name.partition(".")
        if name in lazy and rest.split(".")[0] == "sims":
            continue
        if first == "thinwire" and rest.split(".")[0] not in MAY_IMPORT[folder]:
            yield name
        if folder == "compression" and first not in {"thinwire", "torch", "numpy", "numba", *sys.stdlib_module_names}:
            yield name
        if folder == "swarm" and (first in NOT_IN_SWARM or (first == "random" and rest not in ("", "Random"))):
            yield name


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_one_way(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {}
    for file in files:
        inside = file.relative_to(ROOT).parent.parts
        package = "thinwire" if inside[:2] == ("node", "public") else ".".join(("thinwire", *inside))
        name = file.relative_to(ROOT).as_posix()
        if bad := list(violations(file.read_text(), folder, package, name)):
            found[name] = bad
    assert not found


@pytest.mark.parametrize(
    ("folder", "source", "bad"),
    [
        ("swarm", "import time", True),
        ("swarm", "from datetime import datetime", True),
        ("swarm", "import random\nrandom.random()", True),
        ("swarm", "from random import shuffle", True),
        ("swarm", "import random\nrandom.Random(1).random()", False),
        ("swarm", "from random import Random", False),
        ("swarm", "from .frame import Frame", False),
        ("swarm", "from ..node import config", True),
        ("swarm", "def f():\n    from thinwire.collectives import transport", True),
        ("compression", "import numpy.typing, struct", False),
        ("compression", "import msgspec", True),
        ("collectives", "import asyncio\nfrom thinwire.swarm.frame import Frame", False),
        ("collectives", "from thinwire import node", True),
        ("node", "from thinwire.sims import clock", True),
        ("node", "from .. import sims", True),
        ("sims", "from thinwire.node import daemon", False),
    ],
)
def test_the_rules_bite(folder, source, bad):
    assert bool(list(violations(source, folder, f"thinwire.{folder}"))) is bad


@pytest.mark.parametrize(
    ("file", "source", "bad"),
    [
        (COMMANDS, "def f():\n    from thinwire.sims import plan", False),
        (COMMANDS, "from thinwire.sims import plan", True),
        (COMMANDS, "from thinwire.sims import plan\ndef f():\n    from thinwire.sims import plan", True),
        ("node/daemon.py", "def f():\n    from thinwire.sims import plan", True),
    ],
)
def test_only_the_command_line_reaches_sims_and_only_when_asked(file, source, bad):
    assert bool(list(violations(source, "node", "thinwire.node", file))) is bad
