"""What the tests of the core share."""

from __future__ import annotations

import pytest

from support.core_harness import Story


@pytest.fixture
def story() -> Story:
    """A pool with two models, nobody there yet."""
    return Story()
