"""From the name in a manifest to a codec: "fp32", "int8", "int8(block=128)"."""

from __future__ import annotations

import re
from collections.abc import Callable

from thinwire.compression.codec import Codec
from thinwire.compression.quantize import Fp32, Int8

CODECS: dict[str, tuple[Callable[..., Codec], tuple[str, ...]]] = {
    "fp32": (Fp32, ()),
    "int8": (Int8, ("block",)),
}
"""Name -> what makes it, and the names of its parameters (integers all)."""

_SPEC = re.compile(r"\s*([a-z0-9_]+)\s*(?:\((.*)\))?\s*")
_PAIR = re.compile(r"\s*([a-z_]+)\s*=\s*([0-9]{1,9})\s*")


class SpecError(ValueError):
    """A codec's name in a manifest that is not one; the message lists those there are."""


def parse(spec: str) -> Codec:
    """The codec of a spec; `parse(codec.spec) == codec`. Raises SpecError."""
    match = _SPEC.fullmatch(spec)
    if match is None or match[1] not in CODECS:
        raise SpecError(f"no codec {spec!r}; there are: {', '.join(_usage(name) for name in CODECS)}")
    make, known = CODECS[match[1]]
    values: dict[str, int] = {}
    for part in (match[2] or "").split(",") if (match[2] or "").strip() else ():
        pair = _PAIR.fullmatch(part)
        if pair is None or pair[1] not in known or pair[1] in values:
            raise SpecError(f"codec {spec!r}: cannot take {part.strip()!r}; it is written {_usage(match[1])}")
        values[pair[1]] = int(pair[2])
    try:
        return make(**values)
    except ValueError as error:
        raise SpecError(f"codec {spec!r}: {error}") from error


def _usage(name: str) -> str:
    known = CODECS[name][1]
    return f"{name}({', '.join(f'{key}=…' for key in known)})" if known else name
