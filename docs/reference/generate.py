"""Generate the reference pages of this folder from the code: `python docs/reference/generate.py`.

The texts are the docstrings of the tables, settings and messages, so a page cannot differ from the code. A test compares
the pages with what this script would write.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from frame_page import frames
from page_text import NOTE, table
from thinwire.collectives.costs.plan_outcome import Comparison
from thinwire.node.cli.main import EXIT_CODES
from thinwire.node.peer.status import FragmentStatus, LinkStatus, PeerStatus, Stall, StateTransfer, Status
from thinwire.node.runtime.settings import SETTINGS
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages import registry, wire_form
from thinwire.swarm.method_specs.registry import METHODS

FOLDER = Path(__file__).parent
GOLDEN = FOLDER.parents[1] / "tests" / "golden" / "help.txt"
README = FOLDER.parents[1] / "README.md"
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
    return table(("key", "value", "default", "meaning"), rows)


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
                f"`{other}.{key} = {_value(value)}`"
                for other, keys in spec.defaults.items()
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
    return "\n".join([NOTE, "# node.toml\n", head, table(("key", "environment", "meaning"), rows)])


def status() -> str:
    """Return the page of the status of a daemon."""
    head = (
        "`thinwire status --json` prints one object: `running`, true or false, and `status`, a `Status`, or null if no daemon\n"
        "has run here; with `--peers` the list `peers` of `PeerStatus` instead of `status`. The exit code is 4 if none runs.\n"
        "Other versions may have more fields.\n"
    )
    parts = [NOTE, "# Status\n", head]
    for kind in (Status, PeerStatus, LinkStatus, FragmentStatus, Comparison, Stall, StateTransfer):
        rows = ((f"`{f.encode_name}`", type_text(f.type)) for f in msgspec.structs.fields(kind))
        form = "An array of these fields in this order, not an object.\n\n" if kind.__struct_config__.array_like else ""
        parts += [f"## {kind.__name__}\n", f"{form}{_plain(kind)}\n", table(("field", "value"), rows)]
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
            parts.append(table(("field", "value"), rows))
    return "\n".join(parts)


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
    codes = re.compile(r"(## Exit codes\n\n\| code \| meaning \|\n\|---\|---\|\n)(?:\|.*\n)*")
    return codes.sub(lambda found: found[1] + rows, README.read_text())


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
