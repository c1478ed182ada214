"""Fixtures of several tests that run processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxpool.client import Client
from support.gateway_thread import GatewayThread
from support.pool import Pool
from support.scripted_gateway import Served


@pytest.fixture
def client(pool: Pool) -> Iterator[Client]:
    """A client of the pool of the module."""
    with pool.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def url(pool: Pool) -> Iterator[str]:
    """A gateway without keys for the pool of the module."""
    with GatewayThread(pool.run_dir) as gateway:
        yield gateway.url


@pytest.fixture
def served() -> Iterator[Served]:
    """Scripted brokers behind gateways; they end with the test."""
    made = Served()
    yield made
    made.close()
