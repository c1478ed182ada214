"""`mlxpool serve --http`: the gateway as a process that the broker starts, restarts and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mlxpool.cli.main import FAILED, USAGE
from mlxpool.common.config.schema import GATEWAY_VARIABLE, GatewayConfig
from support.counting_checker import expected_ids, text_of
from support.free_ports import free_port
from support.gateway_thread import GatewayThread
from support.pool import PATIENCE, Pool, gone, until
from support.secret_file import secret_file

CONFIG = """
[pool]
http = "{address}"
metrics = "127.0.0.1:0"
restart_delay = 0.05
beat_limit = {beats}
{more}
[models.slow]
path = "builtin:counting"
counting.step_us = {step}
"""
KEY = "a-key-of-more-than-16-characters"
SEED, COUNT = 7, 300
# Microseconds per token. A slow stream takes longer than any wait of a test, so it still runs when
# the test ends it or makes its model fast.
SLOW, FAST = 1_000_000, 1000
assert COUNT * SLOW / 1_000_000 > PATIENCE


def settings(
    address: str = "127.0.0.1:0", more: str = "", step: int = FAST, beats: float = PATIENCE
) -> str:
    """Returns a config. A process without a heartbeat for 2 * `beats` seconds is replaced."""
    return CONFIG.format(address=address, more=more, step=step, beats=beats)


def test_flags_alone_give_a_gateway_and_a_status_page_whose_urls_ps_shows(tmp_path: Path) -> None:
    flags = ("--http", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    with Pool(tmp_path, arguments=flags) as pool:
        gateway, page = pool.gateway(state="ready"), pool.ask("ps")["broker"]["metrics"]
        shown = pool.cli("ps").stdout
        assert f"status page {page}" in shown and gateway["url"] in shown
        assert "<html" in httpx.get(page, timeout=PATIENCE).text


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool(tmp_path, settings()) as running:
        running.gateway(state="ready")
        yield running


def complete(url: str, **headers: str) -> httpx.Response:
    body = {"model": "slow", "prompt": "hello", "max_tokens": 3, "seed": SEED}
    with httpx.Client(timeout=PATIENCE) as client:
        return client.post(f"{url}/v1/completions", json=body, headers=headers)


class Completion:
    """A stream over HTTP that has begun."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(timeout=PATIENCE)
        body = {"model": "slow", "prompt": "hello", "max_tokens": COUNT, "seed": SEED}
        request = self._client.build_request(
            "POST", f"{url}/v1/completions", json={**body, "stream": True}
        )
        self._lines = self._client.send(request, stream=True).iter_lines()
        self.text = self._next()["choices"][0]["text"]

    def _next(self) -> dict[str, Any]:
        """Returns the next event; {} at the end."""
        for line in self._lines:
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                return {} if data == "[DONE]" else dict(json.loads(data))
        raise AssertionError(f"it ended without an end, after {self.text!r}")

    def rest(self) -> dict[str, Any]:
        """Reads to the end; returns the error event, {} if there is none."""
        while event := self._next():
            if "error" in event:
                return dict(event["error"])
            self.text += event["choices"][0]["text"]
        return {}

    def assert_whole(self) -> None:
        assert self.rest() == {}
        assert self.text == text_of(expected_ids("hello", SEED, COUNT))

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def completions() -> Iterator[list[Completion]]:
    """Returns a list for streams, which are closed at the end of a test."""
    streams: list[Completion] = []
    yield streams
    for each in streams:
        each.close()


def test_one_command_answers_http(pool: Pool) -> None:
    gateway = pool.gateway()
    assert complete(gateway["url"]).json()["choices"][0]["text"] == text_of(
        expected_ids("hello", SEED, 3)
    )
    shown = pool.cli("ps").stdout
    assert f"gateway {gateway['pid']} ready, up " in shown and gateway["url"] in shown
    assert pool.ask("stats")["gateway"]["restarts"] == 0
    assert "logger=gateway" in pool.log(), "its log is the broker's"
    process = psutil.Process(gateway["pid"])
    assert pool.cli("stop").returncode == 0
    until(lambda: gone(process), "the gateway ends with the broker")


def test_a_killed_gateway_is_replaced_and_no_connection_is_refused(pool: Pool) -> None:
    first = pool.gateway()
    for number in range(1, 4):
        process = psutil.Process(pool.gateway(state="ready")["pid"])
        process.kill()
        until(partial(gone, process), "it has ended")
        assert complete(first["url"]).status_code == 200
        now = pool.gateway(state="ready", restarts=number)
        assert (now["url"], now["last_exit"]) == (first["url"], "killed by SIGKILL")
    metrics = f"{pool.ask('ps')['broker']['metrics']}/metrics"

    def told() -> bool:
        """Returns whether the metrics show a running gateway after its third restart."""
        text = httpx.get(metrics, timeout=PATIENCE).text
        return "\nmlxpool_gateway_up 1.0\n" in text and (
            "\nmlxpool_gateway_restarts_total 3.0\n" in text
        )

    until(told, "the metrics have the gateway")
    assert "3 restarts, last exit: killed by SIGKILL" in pool.cli("ps").stdout


def test_a_gateway_that_hangs_is_replaced(tmp_path: Path) -> None:
    with Pool(tmp_path, settings(beats=2.0)) as pool:
        stopped = pool.gateway(state="ready")["pid"]
        os.kill(stopped, signal.SIGSTOP)

        def replaced() -> bool:  # on a busy machine, the gateway may be replaced twice
            row = pool.gateway()
            return bool(row["state"] == "ready" and row["pid"] != stopped)

        until(replaced, "another one is ready")
        assert pool.gateway()["last_exit"].startswith("hung: it said nothing for")

        def answers() -> bool:
            try:
                return complete(pool.gateway()["url"]).status_code == 200
            except httpx.TransportError:  # the gateway was replaced once more
                return False

        until(answers, "it answers")


def test_answers_finish_at_sigterm(tmp_path: Path, completions: list[Completion]) -> None:
    """At SIGTERM no new request is taken; the broker ends after the last answer.

    Meanwhile a reload replaces the slow worker at once, so that the answer comes to its end.
    """
    more = "http_drain_timeout = 3000\ndrain_grace = 0.0"
    with Pool(tmp_path, settings(more=more, step=SLOW)) as pool:
        url = pool.gateway(state="ready")["url"]
        completions.append(stream := Completion(url))
        assert pool.process is not None
        pool.process.terminate()
        pool.gateway(state="draining")
        until(lambda: complete(url).status_code == 503, "no new request is taken")
        assert complete(url).headers["retry-after"] == "1"
        health = httpx.get(f"{url}/health", timeout=PATIENCE)
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        assert pool.ask("ps")["broker"]["state"] == "draining"
        pool.config.write_text(settings(more=more))
        pool.ask("reload")
        stream.assert_whole()
        assert pool.process.wait(PATIENCE) == 0


def test_answers_that_do_not_finish_in_time_end_with_an_error(
    tmp_path: Path, completions: list[Completion]
) -> None:
    with Pool(tmp_path, settings(more="http_drain_timeout = 0.1", step=SLOW)) as pool:
        completions.append(stream := Completion(pool.gateway(state="ready")["url"]))
        assert pool.stop() == 0
        assert stream.rest()["code"] == "draining"


def test_a_second_signal_ends_answers_with_the_error_of_their_interface(
    tmp_path: Path, completions: list[Completion]
) -> None:
    with Pool(tmp_path, settings(more="http_drain_timeout = 3000", step=SLOW)) as pool:
        url = pool.gateway(state="ready")["url"]
        completions.append(stream := Completion(url))
        body = {"model": "slow", "prompt": "hello"}
        with httpx.stream("POST", f"{url}/api/generate", json=body, timeout=PATIENCE) as ollama:
            lines = ollama.iter_lines()
            assert json.loads(next(lines))["done"] is False
            assert pool.process is not None
            pool.process.terminate()
            pool.gateway(state="draining")
            pool.process.terminate()
            assert json.loads([*lines][-1]) == {"error": "the gateway is ending"}
        assert stream.rest()["code"] == "draining"
        assert pool.process.wait(PATIENCE) == 0


def test_streams_over_http_outlive_the_broker(
    tmp_path: Path, completions: list[Completion]
) -> None:
    """The old gateway hands its address to the new gateway, and ends after its last stream."""
    address = f"127.0.0.1:{free_port()}"
    with Pool(tmp_path, settings(address, step=SLOW)) as pool:
        first = pool.gateway(state="ready")
        process = psutil.Process(first["pid"])
        completions.append(stream := Completion(first["url"]))
        pool.kill()
        pool.config.write_text(settings(address))
        pool.start()
        second = pool.gateway(state="ready")
        assert second["url"] == first["url"] and second["pid"] != first["pid"]
        assert complete(second["url"]).status_code == 200
        stream.assert_whole()
        stream.close()
        until(lambda: gone(process), "the gateway of the first broker ends")


def test_a_gateway_of_its_own_keeps_its_answers_over_a_restart(
    tmp_path: Path, completions: list[Completion]
) -> None:
    slow, fast = (
        f'[models.slow]\npath = "builtin:counting"\ncounting.step_us = {step}'
        for step in (SLOW, FAST)
    )
    with Pool(tmp_path, slow) as pool, GatewayThread(pool.run_dir) as gateway:
        completions.append(stream := Completion(gateway.url))
        assert pool.stop() == 0
        pool.config.write_text(fast)
        pool.start()
        stream.assert_whole()


def test_a_stopped_gateway_of_an_earlier_broker_does_not_keep_the_address(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with Pool(tmp_path, settings(address)) as pool:
        process = psutil.Process(pool.gateway(state="ready")["pid"])
        process.suspend()
        pool.kill()
        pool.start()
        assert pool.gateway(state="ready")["restarts"] == 0
        until(lambda: gone(process), "the stopped one has ended")


def test_a_reload_reads_the_bearer_keys_again(tmp_path: Path) -> None:
    keys = secret_file(tmp_path / "http.keys", f"{KEY}\n")
    with Pool(tmp_path, settings("0.0.0.0:0", f'http_keys = "{keys}"')) as pool:
        url = pool.gateway(state="ready")["url"].replace("0.0.0.0", "127.0.0.1")
        assert complete(url).status_code == 401
        assert complete(url, authorization=f"Bearer {KEY}").status_code == 200
        keys.write_text(f"{KEY}-2\n")
        assert pool.cli("reload").returncode == 0
        second = {"authorization": f"Bearer {KEY}-2"}
        until(lambda: complete(url, **second).status_code == 200, "the second key is known")
        assert complete(url, authorization=f"Bearer {KEY}").status_code == 401
        keys.write_text(f"{KEY}\nshort\n")
        failed = pool.cli("reload")
        assert failed.returncode == USAGE
        assert f"not reloaded, nothing has changed: {keys}, line 2: " in failed.stderr
        assert complete(url, **second).status_code == 200


def refused(*arguments: str) -> tuple[int, str]:
    """Returns the exit code and the error output of a broker that does not start."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        command = [sys.executable, "-m", "mlxpool.cli.main", "--run-dir", folder, "serve"]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=PATIENCE
        )
    assert done.stdout == "" and "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_an_address_in_use_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, words = refused("--http", address)
    assert code == FAILED
    assert f"pool.http: cannot listen on {address}: Address already in use; give another" in words


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--http", "11434"], "pool.http must be HOST:PORT such as"),
        (["--http", "0.0.0.0:0"], "name the keys that may ask with pool.http_keys"),
        (["--http", "127.0.0.1:0", "--http-keys", "/none"], "the keys in /none cannot be read"),
        (["--http", "127.0.0.1:0", "--http-keys", "/dev/null"], "it is not a regular file"),
    ],
)
def test_wrong_settings_are_errors_at_once(flags: list[str], words: str) -> None:
    code, printed = refused(*flags)
    assert code == USAGE and words in printed


def test_the_gateways_module_is_for_brokers() -> None:
    done = subprocess.run([sys.executable, "-m", "mlxpool.gateway"], capture_output=True, text=True)
    assert done.returncode == USAGE and "use `mlxpool serve --http" in done.stderr


@pytest.mark.parametrize("text", [None, "short\n"])
def test_a_file_of_keys_that_is_unusable_at_a_restart_is_one_line(
    tmp_path: Path, text: str | None
) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    if text is not None:
        keys.write_text(text)
    config = GatewayConfig(str(tmp_path), [-1], -1, "0.0.0.0", 0, keys=str(keys))
    done = subprocess.run(
        [sys.executable, "-m", "mlxpool.gateway"],
        capture_output=True, text=True, timeout=PATIENCE,
        env={**os.environ, GATEWAY_VARIABLE: config.to_environment()},
    )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert done.returncode == USAGE and f"{keys}" in line and "cannot start" in line
