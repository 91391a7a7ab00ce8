"""Text sources: reading, caching, refusals."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from thinwire.node.training import corpus as corpus_module
from thinwire.node.training.corpus import STANDARD_LIBRARY_LIMIT, Corpus, open_corpus
from thinwire.node.training.tokenizer import Bytes, DataError


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
    for name, said in [
        ("absent", "no such"),
        ("folder", "no data"),
        ("mixed", "contains both"),
        ("picture.png", "cannot read"),
        ("empty.txt", "no text"),
    ]:
        with pytest.raises(DataError, match=said) as error:
            opened(tmp_path / name, tmp_path)
        assert error.value.hint and error.value.exit_code == 2


def test_text_is_tokenized_once_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.txt").write_text("hello")
    first = opened(tmp_path / "x.txt", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "_tokenize", lambda *_: pytest.fail("tokenized again"))
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


def test_long_lines_are_read_completely(tmp_path: Path) -> None:
    content = b"x" * (9 << 20) + b"\n" + b"y" * 100
    (tmp_path / "x.txt").write_bytes(content)
    assert text_of(opened(tmp_path / "x.txt", tmp_path)) == content + b"\n\n"


def test_default_corpus_is_the_standard_library(tmp_path: Path) -> None:
    corpus = open_corpus(None, Bytes(), tmp_path / "cache")
    assert 1 << 20 < corpus.tokens < STANDARD_LIBRARY_LIMIT + (1 << 20)
    text = text_of(corpus)
    assert b"class OrderedDict" in text and b"def dedent" in text
