"""Try the lowest versions that pyproject.toml allows, except that of torch: `python tests/tools/lowest.py FOLDER`.

They are installed into FOLDER and stand before those of this environment, and the kernels are compiled again with them. Then
the command line founds a run, ends it, shows it and exports it. torch stays as pinned, because each version of it is
gigabytes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BOUND = re.compile(r"([a-z0-9-]+)>=([0-9.]+)")
RUN = """
[run]
rounds = 2
[model]
layers = 1
width = 32
heads = 2
context = 32
[outer]
sync_every = 2
[exchange]
codec = "fp32"
"""


def lowest() -> Iterator[str]:
    """Yield "name==version" of each dependency but torch. Raises ValueError for one without a lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wanted in [*project["dependencies"], *project["optional-dependencies"]["hf"]]:
        found = BOUND.match(wanted)
        if found is None:
            raise ValueError(f"{wanted!r} has no lower bound")
        if found[1] != "torch":
            yield f"{found[1]}=={found[2]}"


def main(folder: Path) -> int:
    """Install the versions and run the commands; return 1 if one ends with another exit code than it should."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*pip, "--target", str(folder), *lowest()], check=True, stderr=subprocess.DEVNULL)
    place = folder / "run"
    shutil.rmtree(place, ignore_errors=True)  # of the last call
    place.mkdir()
    (place / "run.toml").write_text(RUN)
    (place / "wrong.toml").write_text("[run]\nnam = 'x'\n")
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    paths = [str(ROOT / "build" / "links"), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NUMBA_CACHE_DIR": str(folder / "kernels")}
    home = ["--home", "home"]
    for code, words in (
        (0, ["--help"]),
        (0, ["start", "--help"]),
        (2, ["start"]),
        (2, ["start", "wrong.toml", *home]),
        (0, ["plan", "run.toml", "--step", "1"]),
        (0, ["start", "run.toml", "--data", "text.txt", "--host", "127.0.0.1", "--port", "0", "--new", *home]),
        (4, ["status", *home]),
        (0, ["config", "show", *home]),
        (0, ["export", "out", "--format", "transformers", *home]),
    ):
        program = "import sys; from thinwire.node.cli.main import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, *words], cwd=place, env=environment, capture_output=True
        )
        print("thinwire", *words, "->", done.returncode, flush=True)
        if done.returncode != code or b"internal error" in done.stderr:
            print(f"expected {code}\n{done.stdout.decode()}\n{done.stderr.decode()}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
