"""Read a manifest from TOML, and sign the file so that peers can check who wrote it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import msgspec
from thinwire.swarm.identity.identity import SIGNATURE_BYTES, Identity, verify
from thinwire.swarm.manifest.manifest import Manifest, ManifestError, ManifestMismatch
from thinwire.swarm.manifest.renamed_keys import KEYS, VALUES
from thinwire.swarm.manifest.type_words import wanted
from thinwire.swarm.manifest.validation import contradictions, nearest
from thinwire.swarm.method_specs.base import Defaults, ManifestTable, MethodSpec
from thinwire.swarm.method_specs.registry import METHODS

MAX_TOML = 32_768
"""Largest manifest in bytes: a Welcome carries no more."""

MAX_DOTS = 256
"""Most dots in a line of a manifest: tomllib takes time in the square of the parts of a key."""

MUON: Mapping[str, object] = {"lr": 0.02}
"""Defaults of [inner] with the optimizer "muon": the values of MuLoCo's paper."""

ONLY_MUON = ("adam_lr", "momentum")
"""Keys of [inner] that only apply to the optimizer "muon"."""

SUITS = "remove the key: every method has a suitable default"
"""Hint for a malformed name of a codec."""

_DOMAIN = "manifest"

_fields_of = cache(msgspec.structs.fields)
"""Fields of a table; to find them takes a millisecond, and a thousand simulated peers need them."""


def parse(toml: str | bytes, name: str = "run.toml") -> Manifest:
    """Read a manifest. `name` is the file's name, for messages. Raises ManifestError."""
    try:
        text = toml.decode() if isinstance(toml, bytes) else toml
        if len(text.encode()) > MAX_TOML:
            raise ManifestError(f"{name}: larger than {MAX_TOML} bytes", "a manifest contains settings only")
        if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
            raise ManifestError(f"{name}: a line with more than {MAX_DOTS} dots", "write each key on a separate line")
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{name}: not TOML: {error}", "see https://toml.io for the format") from None
    tables = {field.name: field.type for field in _fields_of(Manifest)}
    values: dict[str, Any] = {}
    for key, table in document.items():
        if key not in tables:
            raise ManifestError(f"{name}: unknown table [{key}]", nearest(key, list(tables), "tables"))
        if not isinstance(table, dict):
            raise ManifestError(f"{name}: {key} is not a table", f"write [{key}] on a separate line")
        kind, given = (_method(table, name), _without_method(table)) if key == "outer" else (tables[key], table)
        values[key] = kind(**_fields(kind, given, name, key))
    manifest = _with_defaults(Manifest(**values), document)
    for key in ONLY_MUON if manifest.inner.optimizer != "muon" else ():
        if key in document.get("inner", {}):
            raise ManifestError(f"{name}: inner.{key} only applies to the optimizer 'muon'", "remove the key")
    for message, hint in contradictions(manifest):
        raise ManifestError(f"{name}: {message}", hint)
    return manifest


def _method(table: dict[str, Any], name: str) -> type[MethodSpec]:
    """Return the method that a table [outer] names."""
    method = table.get("method", "diloco")
    if not isinstance(method, str) or method not in METHODS:
        raise ManifestError(
            f"{name}: outer.method: there is no method {_shown(method)}",
            nearest(str(method) if isinstance(method, str) else "", list(METHODS), "methods"),
        )
    return METHODS[method]


def _without_method(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "method"}


def _with_defaults(manifest: Manifest, document: dict[str, Any]) -> Manifest:
    """Return the manifest with the defaults of its method for keys that the file does not have.

    `defaults` of the method come first: they may set the codec, on which `adjusted` depends.
    """
    manifest = _filled(manifest, manifest.outer.defaults, document)
    manifest = _filled(manifest, manifest.outer.adjusted(manifest.sparse, manifest.pipeline.stages), document)
    return _filled(manifest, {"inner": MUON} if manifest.inner.optimizer == "muon" else {}, document)


def _filled(manifest: Manifest, defaults: Defaults, document: dict[str, Any]) -> Manifest:
    for section, usual in defaults.items():
        new = {key: value for key, value in usual.items() if key not in document.get(section, {})}
        if new:
            table = msgspec.structs.replace(getattr(manifest, section), **new)
            manifest = msgspec.structs.replace(manifest, **{section: table})
    return manifest


def _fields(kind: type[ManifestTable], table: dict[str, Any], name: str, section: str) -> dict[str, Any]:
    fields = {field.name: field for field in _fields_of(kind)}
    values = {}
    for key, value in table.items():
        place = f"{name}: {section}.{key}"
        if key not in fields:
            raise ManifestError(*_unknown(place, section, key, list(fields)))
        if isinstance(value, str) and (new := VALUES.get((section, key, value))) is not None:
            raise ManifestError(f"{place}: {value!r} is now called {new!r}", f"write {key} = {new!r}")
        field = fields[key]
        try:
            values[key] = msgspec.convert(value, field.type)
        except msgspec.ValidationError:
            choices = [choice for choice in get_args(field.type) if isinstance(choice, str)]
            usual = SUITS if key == "codec" else f"the default is {msgspec.json.encode(field.default).decode()}"
            hint = nearest(value if isinstance(value, str) else "", choices, "choices") if choices else usual
            raise ManifestError(f"{place}: {_shown(value)} is not {wanted(field.type)}", hint) from None
    return values


def _shown(value: object) -> str:
    """Return a value of a manifest as text for a message, cut after 200 characters."""
    try:
        text = repr(value) if not isinstance(value, bool) else str(value).lower()
    except ValueError:  # Python writes no integers of more than 4,300 digits, and TOML has hexadecimal ones.
        return "this number"
    return text if len(text) <= 200 else text[:200] + "…"


def _unknown(place: str, section: str, key: str, known: list[str]) -> tuple[str, str]:
    """Return message and hint for a key that a table does not have."""
    new = KEYS.get(section, {}).get(key)
    if new is not None:
        return f"{place} is now called {section}.{new}", f"write {new} instead of {key}"
    others = [] if section != "outer" else [name for name, kind in METHODS.items() if key in kind.__struct_fields__]
    if others:
        return f"{place} does not apply to this method", f"remove the key; it applies to {', '.join(others)}"
    return f"{place}: unknown key", nearest(key, known, f"keys of [{section}]")


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest as it travels: the file's bytes, its author's Ed25519 public key and signature."""

    toml: bytes
    author: bytes
    signature: bytes

    def verify(self, run_id: bytes | None = None) -> Manifest:
        """Return the manifest.

        Raises ManifestMismatch if the signature is not valid, it cannot be read, or its run id is not `run_id` (if given).
        """
        fits = len(self.toml) <= MAX_TOML and len(self.signature) == SIGNATURE_BYTES
        if not fits or not verify(self.author, _DOMAIN, self.signature, self.toml):
            raise ManifestMismatch("the manifest is not signed by its author", "ask for a new invite")
        try:
            manifest = parse(self.toml, "the swarm's manifest")
        except ManifestError as error:
            raise ManifestMismatch(str(error), "the swarm may run another version of thinwire") from None
        if run_id is not None and manifest.run_id(self.author) != run_id:
            raise ManifestMismatch(
                f"the manifest belongs to run {manifest.run_id(self.author)[:4].hex()}, not {run_id[:4].hex()}",
                "ask for a new invite",
            )
        return manifest


def sign(toml: bytes, identity: Identity) -> SignedManifest:
    """Publish a manifest as its author. Raises ManifestError when it is not valid."""
    parse(toml)
    return SignedManifest(toml, identity.public_key, identity.sign(_DOMAIN, toml))
