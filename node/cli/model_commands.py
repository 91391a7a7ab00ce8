"""Commands about the model of a run on this machine: the newest checkpoint, or a file of weights.

Heavy modules are imported inside the functions.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from thinwire.node.cli.arguments import (
    LAST_SEED,
    MOST,
    Debug,
    Device,
    Home,
    InputError,
    Json,
    Threads,
    finite,
    settings,
)
from thinwire.node.cli.completion import runs

if TYPE_CHECKING:
    from thinwire.node.runtime.load_settings import Config
    from thinwire.node.training.stored_model import StoredModel

Source = Annotated[
    str,
    typer.Argument(
        metavar="RUN|FILE",
        autocompletion=runs,
        help="A run of this machine by its name or the start of its id, a file of `thinwire export`, or a "
        "checkpoint's directory [the running daemon's run, or the only one].",
    ),
]
UserModel = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="A run's own model, as for join: MODULE:FUNCTION or hf:FOLDER."),
]
Text = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="PATH", help="The run's text: file, directory or hf:DATASET [Python's own library]."
    ),
]
With = Annotated[
    list[Path] | None,
    typer.Option("--with", metavar="DIR", help="Daemon directory with other stages; may be given again."),
]


def export(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write, or directory for transformers.")],
    run: Annotated[
        str,
        typer.Option("--run", metavar="RUN", autocompletion=runs, help="The run, by its name or the start of its id."),
    ] = "",
    format: Annotated[
        str, typer.Option("--format", metavar="KIND", help="safetensors (a file), transformers or peft (a folder).")
    ] = "safetensors",
    force: Annotated[bool, typer.Option("--force", help="Replace OUT although it is no earlier export.")] = False,
    homes: With = None,
    model: UserModel = None,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Write the weights of the newest valid checkpoint."""
    config = settings(context, debug, {"home": home, "model": model})
    from thinwire.node.training.export import export as write

    write(_stored(config, run, homes), out, format, config, force=force)


def generate(
    context: typer.Context,
    source: Source = "",
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Text that the model continues.")] = "",
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=1, max=MOST, help="Number of tokens to write.")
    ] = 200,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            metavar="T",
            min=0.0,
            max=MOST,
            callback=finite,
            help="Temperature of draws; 0: always the most likely token.",
        ),
    ] = 0.7,
    top_k: Annotated[
        int,
        typer.Option("--top-k", metavar="N", min=0, max=MOST, help="Draw among the N most likely tokens; 0: all."),
    ] = 40,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, max=LAST_SEED, help="The same seed draws the same text.")
    ] = 0,
    homes: With = None,
    model: UserModel = None,
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Let the model of the newest checkpoint continue a text."""
    config = settings(context, debug, {"home": home, "model": model, "device": device, "threads": threads})
    from thinwire.node.training.models.causal_model import written

    stored = _stored(config, source, homes)
    made, tokenizer = stored.model(config, Path())
    raw = prompt.encode("utf-8", "surrogateescape")
    shown = raw.decode("utf-8", "replace")
    parts = written(
        *(made, tokenizer, raw, tokens),
        context=stored.described().model.context,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    if json:
        _print_json({"from": stored.origin, "prompt": shown, "text": "".join(parts)})
        return
    print(f"from {stored.origin}", file=sys.stderr)
    sys.stdout.write(shown)
    for part in parts:
        sys.stdout.write(part)
        sys.stdout.flush()
    sys.stdout.write("\n")


def evaluate(
    context: typer.Context,
    source: Source = "",
    data: Text = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            metavar="N",
            min=0,
            max=MOST,
            help="Number of sequences to evaluate on, at most; 0: all [as the run does, 256 or fewer].",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Use all of the text, for text that the run has not trained on.")
    ] = False,
    homes: With = None,
    model: UserModel = None,
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Print the loss of the newest checkpoint on held-out text."""
    config = settings(
        context, debug, {"home": home, "data": data, "model": model, "device": device, "threads": threads}
    )
    from thinwire.node.runtime.console import warn
    from thinwire.node.training.text_source import DEFAULT_DATA

    stored = _stored(config, source, homes)
    learner = stored.learner(config, Path(), lambda line: print(line, file=sys.stderr))
    if config.data is None:
        warn(DEFAULT_DATA.replace("training uses", "the text is"))
    result = learner.evaluate(samples, whole=whole)
    if result is None:
        raise InputError(
            "the manifest holds out no text: data.holdout = 0",
            "add --whole with a text that the run has not trained on",
        )
    perplexity = math.exp(min(result.loss, 700.0))
    if json:
        _print_json(
            {
                **{"from": stored.origin, "rounds": stored.rounds, "loss": result.loss},
                **{"perplexity": perplexity, "samples": result.samples, "tokens": result.tokens},
            }
        )
        return
    print(
        f"loss {result.loss:.4f} nats per token, perplexity {perplexity:.4g}, on {result.samples} sequences "
        f"({result.tokens} tokens)\nfrom {stored.origin}"
    )


def _stored(config: Config, source: str, homes: list[Path] | None) -> StoredModel:
    """Return the model of a run, by default that of the running daemon, or of a file."""
    from thinwire.node.peer.status import alive, read_status
    from thinwire.node.training.stored_model import stored_model

    status = read_status(config.directories.status)
    default = status.run if status is not None and alive(status, config.directories.lock) else ""
    return stored_model(config.directories, source, default, homes or ())


def _print_json(value: object) -> None:
    import msgspec

    print(msgspec.json.encode(value).decode())
