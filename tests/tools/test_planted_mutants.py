"""Planted mutants are mutations of the present code."""

import ast
from pathlib import Path

import pytest
from tools.planted_mutants import PLANTED

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("module", "wrong", "text", "mutation"), PLANTED, ids=[wrong for _, wrong, *_ in PLANTED])
def test_planted_mutant_is_another_valid_module(module, wrong, text, mutation):
    code = (ROOT / module).read_text()
    assert code.count(text) == 1
    assert ast.dump(ast.parse(code.replace(text, mutation))) != ast.dump(ast.parse(code))
