"""Text to train on: files, folders, data sets of Hugging Face, or the standard library's source."""

from __future__ import annotations

import json
import logging
import os
import sysconfig
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import blake3
from thinwire.node.runtime.disk import present
from thinwire.node.runtime.settings import HF
from thinwire.node.training.models.tokenizer import DataError, Tokenizer
from thinwire.swarm.identity.errors import NotInstalled

STANDARD_LIBRARY_LIMIT = 30 << 20
"""Most bytes of the standard library's source to use."""

DEFAULT_DATA = (
    "no data is named, so training uses the source of Python's standard library; --data names a file or a folder"
)
"""Message to the owner of a peer without a source."""

FIELD = "text"
"""Key of the text in JSON lines and records."""

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".bin")

_PIECE = 1 << 20  # bytes of text given to a tokenizer at once
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


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


@dataclass(frozen=True, slots=True)
class Text:
    """Text to tokenize.

    - `name`: names the text in messages.
    - `identity`: returns a hash of the whole text.
    - `documents`: returns the documents, each in pieces.
    - `size`: bytes of the text (0: unknown).
    """

    name: str
    identity: Callable[[], str]
    documents: Callable[[], Iterator[Iterator[bytes]]]
    size: int = 0


def text_of_files(files: list[Path], source: TextSource, tokenizer: Tokenizer) -> Text:
    """Return the text of the files of a source."""
    root = source.path if source.path is not None and source.path.is_dir() else files[0].parent
    field = source.field or FIELD

    def identity() -> str:
        return _identity(files, root, tokenizer, field)

    def documents() -> Iterator[Iterator[bytes]]:
        return (document for file in files for document in _documents(file, field))

    return Text(str(source.path or root), identity, documents, sum(file.stat().st_size for file in files))


def text_of_data_set(source: TextSource, tokenizer: Tokenizer) -> Text:
    """Return the text of a data set's training part, which is read record by record. Raises DataError."""
    try:
        import datasets
    except ImportError:
        raise NotInstalled(
            "data of Hugging Face needs the package datasets", "pip install 'thinwire[datasets]'"
        ) from None
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

    return Text(whole, identity, documents)


def files_of(source: TextSource) -> list[Path]:
    """Return the files of a source that is no data set. Raises DataError if there are none."""
    return _standard_library() if source.path is None else _found_files(source.path)


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


def _found_files(path: Path) -> list[Path]:
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


def unreadable(file: Path, error: OSError) -> DataError:
    """Return the error for a file that cannot be read."""
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
