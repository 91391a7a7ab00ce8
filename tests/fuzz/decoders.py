"""libFuzzer targets for all decoders: `python tests/fuzz/decoders.py -seeds=DIR -runs=100000 -seed=1`.

One input is a byte that picks the target, and the payload. Coverage is that of the Python code around the kernels, and
of each fault that a kernel reports. The targets check that decoders raise nothing but CodecError, that decoded values
are finite, and, where the format leaves no choice, that an accepted payload equals the encoding of its decoded values.
"""

from __future__ import annotations

import json
import math
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import channels
import files
import numpy as np
import payloads
import wire
from kit.planted.cards import NOW, card, identity
from thinwire.collectives.transport.circuits import ticket
from thinwire.compression import registry
from thinwire.compression.activations import codecs, subspace
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.noise import normal
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.dense import blockint, e3m0, floats
from thinwire.compression.kernels import payload_arrays
from thinwire.compression.sparse import demo, header, index_coding, topk
from thinwire.swarm.identity import run_card
from thinwire.swarm.identity.identity import SIGNATURE_BYTES
from thinwire.swarm.identity.peer_record import RecordError
from thinwire.swarm.identity.run_card import CARD_BYTES, RunCard

PYTHON = (
    codecs,
    demo,
    index_coding,
    floats,
    e3m0,
    payload_arrays,
    blockint,
    topk,
    header,
    subspace,
    run_card,
    ticket,
    *wire.MODULES,
    *files.MODULES,
    *payloads.MODULES,
    *channels.MODULES,
)
"""Modules whose functions are instrumented; compiled kernels cannot be."""

Target = tuple[str, Callable[[bytes], None], list[bytes]]
"""Name, function that takes a payload, and valid payloads as seeds."""

ELEMENTS = 70
DENSE = ("fp32", "fp16", "bf16", "int8(block=32)", "int4(block=32)", "int3(block=32)", "e3m0(block=32)")
DENSE += tuple(f"int{bits}(block=32,asymmetric=1)" for bits in (8, 4, 3))
TENSOR = ("topk(k=9,chunk=256)", "topk(k=9,chunk=256)|1bit", "topk(k=9,chunk=256)|2bit|fixed", "topk(k=256,chunk=256)")
TENSOR += ("topk(k=200,chunk=4096)", "demo(k=5,chunk=256)", "demo(k=5,chunk=256)|1bit|fixed")
SHAPES = (("a", (3,)), ("b", (20, 17)), ("c", (2, 2, 2)))
ROWS, COLS = 3, 48
REPORT = 10_000
"""Inputs between two reports: a JSON line with the number of inputs, and of valid ones for each target."""


def targets() -> list[Target]:
    """Every decoder; its place in the list is the first byte of an input."""
    made = [_dense(spec) for spec in DENSE] + [_tensor(spec) for spec in TENSOR]
    made += [_rows(spec) for spec in ("rows", "rows(bits=4)", "tah")]
    boundaries = [_boundary(vocabulary) for vocabulary in (0, 300, 70_000)]
    others = [_run_card(), *wire.targets(), _ticket(), *files.targets(), *payloads.targets(), *channels.targets()]
    return [*made, *boundaries, *map(_after_one, others)]


def _after_one(target: Target) -> Target:
    """Return the target for inputs with a byte before the payload, see `_fitted`."""
    name, take, seeds = target
    return name, lambda data: take(data[1:]), seeds


def _dense(spec: str) -> Target:
    codec: Any = registry.parse(spec)

    def take(data: bytes) -> None:
        payload, out = _fitted(data, codec.nbytes(ELEMENTS)), np.empty(ELEMENTS, np.float32)
        squared = _answer(codec.check, payload, ELEMENTS)
        if (_answer(codec.decode, payload, out) is None) != (squared is None):
            raise AssertionError("check and decode disagree")
        if squared is None:
            raise CodecError("refused by both")
        assert np.isfinite(out).all()
        assert math.isclose(squared, float((out.astype(np.float64) ** 2).sum()), rel_tol=1e-9)
        again = np.empty_like(out)
        codec.mean([payload, payload], [1.0, 3.0], again)
        assert np.allclose(again, out, rtol=1e-6, atol=0)

    x, seeds = normal(1, "fuzz", ELEMENTS), []
    for scale in (1e-8, 1.0, 1e4):
        payload = np.empty(codec.nbytes(ELEMENTS), np.uint8)
        codec.encode(x * np.float32(scale), payload)
        seeds.append(payload.tobytes())
    return codec.spec, take, seeds


def _tensor(spec: str) -> Target:
    codec: Any = registry.parse(spec)
    chunks = Chunks(SHAPES, codec.chunk)

    def take(payload: bytes) -> None:
        selected = codec.decode(payload, chunks)
        assert len(payload) == codec.nbytes(selected) <= codec.bound(chunks)
        assert codec.encode(selected) == payload
        out = np.zeros(chunks.total, np.float32)
        selected.scatter(out)
        assert np.isfinite(out).all()

    x, seeds = normal(2, "fuzz", chunks.total), []
    for values in (x, x * x * x, x * (np.abs(x) > 2), np.zeros_like(x), np.sign(x)):
        seeds.append(codec.encode(codec.select(values.astype(np.float32), chunks)))
    return codec.spec, take, seeds


def _rows(spec: str) -> Target:
    codec: Any = registry.parse(spec)

    def take(data: bytes) -> None:
        out = np.empty((ROWS, COLS), np.float32)
        codec.decode(_fitted(data, codec.nbytes(ROWS, COLS)), out)
        assert np.isfinite(out).all()

    x = normal(3, "fuzz", ROWS * COLS).reshape(ROWS, COLS)
    payload = np.empty(codec.nbytes(ROWS, COLS), np.uint8)
    codec.encode(x * x * x, payload)
    return codec.spec, take, [payload.tobytes()]


def _boundary(vocabulary: int) -> Target:
    codec: Any = registry.parse("subspace(k=4)")

    def take(data: bytes) -> None:
        payload = _fitted(data, codec.nbytes(6, vocabulary))
        h, tokens = codec.decode(payload, 6, vocabulary)
        assert codec.encode(h, tokens, vocabulary) == payload

    tokens = np.arange(6) if vocabulary else None
    return f"{codec.spec} {vocabulary}", take, [codec.encode(normal(4, "fuzz", 24).reshape(6, 4), tokens, vocabulary)]


def _run_card() -> Target:
    """Return the target of run cards: the input is a body, which its publisher signs, so that inputs come past that."""
    first = card()
    signer = identity(1)

    def take(body: bytes) -> None:
        try:
            parsed = RunCard.parse(body + signer.sign("card", body), now=NOW)
        except RecordError as error:
            raise CodecError(str(error)) from None
        assert len(parsed.wire) <= CARD_BYTES and parsed.wire[:-SIGNATURE_BYTES] == body
        loss = parsed.description.loss
        assert loss is None or math.isfinite(loss)

    return "run card", take, [one.wire[:-SIGNATURE_BYTES] for one in (first, card(loss=None), card(addresses=()))]


def _ticket() -> Target:
    def take(data: bytes) -> None:
        try:
            token = ticket.decode(data)
        except ValueError as error:
            raise CodecError(str(error)) from None
        if token is None:
            assert len(data) < ticket.TICKET_BYTES
        else:
            assert ticket.encode(token) == data

    whole = ticket.encode(bytes(range(ticket.TOKEN_BYTES)))
    return "ticket", take, [whole, whole[:-1], whole[:3]]


def _fitted(data: bytes, size: int) -> bytes:
    """Make a payload fit a fixed length if it begins with an odd byte.

    Otherwise the target would refuse nearly all inputs for their length.
    """
    return data[1 : size + 1].ljust(size, b"\0") if data[:1] and data[0] & 1 else data[1:]


def _answer(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call, True for None, and None if it refuses the payload."""
    try:
        answer = call(*arguments)
    except CodecError:
        return None
    return True if answer is None else answer


def watch(instrument: Callable[[Any], Any]) -> None:
    """Replace each Python function by an instrumented copy, in every module and class that has it."""
    done: dict[int, Any] = {}
    names = {module.__name__ for module in PYTHON}
    for module in PYTHON:
        holders = [module, *(x for x in vars(module).values() if isinstance(x, type) and x.__module__ in names)]
        for holder in holders:
            for name, found in list(vars(holder).items()):
                if isinstance(found, types.FunctionType) and found.__module__ in names and not name.startswith("__"):
                    if id(found) not in done:
                        done[id(found)] = instrument(found)
                    setattr(holder, name, done[id(found)])


def plant() -> None:
    """Plant a bug for the fuzzer to find: the padding bits at the end of a stream are not checked."""
    index_coding.check = lambda *arguments: None


def main(arguments: list[str]) -> None:
    """Run libFuzzer. First options: -only=NUMBER of a target; -planted, with the bug; -seeds=DIR.

    DIR is an empty folder for seed inputs. All other options are those of libFuzzer.
    """
    everyone = targets()
    chosen = list(range(len(everyone)))
    if arguments and arguments[0].startswith("-only="):
        chosen = [int(arguments.pop(0).removeprefix("-only="))]
    if arguments and arguments[0] == "-planted":
        arguments.pop(0)
        plant()
    if arguments and arguments[0].startswith("-seeds="):
        folder = Path(arguments.pop(0).removeprefix("-seeds="))
        arguments.append(str(folder))
        for at, i in enumerate(chosen):
            tensor = len(DENSE) <= i < len(DENSE) + len(TENSOR)
            for j, seed in enumerate(everyone[i][2]):
                (folder / f"{i:02d}-{j}").write_bytes(bytes([at]) + (b"" if tensor else b"\1") + seed)

    import atheris

    watch(atheris.instrument_func)
    tally = Counter[str]()

    @atheris.instrument_func
    def one(data: bytes) -> None:
        if not data:
            return
        name, take, _ = everyone[chosen[data[0] % len(chosen)]]
        tally["inputs"] += 1
        if tally["inputs"] % REPORT == 0:
            print(json.dumps(tally, sort_keys=True), flush=True)
        try:
            take(data[1:])
        except CodecError:
            return
        tally[name] += 1

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
