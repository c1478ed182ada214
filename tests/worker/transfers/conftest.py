"""What is set for the tests of transfers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def machine(on_cuda: bool) -> Iterator[None]:
    """Runs CUDA kernels: on the GPU, or simulated where there is none."""
    if on_cuda:
        yield
        return
    from support import simt  # it needs MLX

    with simt.simulated():
        yield
