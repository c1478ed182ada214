"""The end of the broker: begun once, by a signal, an operator or a completed drain."""

from __future__ import annotations

from mlxpool.broker.admin.service_notifier import ServiceNotifier
from mlxpool.broker.interface import events as ev
from mlxpool.broker.interface.ports import Perform


class Lifecycle:
    """Owned by the broker's thread. The loop ends when `stopping` and the last worker has ended."""

    def __init__(self, perform: Perform, notifier: ServiceNotifier) -> None:
        self.stopping = False
        self._perform = perform
        self._notifier = notifier

    def stop(self, now: float, *, final: bool) -> None:
        """End every stream, then the workers. `final`: no other broker follows."""
        if not self.stopping:
            self.stopping = True
            self._notifier.stopping()
            self._perform(ev.Shutdown(final), now)
