"""The wire formats are frozen: byte for byte as tests/golden/codecs/make.py once wrote them."""

import importlib.util
from pathlib import Path

from thinwire.compression.registry import CODECS

GOLDEN = Path(__file__).parents[1] / "golden" / "codecs"
_spec = importlib.util.spec_from_file_location("make", GOLDEN / "make.py")
assert _spec is not None and _spec.loader is not None
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)


def test_every_codec_writes_and_reads_the_bytes_it_always_did() -> None:
    made = make.payloads()
    assert {path.name for path in GOLDEN.glob("*.bin")} == set(made)
    assert [name for name, (payload, _) in made.items() if payload != (GOLDEN / name).read_bytes()] == []
    found, expected = make.digests(made).splitlines(), (GOLDEN / "decoded.txt").read_text().splitlines()
    assert [line for line in found if line not in expected] == [] and len(found) == len(expected)


def test_no_codec_is_left_out() -> None:
    written = {path.name.split("-")[0].split(".")[0] for path in GOLDEN.glob("*.bin")}
    assert written == set(CODECS)
