"""`thinwire page` beside a real daemon."""

import json
import shutil
import socket
import time
import urllib.error
import urllib.request

import pytest
from kit.real.dashboard import lacking
from kit.real.waiting import CAP, until
from thinwire.collectives.costs.plan_outcome import Comparison
from thinwire.node.peer.status import FragmentStatus, LinkStatus, PeerStatus, Status, write_status
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.event_log import EventLog
from thinwire.node.runtime.process_lock import hold, this_process

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

READ = """
const all = (selector) => [...document.querySelectorAll(selector)], one = (id) => document.getElementById(id);
const text = (id) => one(id).innerText ?? one(id).textContent;  // a drawing has only the latter
return {
  cells: all("#links td").length, bars: all("#links i").length, rows: all("#fragments tr").length,
  colours: all("#links i").map((one) => getComputedStyle(one).backgroundColor),
  links: text("links"), plan: text("plan"), crowd: text("crowd"),
};
"""
"""Script that returns what the page shows."""


def get(url):
    """Return code and text of an answer."""
    try:
        with urllib.request.urlopen(url, timeout=CAP) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def api(url):
    """Return the state that the API tells."""
    return json.loads(get(url + "api/v1/state")[1])


def a_browser(width):
    """Return a headless browser with a window of this width."""
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-sync",
    ):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    browser.set_window_size(width, 900)
    return browser


def page_of(machine, daemon):
    """Start a page for the daemon's home; return its address."""
    page = machine.daemon("page")
    page.home = daemon.home
    page.run("page", "--port", 0)
    return until("the page listens", lambda: page.stdout.strip())


def test_page_shows_the_api_and_survives_a_restart_of_the_daemon(machine):
    swarm = machine(steps=4)
    daemon = swarm.found("a", "--evaluate-every", 1)
    daemon.wait("held_out")
    url = page_of(swarm, daemon)
    until("good health", lambda: get(url + "healthz")[0] == 200)
    state = until("a status of the run", lambda: (said := api(url))["status"]["round"] and said)
    assert state["running"] and state["status"]["run_name"] == "e2e"
    assert [one["round"] for one in state["rounds"]][:2] == [1, 2]
    metrics = until("all metrics", lambda: (text := get(url + "metrics")[1]) and "held_out" in text and text)
    assert "thinwire_up 1.0" in metrics and lacking(metrics) == [], "examples/grafana.json asks for them"
    assert "<title>thinwire" in get(url)[1]
    with urllib.request.urlopen(url + "api/v1/events", timeout=CAP) as stream:
        newest = state["status"]["round"]
        for line in stream:
            found = json.loads(line[6:]) if line.startswith(b"data: ") else {}
            if any(one["round"] > newest for one in found.get("rounds", ())):
                break
    daemon.kill()
    daemon.process.wait()
    assert get(url + "healthz")[0] == 503
    before = daemon.round
    swarm.found("a").wait("round", least=before + 1)
    until("good health again", lambda: get(url + "healthz")[0] == 200)
    rounds = until(
        "the new rounds",
        lambda: [one for one in api(url)["rounds"] if one["round"] > before],
    )
    assert rounds[0]["round"] == before + 1


def test_page_that_cannot_listen_says_why(machine):
    daemon = machine().daemon("a")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        daemon.run("page", "--port", taken.getsockname()[1])
        assert daemon.exit() == 3
        error, hint = daemon.complaint()
        assert "cannot listen on 127.0.0.1" in error and "--port" in hint
    daemon.run("page", "--host", "0.0.0.0")
    assert daemon.exit() == 2
    assert "--hide-addresses" in daemon.complaint()[1]


@pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs Chromium and its driver")
@pytest.mark.parametrize("width", [1200, 400])
def test_page_in_a_browser_shows_what_the_api_says(machine, width):
    swarm = machine(steps=4, rounds=6)
    daemon = swarm.found("a")
    daemon.wait("round", round=3)
    url = page_of(swarm, daemon)
    browser = a_browser(width)
    try:
        browser.get(url)
        assert daemon.exit() == 0
        until("the end of the run on the page", lambda: "6 of 6" in browser.find_element("id", "facts").text)
        state = api(url)
        shown = browser.find_element("id", "facts").text
        assert f"{state['status']['loss']:.4f}" in shown and state["status"]["digest"][:8] in shown
        assert len(browser.find_elements("css selector", "#grid i")) == 6
        assert "not running" in until("the phase", lambda: browser.find_element("id", "phase").text)
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    finally:
        browser.quit()


@pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs Chromium and its driver")
@pytest.mark.parametrize("width", [1200, 400])
def test_page_in_a_browser_shows_links_fragments_plan_and_lineages(machine, tmp_path, width):
    here = machine()
    daemon = here.daemon("a")
    files = directories(daemon.home)
    peers = [f"{number:02x}" * 32 for number in range(1, 5)]
    links = [
        LinkStatus(one[:16], other[:16], 0.01 * (1 + number), 1e6 / (1 + number))
        for number, one in enumerate(peers)
        for other in peers
        if one != other
    ]
    process, started = this_process()
    status = Status(
        process=process, process_started=started, wall=time.time(), peer=peers[0], run="ab" * 32, run_name="demo", round=9,
        peers=tuple(PeerStatus(peer=one, name=f"<b>{one[:2]}", state="alive") for one in peers[1:]), links=tuple(links),
        fragments=tuple(FragmentStatus(fragment=n, round=4 + n, members=("a", "b")) for n in range(2)),
        plan=(Comparison("a round", "seconds", 2.0, 2.5, 1.25), Comparison("utilisation", "part", 0.9, 0.85, 0.94)),
    )  # fmt: skip
    write_status(files.status, status)
    log = EventLog(files.run(b"\xab" * 32).events)
    for number in range(1, 10):
        lineage = {"lineage": "c0ffee" * 10} if number > 6 else {}
        shown = {"round": number, "members": [one[:8] for one in peers[: 4 if number < 7 else 2]], "contributors": 2}
        log.append("round", {**shown, **lineage, "fragment": 0, "sync_seconds": 0.5, "missing": {}}, at=0.0, wall=1e9)
    log.close()
    url = page_of(here, daemon)
    browser = a_browser(width)
    try:
        with hold(files.lock):
            browser.get(url)
            # The page replaces its elements once a second, so one script reads all of them at the same moment.
            seen = until("the matrix", lambda: (all_of := browser.execute_script(READ))["cells"] and all_of)
            assert (seen["cells"], seen["bars"], seen["rows"]) == (16, 2 * 12, 3)
            assert "10.0 ms" in seen["links"] and "8.00 Mbit/s" in seen["links"] and "<b>02" in seen["links"]
            assert len(set(seen["colours"])) == 4, "each link is as good as its sender"
            assert "85 %" in seen["plan"] and "lineage c0ffeec0" in seen["crowd"]
            assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
            assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
            browser.save_screenshot(str(tmp_path / "page.png"))
    finally:
        browser.quit()
