"""Imports point one way, between top folders and between packages; docs/architecture.md has the reason."""

import ast
import subprocess
import sys
import tarfile
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "compression": {"compression"},
    "swarm": {"swarm"},
    "collectives": {"compression", "swarm", "collectives"},
    "node": {"compression", "swarm", "collectives", "node"},
    "sims": {"compression", "swarm", "collectives", "node", "sims"},
}
# The swarm package is sans-IO: the caller passes time, randomness and the network in.
NOT_IN_SWARM = {"time", "datetime", "socket", "ssl", "select", "selectors", "asyncio", "threading", "zmq"}

# Package -> packages that it may import. It may also import all that these may import. The name of a folder means only
# the modules in it: "collectives" is collectives/outcome.py and its neighbours, not collectives/rounds/.
PACKAGES = {
    "compression/core": (),
    "compression/kernels": ("compression/core",),
    "compression/dense": ("compression/kernels",),
    "compression/sparse": ("compression/kernels",),
    "compression/activations": ("compression/dense",),
    "compression": ("compression/activations", "compression/sparse"),
    "swarm/messages": (),
    "swarm/identity": ("swarm/messages",),
    "swarm": ("swarm/identity",),
    "swarm/membership": ("swarm",),
    "swarm/method_specs": ("swarm", "swarm/messages"),
    "swarm/manifest": ("swarm/identity", "swarm/method_specs"),
    "collectives": ("swarm/messages", "compression"),
    "collectives/aggregation": ("swarm", "compression/sparse"),
    "collectives/transport": ("swarm", "compression/core", "collectives/transport/addresses"),
    "collectives/transport/addresses": ("swarm/identity",),
    "collectives/transport/circuits": ("collectives/transport",),
    "collectives/transport/sending": ("collectives/transport",),
    "collectives/transport/shared_memory": ("swarm",),
    "collectives/transport/zeromq/sockets": (
        "collectives",
        "collectives/transport/circuits",
        "collectives/transport/shared_memory",
    ),
    "collectives/transport/zeromq/streams": ("collectives/transport/zeromq/sockets",),
    "collectives/transport/zeromq": ("collectives/transport/zeromq/streams",),
    "collectives/topology": ("swarm",),
    "collectives/health": ("swarm/messages",),
    "collectives/consensus": ("collectives/consensus/members",),
    "collectives/consensus/members": ("collectives/topology",),
    "collectives/state_sync": ("swarm", "collectives", "collectives/consensus"),
    "collectives/rounds": ("collectives/rounds/data_planes/allgather", "collectives/state_sync"),
    "collectives/rounds/data_planes": (
        *("collectives", "collectives/aggregation", "collectives/consensus", "collectives/transport/sending"),
    ),
    "collectives/rounds/data_planes/allgather": ("collectives/rounds/data_planes",),
    "collectives/gossip": (
        "collectives",
        "collectives/aggregation",
        "collectives/topology",
        "collectives/transport/sending",
        "compression",
    ),
    "collectives/costs": ("collectives/consensus", "collectives/gossip", "swarm/manifest"),
    "collectives/allreduce": ("collectives/rounds", "compression/dense"),
    "node": (),
    "node/runtime": ("collectives", "collectives/transport"),
    "node/state": ("node/runtime", "collectives/rounds/data_planes", "collectives/state_sync", "swarm/manifest"),
    "node/membership": (
        *("node/runtime", "collectives/allreduce", "collectives/health", "swarm/manifest", "swarm/membership"),
    ),
    "node/membership/router": ("node/runtime",),
    "node/discovery": ("node/membership",),
    "node/training": ("node/state", "node/training/models"),
    "node/training/models": ("node/state", "collectives/costs"),
    "node/outer/verification": ("node/state", "node/membership"),
    "node/outer/state_transfer": ("node/state", "collectives/rounds"),
    "node/outer": ("node/outer/verification", "node/outer/state_transfer"),
    "node/methods/asynchronous": ("node/outer",),
    "node/methods/overlapped": ("node/outer",),
    "node/methods/noloco": ("node/outer", "collectives/gossip"),
    "node/methods/sparse": ("node/state", "collectives/rounds/data_planes/allgather", "compression/sparse"),
    "node/methods/powersgd": ("node/methods/sparse", "node/outer", "compression"),
    "node/methods/fragments": ("node/methods/overlapped", "node/methods/sparse"),
    "node/methods": (
        *("node/methods/asynchronous", "node/methods/fragments", "node/methods/noloco", "node/methods/overlapped"),
        *("node/methods/powersgd", "node/methods/sparse"),
    ),
    "node/peer": ("node/methods", "node/training", "node/peer/reports", "collectives/transport/zeromq"),
    "node/peer/reports": ("node/state", "collectives/costs"),
    "node/pipeline": (),
    "node/pipeline/model": ("node/training", "compression"),
    "node/pipeline/planner": ("node/runtime",),
    "node/pipeline/step": ("node/pipeline/model", "node/pipeline/planner"),
    "node/pipeline/recovery": ("node/peer",),
    "node/pipeline/groups": ("node/pipeline/recovery", "node/pipeline/step"),
    "node/api": ("node/peer",),
    "node/public": ("node/api", "node/cli"),
    "node/doctor": ("node/peer", "node/membership/router"),
    "node/daemon": ("node/discovery", "node/membership/router", "node/pipeline/groups"),
    "node/local_swarm": ("node/daemon",),
    "node/cli/page": ("node/peer",),
    "node/cli/top": ("node/cli/page",),
    "node/cli": ("node/cli/top", "node/local_swarm", "node/doctor"),
    "sims": (),
    "sims/engine": ("node/runtime",),
    "sims/network": ("sims/engine", "collectives/costs", "collectives/transport/circuits"),
    "sims/scenario": ("sims/network", "swarm/manifest"),
    "sims/planner": ("collectives/costs", "node/training/models"),
    "sims/results": ("sims/scenario",),
    "sims/peers": ("sims/scenario", "node/pipeline/groups"),
    "sims/invariants": ("sims/peers",),
    "sims/simulation": ("sims/invariants", "sims/results"),
    "sims/trials": ("sims/simulation",),
    "sims/processes": ("sims/peers", "sims/results", "node/local_swarm"),
    "sims/cli": ("sims/simulation", "sims/processes", "sims/planner", "node/cli"),
}
# Other folders that must have few entries. Golden files are data: they are not counted.
OTHER_FOLDERS = (
    *("docs", "docs/guides", "docs/reference", "examples", "sims/scenarios"),
    *sorted({file.parent.relative_to(ROOT).as_posix() for file in (ROOT / "benchmarks").rglob("*.py")}),
    *sorted(
        {
            file.parent.relative_to(ROOT).as_posix()
            for file in (ROOT / "tests").rglob("*.py")
            if "golden" not in file.parts
        }
    ),
)
MOST_ENTRIES = 15
TRIALS = ("thinwire.sims.trials.trial", "thinwire.sims.trials.noloco_trial")
"""Commands of the simulator that are run with `python -m` (docs/simulation.md)."""


def imports(source, package):
    """Return the absolute dotted names that a module of `package` imports, with names from modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            yield f"random.{node.attr}"  # the class `Random` takes its seed as an argument; the functions are global


def violations(source, folder, package):
    """Imports against the rules of a top folder."""
    for name in imports(source, package):
        first, _, rest = name.partition(".")
        if first == "thinwire" and rest.split(".")[0] not in MAY_IMPORT[folder]:
            yield name
        if folder == "compression" and first not in {"thinwire", "torch", "numpy", "numba", *sys.stdlib_module_names}:
            yield name
        if folder == "swarm" and (first in NOT_IN_SWARM or (first == "random" and rest not in ("", "Random"))):
            yield name


@cache
def modules():
    """Return the file of each module by dotted name; a package's name stands for its `__init__.py`."""
    found = {}
    for folder in MAY_IMPORT:
        for file in sorted((ROOT / folder).rglob("*.py")):
            inside = file.relative_to(ROOT).with_suffix("").parts
            inside = inside[:-1] if inside[-1] == "__init__" else inside
            found["thinwire" if inside == ("node", "public") else ".".join(("thinwire", *inside))] = file
    return found


def folder_of(file):
    return file.relative_to(ROOT).parent.as_posix()


def dotted_of(folder):
    return "thinwire" if folder == "node/public" else f"thinwire.{folder.replace('/', '.')}"


def package_of(name):
    """Return the package that has a dotted name; "node/public" for a name of `thinwire` itself."""
    parts = name.split(".")[1:]
    inside = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((folder for folder in inside if folder in PACKAGES), "node/public")


def allowed(package, table):
    """Return the packages that a package may import: itself, and its entries in the table, recursively."""
    found, left = {package}, [package]
    while left:
        for other in table[left.pop()]:
            if other not in found:
                found.add(other)
                left.append(other)
    return found


def against_the_table(source, package, table=PACKAGES):
    """Return imports of a module that the table does not allow."""
    for name in imports(source, dotted_of(package)):
        if name.split(".")[0] == "thinwire" and package_of(name) not in allowed(package, table):
            yield name


def circles(graph):
    """Return the nodes of each cycle: strongly connected components of several nodes (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            place = stack.index(node)
            if len(stack) > place + 1:
                found.append(sorted(stack[place:]))
            del stack[place:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def edges(sources):
    """Return the imports of each module, also lazy and type-only ones. `sources`: by dotted name."""
    graph = {}
    for module, (package, source) in sources.items():
        graph[module] = set()
        for name in imports(source, package):
            parts = name.split(".")
            inside = (".".join(parts[:count]) for count in range(len(parts), 1, -1))
            other = next((prefix for prefix in inside if prefix in sources), module)
            if other != module:
                graph[module].add(other)
    return graph


@cache
def product():
    return edges({name: (dotted_of(folder_of(file)), file.read_text()) for name, file in modules().items()})


def commands():
    """Modules of the entry points of the distribution: the command `thinwire` and the commands that it finds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [*project["scripts"].values(), *project["entry-points"]["thinwire.commands"].values()]
    return {name.partition(":")[0] for name in found}


def reachable(graph, sources, starts):
    """Modules that `starts` need, directly or not: those that a module imports, also lazily, or names in a string.

    A string that is exactly the dotted name of a module is how `python -m` and importlib get it.
    """
    found, left = set(), [start for start in starts if start in sources]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            constants = (node for node in ast.walk(ast.parse(sources[module])) if isinstance(node, ast.Constant))
            left += [*graph[module], *(node.value for node in constants if node.value in sources)]
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_one_way(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {}
    for file in files:
        if bad := list(violations(file.read_text(), folder, dotted_of(folder_of(file)))):
            found[file.relative_to(ROOT).as_posix()] = bad
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
        ("node", "from thinwire.sims import engine", True),
        ("node", "from .. import sims", True),
        ("node", "def f():\n    from thinwire.sims import planner", True),
        ("sims", "from thinwire.node import daemon", False),
    ],
)
def test_the_rules_of_the_folders_bite(folder, source, bad):
    assert bool(list(violations(source, folder, f"thinwire.{folder}"))) is bad


def test_packages_import_what_the_table_allows():
    found = {}
    for file in modules().values():
        if bad := list(against_the_table(file.read_text(), folder_of(file))):
            found[file.relative_to(ROOT).as_posix()] = bad
    assert not found


@pytest.mark.parametrize(
    ("package", "source", "bad"),
    [
        ("compression/core", "from thinwire.compression.kernels import dct", True),
        ("compression/sparse", "from thinwire.compression.kernels.dct import matrix", False),
        ("compression/sparse", "from thinwire.compression.dense.floats import Floats", True),
        ("collectives/topology", "from thinwire.collectives.transport.sending.own_bandwidth import Bandwidth", True),
        ("collectives/topology", "from thinwire.collectives import outcome", True),
        ("collectives/consensus", "from thinwire.swarm.messages.registry import Commit", False),
        ("collectives/rounds", "from thinwire.collectives.outcome import Outcome", False),
        ("node/state", "def f():\n    from thinwire.node.methods import registry", True),
        ("node/state", "if TYPE_CHECKING:\n    from thinwire.node.peer.peer import Peer", True),
        ("node/state", "from ..peer import peer", True),
        ("node/methods/sparse", "from thinwire.node.methods.fragments import fragment_loop", True),
        ("node/methods/fragments", "from thinwire.node.methods.sparse import replica", False),
        ("node/pipeline/model", "import thinwire.node.pipeline.step.host", True),
        ("node/daemon", "from thinwire.node.local_swarm.launcher import start_local", True),
        ("node/daemon", "from thinwire import Swarm", True),
        ("sims/scenario", "from thinwire.sims.peers.lies import make_liar", True),
    ],
)
def test_the_table_bites(package, source, bad):
    assert bool(list(against_the_table(source, package))) is bad


def test_every_entry_of_the_table_is_used():
    used = {(folder_of(file), package_of(name)) for module, file in modules().items() for name in product()[module]}
    idle = {(package, other) for package, others in PACKAGES.items() for other in others} - used
    assert not idle, "may be taken off the table"


def test_the_table_has_no_circle():
    assert not circles(PACKAGES)
    assert circles({**PACKAGES, "node/state": ("node/peer",)})[0][-1] == "node/training/models"


def test_no_imports_form_a_circle():
    assert len(product()) > 300 and sum(map(len, product().values())) > 1500
    assert not circles(product())


PROGRAM = "thinwire.node.public.__main__"
"""Module of `python -m thinwire`."""


def test_every_module_is_reachable():
    """Code that only tests or benchmarks use belongs to them."""
    found = {name: file.read_text() for name, file in modules().items() if file.name != "__init__.py"}
    sources = {**found, "thinwire": modules()["thinwire"].read_text()}
    graph = {name: product()[name] & set(sources) for name in sources}
    assert {*commands(), *TRIALS} <= set(sources) and len(commands()) == 2
    unused = set(sources) - reachable(graph, sources, ("thinwire", PROGRAM, *commands(), *TRIALS))
    assert not unused, "neither the command line nor the Python interface nor the simulator uses them"


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("import thinwire.b", {"a", "b"}),
        ("from .b import x", {"a", "b"}),
        ("def f():\n    from thinwire.b import x", {"a", "b"}),
        ("if TYPE_CHECKING:\n    from thinwire.c import x", {"a", "b", "c"}),
        ("COMMAND = ('python', '-m', 'thinwire.c')", {"a", "b", "c"}),
        ("x = 'text about thinwire.b'", {"a"}),
    ],
)
def test_a_module_that_nobody_imports_is_not_reachable(start, found):
    fake = {"a": start, "b": "", "c": "import thinwire.b", "unused": "import thinwire.a"}
    sources = {f"thinwire.{name}": source for name, source in fake.items()}
    graph = edges({name: ("thinwire", source) for name, source in sources.items()})
    assert reachable(graph, sources, ("thinwire.a",)) == {f"thinwire.{name}" for name in found}


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_no_imports_of_folders_form_a_circle(depth):
    """Folders inside a folder of this depth count as a part of it."""
    graph = defaultdict(set)
    for module, others in product().items():
        folder = "/".join(folder_of(modules()[module]).split("/")[:depth])
        graph[folder] |= {"/".join(folder_of(modules()[other]).split("/")[:depth]) for other in others} - {folder}
    assert not circles(graph)


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"a": "import thinwire.b", "b": "import thinwire.c", "c": ""}, []),
        ({"a": "import thinwire.b", "b": "import thinwire.a", "c": ""}, [["thinwire.a", "thinwire.b"]]),
        (
            {"a": "from thinwire.b import x", "b": "def f():\n    from thinwire import a"},
            [["thinwire.a", "thinwire.b"]],
        ),
        ({"a": "if TYPE_CHECKING:\n    from .b import x", "b": "from .a import y"}, [["thinwire.a", "thinwire.b"]]),
        (
            {
                "a": "import thinwire.b",
                "b": "import thinwire.c",
                "c": "from thinwire.a import x",
                "d": "import thinwire.a",
            },
            [["thinwire.a", "thinwire.b", "thinwire.c"]],
        ),
    ],
)
def test_a_circle_of_imports_is_found(sources, found):
    assert circles(edges({f"thinwire.{name}": ("thinwire", source) for name, source in sources.items()})) == found


def entries(folder):
    """Return the entries of a folder, except those that a folder must have, hidden files, and files that tools make."""
    required = (".", "__", "conftest.py")
    return [path.name for path in folder.iterdir() if not path.name.startswith(required) and path.suffix != ".egg-info"]


@pytest.mark.parametrize("folder", [*PACKAGES, *OTHER_FOLDERS])
def test_a_folder_has_few_entries(folder):
    assert 0 < len(entries(ROOT / folder)) <= MOST_ENTRIES


def test_entries_are_counted(tmp_path):
    for name in ("__init__.py", "conftest.py", ".hidden", "a.py", "b.toml"):
        (tmp_path / name).touch()
    for name in ("__pycache__", "inner"):
        (tmp_path / name).mkdir()
    assert sorted(entries(tmp_path)) == ["a.py", "b.toml", "inner"]


def test_every_package_is_in_the_table_and_in_pyproject():
    folders = {folder_of(file) for file in modules().values()}
    assert folders == set(PACKAGES)
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == {dotted_of(folder) for folder in folders}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_a_docstring(package):
    """Every package has a docstring. A folder `compression` with an `__init__.py` would hide a standard module."""
    file = ROOT / package / "__init__.py"
    if package == "compression":
        assert not file.exists()
    else:
        assert len(ast.get_docstring(ast.parse(file.read_text())).splitlines()[0]) > 20


BUILD = "from setuptools import build_meta; print(build_meta.build_sdist('made'))"


@pytest.mark.trial
def test_source_archive_has_all_packages_and_no_test(tmp_path):
    pytest.importorskip("setuptools", "77")
    for name in (*MAY_IMPORT, "tests"):
        copytree(ROOT / name, tmp_path / name, ignore=ignore_patterns("__pycache__"))
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with tarfile.open(tmp_path / "made" / built.stdout.split()[-1]) as archive:
        names = {one.partition("/")[2] for one in archive.getnames()}
    assert not [one for one in names if one.startswith("tests")]
    sources = {str(path.relative_to(ROOT)) for name in MAY_IMPORT for path in (ROOT / name).rglob("*.py")}
    assert not sources - names
    assert "node/cli/page/page.html" in names and "sims/template.toml" in names
