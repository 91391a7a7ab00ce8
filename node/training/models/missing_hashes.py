"""Hashes of files that a manifest must have: all that are missing are named at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec
from thinwire.node.training.models.tokenizer import Tokenizer
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.manifest.manifest import Manifest

Made = TypeVar("Made")


class MissingHashError(HintedError):
    """A manifest without the hash of a file that its run needs.

    key: in [model]. value: the hash of the file here, in hexadecimal.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, key: str, value: str, source: Path | str) -> None:
        super().__init__(f"the run's manifest has no hash of {source}", f'add to [model]: {key} = "{value}"')
        self.key, self.value = key, value


def with_all_hashes(manifest: Manifest, tokenizer: Tokenizer, make: Callable[[Manifest], Made]) -> Made:
    """Return make(manifest). Raises HintedError that names all hashes that the manifest lacks.

    make: raises MissingHashError for the first of them.
    """
    missing: dict[str, str] = {}
    while True:
        known = msgspec.structs.replace(manifest.model, **missing)
        try:
            made = make(msgspec.structs.replace(manifest, model=known))
        except MissingHashError as error:
            first = error
            missing[error.key] = error.value
            continue
        if not missing:
            return made
        lines = "; ".join(f'{key} = "{value}"' for key, value in missing.items())
        if manifest.data.tokenizer != "bytes" and not manifest.data.tokenizer_hash:
            lines += f'; to [data]: tokenizer_hash = "{tokenizer.identity.removeprefix("json-")}"'
        raise HintedError(str(first), f"add to [model]: {lines}")
