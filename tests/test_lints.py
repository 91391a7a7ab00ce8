"""Lints beyond ruff: foreign bytes, machine paths, names, language, environment, layout of tests."""

import ast
import io
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import get_args

import pytest
import thinwire
from thinwire.swarm import choices
from thinwire.swarm.method_specs.registry import METHODS

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
    """Yield each use of a function that may execute its input, with its line."""
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


def test_package_never_executes_foreign_bytes():
    files = [file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 10
    found = {str(file.relative_to(ROOT)): bad for file in files if (bad := list(dangers(file.read_text())))}
    assert found == {}


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
def test_foreign_bytes_lint_finds_violations(source):
    assert list(dangers(source))


def test_foreign_bytes_lint_accepts_harmless_code():
    source = "model.eval()\nx = torch.compile(f)\nfrom safetensors.numpy import load\nimport re\nre.compile('a')"
    assert not list(dangers(source))


# Built from parts, so that this file does not match.
MACHINE = re.compile(
    rb"(?<![\w.~$}>)\]*:-])/(?:" + b"|".join([b"work", b"root", b"tmp", b"farm", b"home"]) + rb")(?=/|\b)"
)


def paths(data):
    return [(data[: match.start()].count(b"\n") + 1, match[0].decode()) for match in MACHINE.finditer(data)]


@pytest.mark.skipif(not shutil.which("git") or not (ROOT / ".git").exists(), reason="not a git checkout")
def test_files_have_no_paths_of_one_machine():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    files = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert len(files) > 20
    found = {str(file.relative_to(ROOT)): bad for file in files if (bad := paths(file.read_bytes()))}
    assert found == {}


@pytest.mark.parametrize(("text", "count"), [(b'"/%s/x"' % b"tmp", 1), (b"cd /%s\n" % b"root", 1), (b"a/tmp/x", 0)])
def test_path_lint_finds_violations(text, count):
    assert len(paths(text)) == count


def test_scripts_do_not_shadow_standard_modules():
    """Scripts import their neighbours by bare names: one called codecs.py would hide Python's module."""
    scripts = [file for folder in ("benchmarks", "examples") for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(scripts) > 10
    assert not {file.stem for file in scripts} & sys.stdlib_module_names


def test_all_lists_every_public_name():
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


# Environment: code that a simulation runs uses clock, randomness, network, disk and threads only through its arguments.
# The modules below may use them directly, for these reasons.
DOORS = ("swarm", "compression", "collectives", "node")
TRANSPORT = "is the transport of life"
DHT = "a process of its own, without thinwire"
PAGE = "a process beside the daemon, which reads its files"
LOCAL = "the demo: it makes the processes of a swarm and watches them"
MAY_OPEN = {
    "clock": {
        "node/api/ranks.py": "a duration for torch.distributed",
        "node/doctor/doctor.py": "makes the environment of a process",
        "node/peer/report_sinks.py": "stamps the events of a process",
        "node/cli/daemon_commands.py": "the age of a status, for a person",
        "node/cli/log_tail.py": "follows a log, for a person",
        "node/cli/page/run_view.py": PAGE,
        "node/cli/page/past_run.py": PAGE,
        "node/cli/top/screen.py": "shows the local time of events, to a person",
        "node/cli/recovery.py": "waits for the daemon, for a person",
        "node/daemon/daemon.py": "makes the environment of a process",
        "node/training/stored_model.py": "makes the environment of a learner that does not train",
        "node/peer/bootstrap.py": "makes the environment of a process",
        "node/discovery/sources.py": "makes the environment of a process",
        "node/local_swarm/evaluation.py": LOCAL,
        "node/local_swarm/baseline.py": LOCAL,
        "node/local_swarm/child_process.py": LOCAL,
        "node/runtime/process_lock.py": "tries again while a reader has the lock",
        "node/local_swarm/launcher.py": LOCAL,
    },
    "chance": {
        "node/discovery/sources.py": "makes the environment of a process",
        "node/discovery/dht_process.py": DHT,
        "node/peer/bootstrap.py": "makes the environment of a process",
        "node/training/models/lora.py": "seeds torch's generator with the run's seed, and restores it",
        "node/pipeline/model/staged_model.py": "seeds torch's generator for a check, and restores it",
        "node/training/models/user_model.py": "seeds torch's generator with the run's seed, and restores it",
        "swarm/identity/identity.py": "a new key, when no seed is given, and the name of its draft",
        "collectives/transport/zeromq/link.py": TRANSPORT + ": keys of bulk streams",
        "collectives/transport/zeromq/transport.py": TRANSPORT + ": tokens of circuits",
        "collectives/transport/shared_memory/local_sockets.py": TRANSPORT + ": names of sockets",
        "node/membership/router/pcp.py": "the nonce of a port mapping",
        "collectives/transport/zeromq/connections.py": TRANSPORT + ": back-off",
        "collectives/transport/zeromq/sockets/listener.py": TRANSPORT + ": which ports of a range are tried first",
    },
    "network": {
        "collectives/transport/zeromq/sockets/zmq_socket.py": TRANSPORT,
        "collectives/transport/zeromq/sockets/control_connection.py": TRANSPORT,
        "collectives/transport/zeromq/admission.py": TRANSPORT,
        "collectives/transport/zeromq/sockets/tcp_relay.py": TRANSPORT,
        "collectives/transport/shared_memory/local_sockets.py": TRANSPORT,
        "collectives/transport/zeromq/sockets/listener.py": TRANSPORT,
        "collectives/transport/tcp_options.py": TRANSPORT,
        "collectives/transport/addresses/name_resolver.py": TRANSPORT,
        "collectives/transport/zeromq/transport.py": TRANSPORT,
        "node/membership/router/gateway_requests.py": "asks the router for port mappings",
        "node/cli/page/server.py": PAGE,
        "node/cli/top/loop.py": "waits for keys",
    },
    "disk": {
        "node/cli/log_tail.py": "reads the log, for a person",
        "node/cli/page/server.py": PAGE,
        "node/cli/top/loop.py": "reads keys",
        "node/membership/router/gateway_requests.py": "reads the kernel's route table",
        "node/api/swarm.py": "knows whether this process is a fork",
        "node/doctor/machine.py": "checks the disk and the caches",
        "node/doctor/network.py": "looks for the key",
        "node/discovery/dht_process.py": DHT,
        "node/discovery/dht_source.py": "ends the process of the DHT",
        "node/runtime/disk.py": "is the disk of life",
        "node/runtime/loop_thread.py": "knows whether this process is a fork",
        "node/runtime/directories.py": "lists the runs, for a person",
        "node/training/stored_model.py": "reads the manifest of a stored model",
        "swarm/identity/identity.py": "the key's file: read before there is a peer",
        "swarm/identity/regular_file.py": "reads files that a user names",
        "node/cli/run_commands.py": "reads the manifest it is given",
        "node/cli/new_run.py": "writes the manifest that it is asked for",
        "node/runtime/load_settings.py": "reads node.toml",
        "node/runtime/settings.py": "tells folders from names of libraries",
        "node/runtime/console.py": "the log file",
        "node/runtime/device.py": "reads the limit of a container",
        "node/training/corpus.py": "reads and writes token files",
        "node/training/text_source.py": "reads the text to train on",
        "node/daemon/daemon.py": "reads the manifest it is given",
        "node/runtime/event_log.py": "the event log of a process",
        "node/training/export.py": "writes what it is asked to export",
        "node/training/models/initial_weights.py": "reads the first weights of a run",
        "node/runtime/process_lock.py": "one process per home",
        "node/peer/bootstrap.py": "reads the manifests of earlier runs",
        "node/peer/recover_command_file.py": "a request of a process to the daemon",
        "node/peer/status.py": "the status of a process",
        "node/training/models/tokenizer.py": "reads the manifest's tokenizer",
        "node/training/models/user_model.py": "reads the configuration of the user's model",
        "node/training/local_learner.py": "looks for the configuration beside the first weights",
        "node/runtime/parent_watch.py": "reads the pipe from the parent",
        "node/local_swarm/child_process.py": LOCAL,
        "node/local_swarm/forked_process.py": LOCAL,
        "node/local_swarm/launcher.py": LOCAL,
        "collectives/transport/zeromq/sockets/listener.py": TRANSPORT + ": how many sockets the system still gives",
        "collectives/transport/shared_memory/local_sockets.py": TRANSPORT + ": sockets of this machine",
        "collectives/transport/shared_memory/region.py": TRANSPORT + ": memory without a file",
    },
    "threads": {
        "node/discovery/dht_process.py": DHT,
        "node/discovery/dht_source.py": "starts the process of the DHT",
        "node/membership/router/upnp.py": "starts the process of a UPnP request",
        "compression/kernels/threads.py": "kernels, whose results do not depend on the number of threads",
        "node/api/allreduce.py": "the handle of what goes on beside a training loop of one's own",
        "node/runtime/loop_thread.py": "the threads beside a training loop of one's own",
        "node/peer/reports/background_thread.py": "the thread of the event log and of the tools of others",
        "node/daemon/daemon.py": "the worker, and signals",
        "node/runtime/signals.py": "names of signals, and how they were when we came",
        "node/peer/bootstrap.py": "makes the environment of a process",
        "node/local_swarm/launcher.py": LOCAL,
        "node/local_swarm/child_process.py": LOCAL,
        "node/local_swarm/forked_process.py": LOCAL,
        "node/runtime/parent_watch.py": "waits in a thread for the end of the parent",
        "collectives/transport/zeromq/transport.py": TRANSPORT + ": seals and opens bulk data",
        "collectives/transport/buffer_pool.py": "a lock, not a thread: views of buffers die in any",
        "collectives/transport/addresses/name_resolver.py": TRANSPORT + ": look-ups of names cannot be stopped",
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
    "cpu_count",
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
    """Yield each direct use of the environment: line, part of the environment, and name."""
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
    """Yield uses that only a call shows: an unseeded generator, a file."""
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
    """Yield the parts of the environment that a dotted name belongs to."""
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


def test_environment_is_used_only_where_allowed():
    files = own_modules(DOORS)
    assert len(files) > 80
    found, used = {}, set()
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        for line, door, what in opened(file.read_text()):
            used.add((door, name))
            if name not in MAY_OPEN[door]:
                found.setdefault(f"{name}:{line}", []).append(f"{door}: {what}")
    assert found == {}
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
def test_environment_lint_finds_violations(source, door):
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
def test_environment_lint_accepts_harmless_code(source):
    assert not list(opened(source))


TESTS = sorted((ROOT / "tests").rglob("*.py"))
RIDDLES = re.compile(r"test_(who|whom|whose|what|which|that|those|it|its|of|and|there)_")
"""Test names that begin with a relative clause or a pronoun instead of the tested unit."""

CLOSED = {"collective", "topology", "aggregation", "denominator", "on_exclusion", "slow_peers", "chunk_assignment"}
"""Names of fields and parameters with few possible strings (swarm/choices.py, compression/core/types.py)."""


def loose_choices(source):
    """Lines on which such a field or parameter is any string, so that the type checker does not see a wrong one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            name, annotation = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name | ast.Attribute):
            name, annotation = dotted(node.target).rpartition(".")[2], node.annotation
        else:
            continue
        if name in CLOSED and annotation is not None and re.search(r"\bstr\b", ast.unparse(annotation)):
            yield node.lineno


def test_fields_with_a_closed_set_of_strings_have_a_literal_type():
    files = [file for folder in PRODUCT[:5] for file in (ROOT / folder).rglob("*.py")]
    found = {file.relative_to(ROOT).as_posix(): list(loose_choices(file.read_text())) for file in files}
    assert len(files) > 300 and not {name: lines for name, lines in found.items() if lines}
    assert set(get_args(choices.MethodName)) == set(METHODS)


@pytest.mark.parametrize(
    ("source", "bad"),
    [
        ("def f(topology: str): ...", True),
        ("class A:\n    collective: ClassVar[str] = 'gather'", True),
        ("self.denominator: str | None = None", True),
        ("def f(topology: Topology, name: str): ...", False),
        ("class A:\n    collective: Collective = 'butterfly'", False),
    ],
)
def test_choices_lint_finds_strings_of_any_value(source, bad):
    assert bool(list(loose_choices(source))) is bad


def test_names_of_tests_begin_with_their_subject():
    names = [
        (file.relative_to(ROOT).as_posix(), node.name)
        for file in TESTS
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 1500
    assert not [entry for entry in names if RIDDLES.match(entry[1])]


PLANTED = "patches the bugs and lies into the product"
CENTRAL = "the one place in which tests of the transport reach into it"
MAY_ACCESS = {
    "tests/kit/planted/agreement.py": (6, PLANTED),
    "tests/kit/planted/product.py": (5, PLANTED),
    "tests/kit/programs/lying_process.py": (2, PLANTED),
    "tests/kit/wire.py": (20, CENTRAL),
}
"""File -> number of permanent accesses to private attributes of the product, and reason."""


def private_accesses(source):
    """Yield lines that use a name with one leading underscore that the file does not define."""
    tree = ast.parse(source)
    own = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    own |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) in ("self", "cls")
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute) and not (dotted(node.value) in ("self", "cls") and node.attr in own):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ("setattr", "getattr", "delattr"):
            names = [
                one.value for one in node.args[1:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
        yield from (node.lineno for name in names if re.match("_[^_]", name))


def test_tests_access_no_private_attributes_beyond_the_list():
    allowed = {name: count for name, (count, _) in MAY_ACCESS.items()}
    found = {file.relative_to(ROOT).as_posix(): list(private_accesses(file.read_text())) for file in TESTS}
    more = {name: lines for name, lines in found.items() if len(lines) > allowed.get(name, 0)}
    assert not more, "use public behaviour or a read-only property"
    fewer = {name: len(found.get(name, ())) for name, count in allowed.items() if len(found.get(name, ())) < count}
    assert not fewer, "lower the numbers in the list"


@pytest.mark.parametrize(
    "source",
    [
        "peer._held",
        "from thinwire.node import _hidden",
        "monkeypatch.setattr(Peer, '_open', f)",
        "def patched(self):\n    self._held",
        "class Mine:\n    def __init__(self, peer):\n        self._mine = peer._mine",
    ],
)
def test_private_access_lint_finds_violations(source):
    assert list(private_accesses(source))


@pytest.mark.parametrize(
    "source", ["peer.held", "peer.__dict__", "class Mine:\n    def f(self):\n        self._mine = self._mine"]
)
def test_private_access_lint_accepts_own_attributes(source):
    assert not list(private_accesses(source))


STARTS = re.compile(r"(Who|What|Whose|Whom|Which|How|That|Whether|See)\b")
LONGEST_FIRST_LINE = 100
BANNED = re.compile(
    "|".join(
        [
            r"\bsay(s|ing)? nothing\b",
            r"\b(is|are|was|were) of (?!no\b)",
            r"\bof (its|their|his|one's) own\b(?! (?!(and|or|that|which|whose|with|in|on|for|to)\b)\w)",
            r"\b(has|have|had|having) to do with\b",
            r"\bthe day when\b",
            r"\bof so many\b",
            r"\belse than\b",
            r"\b(go|goes|gone|went) on\b",
            r"\banew\b",
            r"\bunder way\b",
            r"\bon (the|its|their|his) way\b",
            r"\bwho (is|are|was|were) gone\b",
            r"\bwhoever\b",
            r"\b(no|any|some|every)body\b",
            r"\b(says|hears|heard)\b",
            r"\b(its|their|his|peer's|'s|by the|without a) word\b",
            r"(^|[.;] )(Who|Whose|What) (is|are|was|has|have|had|does|came|comes|can|may|sends|takes|makes)\b[^?]*$",
        ]
    ),
    re.IGNORECASE,
)
"""Patterns that CONTRIBUTING.md bans."""


def texts(source, strings=True):
    """Yield (line, docstring or "", text) of docstrings, comments, and longer strings if wanted."""
    tree, docstrings = ast.parse(source), set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                docstrings.add(one.value)
                yield one.lineno, one.value.value.strip(), one.value.value
    if strings:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                if node.value.count(" ") > 1:
                    yield node.lineno, "", node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], "", token.string


def riddles(source, strings=True, longest=LONGEST_FIRST_LINE):
    """Yield (line, finding) for the language rules of CONTRIBUTING.md; names in backticks do not count."""
    for line, docstring, text in texts(source, strings):
        first, _, rest = docstring.partition("\n")
        if len(first) > longest:
            yield line, f"first line has {len(first)} characters"
        if rest and rest.lstrip(" ")[0] != "\n":
            yield line, f"no empty line after {first!r}"
        if STARTS.match(first):
            yield line, first
        yield from ((line, found[0]) for found in BANNED.finditer(re.sub(r"`[^`]*`", "`", " ".join(text.split()))))


def test_language_of_package_and_tests_is_plain():
    """Strings of tests are data, and first lines of their docstrings may fill the line."""
    found = {}
    for file in (*own_modules((*DOORS, "sims")), *TESTS):
        name = file.relative_to(ROOT).as_posix()
        bad = list(riddles(file.read_text(), False, 120) if file in TESTS else riddles(file.read_text()))
        if bad:
            found[name] = bad
    assert found == {}


EXAMPLES = "| do not write | write |"
"""Head of the table in CONTRIBUTING.md that quotes banned phrases."""


def paragraphs(document):
    """Yield (line, text) of each paragraph, list item and table row; without code, and without the table of examples."""
    text = re.sub(
        r"^( *)```.*?^\1```$", lambda block: "\n" * block[0].count("\n"), document, flags=re.MULTILINE | re.DOTALL
    )
    parts, start, examples = [], 0, False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if not line.strip() or re.match(r" *(\||[-*] |\d+\. |#)", line):
            if parts:
                yield start, re.sub(r"`[^`]*`", "`", " ".join(parts))
            parts = []
        examples = line.startswith("|") and (examples or line == EXAMPLES)
        if line.strip() and not examples:
            start = start if parts else number
            parts.append(line.strip())


def prose_riddles(document):
    """Yield (line, finding) for the banned phrases in a document."""
    for line, text in paragraphs(document):
        yield from ((line, found[0]) for found in BANNED.finditer(text))


def test_language_of_documents_is_plain():
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))]
    assert len(files) > 40
    found = {}
    for file in files:
        bad = list(prose_riddles(file.read_text()))
        if bad:
            found[file.relative_to(ROOT).as_posix()] = bad
    assert found == {}


@pytest.mark.parametrize(
    ("document", "lines"),
    [
        ("The peers\ngo on without it.", [1]),
        ("A peer.\n\n- It says so.\n- Nobody waits.", [3, 4]),
        ("| case | then |\n|---|---|\n| it starts anew | `x` |", [3]),
        (f"{EXAMPLES}\n|---|---|\n| says | states |\n\nIt says.", [5]),
    ],
)
def test_document_lint_finds_violations(document, lines):
    assert [line for line, _ in prose_riddles(document)] == lines


@pytest.mark.parametrize("document", ["The page `a\nsays b` is short.", "```\nit says\n```", "It reports the error."])
def test_document_lint_accepts_code_and_plain_english(document):
    assert not list(prose_riddles(document))


@pytest.mark.parametrize(
    "source",
    [
        '"""What a peer sends."""',
        '"""See Handler."""',
        '"""Queue of frames, and the peers that\n    wait for them.\n    """',
        f'"""{"long " * 20}line."""',
        "# the others go on without it",
        'raise Error("exchange.keep says nothing but of a butterfly")',
        "# who is gone is not asked",
        'def f():\n    """Return a buffer of its own."""',
        '"""Return peers. Who comes late waits."""',
    ],
)
def test_language_lint_finds_violations(source):
    assert list(riddles(source))


@pytest.mark.parametrize(
    "source",
    [
        '"""Return the peers that sent `whatever`."""',
        "# the owner sends the result",
        'hint = "What now?"',
        "x = 'a word'",
        'parser = "go on"',
    ],
)
def test_language_lint_accepts_plain_english(source):
    assert not list(riddles(source))
