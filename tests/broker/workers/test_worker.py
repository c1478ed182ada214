"""How long a slot stays empty after failures."""

from __future__ import annotations

import pytest

from mlxpool.broker.workers.worker import restart_delay


@pytest.mark.parametrize(
    ("failures", "delay"), [(-1, 0), (0, 0), (1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (10**9, 60)]
)
def test_the_restart_delay_doubles_up_to_a_bound(failures: int, delay: float) -> None:
    assert restart_delay(failures, 1.0, 60.0) == delay
