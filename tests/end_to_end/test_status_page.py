"""The status page of a running pool, in a real browser."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxpool.broker.core import events as ev
from mlxpool.broker.http.server import HttpServer
from mlxpool.common.errors import PoolError
from support import snapshots
from support.chromium import Chromium
from support.core_harness import Story
from support.core_harness import model as counting
from support.free_ports import free_port
from support.pool import PATIENCE, Pool, until
from support.secret_file import secret_file
from support.web_loop import Loop

HOSTILE = "<img src=x onerror=document.title=1>\u2028<b>bold</b>"
HOSTILE_SHOWN = HOSTILE.replace("\u2028", r"\u2028")
CONFIG = f"""
[pool]
metrics = "127.0.0.1:{{port}}"
[models.slow]
path = "builtin:counting"
counting.step_us = 20000
[models."{HOSTILE}"]
path = "builtin:counting"
[models.unsound]
path = "builtin:counting"
counting.fault = "raise"
counting.fault_in = "load"
"""
TOKEN = "operators-only-" + 2 * "0123456789abcdef"
MAX_PAGE_BYTES = 100_000  # loaded before the first figures are shown
ALARM = "#alarm:not([hidden])"
FIGURE = "#cards .figure"  # the figure of the first card: tokens per second


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool"), CONFIG.format(port=0)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as running:
        yield running


@pytest.fixture
def page(browser: Chromium, pool: Pool) -> Chromium:
    """The page, newly opened, with its first figures."""
    browser.open("about:blank")  # so that the previous page sends no more requests
    browser.events()
    browser.console_messages()
    browser.open(url(pool))
    browser.wait_for_text("#state", "ready")
    return browser


def url(pool: Pool) -> str:
    return f"{pool.ask('ps')['broker']['metrics']}/"


@contextmanager
def reader(pool: Pool, name: str) -> Iterator[None]:
    """Reads a long stream of this model inside the context."""
    command = [*pool.command(), "run", name, "hello", "--max-tokens", "100000"]
    process = subprocess.Popen(command, env=pool.environment, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def model(page: Chromium, name: str) -> list[str]:
    """Returns the cells of a model's row; [] without a row."""
    rows = page.run(
        "return Array.from(document.querySelectorAll('#models tbody tr'),"
        " (row) => Array.from(row.cells, (cell) => cell.innerText))"
    )
    return next((list(row) for row in rows if row[0] == name), [])


def tokens(page: Chromium) -> int:
    """Returns the total of tokens on the page."""
    counts = dict(each.split("\n") for each in page.texts("#counts div"))
    return int(counts["Tokens"].replace(",", ""))


def points(page: Chromium) -> int:
    """Returns the number of points of the first plot."""
    line = page.run("return document.querySelector('#cards .line').getAttribute('d')")
    return len(re.findall("[ML]", line))


def test_figures_change_while_streams_run(page: Chromium, pool: Pool) -> None:
    assert model(page, "counting")[1] == "cold"
    with reader(pool, "slow"):
        until(lambda: model(page, "slow")[1] == "ready", "the model is ready")
        until(lambda: model(page, "slow")[4] == "1", "its request runs")
        until(lambda: "slow/0" in page.texts("#workers tbody td.name"), "its worker is there")
        until(lambda: not page.text(FIGURE).startswith("0 "), "tokens a second")
        before = tokens(page)
        until(lambda: tokens(page) > before > 0, "more tokens")
        until(lambda: points(page) > 3, "a line")
        page.point_at("#cards .plot")
        page.wait_for_text("#cards .note", " ago")
        assert page.run("return document.querySelectorAll('#cards circle').length") == 1
        page.open(url(pool))
        page.wait_for_text(FIGURE, "tokens/s")
        assert points(page) > 3, "a page just opened has what was before"


def test_names_with_html_and_line_breaks_are_escaped(page: Chromium, pool: Pool) -> None:
    with pool.client() as client:
        client.generate(HOSTILE, "hello", max_tokens=3)
    until(lambda: model(page, HOSTILE_SHOWN)[1:2] == ["ready"], "its row")
    assert f"{HOSTILE_SHOWN}/0" in page.texts("#workers tbody td.name")
    assert page.run("return document.querySelectorAll('main img, main b').length") == 0
    assert page.run("return document.title").endswith(" · mlxpool")
    assert page.console_messages() == []


def test_the_page_loads_only_from_its_broker_and_little(page: Chromium, pool: Pool) -> None:
    until(lambda: "as of" in page.text("#told"), "first figures")
    paths: dict[str, str] = {}
    loaded: dict[str, int] = {}
    for message in page.events():
        params = message["params"]
        if message["method"] == "Network.requestWillBeSent":
            asked = urllib.parse.urlsplit(params["request"]["url"])
            base = urllib.parse.urlsplit(url(pool))
            assert asked.scheme == "data" or asked.netloc == base.netloc, asked
            paths[params["requestId"]] = asked.path
        elif message["method"] == "Network.loadingFinished" and params["requestId"] in paths:
            # Counts only the first request for a path: the page fetches figures again every second.
            loaded.setdefault(paths[params["requestId"]], int(params["encodedDataLength"]))
    assert 10_000 < sum(loaded.values()) <= MAX_PAGE_BYTES
    assert page.console_messages() == []


@pytest.mark.parametrize("width", [360, 820, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_readable_at_each_width(
    browser: Chromium, pool: Pool, width: int, dark: bool
) -> None:
    browser.open(url(pool), dark=dark, width=width, height=800)
    browser.wait_for_text("#state", "ready")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    light = browser.run(
        "const [r, g, b] = getComputedStyle(document.body).color.match(/[0-9.]+/g);"
        "return Number(r) + Number(g) + Number(b) > 380"
    )
    assert light is dark, "light text on a dark ground, and the other way round"
    assert browser.console_messages() == []


def test_a_failed_model_is_a_problem_in_the_words_of_ps(page: Chromium, pool: Pool) -> None:
    with pool.client() as client, pytest.raises(PoolError):
        client.generate("unsound", "hello", max_tokens=1)
    page.wait_for_text("#problems", "1 model failed")
    # On a busy machine the lag of the event loop is a second problem.
    until(lambda: re.fullmatch(r"ready, \d problems?", page.text("#state")), "the badge says so")
    assert page.run("return document.querySelector('#state').classList.contains('bad')")
    assert re.fullmatch(r"ready, \d problems? · mlxpool", page.run("return document.title"))
    assert model(page, "unsound")[1] == "failed"
    (why,) = (text for text in page.texts("#problems li span") if text.startswith("unsound: "))
    # The time until the next retry changes from second to second.
    said = re.sub(r"\d+ s\b", "N s", pool.cli("ps").stdout)
    assert re.sub(r"\d+ s\b", "N s", why) in said.splitlines()
    rows = page.texts("#errors tbody tr")
    assert any("model_load_failed" in row for row in rows), rows
    count = dict(each.split("\n") for each in page.texts("#counts div"))
    assert int(count["Failed"]) + int(count["Refused"]) > 0


def test_live_requests_are_shown_without_a_cancel(page: Chromium, pool: Pool) -> None:
    with reader(pool, "slow"):
        until(lambda: page.texts("#live tbody td.mood") == ["streaming"], "its request")
        (live,) = pool.ask("requests")["requests"]
        (shown,) = page.texts("#live tbody td.name")
        assert live["id"].startswith(shown) and len(shown) == 12
        assert page.run("return document.querySelector('#live button').offsetParent === null")
        assert live["id"] not in page.run("return document.documentElement.outerHTML")
    until(lambda: page.text("#live-none"), "it has ended")


def test_the_charts_show_the_time_that_a_new_pool_has(browser: Chromium, tmp_path: Path) -> None:
    with HttpServer("127.0.0.1:0") as server:
        server.latest.fresh, server.latest.max_wait = 0.0, PATIENCE
        for uptime, oldest in ((5.0, "1 min ago"), (70.0, "2 min ago"), (9000.0, "10 min ago")):
            with Loop(server, snapshots.of(Story(), uptime_s=uptime)):
                browser.open(server.url)
                browser.wait_for_text("#told", "as of")
                marks = browser.run(
                    "return Array.from(document.querySelectorAll('#cards text'),"
                    " (text) => text.textContent)"
                )
                assert oldest in marks, marks


def test_the_gpus_of_a_worker_are_beside_its_name(browser: Chromium) -> None:
    story = Story({"m": counting(), "n": counting()})
    for name, gpus in (("m", ("0", "GPU-8f3c2d1e-77")), ("n", ())):
        story.do(ev.Spawned(story.ready_worker(name).slot, 1, gpus))
    with HttpServer("127.0.0.1:0") as server, Loop(server, snapshots.of(story)):
        browser.open(server.url)
        browser.wait_for_text("#told", "as of")
        names = browser.texts("#workers tbody td.name")
    assert names == ["m/0 on GPU 0, GPU-8f3c2d1e", "n/0"]


@pytest.mark.parametrize(("width", "first"), [(400, "models"), (1280, "cards")])
def test_on_a_phone_the_state_comes_before_the_charts(
    browser: Chromium, pool: Pool, width: int, first: str
) -> None:
    browser.open(url(pool), width=width)
    browser.wait_for_text("#told", "as of")
    tops = {
        id: browser.run(f"return document.getElementById('{id}').getBoundingClientRect().top")
        for id in ("counts", "models", "cards")
    }
    assert sorted(tops, key=lambda id: tops[id])[:2] == ["counts", first]


def test_on_a_phone_a_worker_that_ended_shows_how(browser: Chromium, pool: Pool) -> None:
    with pool.client() as client, pytest.raises(PoolError):
        client.generate("unsound", "hello", max_tokens=1)
    browser.open(url(pool), width=400)
    until(
        lambda: browser.run(
            "return Array.from(document.querySelectorAll('#workers .asleep td.quiet'))"
            ".some((cell) => cell.offsetParent && cell.innerText.includes('exit code 1'))"
        ),
        "the last end is visible",
    )


def test_an_operator_cancels_a_request_and_reads_a_log(browser: Chromium, tmp_path: Path) -> None:
    token = secret_file(tmp_path / "status.token", f"{TOKEN}\n")
    setting = f'metrics_admin_token = "{token}"'
    config = CONFIG.format(port=0).replace("[models.slow]", f"{setting}\n[models.slow]")
    with Pool(tmp_path, config) as pool, reader(pool, "slow"), reader(pool, "slow"):
        browser.open(url(pool))
        until(lambda: len(browser.texts("#live tbody tr")) == 2, "both requests")
        first = browser.text("#live tbody td.name")
        browser.click("#live tbody button")
        browser.wait_for_text("#cancel-what", f"{first} of slow")
        browser.write("#token", "a-wrong-token-that-is-long-enough")
        browser.click("#cancel-yes")
        browser.wait_for_text("#cancel-error", "the operators' token is missing or wrong")
        assert len(pool.ask("requests")["requests"]) == 2
        browser.write("#token", TOKEN)
        browser.click("#cancel-yes")
        until(lambda: first not in browser.texts("#live tbody td.name"), "it is gone")
        # The request may leave the list before the answer to the cancel comes.
        closed = "return !document.querySelector('#cancel').open"
        until(lambda: browser.run(closed), "the dialog is closed")
        (left,) = pool.ask("requests")["requests"]
        browser.click("#live tbody button")
        browser.wait_for_text("#cancel-what", left["id"][:12])
        assert browser.run("return document.querySelector('#cancel-token').hidden"), "it is known"
        browser.click("#cancel-no")
        browser.click("#workers tbody button")
        browser.wait_for_text("#log-text", "event=")
        browser.click("#log-close")
        assert len(pool.ask("requests")["requests"]) == 1
        assert pool.log().count("event=operator command=cancel") == 1
        assert TOKEN not in pool.log()
    browser.console_messages()  # drops the message about status 401


def test_a_token_that_others_can_read_ends_the_start(tmp_path: Path) -> None:
    token = tmp_path / "status.token"
    token.write_text(TOKEN)
    token.chmod(0o644)
    file = tmp_path / "mlxpool.toml"
    file.write_text(f'[pool]\nmetrics = "127.0.0.1:0"\nmetrics_admin_token = "{token}"\n')
    command = [sys.executable, "-m", "mlxpool.cli.main", "serve", "--config", str(file)]
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as run_dir:
        done = subprocess.run(
            [*command, "--run-dir", run_dir], capture_output=True, text=True, timeout=PATIENCE
        )
    assert done.returncode == 2
    assert f"pool.metrics_admin_token: {token} can be read by others (mode 0644)" in done.stderr
    assert TOKEN not in done.stderr


def test_a_broker_that_is_killed_and_restarted(browser: Chromium, tmp_path: Path) -> None:
    with Pool(tmp_path, CONFIG.format(port=free_port())) as pool:
        browser.open(url(pool))
        browser.wait_for_text("#state", "ready")
        assert not browser.text(ALARM)
        pool.kill()
        browser.wait_for_text("#state", "no answer")
        browser.wait_for_text(ALARM, "No answer from the broker since")
        assert "What is below was so at" in browser.text(ALARM)
        assert model(browser, "slow"), "the last figures stay"
        assert browser.run("return document.title") == "no answer · mlxpool"
        pool.start()
        browser.wait_for_text("#state", "ready")
        until(lambda: not browser.text(ALARM), "the alarm is over")
    browser.console_messages()  # drops messages about refused connections


def test_a_broker_whose_loop_is_stuck(browser: Chromium) -> None:
    """The HTTP threads of the broker still answer, and report the stuck loop."""
    with HttpServer("127.0.0.1:0") as server, Loop(server, snapshots.of(Story())) as loop:
        browser.open(server.url)
        browser.wait_for_text("#state", "ready")
        server.latest.fresh, server.latest.max_wait = 0.0, 0.2
        loop.turning = False
        browser.wait_for_text(
            ALARM, "No figures from the broker (the broker's loop has not answered"
        )
        browser.wait_for_text("#state", "no answer")
        server.latest.max_wait = PATIENCE
        loop.turning = True
        browser.wait_for_text("#state", "ready")
    browser.console_messages()  # drops the message about status 503
