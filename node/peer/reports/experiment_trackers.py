"""Figures of a run in TensorBoard and Weights & Biases, from the events of a peer.

Only tools that the setting `monitor` names are loaded. Their calls run in a separate thread (`later`), so that neither
a slow disk nor a slow server stops the event loop; a tool that fails is left out, and the run continues.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from thinwire.node.runtime.load_settings import Config
from thinwire.swarm.identity.errors import NotInstalled

SCALARS = {
    "loss": "loss",
    "tokens_per_second": "tokens_per_second",
    "sync_seconds": "exchange/seconds",
    "contributors": "exchange/contributors",
    "bytes_up": "exchange/bytes_sent",
    "bytes_down": "exchange/bytes_received",
    "factor": "exchange/less_than_fp32",
    "peers": "swarm/peers",
}
"""Fields of the event of a round -> name of the figure in the tools."""

HELD_OUT = "held_out/loss"
"""Name of the figure of the event "held_out"."""


class Tool(Protocol):
    """One tool. Its methods run in one thread."""

    def write(self, round: int, figures: Mapping[str, float]) -> None:
        """Write figures of a round."""
        ...

    def close(self) -> None:
        """Write what waits, and end."""
        ...


class TensorBoard:
    """Writer of event files of TensorBoard in the folder "tensorboard" of a run."""

    def __init__(self, folder: Path, writer: Any) -> None:
        self._made = writer(log_dir=str(folder / "tensorboard"))

    def write(self, round: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._made.add_scalar(name, value, round)
        self._made.flush()

    def close(self) -> None:
        self._made.close()


class WandB:
    """Writer of one run of Weights & Biases for each peer; a restart continues it."""

    def __init__(self, folder: Path, wandb: Any, peer: str, run: str, name: str) -> None:
        self._made = wandb.init(
            project="thinwire", group=run[:16], id=f"{run[:16]}-{peer[:16]}", name=name or peer[:8], dir=str(folder),
            resume="allow", config={"run": run, "peer": peer}, settings={"console": "off"},  # our lines stay here
        )  # fmt: skip

    def write(self, round: int, figures: Mapping[str, float]) -> None:
        self._made.log(dict(figures), step=round)

    def close(self) -> None:
        self._made.finish()


class Monitors:
    """The tools that the settings name, fed with the events of a peer of a run.

    later: runs a function in the thread of the tools; returns False if it does not, and then figures are missing there. warn:
    receives a problem, in that thread. Raises NotInstalled.
    """

    def __init__(
        self,
        config: Config,
        run_id: bytes,
        peer: bytes,
        *,
        later: Callable[[Callable[[], None]], bool],
        warn: Callable[[str], None],
    ) -> None:
        self._later, self._warn, self._names = later, warn, config.monitor
        self._tools: dict[str, Tool] = {}
        modules = {tool: _module(tool) for tool in config.monitor}
        folder = config.directories.run(run_id).path
        # The default is the name of the machine, which its owner may not want to publish.
        name = "" if config.sources["name"] == "default" else config.name
        makers: dict[str, Callable[[], Tool]] = {
            "tensorboard": lambda: TensorBoard(folder, modules["tensorboard"].SummaryWriter),
            "wandb": lambda: WandB(folder, modules["wandb"], peer.hex(), run_id.hex(), name),
        }
        for tool in modules:
            later(partial(self._open, tool, makers[tool]))

    def take(self, kind: str, fields: Mapping[str, object]) -> None:
        """Pass an event on, if tools show it."""
        if kind == "round":
            self._write(fields["round"], {SCALARS[name]: value for name, value in fields.items() if name in SCALARS})
        elif kind == "held_out":
            self._write(fields["round"], {HELD_OUT: fields["loss"]})

    def close(self) -> None:
        """End all tools, once nothing runs in their thread any more."""
        self._each(lambda tool: tool.close())

    def _open(self, name: str, make: Callable[[], Tool]) -> None:
        try:
            self._tools[name] = make()
        except Exception as error:  # of any kind, from code of others
            self._warn(f"{name} shows nothing of this run: {_first_line(error)}")

    def _write(self, round: Any, values: Mapping[str, Any]) -> None:
        if self._names:
            figures = {name: float(value) for name, value in values.items() if math.isfinite(value)}
            self._later(lambda: self._each(lambda tool: tool.write(round, figures)))

    def _each(self, call: Callable[[Tool], None]) -> None:
        for name, tool in list(self._tools.items()):
            try:
                call(tool)
            except Exception as error:  # of any kind, from code of others
                del self._tools[name]
                self._warn(f"{name} shows nothing more of this run: {_first_line(error)}")


def _module(tool: str) -> Any:
    """Return the module of a tool. Raises NotInstalled."""
    names: Sequence[str] = {"tensorboard": ("torch.utils.tensorboard", "tensorboard")}.get(tool, (tool, tool))
    try:
        return importlib.import_module(names[0])
    except ImportError:
        raise NotInstalled(
            f"the setting monitor needs the package {names[1]}",
            f"pip install {names[1]}, or remove it from the setting",
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
