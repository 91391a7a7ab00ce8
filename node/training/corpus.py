"""Training text as arrays of token ids.

It comes from files, folders, token files, data sets of Hugging Face, or the standard library's source.

Text is tokenized once, into a cache file that is named by its content and mapped into memory.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.node.runtime.disk import present
from thinwire.node.runtime.settings import HF
from thinwire.node.training.models.tokenizer import DataError, Tokenizer

STANDARD_LIBRARY_LIMIT = 30 << 20
"""Most bytes of the standard library's source to use."""

DEFAULT_DATA = (
    "no data is named, so training uses the source of Python's standard library; --data names a file or a folder"
)
"""Message to the owner of such a peer."""

FIELD = "text"
"""Key of the text in JSON lines and records."""

FIRST_LINE, NEXT_LINE = 1.0, 5.0
"""Seconds until the first line of progress, and between two of them."""

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".bin")

ABANDONED_SECONDS = 3600.0
"""Seconds after the last write to an unfinished token file, after which it is removed."""

_PIECE = 1 << 20  # bytes of text given to a tokenizer at once
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
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


@dataclass(frozen=True, slots=True)
class TextSource:
    """Origin of text: `path`, or the `dataset` of Hugging Face; the standard library if it has neither.

    field: key of the text in JSON lines and records, or the type of the token ids in .bin files; "": the usual one.
    """

    path: Path | None = None
    dataset: str = ""
    field: str = ""


def source_of(data: str | Path | None) -> TextSource:
    """Return the source of a setting: "PATH", "PATH#FIELD", "hf:NAME", "hf:NAME:CONFIGURATION#FIELD".

    Raises DataError for a name of nothing.
    """
    if data is None or isinstance(data, Path):
        return TextSource(data)
    name, _, field = data.rpartition("#")
    if not name or (not data.startswith(HF) and present(Path(data))):  # a name may have a "#"
        name, field = data, ""
    if name.startswith(HF) and not name.removeprefix(HF).partition(":")[0]:
        raise DataError(f"{data!r} names no data set", "name one: hf:NAME or hf:NAME:CONFIGURATION")
    return TextSource(None, name.removeprefix(HF), field) if name.startswith(HF) else TextSource(Path(name), "", field)


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
        text = _data_set(source, tokenizer)
    else:
        files = _standard_library() if source.path is None else _files(source.path)
        if any(file.suffix == ".bin" for file in files):
            if not all(file.suffix == ".bin" for file in files):
                raise DataError(f"{data} contains both .bin token files and text", "use only one kind")
            return _token_files(files, tokenizer, source.field or "uint16")
        text = _text_files(files, source, tokenizer)
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
        raise _unreadable(Path(error.filename or text.name), error) from None


@dataclass(frozen=True, slots=True)
class _Text:
    """Text to tokenize.

    name: for messages. identity: returns a hash of all of it. documents: returns them, each in pieces. size: its bytes (0:
    unknown).
    """

    name: str
    identity: Callable[[], str]
    documents: Callable[[], Iterator[Iterator[bytes]]]
    size: int = 0


def _text_files(files: list[Path], source: TextSource, tokenizer: Tokenizer) -> _Text:
    root = source.path if source.path is not None and source.path.is_dir() else files[0].parent
    field = source.field or FIELD

    def identity() -> str:
        return _identity(files, root, tokenizer, field)

    def documents() -> Iterator[Iterator[bytes]]:
        return (document for file in files for document in _documents(file, field))

    return _Text(str(source.path or root), identity, documents, sum(file.stat().st_size for file in files))


def _data_set(source: TextSource, tokenizer: Tokenizer) -> _Text:
    """Return the text of a data set's training part, which is read record by record. Raises DataError."""
    try:
        import datasets
    except ImportError:
        raise DataError("data of Hugging Face needs the package datasets", "pip install 'thinwire[datasets]'") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # It warns of each retry; the error names the reason.
    name, _, configuration = (
        (source.dataset, "", "") if present(Path(source.dataset)) else source.dataset.partition(":")
    )
    field, whole = source.field or FIELD, f"{HF}{source.dataset}"
    try:
        builder = datasets.load_dataset_builder(name, configuration or None)
        records = builder.as_streaming_dataset(split="train")
    except Exception as error:  # the library raises many kinds
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{whole}: {reason}", "give hf:NAME, hf:NAME:CONFIGURATION, or hf:FOLDER") from error

    def identity() -> str:
        description = f"{name}\n{configuration}\n{builder.hash}\n{field}\n{tokenizer.identity}"
        return blake3.blake3(b"thinwire/data set/1\0" + description.encode()).hexdigest()

    def documents() -> Iterator[Iterator[bytes]]:
        for number, record in enumerate(records, start=1):
            if not isinstance(text := record.get(field), str):
                known = ", ".join(map(str, record))
                raise DataError(f"{whole}, record {number}: no text {field!r}", f"name one as {whole}#KEY: {known}")
            yield iter([text.encode("utf-8", "replace")])

    return _Text(whole, identity, documents)


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
        why = "neither a file nor a folder" if path.exists() else "no such file or folder"
        raise DataError(f"{path}: {why}", accepted)
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


def _remove_abandoned(folder: Path, now: float) -> None:
    """Remove unfinished files of processes that were killed: nothing has been written to them for long."""
    for file in folder.glob("*.tmp"):
        with suppress(FileNotFoundError):  # another process may remove it, too
            if file.stat().st_mtime < now - ABANDONED_SECONDS:
                file.unlink()


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"{file}: {error.strerror or error}", "check the file's permissions")


def _identity(files: list[Path], root: Path, tokenizer: Tokenizer, field: str) -> str:
    other = "" if field == FIELD else f"\0{field}"
    digest = blake3.blake3(b"thinwire/corpus/1\0" + (tokenizer.identity + other).encode() + b"\0")
    for file in files:
        content = blake3.blake3()
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                content.update(piece)
        # The suffix decides how a file is read; the location of the folder does not matter.
        digest.update(content.digest() + file.relative_to(root).as_posix().encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def _tokenize(text: _Text, tokenizer: Tokenizer, dtype: np.dtype[Any], target: Path, progress: Progress | None) -> None:
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


def _documents(file: Path, field: str) -> Iterator[Iterator[bytes]]:
    """Yield the documents of a file, each in pieces."""
    if file.suffix.lower() != ".jsonl":
        yield _pieces(file)
        return
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield iter([_text(line, file, number, field)])


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


def _text(line: bytes, file: Path, number: int, field: str) -> bytes:
    try:
        text = json.loads(line.decode("utf-8", "replace"))[field]
        if isinstance(text, str):
            return text.encode("utf-8", "replace")
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise DataError(
        f'{file}, line {number}: not a JSON object with a string "{field}"',
        f"correct or remove the line, or name the key of the text: {file.name}#KEY",
    )


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
            raise _unreadable(file, error) from None
        # The first million ids reveal a wrong tokenizer; a later stray id is found when its batch is drawn.
        if part.size and int(part[:_PIECE].max()) >= tokenizer.vocab:
            raise DataError(
                f"{file} has token ids up to {int(part[:_PIECE].max())}, the tokenizer knows {tokenizer.vocab}",
                "set data.tokenizer to the tokenizer the file was made with",
            )
        digest.update(
            f"{file.name} {size}{'' if dtype.itemsize == 2 else ' uint32'}\n".encode("utf-8", "surrogateescape")
        )
        parts.append(part)
    if not sum(part.size for part in parts):
        raise DataError(f"{files[0].parent}: the token files are empty", "is it the right folder?")
    return Corpus(tuple(parts), tokenizer.vocab, digest.hexdigest())
