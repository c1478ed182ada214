"""Fixtures that several tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxpool.client import Client
from support.pool import Pool


@pytest.fixture
def client(pool: Pool) -> Iterator[Client]:
    """A client of the module's pool, with a timeout longer than any fault."""
    with pool.client() as connected:
        yield connected
