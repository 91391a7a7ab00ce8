"""The page's API, read from the files of a daemon that does not run."""

import json
import os
import time

import msgspec
import pytest
from kit.real.dashboard import asked, dashboard, exported, lacking
from starlette.testclient import TestClient
from thinwire.node.cli.page.prometheus_metrics import exposition
from thinwire.node.cli.page.run_view import RunView
from thinwire.node.cli.page.server import PAGE, application
from thinwire.node.peer.status import LinkStatus, PeerStatus, Status, write_status
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.event_log import EventLog
from thinwire.node.runtime.process_lock import hold, this_process

RUN, ME, OTHER = "ab" * 32, "cd" * 32, "ef" * 32
ADDRESS = "203.0.113.7:7400"


@pytest.fixture
def files(tmp_path):
    """Files of a home whose lock this process holds, as a daemon does."""
    found = directories(tmp_path)
    with hold(found.lock):
        yield found


def status_of(**more):
    process, started = this_process()
    peers = (PeerStatus(peer=OTHER, state="alive", address=ADDRESS, round=2, loss=2.5),)
    given = {
        "process": process,
        "process_started": started,
        "wall": time.time(),
        "peer": ME,
        "run": RUN,
        "run_name": "demo",
    }
    return Status(
        **{**given, "invite": "tw1-secret", "addresses": (ADDRESS,), "round": 2, "loss": 3.0, "peers": peers, **more}
    )


def play(files, first=1, last=2):
    log = EventLog(files.run(bytes.fromhex(RUN)).events)
    for number in range(first, last + 1):
        fields = {"round": number, "loss": 3.0, "members": [ME[:8]], "missing": {OTHER[:8]: "silent"}}
        log.append("phase", {"round": number, "phase": "announce"}, at=0.0, wall=0.0)
        log.append("round", {**fields, "bytes_up": 10, "dropped_frames": 0}, at=0.0, wall=float(number))
    log.append("joined", {"peer": OTHER, "detail": ADDRESS}, at=0.0, wall=9.0)
    log.close()


def client(files, public=False):
    return TestClient(application(lambda: RunView(files, public=public), public=public), base_url="http://localhost")


def test_state_has_the_status_and_the_history(files):
    write_status(files.status, status_of())
    play(files)
    state = client(files).get("/api/v1/state").json()
    assert (
        state["running"] and state["status"]["run_name"] == "demo" and state["status"]["peers"][0]["address"] == ADDRESS
    )
    assert [one["round"] for one in state["rounds"]] == [1, 2] and state["rounds"][0]["missing"] == {
        OTHER[:8]: "silent"
    }
    assert [note["kind"] for note in state["notes"]] == ["joined"] and state["phase"] == "announce"
    play(files, 3, 3)
    assert [one["round"] for one in client(files).get("/api/v1/state").json()["rounds"]] == [1, 2, 3]


def test_no_answer_contains_the_invite_and_no_public_one_an_address(files):
    links = (LinkStatus(ME[:16], OTHER[:16], 0.125, 1e6),)
    write_status(files.status, status_of(checkpoint="/somewhere/step-1", reach="behind NAT", links=links))
    play(files)
    assert "0.125" in client(files).get("/api/v1/state").text
    assert "0.125" not in client(files, public=True).get("/api/v1/state").text
    for path in ("/", "/api/v1/state", "/metrics"):
        assert "tw1-secret" not in client(files).get(path).text
        public = client(files, public=True).get(path).text
        assert ADDRESS not in public and "/somewhere" not in public and str(os.getpid()) not in public, path
    news = RunView(files, public=True).news()
    assert len(news["rounds"]) == 2 and len(news["notes"]) == 1 and ADDRESS not in json.dumps(news)


def test_private_page_refuses_names_of_other_hosts(files):
    """A page of a stranger could otherwise read it under a name that points to this machine."""
    made = TestClient(application(lambda: RunView(files)), base_url="http://evil.example")
    assert made.get("/api/v1/state").status_code == 400
    assert (
        TestClient(application(lambda: RunView(files, public=True), public=True), base_url="http://evil.example")
        .get("/")
        .status_code
        == 200
    )


def test_health_is_bad_without_daemon_or_with_an_old_status(files):
    made = client(files)
    assert made.get("/healthz").status_code == 503
    write_status(files.status, status_of())
    assert made.get("/healthz").status_code == 200
    write_status(files.status, status_of(wall=time.time() - 100.0))
    assert made.get("/healthz").status_code == 503
    write_status(files.status, status_of(process_started=1.0))
    assert made.get("/healthz").status_code == 503


def test_page_is_small_and_asks_no_other_host(files):
    text = PAGE.read_text()
    assert len(text) < 50_000 and "innerHTML" not in text  # Names come from strangers.
    assert text.count("http") == text.count("http://www.w3.org/2000/svg")
    assert client(files).get("/").headers["content-security-policy"].startswith("default-src 'none'")


def test_view_follows_a_new_run_and_a_log_that_began_again(files):
    view = RunView(files)
    assert view.state()["status"] is None and view.news()["rounds"] == []
    write_status(files.status, status_of())
    play(files)
    first, second = view.news(), view.news()
    assert [one["round"] for one in first["rounds"]] == [1, 2] and first["before"] == 0
    assert second == {"before": first["offset"], "offset": first["offset"], "rounds": [], "notes": []}
    assert RunView(files).state()["offset"] == first["offset"]
    files.run(bytes.fromhex(RUN)).events.write_bytes(b"")
    play(files, 7, 7)
    assert [one["round"] for one in view.news()["rounds"]] == [7] and len(view.state()["rounds"]) == 1
    write_status(files.status, status_of(run="12" * 32))
    assert view.state()["rounds"] == []


def test_metrics_have_every_figure_of_the_status(files):
    text = exposition(status_of(), running=True).decode()
    labels = f'peer="{ME[:16]}",run="{RUN[:16]}"'
    assert (
        "thinwire_up 1.0" in text
        and f"thinwire_round{{{labels}}} 2.0" in text
        and f"thinwire_loss{{{labels}}} 3.0" in text
    )
    assert f'thinwire_peers{{{labels},state="alive"}} 1.0' in text and "thinwire_sent_bytes_total" in text
    assert exposition(None, running=False).decode().count("thinwire_") == 3
    assert "thinwire_loss{" not in exposition(msgspec.structs.replace(status_of(), loss=None), running=True).decode()


def test_dashboard_of_grafana_names_metrics_that_exist_and_all_of_them():
    text = exposition(status_of(held_out=2.0), running=True).decode()
    needed, present = asked(dashboard()), exported(text)
    assert lacking(text) == [] and len(needed) > 10
    assert needed.keys() == {name for name in present if not name.endswith("_created")}
    assert needed["thinwire_peers"] == {"run", "peer", "state"} and needed["thinwire_loss"] == {"run", "peer"}
    without = "\n".join(line for line in text.splitlines() if "alarm" not in line).replace('state="', 'condition="')
    assert lacking(without) == ["thinwire_alarm", "thinwire_peers: state"]


def test_dashboard_of_grafana_has_the_structure_of_its_schema():
    """Fields that an import needs, by Grafana's page "View dashboard JSON model"."""
    board = dashboard()
    assert board["schemaVersion"] >= 36, "since then a data source is an object with type and uid"
    assert board["uid"] == "thinwire" and board.get("id") is None, "Grafana itself gives the number"
    assert board["time"].keys() == {"from", "to"} and board["title"]
    (source,) = [one for one in board["templating"]["list"] if one["type"] == "datasource"]
    assert source["query"] == "prometheus"
    link = {"type": "prometheus", "uid": f"${{{source['name']}}}"}
    (run,) = [one for one in board["templating"]["list"] if one["type"] == "query"]
    assert run["datasource"] == link and run["query"]["refId"]
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in {"stat", "timeseries"} and panel["title"] and panel["datasource"] == link
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        assert all(target["datasource"] == link and target["expr"] for target in panel["targets"])
    taken = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(taken)) == len(taken) and max(x for x, _ in taken) < 24, "panels overlap or exceed the grid"
