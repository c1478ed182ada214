"""The last lines of `make test`: its time, and how many more tests `make test-all` runs."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any

import pytest

from support.tiers import Tiers

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

LEFT_OUT = "mlxpool_left_out"  # key in an xdist process's output: the number of deselected cases


class ClosingLines:
    """A pytest plugin for the process that prints the summary."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._started = time.monotonic()
        self._left_out = 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Counts the deselected cases if one process runs all tests."""
        self._left_out += len(items)

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Reads the count of deselected cases from an xdist process.

        Each process counts all cases, so all counts are equal.
        """
        self._left_out = max(self._left_out, getattr(node, "workeroutput", {}).get(LEFT_OUT, 0))

    def pytest_terminal_summary(
        self, terminalreporter: TerminalReporter, config: pytest.Config
    ) -> None:
        """Prints the time of the run, and how many more tests `make test-all` runs."""
        took = _minutes(time.monotonic() - self._started)
        terminalreporter.write_line(
            f"took {took}, {_minutes(_processor_seconds())} of processor time"
        )
        if not config.getoption("full"):
            terminalreporter.write_line(
                f"`make test-all` runs besides: {self._left_out:,} cases of these files, and "
                f"{sum('::' not in key for key in self._tiers.full)} other files (tests/tiers.toml)"
            )


def _processor_seconds() -> float:
    """Returns the processor time of this process and its ended descendants, in seconds."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
