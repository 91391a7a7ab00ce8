"""Generate the reference pages of this folder from the code: `python docs/reference/generate.py`.

The texts are the docstrings of the tables, settings and messages, so a page cannot differ from the code. A test compares
the pages with what this script would write.
"""

from __future__ import annotations

import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from thinwire.collectives.costs.plan_outcome import Comparison
from thinwire.collectives.transport.zeromq import link
from thinwire.collectives.transport.zeromq import record_crypto as crypto
from thinwire.node.cli.main import EXIT_CODES
from thinwire.node.peer.status import FragmentStatus, LinkStatus, PeerStatus, Stall, StateTransfer, Status
from thinwire.node.runtime.settings import SETTINGS
from thinwire.swarm.frame import HEADER_BYTES, Frame, encode
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages import registry, wire_form
from thinwire.swarm.method_specs.registry import METHODS

FOLDER = Path(__file__).parent
GOLDEN = FOLDER.parents[1] / "tests" / "golden" / "help.txt"
README = FOLDER.parents[1] / "README.md"
NOTE = "<!-- Written by docs/reference/generate.py; change the code instead. -->\n"
_ELSEWHERE = re.compile(r"see (\w+)\.( The other keys.*)?")
_KEYS = re.compile(r"^([a-z_0-9]+(?:, [a-z_0-9]+)*): ")


def described(kind: type) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the description of each key, by name.

    A description begins with the key, or keys, and a colon; its further lines are indented.
    """
    lines = (kind.__doc__ or "").splitlines()
    text: list[str] = []
    keys: dict[str, str] = {}
    names: tuple[str, ...] = ()
    for line in lines:
        bare = line[4:] if line.startswith("    ") else line
        if match := _KEYS.match(bare):
            names = tuple(match[1].split(", "))
            keys.update(dict.fromkeys(names, bare[match.end() :]))
        elif names and bare.startswith("    "):
            for name in names:
                keys[name] += f" {bare.strip()}"
        elif bare.strip() or not names:
            names = ()
            text.append(bare)
        else:
            names = ()
    return "\n".join(text).strip(), keys


def type_text(kind: Any) -> str:
    """Describe a type with its bounds, for a reader who need not know Python."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _bounded(type_text(parts[0]), [mark for mark in parts[1:] if isinstance(mark, msgspec.Meta)])
    if origin is typing.Literal:
        return ", ".join(f'"{value}"' for value in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("nothing" if part is type(None) else type_text(part) for part in parts)
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return f"list of {type_text(parts[0])}"
        return f"list of {len(parts)}: {', '.join(type_text(part) for part in parts)}"
    if origin is dict:
        return f"map from {type_text(parts[0])} to {type_text(parts[1])}"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"`{kind.__name__}`"
    return {int: "integer", float: "number", str: "text", bool: "true or false", bytes: "bytes"}.get(kind, str(kind))


def _bounded(text: str, marks: list[msgspec.Meta]) -> str:
    bounds = [
        f"{sign} {_number(value)}"
        for mark in marks
        for sign, value in ((">", mark.gt), ("≥", mark.ge), ("<", mark.lt), ("≤", mark.le))
        if value is not None
    ]
    for mark in marks:
        low, high = mark.min_length, mark.max_length
        if low is not None and low == high:
            bounds.append(f"length {low}")
        elif high is not None:
            bounds.append(f"length ≤ {high}")
    return f"{text} ({', '.join(bounds)})" if bounds else text


def _number(value: float) -> str:
    exponent = int(value).bit_length() - 1
    for wanted, text in ((2**exponent, f"2^{exponent}"), (2 ** (exponent + 1) - 1, f"2^{exponent + 1} - 1")):
        if exponent >= 10 and value == wanted:
            return text
    return f"{value:g}"


def _value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple():
            return f"[{', '.join(_value(part) for part in value)}]"
        case float():
            return f"{value:.6g}"
        case _:
            return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def meaning(kind: type, name: str) -> str:
    """Return the description of a key: of the class, its bases, or the class that it refers to ("see DiLoCo.").

    Raises LookupError if there is none.
    """
    text = next(keys[name] for base in kind.__mro__ if name in (keys := described(base)[1]))
    if match := _ELSEWHERE.fullmatch(text):
        return meaning(next(spec for spec in METHODS.values() if spec.__name__ == match[1]), name)
    return text


def _keys(kind: type[msgspec.Struct]) -> str:
    rows = (
        (f"`{field.encode_name}`", type_text(field.type), f"`{_value(field.default)}`", meaning(kind, field.name))
        for field in msgspec.structs.fields(kind)
    )
    return _table(("key", "value", "default", "meaning"), rows)


def manifest() -> str:
    """Return the page of run.toml: all tables of a manifest, and [outer] for each method."""
    parts = [
        NOTE,
        "# run.toml\n",
        "The manifest of a run, equal for all peers. Every key has a default; an unknown key is an error. The hash of the\n"
        "parsed manifest is the run id, so a change of any value makes another run.\n",
    ]
    for field in msgspec.structs.fields(Manifest):
        if field.name != "outer":
            text, _ = described(field.type)
            parts += [f"## [{field.name}]\n", f"{_without_name(text)}\n", _keys(field.type)]
            continue
        parts += [
            "## [outer]\n",
            "`method` chooses the outer method, which decides what other keys there are.\n",
        ]
        for name, spec in METHODS.items():
            text = sys.modules[spec.__module__].__doc__ or ""
            parts += [f'### method = "{name}"\n', f"{text}\n"]
            if others := ", ".join(
                f"`{table}.{key} = {_value(value)}`"
                for table, keys in spec.defaults.items()
                for key, value in keys.items()
            ):
                parts.append(f"Defaults of other tables: {others}.\n")
            parts.append(_keys(spec))
    return "\n".join(parts)


def _without_name(text: str) -> str:
    """Remove "[table]: " from the beginning of a docstring, and make a sentence of the rest."""
    text = re.sub(r"^\[\w+\]( of the method \"[a-z0-9-]+\")?[:.] ?", "", text).strip()
    return text[:1].upper() + text[1:]


def settings() -> str:
    """Return the page of node.toml."""
    head = (
        "Settings of one machine. A value comes from the flag of the command, else from the environment, else from\n"
        "`node.toml`, else it is the default. `thinwire config show` prints each value and its source.\n"
    )
    rows = ((f"`{s.name}`", f"`{s.variable}`", s.help) for s in SETTINGS)
    return "\n".join([NOTE, "# node.toml\n", head, _table(("key", "environment", "meaning"), rows)])


def status() -> str:
    """Return the page of the status of a daemon."""
    parts = [NOTE, "# Status\n", "`thinwire status --json` prints one object.\n"]
    for kind in (Status, PeerStatus, LinkStatus, FragmentStatus, Comparison, Stall, StateTransfer):
        rows = ((f"`{f.encode_name}`", type_text(f.type)) for f in msgspec.structs.fields(kind))
        text = "\n".join(line.removeprefix("    ") for line in (kind.__doc__ or "").splitlines()).strip()
        parts += [f"## {kind.__name__}\n", f"{text}\n", _table(("field", "value"), rows)]
    return "\n".join(parts)


def _plain(kind: type) -> str:
    """Return the docstring of a type without its indentation."""
    return "\n".join(line.removeprefix("    ") for line in (kind.__doc__ or "").splitlines()).strip()


def messages() -> str:
    """Return the page of the wire protocol: all messages with their numbers, limits and fields."""
    parts = [
        NOTE,
        "# Messages\n",
        "The body of a message is a msgpack array of its fields in this order. [Frames](frames.md) describes the bytes\n"
        "around it. A peer drops a message with another number, length, type or value.\n",
    ]
    for number, kind in sorted(registry.TYPES.items()):
        text = _plain(kind)
        facts = f"Number {number}. Body ≤ {kind.limit} bytes" + (
            f", payload ≤ {kind.payload} bytes" if kind.payload else ""
        )
        facts += "; signed.\n" if kind.signed else "; not signed.\n"
        packed = wire_form.PACKED.get(kind)
        rows = ((f"`{f.name}`", type_text(f.type)) for f in msgspec.structs.fields(packed or kind))
        parts += [f"## {kind.__name__}\n", facts, f"{text}\n"]
        if packed is not None:
            parts.append(_plain(packed) + "\n")
        if msgspec.structs.fields(kind):
            parts.append(_table(("field", "value"), rows))
    return "\n".join(parts)


def _layout(pieces: Sequence[tuple[str, bytes, str]], whole: bytes) -> str:
    """Return a table of consecutive pieces with their offsets. Raises ValueError if they are not `whole`."""
    if (found := b"".join(piece for _, piece, _ in pieces)) != whole:
        raise ValueError(f"the code makes {whole.hex()}, and the page {found.hex()}")
    rows, at = [], 0
    for name, piece, text in pieces:
        shown = piece.hex() if len(piece) <= 32 else f"{piece[:8].hex()}…{piece[-8:].hex()}"
        rows.append((str(at), str(len(piece)), name, f"`{shown}`", text))
        at += len(piece)
    return _table(("offset", "bytes", "part", "in the example", "meaning"), iter(rows))


def _header(frame: bytes, kind: type[registry.Message]) -> list[tuple[str, bytes, str]]:
    """Return the pieces of the header of a frame."""
    body, payload = f"1 to {kind.limit}" if kind.limit else "", f"at most {kind.payload}" if kind.payload else "0"
    return [
        ("magic", frame[:4], "the same in every frame"),
        ("version", frame[4:5], f"protocol version, {registry.VERSION}; another one ends the link"),
        ("type", frame[5:6], f"number of the message, {kind.__name__} here"),
        ("flags", frame[6:8], "0; bit 0: a receiver that does not know the type may ignore the frame"),
        ("body length", frame[8:12], f"{body} for this type, without the signature"),
        ("payload length", frame[12:16], f"{payload} for this type"),
    ]


def _text(text: str) -> str:
    """Return a paragraph of lines of a page's width."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False) + "\n"


RUN, SECRET = bytes([0x11]) * 32, bytes(range(32))
"""Run id in the examples of frames, and the secret of their link, which is the seed of their key, too."""


def frames() -> str:
    """Return the page of the layout of a frame, byte by byte; its examples are made by the code."""
    parts = [
        NOTE,
        "# Frames\n",
        _text(
            """Byte by byte: what two peers send each other. Numbers are unsigned and big endian; the limits and the
            examples come from the code. A frame is a header, the body of one [message](messages.md), a signature for signed
            types, and a payload for some types. A receiver checks each length against the limit of the type before it
            allocates memory."""
        ),
        *_signed_frame(),
        *_sealed_frame(),
        "## Keys\n",
        _text(
            f"""The acceptor of a link draws its secret (32 bytes) and sends it inside CURVE, in `Welcome`; the examples have
            00 01 … 1f. HKDF-SHA256 (RFC 5869) without salt makes of it the session (16 bytes, info "thinwire bulk session
            1") and, for each stream, 64 bytes (info "thinwire bulk stream 1" and the number of the stream as one byte): the
            key from dialler to acceptor, and the key back. Each seal is AES-256-GCM (NIST SP 800-38D); its nonce is the
            number of earlier seals with the key, in 12 bytes, and its associated data are the two lengths of the record (8
            bytes). The acceptor sends no proof, so its first nonce is 0. A key makes {crypto.MAX_SEALS} seals at most."""
        ),
    ]
    return "\n".join(parts)


def _signed_frame() -> list[str]:
    """Return the section about a frame with a signature."""
    frame = encode(Frame(registry.Ping(7, 3, ())), Identity.generate(SECRET), RUN)
    end = HEADER_BYTES + int.from_bytes(frame[8:12], "big")
    return [
        "## Signed frame\n",
        _text(
            f"A `Ping` of the peer whose key is made from the seed 00 01 … 1f, in the run whose id is 32 times {RUN[:1].hex()}:"
        ),
        _layout(
            [
                *_header(frame, registry.Ping),
                ("body", frame[HEADER_BYTES:end], "msgpack array of the fields in order; only the shortest encoding"),
                ("signature", frame[end:], "Ed25519 (RFC 8032) of the sender"),
            ],
            frame,
        ),
        _text(
            r"""The signature is over `thinwire/message/1\0` and four parts, each after its length in 8 bytes: the run id (32
            bytes), the type number (2 bytes), the body, and the BLAKE3 hash of the payload (32 bytes), also of an empty
            one. A `Ready` has the signature of its [Announced](messages.md#announced): two of these are short evidence."""
        ),
        _text(
            f"""A signed frame travels on the control connection, or on the express stream if rounds wait for it. The control
            connection is ZeroMQ (ZMTP 3.1) with CURVE: each frame is one message, whose second part is the payload, if there
            is one. A message of no bytes ends the handshake; the byte {link.SWITCH.hex()} announces that messages of
            rounds now use the express stream; a message that begins with the byte {link.BYE.hex()} has the reason why the link
            ends."""
        ),
    ]


def _sealed_frame() -> list[str]:
    """Return the section about a frame without a signature and its seal on a stream."""
    payload = b"sixteen bytes..."
    head = encode(Frame(registry.Chunk(3, 0, 1, 5), payload), None, RUN)
    sealer, _ = crypto.stream_keys(SECRET, 0)
    opening = crypto.OPENING.pack(crypto.session_of(SECRET), 0)
    proof = sealer.prove(opening)
    record = bytearray(crypto.record_size(len(head), len(payload)))
    sealer.seal(head, payload, memoryview(record))
    sealed, first = bytes(record), crypto.LENGTHS.size
    middle = first + len(head) + crypto.TAG
    heads = f"{HEADER_BYTES + 1} to {crypto.MAX_BULK[0]}, on the express stream to {crypto.MAX_EXPRESS[0]}"
    numbered = f"number of the stream, {crypto.EXPRESS} for the express stream; each once in a session"
    return [
        "## Frame without signature, sealed for a stream\n",
        _text(
            f"""A `Chunk` with a payload of {len(payload)} bytes. Bulk data is not signed: the sealed stream shows who sends,
            and a signed message before has the hash of the payload. First the frame itself:"""
        ),
        _layout(
            [
                *_header(head, registry.Chunk),
                ("body", head[HEADER_BYTES:], "as above"),
                ("payload", payload, "encoded values; not msgpack"),
            ],
            head + payload,
        ),
        "A stream is a separate TCP connection. The dialler begins it with\n",
        _layout(
            [
                ("session", opening[:16], "names the link: from its secret"),
                ("stream", opening[16:], numbered),
                ("proof", proof, "tag of no bytes, with the 17 bytes before as associated data; nonce 0"),
            ],
            opening + proof,
        ),
        "Records follow, in both directions. The record of the frame above is\n",
        _layout(
            [
                ("head length", sealed[:4], heads),
                ("payload length", sealed[4:first], f"at most {crypto.MAX_BULK[1]}, on the express stream 0"),
                ("head", sealed[first : middle - crypto.TAG], "sealed: header, body, and signature of a signed type"),
                ("tag", sealed[middle - crypto.TAG : middle], "of the head; nonce 1"),
                ("payload", sealed[middle : -crypto.TAG], "sealed"),
                ("tag", sealed[-crypto.TAG :], "of the payload, also of an empty one; nonce 2"),
            ],
            sealed,
        ),
    ]


def commands() -> str:
    """Return the page of the commands: their frozen help."""
    parts = [NOTE, "# Commands\n"]
    for part in GOLDEN.read_text().split("$ thinwire")[1:]:
        line, _, text = part.partition("\n")
        name = f"thinwire{line.removesuffix(' --help')}"
        parts += [f"## {name}\n", f"```text\n{text.strip()}\n```\n"]
    return "\n".join(parts)


def readme() -> str:
    """Return the README with the exit codes of the code."""
    rows = "".join(f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES.items())
    table = re.compile(r"(## Exit codes\n\n\| code \| meaning \|\n\|---\|---\|\n)(?:\|.*\n)*")
    return table.sub(lambda found: found[1] + rows, README.read_text())


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "frames.md": frames,
    "messages.md": messages,
    "node-toml.md": settings,
    "run-toml.md": manifest,
    "status.md": status,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
    README.write_text(readme())
