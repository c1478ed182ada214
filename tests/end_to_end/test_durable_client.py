"""Streams survive the loss of their broker and their connection, token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpool.client import Client, Stream
from mlxpool.common.errors import BrokerLost
from support.counting_checker import expected_ids, text_of
from support.pool import PATIENCE, Pool, reconnects, until
from support.relay import Relay

CONFIG = """
[pool]
drain_grace = 0.0
[models.slow]
path = "builtin:counting"
sequences = 4
counting.step_us = {step}
"""
COUNT = 300
# Microseconds per token before and after a fault: streams cannot end before it, and end soon after.
BEFORE, AFTER = 200_000, 1000


def started(client: Client, seed: int) -> Stream:
    """Returns a stream that has received its first ids."""
    stream = client.stream("slow", "hello", seed=seed, max_tokens=COUNT, batch=seed % 2 == 0)
    until(lambda: stream.facts, "the first ids")
    return stream


def accepted(pool: Pool) -> int:
    """Returns the number of streams that the broker has accepted since its start."""
    return int(pool.ask("stats")["requests"]["accepted"])


def whole(stream: Stream, seed: int) -> None:
    """Asserts that a stream has every id once and in order, and the text of these ids."""
    deltas = list(stream)
    ids = [token for delta in deltas for token in delta.ids]
    assert ids == list(stream.result.ids) == expected_ids("hello", seed, COUNT)
    assert "".join(delta.text for delta in deltas) == stream.result.text == text_of(ids)
    assert stream.result.reason == "length"


def test_a_killed_broker_that_comes_back(tmp_path: Path) -> None:
    config = CONFIG.format(step=BEFORE)
    with Pool(tmp_path, config) as pool, pool.client(broker_grace=PATIENCE) as client:
        streams = {seed: started(client, seed) for seed in range(3)}
        for step in (BEFORE, AFTER):
            pool.kill()
            pool.config.write_text(CONFIG.format(step=step))
            pool.start()
            until(lambda: accepted(pool) == len(streams), "the new broker has taken them over")
        for seed, stream in streams.items():
            whole(stream, seed)
        assert accepted(pool) == len(streams)


def test_a_stream_that_is_not_durable_ends_with_its_broker(tmp_path: Path) -> None:
    config = CONFIG.format(step=BEFORE)
    with Pool(tmp_path, config) as pool, pool.client(broker_grace=PATIENCE) as client:
        stream = client.stream("slow", "hello", seed=1, durable=False)
        until(lambda: stream.facts, "the first ids")
        pool.kill()
        pool.start()
        with pytest.raises(BrokerLost):
            stream.read()


def cut(relay: Relay, client: Client) -> None:
    relay.cut()


def freeze(relay: Relay, client: Client) -> None:
    """Freezes the broker until the client has made a new connection."""
    relay.freeze()
    until(lambda: reconnects(client), "the client has a new connection")
    relay.thaw()


@pytest.mark.parametrize("fault", [cut, freeze])
def test_a_bad_network(tmp_path: Path, fault: Callable[[Relay, Client], None]) -> None:
    with (
        Pool(tmp_path, CONFIG.format(step=BEFORE)) as pool,
        Relay(("ipc", str(pool.run_dir / "front.ipc"))) as relay,
        Client(endpoint=relay.endpoint, connect_timeout=PATIENCE, broker_grace=PATIENCE) as client,
    ):
        streams = {seed: started(client, seed) for seed in range(3)}
        fault(relay, client)
        pool.config.write_text(CONFIG.format(step=AFTER))
        pool.ask("reload")
        for seed, stream in streams.items():
            whole(stream, seed)
            assert stream._open.state.attempt > 1
