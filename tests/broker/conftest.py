"""Fixtures of the tests of the core."""

from __future__ import annotations

import pytest

from support.core_harness import Story


@pytest.fixture
def story() -> Story:
    """A simulated pool with two models, without workers and clients."""
    return Story()
