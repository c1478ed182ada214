"""Several choices, and log-probabilities of prompts, under faults: the results do not change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chaos.harness import LIMITS, WEIGHTS_LIMITS
from mlxpool.client import Choices, ChoicesStream, Client, Result
from support.pool import Pool, until

pytest.importorskip("mlx.core")

DEMO = (
    WEIGHTS_LIMITS
    + """
[models.demo]
path = "builtin:demo"
replicas = 2
sequences = 8
"""
)
SLOW = (
    LIMITS
    + """
[models.slow]
path = "builtin:counting"
counting.prefill_us = 20000
counting.step_us = 20000
counting.joint = 1
batch = 16
"""
)
PROMPT = "import os\n\n\n" + "\n".join(f"def walk{i}(top):\n    return {i}" for i in range(20))
TOKENS = 60
MANY = 400  # too many for a worker to finish before it is killed
EIGHT: dict[str, Any] = {"n": 8, "max_tokens": MANY, "seed": 3, "ignore_eos": True}
REPORTED = "0123456789" * 15
REPORT: dict[str, Any] = {"max_tokens": 3, "seed": 1, "echo": True, "prompt_logprobs": 1}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool"), DEMO) as running:
        yield running


@pytest.fixture(scope="module")
def slow_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("slow"), SLOW) as running:
        yield running


@pytest.fixture(scope="module")
def eight(pool: Pool) -> Choices:
    """Returns the choices of an undisturbed run."""
    with pool.client() as client:
        whole: Choices = client.choices("demo", PROMPT, **EIGHT)
    return whole


@pytest.fixture(scope="module")
def report(slow_pool: Pool) -> Result:
    """Returns the result, with log-probabilities of the prompt, of an undisturbed run."""
    with slow_pool.client() as client:
        whole: Result = client.generate("slow", REPORTED, **REPORT)
    return whole


def kill_busy(pool: Pool, model: str) -> None:
    """Kills the worker that reports a running request."""

    def busy() -> list[str]:
        rows = [w for w in pool.ask("ps")["workers"] if w["slot"].startswith(f"{model}/")]
        return [row["slot"] for row in rows if row["running"]]

    pool.kill_worker(until(busy, "a worker is busy")[0])


def restart_the_broker(pool: Pool) -> None:
    pool.kill()
    pool.start()


def apart(fault: Callable[[], None]) -> None:
    """Runs a fault in another thread and waits for it: meanwhile the caller reads no stream."""
    thread = threading.Thread(target=fault)
    thread.start()
    thread.join()


def read(client: Client, at: int, fault: Callable[[], None], **options: Any) -> Choices:
    """Reads all choices of a stream; causes the fault after `at` ids of all choices together."""
    stream: ChoicesStream
    with client.stream_choices("demo", PROMPT, **options) as stream:
        had, struck = 0, False
        for delta in stream:
            had += len(delta.ids)
            if had >= at and not struck:
                struck = True
                apart(fault)
        assert struck
        return stream.result


@pytest.mark.parametrize("at", [1, 600])
def test_a_killed_worker_changes_no_choice(
    pool: Pool, client: Client, eight: Choices, at: int
) -> None:
    hit = read(client, at, lambda: kill_busy(pool, "demo"), **EIGHT)
    assert [choice.ids for choice in hit] == [choice.ids for choice in eight]
    assert [choice.text for choice in hit] == [choice.text for choice in eight]
    assert [choice.reason for choice in hit] == [choice.reason for choice in eight]
    assert sum(choice.attempts > 1 for choice in hit) > 0
    assert hit.usage["completion_tokens"] == eight.usage["completion_tokens"]


def test_a_restarted_broker_changes_no_choice(pool: Pool, client: Client) -> None:
    ask: dict[str, Any] = {"n": 4, "max_tokens": TOKENS, "seed": 3, "prompt_logprobs": 1}
    whole: Choices = client.choices("demo", PROMPT, **ask)
    hit = read(client, 30, lambda: restart_the_broker(pool), **ask, window=8)
    assert [choice.ids for choice in hit] == [choice.ids for choice in whole]
    assert [entry["id"] for entry in hit.prompt] == [entry["id"] for entry in whole.prompt]


@pytest.mark.parametrize("fault", ["worker", "broker"])
@pytest.mark.parametrize("at", [1, 20, 100])
def test_no_token_of_a_prompt_is_reported_twice_or_lost(
    slow_pool: Pool, report: Result, fault: str, at: int
) -> None:
    """The fault comes when log-probabilities of `at` of the prompt's 150 tokens have arrived."""
    positions: list[int] = []
    text, struck = "", False
    with (
        slow_pool.client() as client,
        client.stream("slow", REPORTED, **REPORT) as s,
    ):
        for delta in s:
            positions += [entry["prompt"] for entry in delta.prompt]
            text += delta.text
            if len(positions) >= at and not struck:
                struck = True
                assert fault == "broker" or len(positions) < 150, "the fault comes too late"
                apart(
                    (lambda: kill_busy(slow_pool, "slow"))
                    if fault == "worker"
                    else (lambda: restart_the_broker(slow_pool))
                )
        result = s.result
    assert struck and positions == [*range(150)]
    assert (result.text, result.ids, result.prompt) == (report.text, report.ids, report.prompt)
    assert text == report.text
    if fault == "worker":
        assert result.attempts == 2
