"""An upgrade as in docs/deploy.md: drain, restart, resume; no stream is lost."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from mlxpool.client import Client, Stream
from mlxpool.common.errors import Draining
from support.counting_checker import expected_ids, text_of
from support.free_ports import free_port
from support.pool import PATIENCE, Pool, until

CONFIG = """
[pool]
front = ["tcp://127.0.0.1:{port}"]
[models.fast]
path = "builtin:counting"
counting.step_us = 1000
[models.slow]
path = "builtin:counting"
counting.step_us = {slow}
"""
FAST, SLOW = 150, 300  # tokens
# Microseconds per token before and after the upgrade: long streams outlast it, and end soon after.
BEFORE, AFTER = 300_000, 1000
SHORT, LONG = range(4), range(10, 14)  # seeds


def ask(client: Client, model: str, seed: int, count: int) -> Stream:
    return client.stream(model, "hello", seed=seed, max_tokens=count, batch=seed % 2 == 0)


def whole(stream: Stream, seed: int, count: int) -> None:
    """Asserts that a stream has every id once and in order, and the text of these ids."""
    deltas = list(stream)
    ids = [token for delta in deltas for token in delta.ids]
    assert ids == list(stream.result.ids) == expected_ids("hello", seed, count)
    assert "".join(delta.text for delta in deltas) == stream.result.text == text_of(ids)
    assert stream.result.reason == "length"
    assert list(stream) == []


def begun(streams: Sequence[Stream]) -> bool:
    return all(stream.facts for stream in streams)


def accepted(pool: Pool) -> int:
    """Returns the number of streams that the broker has accepted since its start."""
    return int(pool.ask("stats")["requests"]["accepted"])


def upgrade(pool: Pool, port: int) -> None:
    """Restarts the broker as `systemctl restart` does."""
    assert pool.stop() == 0
    pool.config.write_text(CONFIG.format(port=port, slow=AFTER))
    pool.start()


@pytest.fixture
def port() -> int:
    return free_port()


def test_a_restart_without_drain(tmp_path: Path, port: int) -> None:
    config = CONFIG.format(port=port, slow=BEFORE)
    with Pool(tmp_path, config) as pool, pool.client(broker_grace=PATIENCE) as client:
        streams = {seed: ask(client, "slow", seed, SLOW) for seed in LONG}
        until(lambda: begun([*streams.values()]), "every stream has begun")
        upgrade(pool, port)
        for seed, stream in streams.items():
            whole(stream, seed, SLOW)
        assert accepted(pool) == len(LONG), "the new broker has taken them over"


def test_drain_restart_resume(tmp_path: Path, port: int) -> None:
    with ExitStack() as stack:
        pool = stack.enter_context(Pool(tmp_path, CONFIG.format(port=port, slow=BEFORE)))
        clients = (
            stack.enter_context(pool.client(broker_grace=PATIENCE)),
            stack.enter_context(
                Client(
                    endpoint=f"tcp://127.0.0.1:{port}",
                    connect_timeout=PATIENCE,
                    broker_grace=PATIENCE,
                )
            ),
        )
        short = {seed: ask(clients[seed % 2], "fast", seed, FAST) for seed in SHORT}
        long = {seed: ask(clients[seed % 2], "slow", seed, SLOW) for seed in LONG}
        until(lambda: begun([*short.values(), *long.values()]), "every stream has begun")
        old = pool.ask("ps")["broker"]

        assert pool.cli("drain", "--timeout", "3600").returncode == 0
        for seed, stream in short.items():
            whole(stream, seed, FAST)
        stats = pool.ask("stats")["requests"]
        assert stats["done"] == len(SHORT), "what is soon done ends in the old broker"
        for client in clients:
            with pytest.raises(Draining):  # new requests are refused
                client.generate("fast", "hello", max_tokens=1)
        assert pool.ask("ps")["broker"]["state"] == "draining"

        upgrade(pool, port)
        new = pool.ask("ps")["broker"]
        assert new["pid"] != old["pid"] and new["boot"] != old["boot"]
        for seed, stream in long.items():
            whole(stream, seed, SLOW)
        assert accepted(pool) == len(LONG), "what was under way goes on in the new one"
        for client in clients:
            assert client.generate("fast", "hello", max_tokens=1).reason == "length"
        stats = pool.ask("stats")
        assert stats["conserved"] is True
        assert stats["requests"]["done"] == len(LONG) + len(clients)
        assert stats["requests"]["failed"] == 0
