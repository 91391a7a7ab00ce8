"""What ruff does not look for: ways to run foreign bytes, paths of one machine, and a complete list of public names."""

import ast
import re
import shutil
import subprocess
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
