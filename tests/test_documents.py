"""Documents: what they name exists, their code runs, and the reference pages are those of the code."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import msgspec
import pytest
from kit.real.documents import DOCUMENTS, ROOT, blocks, shell_lines
from thinwire.collectives.costs.access_links import ACCESS, MBIT
from thinwire.node.cli.main import EXIT_CODES, command_line
from thinwire.node.cli.new_run import LINKS
from thinwire.node.runtime.settings import SETTINGS
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.membership.peer_table import EventKind

FOLDERS = "benchmarks|collectives|compression|docs|examples|node|sims|swarm|tests"
NAMED = [
    (document.name, file, test)
    for document in DOCUMENTS
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text())
]

sys.path.append(str(ROOT / "docs" / "reference"))  # the script imports its neighbours by bare names
_generate = importlib.import_module("generate")
PAGES = _generate.PAGES
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
FLAGS = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", (ROOT / "docs" / "reference" / "commands.md").read_text()))
"""Flags of thinwire."""


def paths_in(document: Path) -> set[str]:
    """Return the files that a document names, and the folders and Python files in backticks."""
    text = document.read_text()
    files = re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]*\.(?:json|md|py|toml|txt)\b", text)
    quoted = re.findall(rf"`((?:{FOLDERS})/[\w/]*|[\w/]+\.py)`", text)
    return {*files, *quoted}


@pytest.mark.parametrize(("document", "file", "test"), sorted(set(NAMED)))
def test_document_named_test_exists(document, file, test):
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), document


def test_documents_name_tests():
    assert len(NAMED) > 30


def test_every_fault_has_a_test():
    rows = re.findall(r"^\| (\d+) \|.*\|(.*)\|$", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 82))
    assert all(re.fullmatch(r" `tests/[\w/]+\.py::\w+`(<br>`tests/[\w/]+\.py::\w+`)* ", named) for _, named in rows)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_document_named_path_exists(document):
    assert [path for path in sorted(paths_in(document)) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_document_link_to_a_file_resolves(document):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_documents_name_code():
    assert sum(len(paths_in(document)) for document in DOCUMENTS) > 200


# --- form of the documents

DESIGN = ROOT / "docs" / "design"
TABLES = {"decisions.md", "timeouts.md"}
"""Pages of `docs/design` that are about all parts."""


def missing_sections(text: str) -> list[str]:
    """Return the sections that a design page needs and lacks."""
    patterns = {
        "purpose": r"^\*\*Purpose\.\*\* |^## Purpose$",
        "modules": r"^\*\*Modules\.\*\*|^## Modules$",
        "invariants": r"^## Invariants\b",
        "limits": r"^## Limits$",
        "time-outs": r"^## Time-outs$|\b[Tt]ime-outs\b.*\]\(timeouts\.md(#[a-z-]+)?\)",
    }
    return [name for name, pattern in patterns.items() if not re.search(pattern, text, re.MULTILINE)]


@pytest.mark.parametrize("page", sorted({path.name for path in DESIGN.glob("*.md")} - TABLES))
def test_design_page_has_purpose_modules_invariants_limits_and_timeouts(page):
    assert missing_sections((DESIGN / page).read_text()) == []


def test_missing_sections_of_a_page_without_any_names_all():
    text = "# Gossip\n\nPurpose. Invariants: none. Limits: none.\n"
    assert missing_sections(text) == ["purpose", "modules", "invariants", "limits", "time-outs"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_heading_of_a_document_is_not_a_paragraph(document):
    text = re.sub(r"^( *)```.*?^\1```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    assert [heading for heading in headings if len(heading) > 80 or "**" in heading] == []


def test_architecture_is_two_pages_with_few_nouns():
    text = (ROOT / "docs" / "architecture.md").read_text()
    nouns = re.search(r"^## Nouns\n\|.*\n\|[-|]*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert nouns and 5 < nouns[1].count("\n") <= 15
    assert len(text.split()) <= 1200


# --- code of the documents

SKIPPED = "…"
"""Values that a reader fills in; a block of TOML with one is not read."""


def parameters(language):
    """Return title and code of each fenced block of this language, as parameters of a test."""
    return [
        pytest.param(block.title, block.code, id=f"{block.document}-{number}")
        for number, block in enumerate(blocks(language))
    ]


def command_lines():
    """Return the lines of the documents that call this command line or make, without comments."""
    return [line for line in shell_lines() if line.startswith(("thinwire ", "make "))]


@pytest.mark.parametrize("line", command_lines())
def test_command_of_a_document_has_valid_arguments(line):
    program, *arguments = shlex.split(line)
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {argument for argument in arguments if "=" not in argument} <= set(targets)
        return
    if arguments[0].startswith("--"):
        assert any(arguments[0] in option.opts for option in command_line().params)
        return
    command = command_line(arguments[0]).commands[arguments[0]]
    command.make_context(arguments[0], arguments[1:])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_command_in_the_text_of_a_document_has_only_known_flags(document):
    for line in re.findall(r"`thinwire ([a-z][^`\n]*)`", document.read_text()):
        name, *rest = line.split()
        known = command_line(name).commands
        flags = {flag for option in known[name].params for flag in (*option.opts, *option.secondary_opts)}
        assert {word for word in rest if word.startswith("--")} <= flags, line


FOREIGN_FLAGS = {"--build-arg", "--gpus", "--shard"}
"""Flags of docker and of `examples/own_loop.py` that a guide names without their program."""


@pytest.mark.parametrize("document", GUIDES, ids=lambda document: str(document.relative_to(ROOT)))
def test_flag_that_a_guide_names_is_in_the_reference_of_commands(document):
    text = re.sub(r"^( *)```.*?^\1```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    quoted = [code for code in re.findall(r"`([^`]+)`", text) if code.startswith(("--", "thinwire "))]
    named = {flag for code in quoted for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", code)}
    assert sorted(named - FOREIGN_FLAGS - FLAGS) == []


@pytest.mark.parametrize(("title", "code"), parameters("toml"))
def test_toml_of_a_document_is_a_manifest_or_a_scenario(title, code):
    if SKIPPED in code:
        pytest.skip("the reader fills in a value")
    tables = tomllib.loads(code)
    if tables.keys() <= {field.name for field in msgspec.structs.fields(Manifest)}:
        parse(code.encode())


@pytest.mark.trial
def test_python_of_the_own_loop_page_runs(tmp_path):
    """Blocks with a title are parts of other files."""
    page = (ROOT / "docs" / "guides" / "own-loop.md").read_text()
    run = re.search(r'^```toml title="run.toml"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    parts = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(parts) >= 3
    (tmp_path / "run.toml").write_text(run[1])
    (tmp_path / "page.py").write_text("\n".join(parts))
    home = {**os.environ, "THINWIRE_HOME": str(tmp_path / "home"), "THINWIRE_HOST": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=home, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    first, loss, contributors, missing, total = done.stdout.splitlines()
    assert first.split()[0] == "3" and first.split()[2].startswith("tw1-")
    assert loss == "2.5" and len(contributors) > 64 and missing == "{}"
    assert abs(float(total.removeprefix("tensor(").removesuffix(")")) - 1000) < 10, "int8 rounds"


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_that_of_the_code(name):
    """`python docs/reference/generate.py` writes the pages."""
    assert (ROOT / "docs" / "reference" / name).read_text() == PAGES[name]()


def test_readme_has_the_exit_codes_of_the_code():
    """`python docs/reference/generate.py` writes them."""
    text = (ROOT / "README.md").read_text()
    assert text == _generate.readme() and all(f"| {code} | {meaning} |" in text for code, meaning in EXIT_CODES.items())


def _documented_events():
    page = (ROOT / "docs" / "reference" / "events.md").read_text()
    return set(re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))


def test_every_event_of_the_package_is_in_its_reference():
    said = set(typing.get_args(EventKind))
    for path in (file for folder in ("node", "collectives", "swarm") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and len(node.args) >= 2 and isinstance(node.args[0], ast.Constant):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in ("emit", "_emit", "_write", "_report") and isinstance(node.args[0].value, str):
                    said.add(node.args[0].value)
    assert len(said) > 40 and sorted(said - _documented_events()) == []


def test_tests_ask_for_no_event_that_does_not_exist():
    """A test that expects no event of a kind cannot fail if its kind is mistyped."""
    of_simulator = {"fault", "up", "down", "violation", "unplayed"}
    asked = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                place = {"of": 0, "events_of": 1, "_told": 1}.get(name, len(node.args))
                if place < len(node.args) and isinstance(node.args[place], ast.Constant):
                    asked.add(node.args[place].value)
    asked = {kind for kind in asked if isinstance(kind, str)}
    assert len(asked) > 30 and sorted(asked - _documented_events() - of_simulator) == []


def test_operations_page_has_the_links_and_methods_of_init():
    page = (ROOT / "docs" / "guides" / "operations.md").read_text()
    shown = re.findall(r"^\| `(\w+)`, (\d+) Mbit/s up \| (\w+), every (\d+) steps", page, re.MULTILINE)
    assert [(kind, float(rate) * MBIT, method.lower(), int(steps)) for kind, rate, method, steps in shown] == [
        (kind, ACCESS[kind].up, link.method, link.sync_every) for kind, link in LINKS.items()
    ]


def test_readme_names_every_setting_of_the_environment():
    readme = (ROOT / "README.md").read_text()
    missing = [f"_{one.name.upper()}" for one in SETTINGS if f"_{one.name.upper()}`" not in readme]
    assert not missing
