"""Training data as arrays of token ids: from token files, or from text.

Text is tokenized once, into a cache file that is named by its content and mapped into memory.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.node.training.models.tokenizer import DataError, Tokenizer
from thinwire.node.training.text_source import Text, files_of, source_of, text_of_data_set, text_of_files, unreadable

FIRST_LINE, NEXT_LINE = 1.0, 5.0
"""Seconds until the first line of progress, and between two of them."""

ABANDONED_SECONDS = 3600.0
"""Seconds after the last write to an unfinished token file, after which it is removed."""

_CHECKED_IDS = 1 << 20  # token ids at the beginning of a file that are compared with the size of the vocabulary
_HEADER = 1024  # bytes of the header of token shards: 256 int32 words (llm.c and its descendants)
_SHARDS = {
    (20_240_520).to_bytes(4, "little"): "uint16",
    (20_240_801).to_bytes(4, "little"): "uint32",
}  # by magic number


class NoRoomError(DataError):
    """The disk has no room for token files."""

    exit_code: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids below `vocab`: one array per part, most often mapped from disk.

    `identity` is a hash of all data, or of names and sizes for token files, which may be too large to read.
    """

    parts: tuple[NDArray[Any], ...]
    vocab: int
    identity: str

    @property
    def tokens(self) -> int:
        """Number of token ids in all parts."""
        return sum(part.size for part in self.parts)


class Progress:
    """Lines about text that is being tokenized, if it takes more than a second; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float], say: Callable[[str], object]) -> None:
        self._clock, self._say = clock, say
        self._began = self._last = clock()

    def made(self, read: int, size: int, tokens: int) -> None:
        """Count text so far: `read` of `size` bytes (0: unknown), which gave `tokens`."""
        now = self._clock()
        if now - self._began < FIRST_LINE or (self._last > self._began and now - self._last < NEXT_LINE):
            return
        self._last = now
        done = f"{read / 1e6:.1f}" + (f" of {size / 1e6:.1f} MB ({100 * read / size:.0f} %)" if size else " MB")
        self._say(f"tokenizing the data: {done}, {tokens} tokens in {now - self._began:.0f} s")


def open_corpus(data: str | Path | None, tokenizer: Tokenizer, cache: Path, progress: Progress | None = None) -> Corpus:
    """Return the corpus of a source, see `source_of`.

    Accepts txt, md and py (one document each), jsonl (one document per line, its field "text") and bin (uint16 token
    ids, or uint32 with the field "uint32", with or without the header of llm.c). Files of a folder are in order of their
    paths. `cache` is a directory for token files, created if missing. Raises DataError.
    """
    source = source_of(data)
    if source.dataset:
        text = text_of_data_set(source, tokenizer)
    else:
        files = files_of(source)
        if any(file.suffix == ".bin" for file in files):
            if not all(file.suffix == ".bin" for file in files):
                raise DataError(f"{data} contains both .bin token files and text", "use only one kind")
            return _token_files(files, tokenizer, source.field or "uint16")
        text = text_of_files(files, source, tokenizer)
    try:
        identity = text.identity()
        dtype = np.dtype(
            np.uint8 if tokenizer.vocab <= 1 << 8 else np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32
        )
        target = cache / f"tokens-{identity[:32]}.u{8 * dtype.itemsize}"
        if not target.exists():
            _tokenize(text, tokenizer, dtype, target, progress)
        if target.stat().st_size == 0:
            raise DataError(f"{text.name}: contains no text", "give a file or a folder with text")
        return Corpus((np.memmap(target, dtype, mode="r"),), tokenizer.vocab, identity)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoomError(
                f"{cache}: {error.strerror}", "token files are stored there: free some space, or choose another --home"
            ) from None
        raise unreadable(Path(error.filename or text.name), error) from None


def _remove_abandoned(folder: Path, now: float) -> None:
    """Remove unfinished files of processes that were killed: nothing has been written to them for long."""
    for file in folder.glob("*.tmp"):
        with suppress(FileNotFoundError):  # another process may remove it, too
            if file.stat().st_mtime < now - ABANDONED_SECONDS:
                file.unlink()


def _tokenize(text: Text, tokenizer: Tokenizer, dtype: np.dtype[Any], target: Path, progress: Progress | None) -> None:
    """Write the token file under another name and rename it.

    So other processes only ever see a complete file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=target.name, suffix=".tmp", dir=target.parent)
    _remove_abandoned(target.parent, os.fstat(handle).st_mtime)
    try:
        with os.fdopen(handle, "wb") as stream:
            separator = tokenizer.separator.astype(dtype).tobytes()
            read = tokens = 0
            for document in text.documents():
                written = 0
                for piece in document:
                    written += stream.write(tokenizer.encode(piece).astype(dtype).tobytes())
                    read += len(piece)
                    if progress is not None:
                        progress.made(read, text.size, (tokens + written) // dtype.itemsize)
                tokens += written
                if written:
                    stream.write(separator)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _token_files(files: list[Path], tokenizer: Tokenizer, kind_given: str) -> Corpus:
    """Return the token ids of files of one type: "uint16" or "uint32", unless they have a header."""
    if kind_given not in ("uint16", "uint32"):
        raise DataError(f"{kind_given!r} is no type of token ids", "write FILE.bin#uint16 or FILE.bin#uint32")
    digest = blake3.blake3(b"thinwire/token files/1\0" + tokenizer.identity.encode() + b"\0")
    parts: list[NDArray[Any]] = []
    for file in files:
        try:
            size = file.stat().st_size
            with file.open("rb") as stream:
                kind = _SHARDS.get(stream.read(4)) if size >= _HEADER else None
            if size == (_HEADER if kind else 0):
                continue
            dtype = np.dtype(kind or kind_given).newbyteorder("<")
            if size % dtype.itemsize:
                raise DataError(f"{file}: {size} bytes are not whole {dtype.name} token ids", "is it a token file?")
            part: NDArray[Any] = np.memmap(file, dtype, mode="r", offset=_HEADER if kind else 0)
        except OSError as error:
            raise unreadable(file, error) from None
        # The first ids reveal a wrong tokenizer; a later stray id is found when its batch is drawn.
        if part.size and int(part[:_CHECKED_IDS].max()) >= tokenizer.vocab:
            raise DataError(
                f"{file} has token ids up to {int(part[:_CHECKED_IDS].max())}, the tokenizer knows {tokenizer.vocab}",
                "set data.tokenizer to the tokenizer the file was made with",
            )
        digest.update(
            f"{file.name} {size}{'' if dtype.itemsize == 2 else ' uint32'}\n".encode("utf-8", "surrogateescape")
        )
        parts.append(part)
    if not sum(part.size for part in parts):
        raise DataError(f"{files[0].parent}: the token files are empty", "is it the right folder?")
    return Corpus(tuple(parts), tokenizer.vocab, digest.hexdigest())
