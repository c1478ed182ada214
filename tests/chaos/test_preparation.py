"""Preparation that takes too long, too much memory, or never ends affects no other request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from mlxpool.client import Client
from mlxpool.common.errors import BadRequest, ContextExceeded, PoolError
from support.pool import PATIENCE, Pool, gone, until
from support.slow_tokenizer import PANICS, SLOW, split_texts
from support.worker_checkpoints import write_checkpoint

pytest.importorskip("mlx.core")

LARGE = "lorem ipsum " * (2**22 // 12)  # 4 MiB; the tokenizer needs seconds and 400 MB for it
MAX_GROWTH = 300 * 2**20  # bytes
CONFIG = """\
[pool]
prepare_limit = {limit}
client_grace = 3.0
[models.m]
path = "{folder}"
sequences = 16
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool with a small model whose tokenizer splits texts by a pattern that can take very long.

    Its vocabulary has every byte, so that a text has at most as many tokens as bytes.
    """
    path = tmp_path_factory.mktemp("pool")
    folder = split_texts(write_checkpoint(path / "model", max_position_embeddings=32_768))
    with Pool(path, CONFIG.format(folder=folder, limit=1.0)) as opened:
        yield opened


@pytest.fixture(scope="module")
def patient_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool like `pool`, but its tokenizer may take an hour."""
    path = tmp_path_factory.mktemp("patient")
    folder = split_texts(write_checkpoint(path / "model"))
    with Pool(path, CONFIG.format(folder=folder, limit=3600.0)) as opened:
        yield opened


def in_background(work: Callable[[], Any], count: int) -> list[threading.Thread]:
    def run() -> None:
        with pytest.raises(PoolError):
            work()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def completes(client: Client) -> bool:
    with client.stream("m", "hello", max_tokens=3, temperature=0, ignore_eos=True) as stream:
        return len(stream.read().ids) == 3


def test_prompts_over_the_context_are_refused_unread(pool: Pool) -> None:
    """200 prompts of 4 MiB are refused: the worker reads none of them, and takes no memory."""
    with pool.client() as client:
        assert completes(client)
        worker = psutil.Process(int(pool.worker("m/0")["pid"]))
        before, used = worker.memory_info().rss, processor_time(worker)
        for _ in range(200):
            with pytest.raises(ContextExceeded, match=r"4194300 bytes.* context .* 32768"):
                client.stream("m", LARGE, max_tokens=1).read()
        assert processor_time(worker) - used < 60  # reading one prompt takes more than 1 s
        assert worker.memory_info().rss - before < MAX_GROWTH
        assert completes(client)


def processor_time(worker: psutil.Process) -> float:
    """Returns the CPU seconds of a worker and of the processes that prepare its requests."""
    spent = 0.0
    for process in (worker, *worker.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # a preparing process may have ended
            times = process.cpu_times()
            spent += times.user + times.system
    return spent


def test_a_short_request_passes_eight_large_ones(pool: Pool) -> None:
    with pool.client() as client:
        assert completes(client)
        threads = in_background(lambda: client.tokenize("m", LARGE), 8)
        pool.in_state("m/0", phase="prepare")
        assert completes(client)
        assert sum(thread.is_alive() for thread in threads) >= 6
        worker = psutil.Process(int(pool.worker("m/0")["pid"]))
        assert worker.memory_info().rss < 2**30  # eight texts at once in the worker took 3 GB
        for thread in threads:
            thread.join(4 * PATIENCE)
        assert completes(client)


def test_a_worker_that_drains_answers_the_calls_it_has(pool: Pool) -> None:
    with pool.client() as client:
        assert completes(client)
        first = pool.worker("m/0")
        (thread,) = in_background(lambda: client.tokenize("m", SLOW), 1)
        pool.in_state("m/0", phase="prepare")
        pool.ask("restart", slot="m/0")
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert completes(client)
        after = pool.worker("m/0")
        assert after["pid"] != first["pid"]
        assert after["restarts"] == first["restarts"], after["last_exit"]


TOKENIZES = """\
import sys
from mlxpool.client import AsyncClient, Client

Client(sys.argv[1], connect_timeout=200).tokenize("m", ("x" * 20 + " ") * 10**5)
"""


def test_the_call_of_a_killed_client_is_not_prepared_to_its_end(patient_pool: Pool) -> None:
    """The preparation of a text ends when its client is killed.

    Otherwise the text would occupy a tokenizing process for 20 minutes.
    """
    pool = patient_pool
    with pool.client() as client:
        assert completes(client)
        arguments = [sys.executable, "-c", TOKENIZES, str(pool.run_dir)]
        with subprocess.Popen(arguments) as process:
            pool.in_state("m/0", phase="prepare")
            process.kill()
        pool.in_state("m/0", phase="idle")
        (server,) = psutil.Process(int(pool.worker("m/0")["pid"])).children()
        until(
            lambda: sum(not gone(child) for child in server.children()) <= 1, "its lane has ended"
        )
        assert completes(client)


def test_a_caller_that_waits_no_longer_frees_the_lane(patient_pool: Pool) -> None:
    async def ask() -> None:
        async with patient_pool.async_client() as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await client.tokenize("m", SLOW * 100)
            patient_pool.in_state("m/0", phase="idle")

    with patient_pool.client() as client:
        assert completes(client)
        asyncio.run(ask())


@pytest.mark.parametrize("text", [SLOW, PANICS], ids=["hang", "panic"])
def test_a_tokenizer_that_hangs_or_panics_ends_its_request_alone(pool: Pool, text: str) -> None:
    with pool.client() as client:
        assert completes(client)
        before = pool.worker("m/0")
        with client.stream("m", "a", max_tokens=400, ignore_eos=True) as stream:
            deltas = iter(stream)
            next(deltas)
            for _ in range(2):
                with pytest.raises(BadRequest, match="tokenizer"):
                    client.stream("m", text, max_tokens=1).read()
            assert completes(client)
            for _ in deltas:
                pass
            assert len(stream.result.ids) == 400
        after = pool.worker("m/0")
        assert (after["pid"], after["restarts"]) == (before["pid"], before["restarts"])
        assert after["state"] == "ready"
