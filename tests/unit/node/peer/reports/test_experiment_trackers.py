"""Figures of a run in the tools of others."""

import sys
from types import SimpleNamespace

import pytest
from thinwire.node.peer.report_sinks import ReportSinks
from thinwire.node.runtime.load_settings import ConfigError, load
from thinwire.swarm.identity.errors import NotInstalled

RUN, ME = b"r" * 32, b"p" * 32
ROUND = {"round": 3, "loss": 2.5, "peers": 2, "contributors": 2, "bytes_up": 10, "bytes_down": 20, "factor": 4.0}


class WandB:
    """Stand-in of the module wandb; `broken`: calls that raise."""

    def __init__(self, *broken):
        self.broken, self.calls = broken, []

    def init(self, **given):
        self.say("init", given)
        return SimpleNamespace(
            log=lambda figures, step: self.say("log", (step, figures)), finish=lambda: self.say("finish", None)
        )

    def say(self, name, value):
        self.calls.append((name, value))
        if name in self.broken:
            raise RuntimeError(f"no {name} today")


def sinks(tmp_path, monkeypatch, module, monitor="wandb", **more):
    monkeypatch.setitem(sys.modules, "wandb", module)
    lines = []
    logger = SimpleNamespace(warning=lambda text, *values: lines.append(text % values), log=lambda *_, **__: None)
    config = load({"home": tmp_path, "monitor": monitor, **more}, {})
    return ReportSinks(config, RUN, ME, logger=logger), lines


def played(tmp_path, monkeypatch, module, **more):
    made, lines = sinks(tmp_path, monkeypatch, module, **more)
    made.report.emit("start", {"peer": ME.hex(), "run": RUN.hex()})
    made.report.emit("round", {**ROUND, "digest": "ab", "missing": {}})
    made.report.emit("round", {**ROUND, "round": 4, "loss": float("nan")})
    made.report.evaluated(4, 2.25)
    made.close()
    return lines


def test_wandb_gets_rounds_and_held_out_losses_in_order(tmp_path, monkeypatch):
    module = WandB()
    assert played(tmp_path, monkeypatch, module, name="ann") == []
    (first, given), (_, (step, figures)), (_, (later, without)), held_out, last = module.calls
    assert first == "init" and given["id"] == f"{RUN.hex()[:16]}-{ME.hex()[:16]}" and given["name"] == "ann"
    assert step == 3 and figures["loss"] == 2.5 and figures["exchange/bytes_sent"] == 10 and "digest" not in figures
    assert later == 4 and "loss" not in without and without["swarm/peers"] == 2, "NaN is no figure"
    assert held_out == ("log", (4, {"held_out/loss": 2.25})) and last == ("finish", None)


def test_default_name_of_the_machine_is_not_sent(tmp_path, monkeypatch):
    module = WandB()
    played(tmp_path, monkeypatch, module)
    assert module.calls[0][1]["name"] == ME.hex()[:8]


@pytest.mark.parametrize(
    ("broken", "line", "calls"),
    [
        ("init", "wandb shows nothing of this run: no init today", ["init"]),
        ("log", "wandb shows nothing more of this run: no log today", ["init", "log"]),
        ("finish", "wandb shows nothing more of this run: no finish today", ["init", "log", "log", "log", "finish"]),
    ],
)
def test_tool_that_fails_is_left_out_and_events_continue(tmp_path, monkeypatch, broken, line, calls):
    module = WandB(broken)
    assert played(tmp_path, monkeypatch, module) == [line]
    assert [name for name, _ in module.calls] == calls
    assert "held_out" in load({"home": tmp_path}, {}).directories.run(RUN).events.read_text()


@pytest.mark.parametrize("tool", ["wandb", "tensorboard"])
def test_missing_tool_is_an_error_with_the_command_that_installs_it(tmp_path, monkeypatch, tool):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(NotInstalled, match=f"monitor needs the package {tool}") as error:
        sinks(tmp_path, monkeypatch, None, monitor=tool)
    assert error.value.hint.startswith(f"pip install {tool}") and error.value.exit_code == 2


def test_tensorboard_files_have_the_figures(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    played(tmp_path, monkeypatch, None, monitor="tensorboard")
    folder = load({"home": tmp_path}, {}).directories.run(RUN).path / "tensorboard"
    found = EventAccumulator(str(folder))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(3, 2.5)]
    assert [(one.step, one.value) for one in found.Scalars("held_out/loss")] == [(4, 2.25)]
    assert [one.step for one in found.Scalars("swarm/peers")] == [3, 4]


def test_monitors_are_named_in_the_settings(tmp_path):
    (tmp_path / "node.toml").write_text('monitor = ["tensorboard", "wandb", "wandb"]\n')
    assert load({"home": tmp_path}, {}).monitor == ("tensorboard", "wandb")
    assert load({"home": tmp_path, "monitor": ""}, {}).monitor == ()
    with pytest.raises(ConfigError, match="--monitor") as error:
        load({"home": tmp_path, "monitor": "mlflow"}, {})
    assert "tensorboard, wandb" in error.value.hint
