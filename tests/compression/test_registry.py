"""Names of codecs in a manifest."""

from __future__ import annotations

import pytest
from thinwire.compression.quantize import Fp32, Int8
from thinwire.compression.registry import CODECS, SpecError, parse


def test_specs_parse_to_codecs() -> None:
    assert parse("fp32") == Fp32()
    assert parse("int8") == parse("int8()") == Int8(256)
    assert parse(" int8( block = 64 ) ") == Int8(64)


def test_a_spec_spells_out_what_was_parsed() -> None:
    assert parse("int8").spec == "int8(block=256)"
    for name in CODECS:
        assert parse(parse(name).spec) == parse(name)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("int9", "int8(block=…)"),
        ("", "fp32"),
        ("int8(blok=3)", "int8(block=…)"),
        ("int8(block=-1)", "block"),
        ("int8(block=3)", "16"),
        ("int8(block=99999999)", "65536"),
        ("int8(block=64,block=32)", "block"),
        ("int8(64)", "block=…"),
        ("fp32(block=64)", "fp32"),
        ("int8(block=64", "there are"),
    ],
)
def test_a_mistake_is_answered_with_what_there_is(spec: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        parse(spec)
    assert said in str(error.value)
