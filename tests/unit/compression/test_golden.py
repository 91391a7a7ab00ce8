"""Frozen wire formats: every codec writes the bytes of tests/golden/codecs/make.py."""

from golden.codecs import make
from thinwire.compression.registry import CODECS

GOLDEN = make.HERE


def test_every_codec_writes_and_reads_its_golden_bytes() -> None:
    made = make.payloads()
    assert {path.name for path in GOLDEN.glob("*.bin")} == set(made)
    assert [name for name, (payload, _) in made.items() if payload != (GOLDEN / name).read_bytes()] == []
    found, expected = make.digests(made).splitlines(), (GOLDEN / "decoded.txt").read_text().splitlines()
    assert [line for line in found if line not in expected] == [] and len(found) == len(expected)


def test_every_codec_has_golden_bytes() -> None:
    written = {path.name.split("-")[0].split(".")[0] for path in GOLDEN.glob("*.bin")}
    assert written == set(CODECS)
