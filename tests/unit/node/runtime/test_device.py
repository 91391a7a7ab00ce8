"""Memory that is left to a process."""

import psutil
import pytest
from thinwire.node.runtime.device import spare_memory

CACHED = "anon 900\ninactive_file 96\nactive_file 50\n"


@pytest.mark.parametrize(
    ("limit", "used", "stat", "left"),
    [
        ("4096\n", "1000\n", CACHED, 3192),
        ("4096\n", "1000\n", "anon 900\n", 3096),
        ("4096\n", "5000\n", CACHED, 0),
        ("max\n", "1000\n", CACHED, None),
        ("4096\n", None, CACHED, None),
    ],
)
def test_memory_left_is_that_of_the_container_if_it_has_a_limit(tmp_path, limit, used, stat, left):
    for name, text in (("max", limit), ("current", used), ("stat", stat)):
        if text is not None:
            (tmp_path / f"memory.{name}").write_text(text)
    found = spare_memory(tmp_path)
    assert found == left if left is not None else 1 << 20 < found < psutil.virtual_memory().total
