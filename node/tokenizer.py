"""Text to token ids and back: bytes, or a Hugging Face `tokenizers` JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.swarm.errors import HintedError


class DataError(HintedError):
    """The data or the tokenizer that was asked for cannot be used."""

    exit_code: ClassVar[int] = 2


class Tokenizer(Protocol):
    """Text as token ids below `vocab`."""

    @property
    def vocab(self) -> int:
        """How many token ids there are."""
        ...

    @property
    def identity(self) -> str:
        """Names the tokenizer and its content: token files made by another one are never mistaken for its own."""
        ...

    @property
    def separator(self) -> NDArray[np.uint32]:
        """Token ids between two documents."""
        ...

    def encode(self, text: bytes) -> NDArray[np.uint32]:
        """Token ids of text, which should be UTF-8; what is not becomes the replacement character, or stays (bytes)."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; a sequence cut off within a character ends in a replacement character."""
        ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """Each byte is a token: nothing to train or to ship, and no text it cannot say."""

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
    """A tokenizer in the JSON format of the `tokenizers` library."""

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


def load_tokenizer(name: str, directory: Path, content_hash: str = "") -> Tokenizer:
    """The tokenizer of a manifest: "bytes", or a JSON file looked for in `directory`.

    `content_hash`, where not empty, is the file's blake3 in hexadecimal. Raises DataError.
    """
    if name == "bytes":
        return Bytes()
    path = directory / name
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"tokenizer {path}: {reason}", "put the run's tokenizer file there") from None
    if content_hash and blake3.blake3(content).hexdigest() != content_hash:
        raise DataError(f"tokenizer {path} is not the one of this run", "get the file from the run's author")
    try:
        from tokenizers import Tokenizer as Engine
    except ImportError:
        raise DataError("a JSON tokenizer needs the package tokenizers", "pip install 'thinwire[hf]'") from None
    try:
        engine = Engine.from_str(content.decode())
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"tokenizer {path}: {error}", "it is not a file that the tokenizers library wrote") from None
    return JsonTokenizer(content, engine)
