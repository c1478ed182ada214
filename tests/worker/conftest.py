"""What is set for the tests of the worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def small_on_a_gpu() -> Iterator[None]:
    """Each engine of a test would take a quarter of the card for its pool, and there are many."""
    with pytest.MonkeyPatch.context() as patch:
        if _on_cuda():
            patch.setattr("mlxpool.worker.engine.back_end.SHARE", 0.02)
        yield


def _on_cuda() -> bool:
    try:
        import mlx.core as mx
    except ImportError:
        return False
    return bool(mx.cuda.is_available())
