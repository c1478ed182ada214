"""Jobs on the status page, in a real browser: counts for everyone, lists only for operators."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mlxpool.common.errors import DuplicateId, UnknownModel
from support.chromium import Chromium
from support.pool import PATIENCE, Pool, until
from support.secret_file import secret_file

TOKEN = "operators-only-" + 2 * "0123456789abcdef"
CONFIG = """
[pool]
metrics = "127.0.0.1:0"
restart_delay = 0.05
{token}
[models.m]
path = "builtin:counting"
counting.step_us = 2000
[models.bad]
path = "builtin:counting"
counting.fault = "segfault"
"""
HOSTILE = "<b>key</b>"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool with four jobs: done, dead, running and waiting."""
    folder = tmp_path_factory.mktemp("pool")
    token = secret_file(folder / "status.token", TOKEN)
    config = CONFIG.format(token=f'metrics_admin_token = "{token}"')
    state = ("--state-dir", str(folder / "jobs"))
    with Pool(folder, config, arguments=state) as running, running.client() as client:
        client.submit("m", "the first", key="report-7", max_tokens=400, seed=7)
        client.submit("m", "hostile", key=HOSTILE, max_tokens=3, seed=7)
        client.submit("bad", "poison", key="poison", max_tokens=5)
        client.submit("m", "on and on", key="long", max_tokens=1_000_000, seed=7)
        client.submit("m", "later", key="later", not_before=4e9)
        until(lambda: client.job("poison")["state"] == "dead", "one is dead")
        until(lambda: client.job("report-7")["state"] == "done", "one is done")
        until(lambda: client.job("long")["ids"] > 0, "one runs")
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as running:
        yield running


def opened(browser: Chromium, pool: Pool, **window: object) -> Chromium:
    """Opens the page with the list of jobs."""
    browser.open(f"{pool.ask('ps')['broker']['metrics']}/", **window)  # type: ignore[arg-type]
    browser.wait_for_text("#jobs-note", "dead")
    browser.console_messages()  # drops messages of the page before, whose broker may have ended
    browser.write("#jobs-token", TOKEN)
    browser.click("#jobs-form button")
    until(lambda: browser.texts("#jobs tbody tr"), "the jobs are listed")
    return browser


def keys(browser: Chromium) -> list[str]:
    return browser.texts("#jobs tbody td.name")


def has_keys(browser: Chromium, wanted: list[str]) -> bool:
    return keys(browser) == wanted


def show(browser: Chromium, key: str) -> None:
    """Opens the page of a job."""
    place = keys(browser).index(key) + 1
    browser.click(f"#jobs tbody tr:nth-child({place}) button")
    browser.wait_for_text("#job-title", key)


def test_operators_list_and_filter_jobs(browser: Chromium, pool: Pool) -> None:
    opened(browser, pool)
    assert keys(browser) == ["later", "long", "poison", HOSTILE, "report-7"]
    browser.wait_for_text("#jobs-note", "1 running · 2 done")
    assert browser.run("return document.querySelector('#jobs-token-label').hidden")
    filters: tuple[tuple[str, list[str]], ...] = (
        ("dead", ["poison"]),
        ("running", ["long"]),
        ("expired", []),
    )
    for state, wanted in filters:
        browser.run(f"document.querySelector('#jobs-state').value = {state!r}")
        browser.click("#jobs-form button")
        until(partial(has_keys, browser, wanted), f"only {wanted}")
    browser.wait_for_text("#jobs-none", "No job is like that")
    browser.run("document.querySelector('#jobs-state').value = ''")
    browser.write("#jobs-model", "bad")
    browser.click("#jobs-form button")
    until(lambda: keys(browser) == ["poison"], "those of a model")
    assert browser.console_messages() == []


def test_the_page_of_a_dead_job_has_causes_and_stacks(browser: Chromium, pool: Pool) -> None:
    opened(browser, pool)
    show(browser, "poison")
    assert browser.text("#job-state") == "dead"
    assert "this request ended two workers" in browser.text("#job-facts")
    failures = browser.texts("#job-failures li")
    assert len(failures) == 3 and "killed by SIGSEGV" in failures[0]
    browser.click("#job-failures summary")
    browser.wait_for_text("#job-failures pre", "Segmentation fault")
    assert browser.texts("#job-actions button") == ["Close", "Delete the result", "Try again"]
    browser.click("#job-close")
    assert browser.console_messages() == []


def test_an_operator_cancels_a_job(browser: Chromium, pool: Pool) -> None:
    opened(browser, pool)
    show(browser, "later")
    assert browser.texts("#job-actions button") == ["Close", "Cancel"]
    browser.click("#job-actions .danger")
    browser.wait_for_text("#job-state", "cancelled")
    browser.wait_for_text("#job-actions", "Delete the result")
    with pool.client() as client:
        assert client.job("later")["state"] == "cancelled"
    browser.click("#job-close")
    assert "command=cancel_job" in pool.log() and TOKEN not in pool.log()


def test_the_text_of_a_job_is_shown_and_never_html(browser: Chromium, pool: Pool) -> None:
    opened(browser, pool)
    show(browser, HOSTILE)
    assert browser.run("return document.querySelectorAll('main b, #job b').length") == 0
    browser.click("#job-close")
    show(browser, "long")
    assert browser.text("#job-text")
    browser.click("#job-close")


def test_refused_submissions_are_told_everywhere(browser: Chromium, pool: Pool) -> None:
    with pool.client() as client:
        for _ in range(2):
            with pytest.raises(UnknownModel):
                client.submit("nowhere", "x", key="nowhere")
        with pytest.raises(DuplicateId):
            client.submit("m", "another", key="report-7")
    base = pool.ask("ps")["broker"]["metrics"]
    assert pool.cli_json("stats")["jobs"]["refused"] == {"unknown_model": 2, "duplicate_id": 1}
    assert "3 refused" in pool.cli("ps").stdout
    assert "refused jobs, batches, files" in pool.cli("stats").stdout
    counted = 'mlxpool_job_submissions_refused_total{error="unknown_model"} 2'
    until(lambda: counted in read_text(f"{base}/metrics"), "the metric has them")
    browser.open(f"{base}/")
    browser.wait_for_text("#jobs-note", "refused: 2 unknown_model, 1 duplicate_id")
    assert browser.console_messages() == []


def read_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def test_a_wrong_token_shows_nothing(browser: Chromium, pool: Pool) -> None:
    browser.open(f"{pool.ask('ps')['broker']['metrics']}/")
    browser.wait_for_text("#jobs-note", "dead")
    browser.write("#jobs-token", "a-wrong-token-that-is-long-enough")
    browser.click("#jobs-form button")
    browser.wait_for_text("#jobs-error", "token is missing or wrong")
    assert keys(browser) == []
    browser.console_messages()  # drops the message about status 401


def test_without_an_operators_token_there_are_counts_only(
    browser: Chromium, tmp_path: Path
) -> None:
    state = ("--state-dir", str(tmp_path / "jobs"))
    with Pool(tmp_path, CONFIG.format(token=""), arguments=state) as pool:
        browser.open(f"{pool.ask('ps')['broker']['metrics']}/")
        browser.wait_for_text("#jobs-note", "0 waiting")
        browser.wait_for_text("#jobs-hint", "mlxpool jobs --all-owners")
        assert browser.run("return document.querySelector('#jobs-form').offsetParent === null")
        assert browser.console_messages() == []


@pytest.mark.parametrize("width", [360, 400, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_jobs_are_readable_at_each_width(
    browser: Chromium, pool: Pool, width: int, dark: bool
) -> None:
    opened(browser, pool, dark=dark, width=width, height=800)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    show(browser, "poison")
    wide = browser.run("return document.querySelector('#job').scrollWidth")
    assert wide <= browser.run("return document.querySelector('#job').clientWidth") <= width
    assert browser.console_messages() == []
