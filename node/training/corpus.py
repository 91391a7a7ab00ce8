"""Training text as arrays of token ids.

It comes from files, folders, token files, or the standard library's source.

Text is tokenized once, into a cache file that is named by its content and mapped into memory.
"""

from __future__ import annotations

import errno
import json
import os
import sysconfig
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.node.training.tokenizer import DataError, Tokenizer

STANDARD_LIBRARY_LIMIT = 30 << 20
"""Most bytes of the standard library's source to use."""

DEFAULT_DATA = (
    "no data is named, so training uses the source of Python's standard library; --data names a file or a folder"
)
"""Message to the owner of such a peer."""

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".bin")

_PIECE = 1 << 20  # bytes of text given to a tokenizer at once
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_SHARD_MAGIC = 20_240_520  # magic number of token shards with a header of 256 int32 words (llm.c and its descendants)


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


def open_corpus(path: Path | None, tokenizer: Tokenizer, cache: Path) -> Corpus:
    """Return the corpus at `path` (a file or a folder), or the standard library's source if it is None.

    Accepts txt, md and py (one document each), jsonl (one document per line, its field "text") and bin (uint16 token
    ids, with or without the header of llm.c). `cache` is a directory for token files, created if missing. Raises
    DataError.
    """
    files = _standard_library() if path is None else _files(path)
    if any(file.suffix == ".bin" for file in files):
        if not all(file.suffix == ".bin" for file in files):
            raise DataError(f"{path} contains both .bin token files and text", "use only one kind")
        return _token_files(files, tokenizer)
    root = files[0].parent if path is None or path.is_file() else path
    try:
        identity = _identity(files, root, tokenizer)
        dtype = np.dtype(
            np.uint8 if tokenizer.vocab <= 1 << 8 else np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32
        )
        target = cache / f"tokens-{identity[:32]}.u{8 * dtype.itemsize}"
        if not target.exists():
            _tokenize(files, tokenizer, dtype, target)
        if target.stat().st_size == 0:
            raise DataError(f"{path or root}: contains no text", "give a file or a folder with text")
        return Corpus((np.memmap(target, dtype, mode="r"),), tokenizer.vocab, identity)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoomError(
                f"{cache}: {error.strerror}", "token files are stored there: free some space, or choose another --home"
            ) from None
        raise _unreadable(Path(error.filename or root), error) from None


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    room = STANDARD_LIBRARY_LIMIT
    for file in _walk(root, _NOT_SOURCE):
        if file.suffix == ".py":
            room -= file.stat().st_size
            if room < 0:
                break
            files.append(file)
    if not files:
        raise DataError(f"no source of the standard library in {root}", "give a file or a folder of text instead")
    return files


def _files(path: Path) -> list[Path]:
    accepted = "give a file or a folder of " + ", ".join(suffix[1:] for suffix in SUFFIXES)
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: cannot read {path.suffix or 'a file without a suffix'}", accepted)
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder", accepted)
    files = [file for file in _walk(path) if file.suffix.lower() in SUFFIXES]
    if not files:
        raise DataError(f"{path}: no data in this folder", accepted)
    return files


def _walk(root: Path, without: Collection[str] = ()) -> Iterator[Path]:
    """Yield the files under root, in the same order everywhere.

    Skips hidden folders and files, links to folders, and folders with a name in `without`.
    """
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in without)
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"{file}: {error.strerror or error}", "check the file's permissions")


def _identity(files: list[Path], root: Path, tokenizer: Tokenizer) -> str:
    digest = blake3.blake3(b"thinwire/corpus/1\0" + tokenizer.identity.encode() + b"\0")
    for file in files:
        content = blake3.blake3()
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                content.update(piece)
        # The suffix decides how a file is read; the location of the folder does not matter.
        digest.update(content.digest() + file.relative_to(root).as_posix().encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def _tokenize(files: list[Path], tokenizer: Tokenizer, dtype: np.dtype[Any], target: Path) -> None:
    """Write the token file under another name and rename it.

    So other processes only ever see a complete file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=target.name, suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            separator = tokenizer.separator.astype(dtype).tobytes()
            for file in files:
                for document in _documents(file):
                    written = 0
                    for piece in document:
                        written += stream.write(tokenizer.encode(piece).astype(dtype).tobytes())
                    if written:
                        stream.write(separator)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _documents(file: Path) -> Iterator[Iterator[bytes]]:
    """Yield the documents of a file, each in pieces."""
    if file.suffix.lower() != ".jsonl":
        yield _pieces(file)
        return
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield iter([_text(line, file, number)])


def _pieces(file: Path) -> Iterator[bytes]:
    """Yield a file's bytes in pieces that end at a line end, unless lines are extremely long."""
    rest = b""
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            whole, newline, rest = (rest + piece).rpartition(b"\n")
            if newline:
                yield whole + newline
            elif len(rest) >= 8 * _PIECE:
                yield rest
                rest = b""
    if rest:
        yield rest


def _text(line: bytes, file: Path, number: int) -> bytes:
    try:
        text = json.loads(line.decode("utf-8", "replace"))["text"]
        if isinstance(text, str):
            return text.encode("utf-8", "replace")
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise DataError(f'{file}, line {number}: not a JSON object with a string "text"', "correct or remove the line")


def _token_files(files: list[Path], tokenizer: Tokenizer) -> Corpus:
    digest = blake3.blake3(b"thinwire/token files/1\0" + tokenizer.identity.encode() + b"\0")
    parts: list[NDArray[Any]] = []
    for file in files:
        try:
            size = file.stat().st_size
            if size % 2:
                raise DataError(f"{file}: {size} bytes are not whole uint16 token ids", "is it a token file?")
            if size == 0:
                continue
            part: NDArray[Any] = np.memmap(file, np.dtype("<u2"), mode="r")
        except OSError as error:
            raise _unreadable(file, error) from None
        if size >= 1024 and part[:2].tobytes() == _SHARD_MAGIC.to_bytes(4, "little"):
            part = part[512:]
        # The first million ids reveal a wrong tokenizer; a later stray id is found when its batch is drawn.
        if part.size and int(part[:_PIECE].max()) >= tokenizer.vocab:
            raise DataError(
                f"{file} has token ids up to {int(part[:_PIECE].max())}, the tokenizer knows {tokenizer.vocab}",
                "set data.tokenizer to the tokenizer the file was made with",
            )
        digest.update(f"{file.name} {size}\n".encode("utf-8", "surrogateescape"))
        parts.append(part)
    if not sum(part.size for part in parts):
        raise DataError(f"{files[0].parent}: the token files are empty", "is it the right folder?")
    return Corpus(tuple(parts), tokenizer.vocab, digest.hexdigest())
