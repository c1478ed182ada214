"""Longer waits for other processes in processes that tests start, because a machine may be busy.

Users get an error after 2 or 5 seconds without an answer of a broker. Python imports this module if
its folder is on the path (tests/conftest.py). When a module that is named below is imported, this
module changes its waits to TESTS_PATIENCE seconds, by default 60. A test whose broker never answers
sets a shorter time.

A process that prepares a long text enters the idle class of Linux, in which it gets almost no
time of a busy processor. In tests it does so only if TESTS_IDLE_CLASS is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PATIENCE = float(os.environ.get("TESTS_PATIENCE", 60))
IDLE_CLASS = bool(os.environ.get("TESTS_IDLE_CLASS"))


def _lanes(module: ModuleType) -> None:
    if not IDLE_CLASS:
        module._become_idle_class = lambda: None  # type: ignore[attr-defined]


def _supervised_gateways(module: ModuleType) -> None:
    module.ABORT_GRACE = max(PATIENCE, module.ABORT_GRACE)  # type: ignore[attr-defined]


def _fork_servers(module: ModuleType) -> None:
    module.REPLY_TIMEOUT = max(PATIENCE, module.REPLY_TIMEOUT)  # type: ignore[attr-defined]


def _commands(module: ModuleType) -> None:
    module.ask.__kwdefaults__["timeout"] = PATIENCE
    module.ANSWER_TIMEOUT = PATIENCE  # type: ignore[attr-defined]


def _clients(module: ModuleType) -> None:
    module.CONNECT_GRACE = PATIENCE  # type: ignore[attr-defined]
    # Only the broker may report a deadline, even if it is late. The defaults of the class Pace are
    # fixed when the class is made, so a new class replaces it.
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
    "mlxpool.broker.edge.http_gateway": _supervised_gateways,
    "mlxpool.broker.http.server": _page_connections,
    "mlxpool.broker.http.loop_exchange": _pages,
    "mlxpool.cli.admin": _commands,
    "mlxpool.cli.request_flags": _requests,
    "mlxpool.client.retry": _clients,
    "mlxpool.worker.preparation.lane": _lanes,
    "mlxpool.worker.preparation.lanes": _fork_servers,
}


class Finder:
    """An import finder that changes the waits of the modules in CHANGED.

    It finds these modules as Python does, and changes each module after the module's code has run.
    """

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
