"""Fixtures of several tests that run processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.scripted_gateway import Served


@pytest.fixture
def served() -> Iterator[Served]:
    """Scripted brokers behind gateways; they end with the test."""
    made = Served()
    yield made
    made.close()
