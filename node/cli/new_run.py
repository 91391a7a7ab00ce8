"""The command `thinwire init`: a few questions, and a manifest with comments."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from thinwire.node.cli.arguments import Debug, Home, InputError, settings
from thinwire.node.runtime.disk import present


@dataclass(frozen=True, slots=True)
class Size:
    """A built-in model. context: in tokens; lr: peak rate; batch: sequences of a forward pass."""

    layers: int
    width: int
    heads: int
    context: int
    lr: float
    batch: int
    needs: str


SIZES = {
    "tiny": Size(4, 128, 4, 128, 1e-3, 8, "0.8M parameters: a first try, on CPUs"),
    "small": Size(8, 512, 8, 512, 6e-4, 8, "25M parameters: a laptop's GPU, or patience"),
    "medium": Size(24, 1024, 16, 1024, 3e-4, 8, "300M parameters: a GPU with 16 GB"),
    "large": Size(24, 2048, 16, 2048, 2e-4, 4, "1.2G parameters: a GPU with 40 GB"),
}


@dataclass(frozen=True, slots=True)
class MethodForLink:
    """Method that suits a kind of link of the slowest peer.

    share: of the uplink, for the limit of outgoing data; 1: no limit.
    """

    method: str
    sync_every: int
    codec: str
    why: str
    share: float = 1.0


_SPARSE = "topk(k=64,chunk=4096)|2bit|rice"
LINKS = {
    "office": MethodForLink("diloco", 20, "int8(block=256)", "a quarter of the bytes of fp32 is small enough"),
    "fibre": MethodForLink("diloco", 50, "int4(block=256)", "an eighth of the bytes of fp32"),
    "cable": MethodForLink("sparseloco", 50, _SPARSE, "about 1/200 of the bytes of fp32", 0.8),
    "dsl": MethodForLink("sparseloco", 100, _SPARSE, "rare exchanges of 1/200 of the bytes", 0.8),
}
"""Kinds of links that `init` offers, all in ACCESS."""

ADMISSION = {
    "closed": "only peers that you invite yourself",
    "invited": "peers with an invite of yours, or of a peer that was invited",
    "open": "any key that finds the run, after a trial",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of the owner. model: in SIZES, or "hf:FOLDER". link: in LINKS. data: "": the default."""

    name: str
    model: str
    link: str
    data: str
    admission: str


def init(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Manifest to write.")] = Path("run.toml"),
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing: take these flags, and defaults for the rest.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing FILE.")] = False,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of the run [first].")] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="SIZE", help="tiny, small, medium, large or hf:FOLDER [tiny].")
    ] = None,
    link: Annotated[
        str | None, typer.Option("--link", metavar="KIND", help="Slowest link: office, fibre, cable or dsl [fibre].")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="PATH", help="Text to train on [Python's own library].")
    ] = None,
    admission: Annotated[
        str | None, typer.Option("--admission", metavar="MODE", help="closed, invited or open [invited].")
    ] = None,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Ask a few questions, and write the manifest of a run."""
    config = settings(context, debug, {"home": home})
    if present(file) and not force:
        raise InputError(f"{file} exists", "name another file, or replace it with --force")
    if not yes and not (sys.stdin is not None and sys.stdin.isatty()):
        raise InputError("there is no terminal to ask questions", "add --yes, which takes the flags and defaults")
    ask = _answer if yes else _ask
    answers = Answers(
        ask("Name of the run", name, "first", _named),
        ask(f"Model: {', '.join(SIZES)}, or hf:FOLDER", model, "tiny", lambda text: _modelled(text, file.parent)),
        ask(
            f"Slowest link of a peer: {', '.join(f'{kind} ({_uplink(kind):g} Mbit/s up)' for kind in LINKS)}",
            link,
            "fibre",
            lambda text: _one_of(text, LINKS),
        ),
        ask("Text to train on, a file or folder (empty: Python's own library)", data, "", _readable),
        ask(
            f"Admission of other peers: {', '.join(ADMISSION)}",
            admission,
            "invited",
            lambda text: _one_of(text, ADMISSION),
        ),
    )
    _write(file, manifest_of(answers, file.parent))
    print(f"wrote {file}")
    print(f"cost estimate:       thinwire plan {file} --link {answers.link} --step SECONDS")
    print(f"begin:               thinwire start {file}")
    if lines := node_lines(answers):
        print(f"settings of this machine, for {config.directories.node_file}:", *lines, sep="\n    ")


def _write(file: Path, text: str) -> None:
    """Write a manifest that is valid; an existing file is replaced whole or not at all."""
    from thinwire.swarm.manifest.parser import parse

    parse(text, str(file))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(text)
        os.replace(draft, file)
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}", "name another file") from None


Check = Callable[[str], str]
"""Returns a checked answer, or raises ValueError with a description of valid ones."""


def _answer(question: str, given: str | None, default: str, check: Check) -> str:
    """Return the flag's value, or the default. Raises InputError."""
    text = default if given is None else given
    try:
        return check(text)
    except ValueError as error:
        raise InputError(f"{text!r} cannot be used", str(error)) from None


def _ask(question: str, given: str | None, default: str, check: Check) -> str:
    """Return the flag's value, or ask until the answer is valid."""
    if given is not None:
        return _answer(question, given, default, check)
    while True:
        text = str(typer.prompt(question, default=default, show_default=bool(default), err=True)).strip()
        try:
            return check(text)
        except ValueError as error:
            print(f"{text!r} cannot be used: {error}", file=sys.stderr)


def _named(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("up to 64 letters, digits, dots, dashes and underscores")
    return text


def _one_of(text: str, table: Collection[str]) -> str:
    if text not in table:
        raise ValueError(f"one of: {', '.join(table)}")
    return text


def _modelled(text: str, folder: Path) -> str:
    if not text.startswith("hf:"):
        return _one_of(text, SIZES)
    place = folder / text.removeprefix("hf:")
    if not present(place / "config.json") or not re.fullmatch(r"hf:[A-Za-z0-9._/-]{1,250}", text):
        raise ValueError(f"{place} has no config.json; the folder is relative to the manifest")
    return text


def _readable(text: str) -> str:

    if text and not text.startswith("hf:") and not present(Path(text.partition("#")[0])):
        raise ValueError("a file or folder that exists, or hf:DATASET")
    return text


def manifest_of(answers: Answers, folder: Path) -> str:
    """Return the text of the manifest.

    folder: directory of the manifest. Raises InputError for a config.json that cannot be used.
    """
    link = LINKS[answers.link]
    if answers.model in SIZES:
        size = SIZES[answers.model]
        model, tokenizer = _built_in(answers.model, size), '"bytes"       # or a tokenizer.json beside this file'
        lr, batch = size.lr, size.batch
    else:
        (model, tokenizer), lr, batch = _of_transformers(answers.model, folder), 3e-4, 4
    trial = "trial_rounds = 8     # scored contributions of a newcomer before its contributions count\n"
    return f"""\
# Manifest of a run: all its peers have this file's content, and its hash is the run id. Each change makes another run.
# Keys that are not here have defaults; docs/reference/run-toml.md has all keys.

[run]
name = "{answers.name}"
seed = 0             # first weights, shards, order of batches
rounds = 0           # exchanges after which all peers stop; 0: until stopped by hand

{model}
[data]
# Each peer names its text itself: --data, or `data` in node.toml. All peers of a run need the same text.
tokenizer = {tokenizer}
holdout = 0.02       # part of the text that is only evaluated

[inner]
# The optimizer of each peer between two exchanges.
lr = {lr:g}
warmup = 50          # inner steps over which lr rises from 0
batch = {batch}            # sequences of a forward pass; lower it if memory is short, and raise `accumulate`

[outer]
# {answers.link}, {_uplink(answers.link):g} Mbit/s up: {link.why}.
method = "{link.method}"
sync_every = {link.sync_every}      # inner steps between two exchanges

[exchange]
codec = "{link.codec}"

[admission]
mode = "{answers.admission}"     # {ADMISSION[answers.admission]}
{trial if answers.admission == "open" else ""}"""


def _built_in(name: str, size: Size) -> str:
    sizes = "".join(f"{key} = {getattr(size, key)}\n" for key in ("layers", "width", "heads"))
    context = f"context = {size.context}        # tokens of a training sequence\n"
    return f"[model]\n# {name}, {size.needs}.\n{sizes}{context}"


def _of_transformers(model: str, folder: Path) -> tuple[str, str]:
    """Return the table [model], and the lines about the tokenizer. Raises InputError."""
    from blake3 import blake3
    from thinwire.swarm.identity.regular_file import TOKENIZER, content_of

    name = model.removeprefix("hf:")
    place = folder / name
    try:
        content = content_of(place / "config.json")
        config = json.loads(content)
        longest = _first(config, "max_position_embeddings", "n_positions")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"{place / 'config.json'} cannot be used: {error}", "give the folder of a language model"
        ) from None
    tokenizer, file = '"bytes"       # the folder has no tokenizer.json', place / "tokenizer.json"
    if file.is_file():
        tokenizer = f'"{name}"\ntokenizer_hash = "{blake3(content_of(file, TOKENIZER)).hexdigest()}"'
    table = f"""\
[model]
# Other peers agree to it with `thinwire join INVITE --model hf:FOLDER`, docs/guides/models-and-data.md.
kind = "hf"
name = "{name}"
config_hash = "{blake3(content).hexdigest()}"
context = {min(512, longest)}        # tokens of a training sequence
"""
    return table, tokenizer


def _first(values: dict[str, object], *names: str) -> int:
    for name in names:
        if type(value := values.get(name)) is int and value > 0:
            return value
    raise ValueError(f"no {names[0]}")


def node_lines(answers: Answers) -> list[str]:
    """Return lines for node.toml that suit the answers."""
    data, share = answers.data, LINKS[answers.link].share
    place = data if data.startswith("hf:") else str(Path(data).absolute())
    lines = [f"data = {json.dumps(place, ensure_ascii=False)}"] if data else []
    if share < 1:
        lines.append(f'up = "{share * _uplink(answers.link):g}Mbit/s"    # leaves a fifth of the uplink free')
    return lines


def _uplink(link: str) -> float:
    """Return the uplink of a kind of link in Mbit/s."""
    from thinwire.collectives.costs.access_links import ACCESS, MBIT

    return ACCESS[link].up / MBIT
