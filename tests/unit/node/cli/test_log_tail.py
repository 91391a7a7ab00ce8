"""Last lines of a log, and following it."""

import os

import pytest
from thinwire.node.cli.log_tail import tail


def test_tail_gives_the_last_lines(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(100)))
    assert list(tail(path, 2, follow=False)) == ["line 98\n", "line 99\n"]
    assert list(tail(path, 0, follow=False)) == [] and len(list(tail(path, 1000, follow=False))) == 100
    with pytest.raises(FileNotFoundError):
        list(tail(tmp_path / "none", 2, follow=False))


def test_tail_follows_added_lines_a_rotation_and_a_truncation(tmp_path, monkeypatch):
    path = tmp_path / "log"
    path.write_text("old\n")
    steps = iter(
        [
            lambda: append(path, "one\ntw"),
            lambda: append(path, "o\n"),
            lambda: (os.replace(path, tmp_path / "log.1"), path.write_text("three\n")),
            lambda: path.write_text(""),
            lambda: append(path, "four\n"),
        ]
    )
    monkeypatch.setattr("thinwire.node.cli.log_tail.time.sleep", lambda seconds: next(steps)())
    lines = tail(path, 1, follow=True)
    assert [next(lines) for _ in range(5)] == ["old\n", "one\n", "two\n", "three\n", "four\n"]
    lines.close()


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_tail_misses_no_line_that_is_written_just_before_a_rotation(tmp_path, monkeypatch):
    path, looks, fstat = tmp_path / "log", [], os.fstat
    path.write_text("old\n")

    def rotate_at_the_second_look(descriptor):
        looks.append(descriptor)
        if len(looks) == 2:
            append(path, "last\n")
            os.replace(path, tmp_path / "log.1")
            path.write_text("new\n")
        return fstat(descriptor)

    monkeypatch.setattr("thinwire.node.cli.log_tail.os.fstat", rotate_at_the_second_look)
    monkeypatch.setattr("thinwire.node.cli.log_tail.time.sleep", lambda seconds: pytest.fail("a line is missing"))
    lines = tail(path, 1, follow=True)
    assert [next(lines) for _ in range(3)] == ["old\n", "last\n", "new\n"]
    lines.close()
