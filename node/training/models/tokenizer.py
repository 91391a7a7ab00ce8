"""Tokenizers: bytes, or a Hugging Face `tokenizers` JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.swarm.identity.errors import HintedError, NotInstalled
from thinwire.swarm.identity.regular_file import TOKENIZER, content_of


class DataError(HintedError):
    """The requested data or tokenizer cannot be used."""

    exit_code: ClassVar[int] = 2


class Tokenizer(Protocol):
    """Converts text to token ids below `vocab` and back."""

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        ...

    @property
    def identity(self) -> str:
        """Identifier of the tokenizer and its content.

        It prevents the use of token files of another tokenizer.
        """
        ...

    @property
    def separator(self) -> NDArray[np.uint32]:
        """Token ids between two documents."""
        ...

    def encode(self, text: bytes) -> NDArray[np.uint32]:
        """Return the token ids of UTF-8 text; invalid bytes become the replacement character, or stay (bytes)."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; a sequence cut off within a character ends in a replacement character."""
        ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """Tokenizer with one token per byte: needs no training or file, and represents any text."""

    vocab: int = 256
    identity: str = "bytes"

    @property
    def separator(self) -> NDArray[np.uint32]:
        return np.frombuffer(b"\n\n", np.uint8).astype(np.uint32)

    def encode(self, text: bytes) -> NDArray[np.uint32]:
        return np.frombuffer(text, np.uint8).astype(np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")


class JsonTokenizer:
    """Tokenizer in the JSON format of the `tokenizers` library."""

    _ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

    def __init__(self, content: bytes, engine: Any) -> None:
        self._engine = engine
        self.vocab = int(engine.get_vocab_size(with_added_tokens=True))
        self.identity = "json-" + blake3.blake3(content).hexdigest()
        ends = [engine.token_to_id(end) for end in self._ENDS]
        found = [end for end in ends if end is not None][:1]
        self.separator = np.array(found, np.uint32) if found else self.encode(b"\n\n")

    def encode(self, text: bytes) -> NDArray[np.uint32]:
        ids = self._engine.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
        return np.array(ids, np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._engine.decode(list(tokens), skip_special_tokens=False))


def byte_tokenizer_file() -> bytes:
    """Return the byte tokenizer as a file of the `tokenizers` library, so that other programs can decode.

    Token i is byte i. The library writes bytes as the letters of GPT-2's table: printable bytes stand for themselves, the
    others follow from 256 on.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = dict(zip(shown, map(chr, shown), strict=True)) | {byte: chr(256 + n) for n, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    file: dict[str, object] = {
        "version": "1.0",
        **rest,
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": model,
    }
    return json.dumps(file, indent=1).encode() + b"\n"


def tokenizer_file(name: str, directory: Path) -> Path:
    """Return the path of a tokenizer's JSON file.

    In a folder, as transformers writes it, that is tokenizer.json.
    """
    path = directory / name
    return path / "tokenizer.json" if path.is_dir() else path


def load_tokenizer(name: str, directory: Path, content_hash: str = "") -> Tokenizer:
    """Return the tokenizer of a manifest: "bytes", or that of a JSON file or a folder in `directory`.

    `content_hash`, if not empty, is the file's blake3 in hexadecimal. Raises DataError.
    """
    if name == "bytes":
        return Bytes()
    path = tokenizer_file(name, directory)
    try:
        content = content_of(path, TOKENIZER)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"tokenizer {path}: {reason}", "put the run's tokenizer file there") from None
    if content_hash and (found := blake3.blake3(content).hexdigest()) != content_hash:
        raise DataError(
            f"tokenizer {path} is not this run's tokenizer (its hash is {found[:8]}…, not {content_hash[:8]}…)",
            "get the file from the run's author",
        )
    try:
        from tokenizers import Tokenizer as Engine
    except ImportError:
        raise NotInstalled("a JSON tokenizer needs the package tokenizers", "pip install 'thinwire[hf]'") from None
    try:
        engine = Engine.from_str(content.decode())
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"tokenizer {path}: {error}", "the file was not written by the tokenizers library") from None
    return JsonTokenizer(content, engine)
