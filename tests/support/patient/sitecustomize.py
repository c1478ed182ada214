"""Longer waits for a broker in processes that tests start, because a machine may be busy.

Users get an error after 2 or 5 seconds without an answer of a broker. Python imports this module if
its folder is on the path (tests/conftest.py). When a module that is named below is imported, this
module changes its waits. A test without an answering broker sets TESTS_PATIENCE, in seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PATIENCE = float(os.environ.get("TESTS_PATIENCE", 60))


def _commands(module: ModuleType) -> None:
    module.ask.__kwdefaults__["timeout"] = PATIENCE
    module.ANSWER_TIMEOUT = PATIENCE  # type: ignore[attr-defined]


def _clients(module: ModuleType) -> None:
    module.CONNECT_GRACE = PATIENCE  # type: ignore[attr-defined]
    # The class already exists with its defaults, so a new class replaces it: only the broker may
    # report a deadline, even if late.
    import msgspec

    patient = [(name, float, PATIENCE) for name in ("overdue", "connect_grace")]
    module.Pace = msgspec.defstruct(  # type: ignore[attr-defined]
        "Pace", patient, bases=(module.Pace,), frozen=True
    )


def _requests(module: ModuleType) -> None:
    module.IPC_GRACE = module.TCP_GRACE = PATIENCE  # type: ignore[attr-defined]


def _pages(module: ModuleType) -> None:
    module.MAX_WAIT = PATIENCE  # type: ignore[attr-defined]


def _page_connections(module: ModuleType) -> None:
    module.MAX_SECONDS = 2 * PATIENCE  # type: ignore[attr-defined]


CHANGED: dict[str, Callable[[ModuleType], None]] = {
    "mlxpool.broker.http.server": _page_connections,
    "mlxpool.broker.http.loop_exchange": _pages,
    "mlxpool.cli.admin": _commands,
    "mlxpool.cli.request_flags": _requests,
    "mlxpool.client.retry": _clients,
}


class Finder:
    """Finds the listed modules as Python does; changes the waits of each after its code has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a spec whose loader also changes the module; None for other modules."""
        change = CHANGED.get(name)
        if change is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
