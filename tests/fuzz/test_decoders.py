"""Coverage-guided fuzzing of all decoders: a short run by default, a long one with `make soak`."""

import json
import os
import subprocess
import sys
import tracemalloc
from importlib.util import find_spec
from pathlib import Path

import pytest
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.registry import parse
from thinwire.compression.sparse.topk import HEADER

HARNESS = Path(__file__).with_name("decoders.py")
TARGETS = 45
LIMITS = ("-max_len=1200", "-timeout=20", "-rss_limit_mb=2048", "-verbosity=0", "-print_final_stats=0")
fuzzer = pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is there for CPython on Linux x86-64 only")


def _with_tests() -> dict[str, str]:
    """Return an environment in which the harness finds the planted objects of tests/kit."""
    paths = (str(HARNESS.parents[1]), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def fuzz(folder: Path, inputs: int, *flags: str, seed: int = 1) -> tuple[int, str, dict[str, int]]:
    """Run the fuzzer; return exit status, output, and the last tally."""
    seeds = folder / "seeds"
    seeds.mkdir()
    # Some runs have the empty input, which is not counted.
    runs = inputs + inputs // 100 + 500
    command = [sys.executable, HARNESS, *flags, f"-seeds={seeds}", f"-runs={runs}", f"-seed={seed}"]
    # The largest memory of a process includes that of the one that forks it, here perhaps after thousands of tests.
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    done = subprocess.run([*shell, *command, *LIMITS], cwd=folder, capture_output=True, text=True, env=_with_tests())
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, done.stdout + done.stderr, json.loads(lines[-1]) if lines else {}


@pytest.mark.trial
@fuzzer
def test_decoders_survive_short_fuzz_run(tmp_path: Path) -> None:
    code, output, tally = fuzz(tmp_path, 40_000)
    assert code == 0, output[-4000:]
    assert tally.pop("inputs") == 40_000
    # Inputs do come past the checks, of every target.
    assert len(tally) == TARGETS and sum(tally.values()) > 2_000, tally


@pytest.mark.trial
@fuzzer
def test_fuzzer_finds_planted_bug(tmp_path: Path) -> None:
    code, output, _ = fuzz(tmp_path, 300_000, "-only=12", "-planted")
    assert code != 0 and "AssertionError" in output


@fuzzer
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", range(TARGETS))
def test_decoder_survives_half_a_million_inputs(tmp_path: Path, target: int) -> None:
    code, output, tally = fuzz(tmp_path, 500_000, f"-only={target}", seed=20261121)
    print(tally)
    assert code == 0, output[-4000:]
    assert tally["inputs"] >= 500_000


@pytest.mark.parametrize("spec", ["topk", "topk|2bit|fixed", "topk(k=4096)", "demo"])
def test_sparse_decoder_given_header_only_allocates_nothing(spec: str) -> None:
    codec, chunks = parse(spec), Chunks((("w", (4096, 4096)),))
    header = HEADER.pack(
        2 if "4096" in spec else 0 if "fixed" in spec else 1, 0 if "|" in spec or "4096" in spec else 3, 1, 2, 0
    )
    for payload in (header, header[:-4] + b"\xff" * 4, header[:-4] + b"\xff" * 4 + bytes(1000)):
        tracemalloc.start()
        with pytest.raises(CodecError):
            codec.decode(payload, chunks)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20, peak
