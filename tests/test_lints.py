"""What ruff does not look for: ways to run foreign bytes, paths of one machine, and a complete list of public names."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import thinwire

ROOT = Path(__file__).parents[1]
PRODUCT = ("swarm", "compression", "collectives", "node", "sims", "benchmarks", "examples")

MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.distributed.checkpoint"}
ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_serialized"}
QUALIFIED = {"torch.load", "torch.save", "numpy.fromregex"}
KEYWORDS = {"allow_pickle", "weights_only"}
BUILTINS = {"eval", "exec", "compile", "__import__"}


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(source):
    """Every use of something that can run what it reads, with its line."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)] + ([node.attr] if node.attr in ATTRIBUTES else [])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            names = [node.func.id]
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
            names = [node.arg]
        for name in names:
            banned = MODULES | QUALIFIED | ATTRIBUTES | KEYWORDS | BUILTINS
            if name in banned or any(name.startswith(f"{module}.") for module in MODULES):
                yield node.lineno, name


def test_nothing_runs_foreign_bytes():
    files = [file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 10
    found = {str(file.relative_to(ROOT)): bad for file in files if (bad := list(dangers(file.read_text())))}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(f)",
        "from torch import load",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "from torch.distributed.checkpoint import save",
        "np.load(f, allow_pickle=True)",
        "s.recv_pyobj()",
        "eval('1')",
        "exec(code)",
        "import shelve",
    ],
)
def test_the_lint_bites(source):
    assert list(dangers(source))


def test_the_lint_lets_live():
    source = "model.eval()\nx = torch.compile(f)\nfrom safetensors.numpy import load\nimport re\nre.compile('a')"
    assert not list(dangers(source))


# Put together here, so that this file does not find itself.
MACHINE = re.compile(
    rb"(?<![\w.~$}>)\]*:-])/(?:" + b"|".join([b"work", b"root", b"tmp", b"farm", b"home"]) + rb")(?=/|\b)"
)


def paths(data):
    return [(data[: match.start()].count(b"\n") + 1, match[0].decode()) for match in MACHINE.finditer(data)]


@pytest.mark.skipif(not shutil.which("git") or not (ROOT / ".git").exists(), reason="not a git checkout")
def test_no_path_of_one_machine():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    files = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert len(files) > 20
    found = {str(file.relative_to(ROOT)): bad for file in files if (bad := paths(file.read_bytes()))}
    assert not found


@pytest.mark.parametrize(("text", "count"), [(b'"/%s/x"' % b"tmp", 1), (b"cd /%s\n" % b"root", 1), (b"a/tmp/x", 0)])
def test_the_path_lint_bites(text, count):
    assert len(paths(text)) == count


def test_no_script_hides_a_standard_module():
    """Scripts import their neighbours by bare names: one called codecs.py would stand before Python's own."""
    scripts = [file for folder in ("benchmarks", "examples") for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(scripts) > 10
    assert not {file.stem for file in scripts} & sys.stdlib_module_names


def test_public_names_are_complete():
    tree = ast.parse((ROOT / "node" / "public" / "__init__.py").read_text())
    defined = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import) and getattr(node, "module", "") != "__future__":
            defined |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    listed = list(getattr(thinwire, "__all__", []))
    assert {name for name in defined if not name.startswith("_")} <= set(listed)
    assert len(listed) == len(set(listed))
    for name in listed:
        assert getattr(thinwire, name).__doc__, f"thinwire.{name} is public and has no docstring"


# The doors: code that a simulation runs touches clock, chance, network, disk and threads only through what it is given.
# Who may open a door himself, and why; everything else in these folders must be told.
DOORS = ("swarm", "compression", "collectives", "node")
TRANSPORT = "is the transport of life"
LOCAL = "the demo: it makes the processes of a swarm and watches them"
MAY_OPEN = {
    "clock": {
        "node/books.py": "stamps the events of a process",
        "node/commands.py": "the age of a status, for a person",
        "node/daemon.py": "makes the doors",
        "node/opening.py": "makes the doors",
        "node/afterwards.py": LOCAL,
        "node/alone.py": LOCAL,
        "node/children.py": LOCAL,
        "node/local.py": LOCAL,
    },
    "chance": {
        "node/opening.py": "makes the doors",
        "swarm/identity.py": "a new key, when no seed is given, and the name of its draft",
        "collectives/links.py": TRANSPORT + ": keys of bulk streams",
        "collectives/peering.py": TRANSPORT + ": back-off",
        "collectives/ports.py": TRANSPORT + ": which ports of a range are tried first",
    },
    "network": {
        "collectives/bundle.py": TRANSPORT,
        "collectives/channel.py": TRANSPORT,
        "collectives/control.py": TRANSPORT,
        "collectives/gate.py": TRANSPORT,
        "collectives/links.py": TRANSPORT,
        "collectives/passage.py": TRANSPORT,
        "collectives/ports.py": TRANSPORT,
        "collectives/tcp.py": TRANSPORT,
        "collectives/wire.py": TRANSPORT,
    },
    "disk": {
        "node/disk.py": "is the disk of life",
        "swarm/identity.py": "the key's file: read before there is a peer",
        "node/api.py": "reads the manifest it is given",
        "node/cli.py": "a pipe that nobody reads any more",
        "node/commands.py": "reads the manifest it is given",
        "node/config.py": "reads node.toml",
        "node/console.py": "the log file",
        "node/corpus.py": "reads the text to train on, and keeps its tokens",
        "node/daemon.py": "reads the manifest it is given",
        "node/events.py": "the event log of a process",
        "node/export.py": "writes what it is asked to export",
        "node/lock.py": "one process per home",
        "node/simcommands.py": "reads the manifest it is given",
        "node/status.py": "the status of a process",
        "node/tokenizer.py": "reads the manifest's tokenizer",
        "node/ward.py": LOCAL,
        "node/alone.py": LOCAL,
        "node/children.py": LOCAL,
        "node/local.py": LOCAL,
        "collectives/ports.py": TRANSPORT + ": how many sockets the system still gives",
    },
    "threads": {
        "compression/parallel.py": "kernels, whose results do not depend on the number of threads",
        "node/averages.py": "the handle of what goes on beside a training loop of one's own",
        "node/background.py": "the threads beside a training loop of one's own",
        "node/daemon.py": "the worker, and signals",
        "node/signals.py": "names of signals, and how they were when we came",
        "node/opening.py": "makes the doors",
        "node/local.py": LOCAL,
        "node/children.py": LOCAL,
        "node/ward.py": LOCAL,
        "collectives/averager.py": "a thread is what `work` is when nobody says otherwise",
        "collectives/buffers.py": "a lock, not a thread: views of buffers die in any",
    },
}
CLOCK = {"time", "datetime"}
NETWORK = {"socket", "ssl", "select", "selectors", "zmq", "http", "urllib", "socketserver"}
STREAMS = {"create_connection", "create_server", "create_datagram_endpoint", "create_unix_server", "open_connection"}
STREAMS |= {"create_unix_connection", "start_server", "start_unix_server", "open_unix_connection", "getaddrinfo"}
DISK = {"tempfile", "shutil", "glob", "mmap", "fileinput", "sqlite3", "fcntl"}
THREADS = {"threading", "_thread", "concurrent", "multiprocessing", "subprocess", "signal"}
HAND_OVER = {"to_thread", "run_in_executor", "create_subprocess_exec", "create_subprocess_shell"}
PATHS = {
    "read_bytes",
    "read_text",
    "write_bytes",
    "write_text",
    "mkdir",
    "rmdir",
    "unlink",
    "touch",
    "iterdir",
    "rglob",
}
PATHS |= {
    "exists",
    "is_file",
    "is_dir",
    "is_symlink",
    "lstat",
    "symlink_to",
    "hardlink_to",
    "cwd",
    "expanduser",
    "resolve",
}
OS_HARMLESS = {
    "PathLike",
    "fspath",
    "name",
    "strerror",
    "environ",
    "path.join",
    "path.basename",
    "path.dirname",
    "path",
}
SEEDED = {"Random", "Generator", "PCG64", "Philox", "SeedSequence", "default_rng", "BitGenerator"}
TORCH_CHANCE = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal", "manual_seed", "seed"}
MODE = re.compile("[rwxa][bt+]*")


def opened(source):
    """Every use of a door: its line, the door, and what is used."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
            for door, methods in (("network", STREAMS), ("threads", HAND_OVER), ("disk", PATHS)):
                if node.attr in methods:
                    yield node.lineno, door, node.attr
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, *found) for found in called(node))
        for name in names:
            yield from ((node.lineno, door, name) for door in doors_of(name))


def called(node):
    """What can be told from a call only: an unseeded generator, a file."""
    name = dotted(node.func)
    last = name.rpartition(".")[2]
    if last in ("Random", "default_rng", "SeedSequence", "PCG64", "Philox") and not node.args and not node.keywords:
        yield "chance", f"{name}() without a seed"
    if name.startswith("torch.") and last in TORCH_CHANCE and all(word.arg != "generator" for word in node.keywords):
        yield "chance", name
    first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
    if name == "open" or (last == "open" and isinstance(first, str) and MODE.fullmatch(first)):
        yield "disk", name


def doors_of(name):
    """The doors that a dotted name belongs to."""
    first, _, rest = name.partition(".")
    last = name.rpartition(".")[2]
    if first in CLOCK:
        yield "clock"
    elif first in NETWORK or (first == "asyncio" and rest in STREAMS):
        yield "network"
    elif first in THREADS or (first == "asyncio" and rest in HAND_OVER):
        yield "threads"
    elif first in DISK or (first == "os" and rest and rest not in {*OS_HARMLESS, "urandom", "getrandom"}):
        yield "disk"
    elif first in ("secrets", "uuid") or name in ("os.urandom", "os.getrandom"):
        yield "chance"
    elif (first == "random" or name.startswith(("np.random.", "numpy.random."))) and rest and last not in SEEDED:
        yield "chance"


def own_modules(names):
    return [file for folder in names for file in sorted((ROOT / folder).rglob("*.py"))]


def test_doors_are_opened_where_it_is_allowed():
    files = own_modules(DOORS)
    assert len(files) > 80
    found, used = {}, set()
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        for line, door, what in opened(file.read_text()):
            used.add((door, name))
            if name not in MAY_OPEN[door]:
                found.setdefault(f"{name}:{line}", []).append(f"{door}: {what}")
    assert not found
    idle = {(door, name) for door, modules in MAY_OPEN.items() for name in modules} - used
    assert not idle, "may be taken off the list"


@pytest.mark.parametrize(
    ("source", "door"),
    [
        ("import time", "clock"),
        ("from time import monotonic", "clock"),
        ("from datetime import datetime", "clock"),
        ("import random\nrandom.random()", "chance"),
        ("from random import choice", "chance"),
        ("import random\nrandom.Random()", "chance"),
        ("import random\nrandom.SystemRandom()", "chance"),
        ("import secrets", "chance"),
        ("import uuid", "chance"),
        ("import os\nos.urandom(8)", "chance"),
        ("from os import urandom", "chance"),
        ("import numpy as np\nnp.random.rand()", "chance"),
        ("import numpy as np\nnp.random.default_rng()", "chance"),
        ("import torch\ntorch.randn(3)", "chance"),
        ("import socket", "network"),
        ("import zmq.asyncio", "network"),
        ("await loop.create_connection(f, host, port)", "network"),
        ("import asyncio\nasyncio.start_server(f)", "network"),
        ("from asyncio import open_connection", "network"),
        ("open(path)", "disk"),
        ("path.open('rb')", "disk"),
        ("path.read_bytes()", "disk"),
        ("path.parent.mkdir()", "disk"),
        ("(a / b).write_text(c)", "disk"),
        ("import os\nos.replace(a, b)", "disk"),
        ("import os\nos.path.getsize(a)", "disk"),
        ("from os import unlink", "disk"),
        ("import tempfile", "disk"),
        ("import threading", "threads"),
        ("from concurrent.futures import ThreadPoolExecutor", "threads"),
        ("import asyncio\nasyncio.to_thread(f)", "threads"),
        ("loop.run_in_executor(None, f)", "threads"),
        ("import subprocess", "threads"),
        ("import signal", "threads"),
    ],
)
def test_the_doors_lint_bites(source, door):
    assert door in {found for _, found, _ in opened(source)}


@pytest.mark.parametrize(
    "source",
    [
        "import random\ndef f(rng: random.Random): rng.random()\nrandom.Random(7)",
        "import numpy as np\nnp.random.default_rng(3)\nnp.random.Generator(np.random.Philox(1))",
        "import torch\ntorch.randint(0, 3, shape, generator=g)",
        "import os\nos.fspath(p)\nos.strerror(5)\nos.path.join(a, b)",
        "link.open(peer)\nstream.open(self, 'secret', 3)\ntext.replace('a', 'b')",
        "import asyncio\nasyncio.sleep(1)\nloop.time()",
    ],
)
def test_the_doors_lint_lets_live(source):
    assert not list(opened(source))
