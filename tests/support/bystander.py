"""A stream that runs during an attack on the broker, and must not be affected by the attack."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from mlxpool.client import Client, Pace
from mlxpool.common.closing import Closing
from support.counting_checker import expected_ids
from support.pool import until

PROMPT, SEED = "bystander", 7
MORE_IDS = 20  # number of token ids that must arrive after the attack
# A client that waits as long as a busy broker needs. It only sends its request again if its
# connection ended, or if the broker asks for it.
UNHURRIED = Pace(silence=math.inf, answer=(math.inf,))


class Bystander(Closing):
    """A long stream of a counting model, which a separate thread reads."""

    def __init__(self, make: Callable[..., Client], model: str = "counting") -> None:
        """`make` makes a client with the given options."""
        self.client = make(pace=UNHURRIED)
        self.stream = self.client.stream(model, PROMPT, seed=SEED, max_tokens=10**6)
        self.ids: list[int] = []
        self.attempts: set[int] = set()
        self.error: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        until(lambda: self.ids or self.error, "the bystander's first id")

    def _read(self) -> None:
        try:
            for delta in self.stream:
                self.ids.extend(delta.ids)
                self.attempts.add(self.stream._open.state.attempt)
                if self._over.is_set():
                    return
        except Exception as error:
            self.error = error

    def check_unaffected(self) -> None:
        """Asserts that more ids arrive, all ids are right, and the connection never ended."""
        self.check_ids(MORE_IDS)
        assert self.attempts == {1}

    def check_ids(self, more: int) -> None:
        """Asserts that `more` further token ids arrive, and that all ids are right."""
        had = len(self.ids)
        until(lambda: self.error or len(self.ids) >= had + more, "the bystander goes on")
        assert self.error is None
        ids = list(self.ids)
        assert ids == expected_ids(PROMPT, SEED, len(ids))

    def close(self) -> None:
        self._over.set()
        until(lambda: self.error or not self._thread.is_alive(), "the bystander's end")
        self.client.close()
        self._thread.join()
