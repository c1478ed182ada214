"""A stream that runs beside an attack and must not notice it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mlxpool.client import Client
from mlxpool.common.closing import Closing
from support.counting_checker import expected_ids
from support.pool import until

PROMPT, SEED = "bystander", 7
MORE = 20  # ids that have to come after the attack


class Bystander(Closing):
    """One long stream of the counting model; leaving the `with` block checks all of it."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self.client = make()
        self.stream = self.client.stream("counting", PROMPT, seed=SEED, max_tokens=10**6)
        self.ids: list[int] = []
        self.sendings: set[int] = set()
        self.error: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        until(lambda: self.ids or self.error, "the bystander's first id")

    def _read(self) -> None:
        try:
            for delta in self.stream:
                self.ids.extend(delta.ids)
                self.sendings.add(self.stream._state.attempt)
                if self._over.is_set():
                    return
        except Exception as error:
            self.error = error

    def unmoved(self) -> None:
        """It goes on, every id is right, and it never had to be sent again."""
        had = len(self.ids)
        until(lambda: self.error or len(self.ids) >= had + MORE, "the bystander goes on")
        assert self.error is None
        ids = list(self.ids)
        assert ids == expected_ids(PROMPT, SEED, len(ids))
        assert self.sendings == {1}

    def close(self) -> None:
        self._over.set()
        until(lambda: self.error or not self._thread.is_alive(), "the bystander's end")
        self.client.close()
        self._thread.join()
