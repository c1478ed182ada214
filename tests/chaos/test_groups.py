"""A group of two ranks whose rank 1 is killed, frozen or hangs: its streams lose no token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.engine_faults import FOLLOWER, install_fault
from mlxpool.client import Client
from support.pool import Pool, until
from support.worker_checkpoints import write_checkpoint

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)
pytestmark = pytest.mark.skipif(
    mx.default_device().type == mx.DeviceType.gpu, reason="two ranks need two GPUs"
)

# A file names a kind of pass. At its next pass of this kind, rank 1 removes the file and sleeps.
HANG = """
import os, time

def arm(kind):
    compute = kind._compute

    def hanging(self, spans, message):
        path = os.environ["HANG_FILE"]
        try:
            wanted = open(path).read()
        except OSError:
            wanted = ""
        chunk = any(count > 1 for count in message.counts)
        if wanted and not message.builds and chunk == (wanted == "prefill"):
            os.remove(path)
            self._progress.awaits(None, len(message.ids) * chunk, len(message.rows))
            time.sleep(10**6)
        compute(self, spans, message)

    kind._compute = hanging
"""
# The limits are short: a pass of this model takes milliseconds, and time without a processor does
# not count.
SETTINGS = """
[pool]
prefill_limit = 1.5
step_limit = 1.5
restart_delay = 0.05
stop_grace = 1.0
[models.one]
path = "{folder}"
context = 1024
sequences = 2
[models.two]
path = "{folder}"
context = 1024
sequences = 2
devices = 2
memory_limit = 2147483648
prefix_cache = "off"
pin = true
"""
PROMPTS = ("one", "a longer prompt, of more tokens")
TOKENS = 120  # enough ids for a stream to be running when a fault comes


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("group")
    model = write_checkpoint(
        folder / "model", model_type="qwen3", head_dim=16, max_position_embeddings=1024
    )
    environment = install_fault(folder, HANG, FOLLOWER)
    settings = SETTINGS.format(folder=model)
    with Pool(
        folder, settings, environment={**environment, "HANG_FILE": str(folder / "hang")}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(pool: Pool) -> Iterator[Client]:
    with pool.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def expected(client: Client) -> list[list[int]]:
    """Returns the token ids that the model generates on a single device."""
    return [_ids(client, "one", number) for number in range(len(PROMPTS))]


def _options(number: int) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "seed": number, "ignore_eos": True}


def _ids(client: Client, model: str, number: int) -> list[int]:
    return list(client.generate(model, PROMPTS[number], **_options(number)).ids)


def _rank(pool: Pool) -> int:
    """Returns the process id of rank 1, once the worker of two ranks is ready."""

    def found() -> int:
        worker = pool.worker("two/0")
        ranks = worker.get("ranks") or [{}]
        pid = ranks[0].get("pid") if worker["state"] == "ready" else None
        return pid if pid and os.path.exists(f"/proc/{pid}") else 0

    return int(until(found, "rank 1 is there"))


def test_the_group_gives_the_tokens_of_one_device(
    pool: Pool, client: Client, expected: list[list[int]]
) -> None:
    assert [_ids(client, "two", number) for number in range(len(PROMPTS))] == expected
    worker = pool.worker("two/0")
    assert worker["layout"] == "pool" and worker["ranks"][0]["rank"] == 1
    assert _rank(pool) != worker["pid"]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (signal.SIGKILL, "killed by SIGKILL"),
        (signal.SIGSTOP, "rank 1: stopped by a signal (SIGSTOP)"),
        ("decode", "rank 1: hung in decode"),
        ("prefill", "rank 1: hung in prefill"),
    ],
    ids=["killed", "frozen", "hangs in decode", "hangs in prefill"],
)
def test_every_stream_goes_on(
    pool: Pool, client: Client, expected: list[list[int]], fault: signal.Signals | str, cause: str
) -> None:
    rank, before, said = _rank(pool), pool.worker("two/0")["restarts"], len(pool.log())
    if fault == "prefill":
        _arm(pool, fault)
    streams = [client.stream("two", PROMPTS[n], **_options(n)) for n in range(len(PROMPTS))]
    reads = [iter(stream) for stream in streams]
    if fault != "prefill":
        for deltas in reads:
            next(deltas)
    if isinstance(fault, signal.Signals):
        os.kill(rank, fault)
    elif fault == "decode":
        _arm(pool, fault)
    results = [stream.read() for stream in streams]
    assert [list(result.ids) for result in results] == expected
    if max(result.attempts for result in results) == 1:  # on a busy machine the fault came late
        assert [_ids(client, "two", number) for number in range(len(PROMPTS))] == expected
    until(lambda: pool.worker("two/0")["restarts"] > before, "the group is replaced")
    assert cause in pool.log()[said:]
    until(lambda: not os.path.exists(f"/proc/{rank}"), "rank 1 of the worker before is gone")


def _arm(pool: Pool, kind: str) -> None:
    Path(pool.environment["HANG_FILE"]).write_text(kind)
