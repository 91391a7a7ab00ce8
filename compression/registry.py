"""Registry of codecs by their names: "fp32", "int8(block=128)", "topk(k=64,chunk=4096)|2bit|rice".

A spec is a name with integer parameters, and the name of a stage after each `|`. Omitted parts take their defaults, and
`codec.spec` is the complete name. A new codec is one line in CODECS.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from thinwire.compression.activations.codecs import Rows, Tah
from thinwire.compression.activations.subspace import Subspace
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import CodecKind
from thinwire.compression.dense.blockint import Int3, Int4, Int8
from thinwire.compression.dense.e3m0 import E3M0
from thinwire.compression.dense.floats import Fp32, bf16, fp16
from thinwire.compression.powersgd import PowerSGD
from thinwire.compression.sparse.demo import Demo
from thinwire.compression.sparse.topk import INDICES, LEVELS, Sparse


class Named(Protocol):
    """Codec of any kind: of vectors, of tensors, of factors or of activations."""

    @property
    def spec(self) -> str:
        """Name in a manifest, with every parameter spelled out."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """Registry entry of a codec.

    make: constructor, called with parameters and stages as keywords; a ValueError from it means a mistake in the
    manifest. parameters: names of its integer parameters. stages: for each `|`, in order, a keyword and its allowed
    names. kind: "dense" is a `codec.Codec` of flat chunks; "tensor" needs the shapes; "factors" is two dependent dense
    averages (powersgd.py); "rows" is for activations.
    """

    make: Callable[..., Named]
    parameters: tuple[str, ...] = ()
    stages: tuple[tuple[str, tuple[str, ...]], ...] = ()
    kind: CodecKind = "dense"


_INTEGERS = ("block", "asymmetric", "stochastic")

CODECS: dict[str, Entry] = {
    "fp32": Entry(Fp32),
    "fp16": Entry(fp16),
    "bf16": Entry(bf16),
    "int8": Entry(Int8, _INTEGERS),
    "int4": Entry(Int4, _INTEGERS),
    "int3": Entry(Int3, _INTEGERS),
    "e3m0": Entry(E3M0, ("block",)),
    "topk": Entry(Sparse, ("k", "chunk"), (("values", tuple(LEVELS)), ("indices", tuple(INDICES))), "tensor"),
    "demo": Entry(Demo, ("k", "chunk"), (("values", tuple(LEVELS)), ("indices", tuple(INDICES))), "tensor"),
    "powersgd": Entry(PowerSGD, ("rank",), (), "factors"),
    "rows": Entry(Rows, ("bits",), (), "rows"),
    "tah": Entry(Tah, (), (), "rows"),
    "subspace": Entry(Subspace, ("k",), (), "rows"),
}

_STAGE = re.compile(r"\s*([a-z0-9_]+)\s*(?:\(([^()]*)\))?\s*")
_PAIR = re.compile(r"\s*([a-z_]+)\s*=\s*([0-9]{1,9})\s*")


class SpecError(ValueError):
    """Error for an unknown or invalid codec name; the message lists the valid ones."""


def parse(spec: str) -> Named:
    """Return the codec of a spec, of any kind; `parse(codec.spec) == codec`. Raises SpecError."""
    return _make(spec)[0]


def dense(spec: str) -> Codec:
    """Return the dense codec of a spec, one that can encode any flat chunk. Raises SpecError."""
    codec, entry = _make(spec)
    if entry.kind != "dense":
        usable = ", ".join(_usage(name) for name, other in CODECS.items() if other.kind == "dense")
        raise SpecError(f"codec {spec!r} is not for dense averages; those are: {usable}")
    return cast(Codec, codec)


def kind_of(spec: str) -> CodecKind:
    """Return the kind of the codec of a spec. Raises SpecError."""
    return _make(spec)[1].kind


def _make(spec: str) -> tuple[Named, Entry]:
    head, *rest = spec.split("|")
    match = _STAGE.fullmatch(head)
    if match is None or match[1] not in CODECS:
        raise SpecError(f"no codec {spec!r}; there are: {', '.join(_usage(name) for name in CODECS)}")
    entry = CODECS[match[1]]
    wrong = f"codec {spec!r}: cannot take {{!r}}; it is written {_usage(match[1])}"
    values: dict[str, int | str] = {}
    for part in (match[2] or "").split(",") if (match[2] or "").strip() else ():
        pair = _PAIR.fullmatch(part)
        if pair is None or pair[1] not in entry.parameters or pair[1] in values:
            raise SpecError(wrong.format(part.strip()))
        values[pair[1]] = int(pair[2])
    open_stages = list(entry.stages)
    for name in (part.strip() for part in rest):
        while open_stages and name not in open_stages[0][1]:
            open_stages.pop(0)
        if not open_stages:
            raise SpecError(wrong.format(name))
        values[open_stages.pop(0)[0]] = name
    try:
        return entry.make(**values), entry
    except ValueError as error:
        raise SpecError(f"codec {spec!r}: {error}") from error


def _usage(name: str) -> str:
    entry = CODECS[name]
    parameters = f"({','.join(f'{key}=…' for key in entry.parameters)})" if entry.parameters else ""
    return name + parameters + "".join("|" + " or ".join(names) for _, names in entry.stages)
