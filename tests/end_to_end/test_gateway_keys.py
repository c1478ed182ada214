"""Keys of a gateway: removed keys, two keys in one request, keys without operator's rights.

Errors never name the folders of the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from support.gateway_thread import GatewayThread
from support.pool import PATIENCE, Pool, until
from support.secret_file import secret_file

KEY = "k" * 32
CONFIG = """
[models.slow]
path = "builtin:counting"
counting.step_us = 20000
"""
ENDLESS: dict[str, Any] = {
    "model": "slow", "prompt": "x", "max_tokens": 10**5, "stream": True,
}  # fmt: skip


def events(stream: httpx.Response) -> Iterator[str]:
    yield from (line for line in stream.iter_lines() if line)


def test_a_key_that_is_taken_away_ends_its_requests(pool: Pool, tmp_path: Path) -> None:
    """Streams of the key end with an error; its other unanswered requests get status 401.

    Requests of other keys continue.
    """
    gone, stays = "g" * 32, "s" * 32
    keys = secret_file(tmp_path / "keys", f"gone {gone}\nstays {stays}\nrenamed {KEY}\n")
    whole = {**ENDLESS, "stream": False}
    with (
        GatewayThread(pool.run_dir, keys=keys) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE) as client,
        ThreadPoolExecutor() as threads,
        ExitStack() as stack,
    ):

        def asked(key: str, path: str, body: dict[str, Any]) -> Iterator[str]:
            headers = {"authorization": f"Bearer {key}"}
            answer = stack.enter_context(client.stream("POST", path, json=body, headers=headers))
            assert answer.status_code == 200
            return events(answer)

        chat = {"model": "slow", "messages": [{"role": "user", "content": "x"}]}
        ended = [
            asked(gone, "/v1/completions", ENDLESS),
            asked(gone, "/api/chat", chat),
            asked(gone, "/v1/messages", {**chat, "max_tokens": 10**5, "stream": True}),
            asked(KEY, "/v1/completions", ENDLESS),
        ]
        other = asked(stays, "/v1/completions", ENDLESS)
        for stream in (*ended, other):
            next(stream)
        silent = threads.submit(
            httpx.post, f"{running.url}/v1/completions", json=whole, timeout=PATIENCE,
            headers={"authorization": f"Bearer {gone}"},
        )  # fmt: skip
        until(lambda: running.gateway.drain.running == 6, "all are admitted")
        keys.write_text(f"stays {stays}\nanother {KEY}\n")
        running.gateway.reload_keys()
        for stream in ended:
            assert "the key of this request was taken away" in "".join(stream)
        answer = silent.result(PATIENCE)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        until(lambda: running.gateway.drain.running == 1, "they have ended")
        for _ in range(5):
            next(other)
        assert not running.gateway.access._revoked
        stack.close()


def test_metrics_are_for_operators(pool: Pool, tmp_path: Path) -> None:
    keys = secret_file(tmp_path / "keys", f"alice {KEY}\nprometheus {'p' * 32} operator\n")
    with GatewayThread(pool.run_dir, keys=keys) as running:
        responses = [
            httpx.get(f"{running.url}/metrics", headers=headers, timeout=PATIENCE)
            for headers in (
                {},
                {"authorization": f"Bearer {KEY}"},
                {"authorization": f"Bearer {'p' * 32}"},
            )
        ]
    assert [response.status_code for response in responses] == [401, 403, 200]
    assert responses[1].json()["error"]["code"] == "operator_only"
    assert "has to end with `operator`" in responses[1].text


def test_two_keys_in_one_request_are_refused(pool: Pool, tmp_path: Path) -> None:
    """A request with two keys is refused: a proxy may check one, and the gateway the other."""
    keys = secret_file(tmp_path / "keys", f"{KEY}\n")
    right = f"Bearer {KEY}"
    with GatewayThread(pool.run_dir, keys=keys) as running:
        for values in ((right, "Bearer other"), ("Bearer other", right), (right, right)):
            headers = [("authorization", value) for value in values]
            answer = httpx.get(f"{running.url}/v1/models", headers=headers, timeout=PATIENCE)
            assert answer.status_code == 400 and "more than once" in answer.text


def test_errors_name_no_folders_of_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "broken"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "none"}')
    config = f'[models.broken]\npath = "{folder}"\n'
    with Pool(tmp_path, config) as pool, GatewayThread(pool.run_dir) as running:
        body = {"model": "broken", "prompt": "x", "max_tokens": 1}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=PATIENCE)
        shown = httpx.post(f"{running.url}/api/show", json={"model": "broken"}, timeout=PATIENCE)
    assert answer.status_code == 503 and "broken" in answer.text
    assert str(tmp_path) not in answer.text + shown.text
