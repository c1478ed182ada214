"""The threads that post notices, and what they bring back to the broker's loop.

Threads, not a process: they spend their time in calls that release the interpreter (names,
connections, TLS, waiting), there are few, and what they share with the broker is two queues.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from time import time

from mlxpool.broker.notices.posting import Outcome, Poster
from mlxpool.broker.notices.signing import headers, read_secrets
from mlxpool.common.closing import Closing
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.web_targets import Allowed

THREADS = 4


@dataclass(frozen=True, slots=True)
class Posting:
    """A notice to be posted. `end_seq` names it, `id` is what the receiver knows it by."""

    end_seq: int
    id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class PostingRules:
    """What the settings say. `secret` is the file of the secrets, None: notices are unsigned."""

    allowed: Allowed
    secret: Path | None


class Courier(Closing):
    """Posts what it is given. `wake` is called, on its threads, when there is an outcome.

    `rules` reads the settings in force, for each try anew.
    """

    def __init__(
        self,
        rules: Callable[[], PostingRules],
        wake: Callable[[], None],
        poster: Poster | None = None,
        threads: int = THREADS,
    ) -> None:
        self._rules, self._wake = rules, wake
        self._poster = poster
        self._waiting: SimpleQueue[Posting | None] = SimpleQueue()
        self._outcomes: deque[tuple[int, Outcome]] = deque()
        self._threads = [
            threading.Thread(target=self._run, name=f"notices-{number}", daemon=True)
            for number in range(threads)
        ]
        self._started = False

    def post(self, posting: Posting) -> None:
        """Have a notice posted; its outcome will come. The first one starts the threads."""
        if not self._started:
            self._started = True
            self._poster = self._poster or Poster()
            for thread in self._threads:
                thread.start()
        self._waiting.put(posting)

    def take(self) -> list[tuple[int, Outcome]]:
        """The outcomes since the last call: (end_seq, outcome)."""
        taken = []
        while self._outcomes:
            taken.append(self._outcomes.popleft())
        return taken

    def close(self) -> None:
        """Begin nothing more. A try under way ends with the process: it is made again."""
        if self._started:
            for _ in self._threads:
                self._waiting.put(None)

    def _run(self) -> None:
        while (posting := self._waiting.get()) is not None:
            try:
                outcome = self._post(posting)
            except Exception as bug:  # a bug of ours must not end the thread
                outcome = Outcome(False, f"it could not be posted: {bug!r:.200}")
            self._outcomes.append((posting.end_seq, outcome))
            self._wake()

    def _post(self, posting: Posting) -> Outcome:
        assert self._poster is not None
        rules = self._rules()
        try:
            secrets = () if rules.secret is None else read_secrets(rules.secret)
        except ConfigError as error:
            return Outcome(False, str(error))
        signed = headers(secrets, posting.id, int(time()), posting.body) if secrets else {}
        named = {"webhook-id": posting.id, **signed}
        return self._poster.post(posting.url, posting.body, named, rules.allowed)
