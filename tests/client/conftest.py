"""Fixtures for a broker that a test of the client controls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxpool.client import Client
from support.fake_broker import PATIENCE, FakeBroker, fake_broker


@pytest.fixture
def closed_broker() -> Iterator[FakeBroker]:
    """A broker whose socket is not open yet."""
    with fake_broker() as fake:
        yield fake


@pytest.fixture
def broker(closed_broker: FakeBroker) -> FakeBroker:
    return closed_broker.open()


@pytest.fixture
def client(broker: FakeBroker) -> Iterator[Client]:
    with broker.client(broker_grace=PATIENCE) as new_client:
        yield new_client
