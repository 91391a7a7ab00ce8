"""Text sources: reading, caching, refusals."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from thinwire.node.training import corpus as corpus_module
from thinwire.node.training.corpus import ABANDONED_SECONDS, Corpus, Progress, open_corpus
from thinwire.node.training.models.tokenizer import Bytes, DataError
from thinwire.node.training.text_source import STANDARD_LIBRARY_LIMIT, TextSource, source_of


def text_of(corpus: Corpus) -> bytes:
    return b"".join(part.astype(np.uint8).tobytes() for part in corpus.parts)


def opened(path: Path, tmp_path: Path) -> Corpus:
    return open_corpus(path, Bytes(), tmp_path / "cache")


def test_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    root = tmp_path / "in"
    (root / "b").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b" / "two.md").write_text("two")
    (root / "a.txt").write_text("one")
    (root / "c.PY").write_text("three")
    (root / "image.png").write_bytes(b"\x89PNG")
    (root / ".git" / "hidden.txt").write_text("hidden")
    (root / "empty.txt").write_text("")
    corpus = opened(root, tmp_path)
    assert text_of(corpus) == b"one\n\nthree\n\ntwo\n\n"
    assert corpus.vocab == 256 and corpus.tokens == 17
    assert corpus.parts[0].dtype == np.uint8


def test_non_utf8_bytes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"a\xff\xfe\x00b")
    assert text_of(opened(tmp_path / "x.txt", tmp_path)) == b"a\xff\xfe\x00b\n\n"


def test_jsonl_has_one_document_per_line(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "ein Stück", "id": 1}), "", json.dumps({"text": "zwei"}), '{"text": "\\ud800!"}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert text_of(opened(tmp_path / "x.jsonl", tmp_path)) == "ein Stück\n\nzwei\n\n?!\n\n".encode()


@pytest.mark.parametrize("line", ['{"text": 3}', '{"body": "x"}', "[1]", '{"text": "x"', "[" * 5000, "\x00"])
def test_bad_jsonl_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"x\.jsonl, line 2"):
        opened(tmp_path / "x.jsonl", tmp_path)
    assert not list((tmp_path / "cache").iterdir())


def test_token_files_are_memory_mapped(tmp_path: Path) -> None:
    ids = np.arange(600, dtype="<u2") % 256
    root = tmp_path / "in"
    root.mkdir()
    ids.tofile(root / "plain.bin")
    header = np.zeros(256, "<i4")
    header[:3] = 20_240_520, 1, 600
    (root / "shard.bin").write_bytes(header.tobytes() + ids.tobytes())
    corpus = opened(root, tmp_path)
    assert [part.tolist() for part in corpus.parts] == [ids.tolist(), ids.tolist()]
    assert all(isinstance(part, np.memmap) for part in corpus.parts)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "said"), [(b"abc", "uint16"), (b"", "empty"), (np.array([7, 300], "<u2").tobytes(), "up to 300")]
)
def test_bad_token_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(DataError, match=said):
        opened(tmp_path / "x.bin", tmp_path)


def test_paths_without_data_are_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("x")
    (tmp_path / "mixed" / "b.bin").write_bytes(b"xx")
    (tmp_path / "picture.png").write_bytes(b"x")
    (tmp_path / "empty.txt").write_text("")
    os.mkfifo(tmp_path / "pipe.txt")
    for name, said in [
        ("absent", "no such"),
        ("pipe.txt", "neither a file nor a folder"),
        ("folder", "no data"),
        ("mixed", "contains both"),
        ("picture.png", "cannot read"),
        ("empty.txt", "no text"),
    ]:
        with pytest.raises(DataError, match=said) as error:
            opened(tmp_path / name, tmp_path)
        assert error.value.hint and error.value.exit_code == 2


@pytest.mark.parametrize("data", ["hf:", "hf::fr", "hf:#title"])
def test_data_set_without_a_name_is_refused(data: str) -> None:
    """Otherwise an unset variable in "hf:$NAME" would train on the default text."""
    with pytest.raises(DataError, match="names no data set"):
        source_of(data)


def test_text_is_tokenized_once_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.txt").write_text("hello")
    first = opened(tmp_path / "x.txt", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Bytes, "encode", lambda *_: pytest.fail("tokenized again"))
        assert opened(tmp_path / "x.txt", tmp_path).identity == first.identity
    (tmp_path / "x.txt").write_text("hellO")
    second = opened(tmp_path / "x.txt", tmp_path)
    assert second.identity != first.identity and text_of(second) == b"hellO\n\n"
    assert text_of(first) == b"hello\n\n"


def test_full_disk_for_token_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "text.txt").write_text("some text")
    monkeypatch.setattr(corpus_module.os, "fsync", full)
    with pytest.raises(DataError, match="cache: No space") as error:
        opened(tmp_path / "text.txt", tmp_path)
    assert error.value.exit_code == 3 and "free some space" in error.value.hint
    assert not list((tmp_path / "cache").iterdir())


def test_corpus_identity_depends_on_content_only(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("same")
    assert opened(tmp_path / "one", tmp_path).identity == opened(tmp_path / "two", tmp_path).identity


def test_concurrent_tokenization_leaves_one_complete_file(tmp_path: Path) -> None:
    content = b"".join(b"line %d\n" % i for i in range(200_000))
    (tmp_path / "x.txt").write_bytes(content)
    seen: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: seen.append(text_of(opened(tmp_path / "x.txt", tmp_path)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [content + b"\n\n"] * 4
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_unfinished_files_of_killed_processes_are_removed_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "x.txt").write_text("some text")
    old, fresh = tmp_path / "cache" / "tokens-0.u8x.tmp", tmp_path / "cache" / "tokens-1.u8x.tmp"
    for file in (old, fresh):
        file.write_bytes(b"half")
    then = fresh.stat().st_mtime - ABANDONED_SECONDS - 60.0
    os.utime(old, (then, then))
    opened(tmp_path / "x.txt", tmp_path)
    assert not old.exists() and fresh.exists()


def test_long_lines_are_read_completely(tmp_path: Path) -> None:
    content = b"x" * (9 << 20) + b"\n" + b"y" * 100
    (tmp_path / "x.txt").write_bytes(content)
    assert text_of(opened(tmp_path / "x.txt", tmp_path)) == content + b"\n\n"


def test_default_corpus_is_the_standard_library(tmp_path: Path) -> None:
    corpus = open_corpus(None, Bytes(), tmp_path / "cache")
    assert 1 << 20 < corpus.tokens < STANDARD_LIBRARY_LIMIT + (1 << 20)
    text = text_of(corpus)
    assert b"class OrderedDict" in text and b"def dedent" in text


def test_named_key_of_jsonl_is_the_text_and_separates_the_caches(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "one", "body": "two"}\n')
    first, second = (open_corpus(f"{file}{end}", Bytes(), tmp_path / "cache") for end in ("", "#body"))
    assert text_of(first) == b"one\n\n" and text_of(second) == b"two\n\n" and first.identity != second.identity
    with pytest.raises(DataError, match='a string "head"') as unknown:
        open_corpus(f"{file}#head", Bytes(), tmp_path / "cache")
    assert "x.jsonl#KEY" in unknown.value.hint


def test_source_of_a_name_with_a_number_sign_is_that_file_if_it_exists(tmp_path: Path) -> None:
    (tmp_path / "c#.txt").write_text("sharp")
    assert text_of(open_corpus(f"{tmp_path}/c#.txt", Bytes(), tmp_path / "cache")) == b"sharp\n\n"
    assert source_of("hf:org/set:en#body") == TextSource(None, "org/set:en", "body")
    assert source_of("a.bin#uint32") == TextSource(Path("a.bin"), "", "uint32") and source_of(None) == TextSource()


def test_token_files_of_four_bytes_are_read_as_stated_or_by_their_header(tmp_path: Path) -> None:
    ids = np.array([1, 70_000, 3, 4] * 100, "<u4")
    ids.tofile(tmp_path / "wide.bin")
    header = np.zeros(256, "<i4")
    header[0] = 20_240_801
    (tmp_path / "shard.bin").write_bytes(header.tobytes() + ids.tobytes())
    (tmp_path / "hollow.bin").write_bytes(header.tobytes())

    def opened_as(name: str) -> Corpus:
        return open_corpus(f"{tmp_path}/{name}", Many(), tmp_path / "cache")

    for name in ("wide.bin#uint32", "shard.bin"):
        assert opened_as(name).parts[0].tolist() == ids.tolist()
    assert opened_as("wide.bin").parts[0].tolist() != ids.tolist()
    for name, said in [("wide.bin#float32", "'float32' is no type"), ("hollow.bin", "are empty")]:
        with pytest.raises(DataError, match=said):
            opened_as(name)


class Many(Bytes):
    """Byte tokenizer with a large vocabulary."""

    def __init__(self) -> None:
        super().__init__(100_000, "many")


def test_data_set_is_read_record_by_record_and_cached_until_it_changes(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one", "body": "a"}\n{"text": "two", "body": "b"}\n')

    def read(end: str = "") -> bytes:
        return text_of(open_corpus(f"hf:{folder}{end}", Bytes(), tmp_path / "cache"))

    assert read() == b"one\n\ntwo\n\n" and read("#body") == b"a\n\nb\n\n"
    cached = set((tmp_path / "cache").iterdir())
    assert read() == b"one\n\ntwo\n\n" and set((tmp_path / "cache").iterdir()) == cached
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"text": "three", "body": "c"}\n')
    assert read() == b"one\n\ntwo\n\nthree\n\n"
    with pytest.raises(DataError, match="record 1: no text 'head'") as unknown:
        read("#head")
    assert "text, body" in unknown.value.hint
    with pytest.raises(DataError, match="nowhere") as absent:
        open_corpus(f"hf:{tmp_path}/nowhere", Bytes(), tmp_path / "cache")
    assert absent.value.hint


def test_retries_of_the_data_set_library_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    shown: list[logging.LogRecord] = []
    library = logging.getLogger("huggingface_hub")
    before, handler = library.level, logging.Handler()
    monkeypatch.setattr(handler, "emit", shown.append)

    def unreachable(*_: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("no such data set")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    library.addHandler(handler)
    try:
        with pytest.raises(DataError, match="hf:nosuch: no such data set"):
            open_corpus("hf:nosuch", Bytes(), tmp_path)
    finally:
        library.removeHandler(handler)
        library.setLevel(before)
    assert shown == []


def test_progress_is_shown_of_text_that_takes_more_than_a_second(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"0123456789\n" * 1_000_000)
    for seconds, said in ((0.01, 0), (0.6, 2)):
        lines: list[str] = []
        times = iter(number * seconds for number in range(100))
        proposal_with = Progress(lambda times=times: next(times), lines.append)  # type: ignore[misc]
        open_corpus(tmp_path / "x.txt", Bytes(), tmp_path / f"cache-{seconds}", proposal_with)
        assert len(lines) == said
    assert lines[0].startswith("tokenizing the data: 2.1 of 11.0 MB (19 %), 2097") and lines[0].endswith("in 1 s")
