"""What documents say is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = [
    (document.name, file, test)
    for document in sorted(ROOT.glob("docs/*.md"))
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text())
]


@pytest.mark.parametrize(("document", "file", "test"), sorted(set(NAMED)))
def test_a_test_that_a_document_names_is_there(document, file, test):
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), document


def test_some_are_named():
    assert len(NAMED) > 30
