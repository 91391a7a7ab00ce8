"""Codec specs as manifests write them."""

from __future__ import annotations

import pytest
from thinwire.compression.dense.blockint import Int8
from thinwire.compression.dense.floats import Fp32
from thinwire.compression.registry import CODECS, Entry, SpecError, dense, parse


def test_codec_specs_parse() -> None:
    assert parse("fp32") == Fp32()
    assert parse("int8") == parse("int8()") == Int8(256)
    assert parse(" int8( block = 64 ) ") == Int8(64)


def test_parsed_codec_prints_its_full_spec() -> None:
    assert parse("int8").spec == "int8(block=256)"
    assert parse("int4(stochastic=1,asymmetric=1)").spec == "int4(block=256,asymmetric=1,stochastic=1)"
    assert parse("int3(asymmetric=0)") == parse("int3") != parse("int3(asymmetric=1)")
    for name in CODECS:
        assert parse(parse(name).spec) == parse(name)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("int9", "int8(block=…"),
        ("", "fp32"),
        ("int8(blok=3)", "int8(block=…"),
        ("int8(block=-1)", "block"),
        ("int8(block=3)", "16"),
        ("int8(block=99999999)", "65536"),
        ("int4(block=20)", "multiple of 8"),
        ("int3(asymmetric=2)", "asymmetric must be 0 or 1"),
        ("int8(stochastic=yes)", "it is written"),
        ("int8(block=64,block=32)", "block"),
        ("int8(64)", "block=…"),
        ("fp32(block=64)", "fp32"),
        ("int8(block=64", "there are"),
    ],
)
def test_invalid_codec_spec_is_answered_with_valid_choices(spec: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        parse(spec)
    assert said in str(error.value)


class Staged:
    """Codec of another kind, as an entry of the registry may make it."""

    def __init__(self, k: int = 64, values: str = "2bit", indices: str = "rice") -> None:
        if not 1 <= k <= 4096:
            raise ValueError("staged: k must be 1…4096")
        self.spec = f"staged(k={k})|{values}|{indices}"


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = (("values", ("2bit", "1bit")), ("indices", ("rice", "fixed")))
    monkeypatch.setitem(CODECS, "staged", Entry(Staged, ("k",), stages, "tensor"))


def test_codec_spec_stages_are_ordered_and_optional(staged: None) -> None:
    full = "staged(k=64)|2bit|rice"
    for spec in ("staged", "staged()|2bit", "staged|rice", full, " staged ( k = 64 ) | 2bit | rice "):
        assert parse(spec).spec == full
    assert parse("staged(k=8)|1bit|fixed").spec == "staged(k=8)|1bit|fixed"
    for wrong in ("staged|rice|2bit", "staged|2bit|1bit", "staged|3bit", "staged|", "staged|2bit(k=3)", "int8|rice"):
        with pytest.raises(SpecError, match="it is written"):
            parse(wrong)
    with pytest.raises(SpecError, match=r"staged\(k=…\)\|2bit or 1bit\|rice or fixed"):
        parse("2bit")
    with pytest.raises(SpecError, match="1…4096"):
        parse("staged(k=0)")


def test_dense_registry_refuses_other_codecs(staged: None) -> None:
    assert dense("int8(block=64)") == Int8(64)
    with pytest.raises(SpecError, match="not for dense averages; those are: fp32, fp16, .*int3"):
        dense("staged")
