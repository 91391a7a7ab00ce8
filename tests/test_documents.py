"""Documents: the tests, files and other documents that they name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
FOLDERS = "benchmarks|collectives|compression|docs|examples|node|sims|swarm|tests"
NAMED = [
    (document.name, file, test)
    for document in DOCUMENTS
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text())
]


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
    assert [int(number) for number, _ in rows] == list(range(1, 79))
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
