"""Fork servers of these tests may be slow, because a machine may be busy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxpool.worker.preparation import lanes
from support.pool import PATIENCE


@pytest.fixture(scope="module", autouse=True)
def patient_with_fork_servers() -> Iterator[None]:
    """A fork server has PATIENCE seconds for its start and for each reply.

    A slow fork server would otherwise be killed with its lanes, and their jobs would start again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "START_TIMEOUT", PATIENCE)
        patch.setattr(lanes, "REPLY_TIMEOUT", PATIENCE)
        yield
