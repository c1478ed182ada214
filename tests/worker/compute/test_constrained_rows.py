"""Tests the smallest number of forced tokens that constrained rows append in one pass.

A smaller number of forced tokens is appended one by one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxpool.worker.compute.constrained_rows import (
    MIN_RUN,
    MIN_RUN_OF_ALL,
    NO_RUN,
    ConstrainedRows,
)


class Rows:
    """A stand-in for Generations with given numbers of rows, and of rows with a constraint."""

    def __init__(self, rows: int, constrained: int) -> None:
        self._rows, self.constrained_count = rows, constrained

    def __len__(self) -> int:
        return self._rows


@pytest.mark.parametrize(
    ("run_lines", "rows", "constrained", "least"),
    [
        (0, 8, 8, MIN_RUN_OF_ALL),
        (0, 8, 1, MIN_RUN),
        (128, 8, 8, MIN_RUN_OF_ALL),
        (128, 127, 127, MIN_RUN_OF_ALL),
        (128, 128, 128, NO_RUN),  # a pass with a run would have more than 128 lines
        (128, 8, 7, NO_RUN),  # the row without a format would wait for such a pass
    ],
)
def test_runs_are_read_where_no_row_loses_by_it(
    run_lines: int, rows: int, constrained: int, least: int
) -> None:
    limits = SimpleNamespace(run_lines=run_lines)
    engine: Any = SimpleNamespace(limits=limits, mask_memory=lambda lines: None)
    constrained_rows = ConstrainedRows(engine, cast("Any", Rows(rows, constrained)))
    assert constrained_rows.min_run() == least
