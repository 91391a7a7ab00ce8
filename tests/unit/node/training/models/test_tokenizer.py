"""Tokenizers: bytes, JSON files, and errors for other files."""

from __future__ import annotations

from pathlib import Path

import blake3
import numpy as np
import pytest
from thinwire.node.training.models.tokenizer import Bytes, DataError, byte_tokenizer_file, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny trained tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(["the cat and the dog", "the end of the day"] * 20, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    engine.save(str(path / "tiny.json"))
    return path


def test_byte_tokenizer_round_trips_any_bytes() -> None:
    tokenizer = load_tokenizer("bytes", Path())
    text = "naïve ☃\n"
    assert tokenizer == Bytes() and tokenizer.vocab == 256
    assert tokenizer.decode(tokenizer.encode(text.encode()).tolist()) == text
    assert tokenizer.encode(b"\xff\x00").tolist() == [255, 0]
    assert tokenizer.decode([0xE2, 0x98]) == "\ufffd"


def test_byte_tokenizer_file_gives_other_programs_the_same_tokens() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    engine, ours = tokenizers.Tokenizer.from_str(byte_tokenizer_file().decode()), Bytes()
    assert engine.get_vocab_size() == ours.vocab
    for text in ("naïve ☃\n\t  x", "def f(x):\r\n\treturn 'ß' * 3\x00\x7f", "\u00ad\u0100 ÿ¡"):
        ids = engine.encode(text).ids
        assert ids == ours.encode(text.encode()).tolist() and engine.decode(ids) == text
    assert engine.decode(list(range(256))) == ours.decode(list(range(256)))


def test_json_tokenizer_round_trips(folder: Path) -> None:
    tokenizer = load_tokenizer("tiny.json", folder)
    ids = tokenizer.encode("the dog ☃".encode())
    assert ids.dtype == np.uint32 and ids.max() < tokenizer.vocab <= 300
    assert len(ids) < len("the dog ☃".encode())
    assert tokenizer.decode(ids.tolist()) == "the dog ☃"
    assert tokenizer.decode(tokenizer.separator.tolist()) == "<|endoftext|>"
    assert tokenizer.decode(tokenizer.encode(b"a\xff").tolist()) == "a\ufffd"


def test_json_tokenizer_hash_is_checked(folder: Path) -> None:
    right = blake3.blake3((folder / "tiny.json").read_bytes()).hexdigest()
    assert load_tokenizer("tiny.json", folder, right).identity == f"json-{right}"
    with pytest.raises(DataError, match="not this run's tokenizer .its hash is .*, not"):
        load_tokenizer("tiny.json", folder, "0" * 64)


def test_invalid_tokenizer_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_text('{"model": 3}')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for name in ("bad.json", "binary.json", "absent.json"):
        with pytest.raises(DataError, match=name) as error:
            load_tokenizer(name, tmp_path)
        assert error.value.hint and error.value.exit_code == 2


def test_folder_of_transformers_has_the_tokenizer_in_its_json_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(DataError, match="tokenizer.json"):
        load_tokenizer("model", tmp_path)
    content = (folder / "tiny.json").read_bytes()
    (tmp_path / "model" / "tokenizer.json").write_bytes(content)
    right = blake3.blake3(content).hexdigest()
    assert load_tokenizer("model", tmp_path, right).identity == f"json-{right}"
