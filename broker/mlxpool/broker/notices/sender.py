"""The thread that posts notices, and what it brings back to the broker's loop.

A thread, not a process: it has an event loop that waits for sockets, signs a few bytes now and
then, and what it shares with the broker is two queues.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import time

from msgspec import Struct

from mlxpool.broker.notices.posting import Outcome, Poster
from mlxpool.broker.notices.signing import headers, read_secrets
from mlxpool.common.closing import Closing
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.web_targets import Allowed

CLOSE_TIMEOUT = 10.0  # seconds for the end of the thread, which waits for nothing

log = logging.getLogger("mlxpool.broker")


class Posting(Struct, frozen=True):
    """A notice to be posted. `end_seq` names it, `id` is what the receiver knows it by."""

    end_seq: int
    id: str
    url: str
    body: bytes


class PostingRules(Struct, frozen=True):
    """What the settings say. `secret` is the file of the secrets, None: notices are unsigned."""

    allowed: Allowed
    secret: Path | None


class NoticeSender(Closing):
    """Posts what it is given. `wake` is called, on its thread, when there is an outcome.

    `rules` reads the settings in force, for each try anew. How many are under way at once is up to
    the caller: each has a task.
    """

    def __init__(
        self,
        rules: Callable[[], PostingRules],
        wake: Callable[[], None],
        make_poster: Callable[[], Poster] = Poster,
    ) -> None:
        """`make_poster` is called on the thread: to read the certificates takes a while."""
        self._rules, self._wake, self._make_poster = rules, wake, make_poster
        self._outcomes: deque[tuple[int, Outcome]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._poster: Poster | None = None  # of the thread, as the tasks are
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, posting: Posting) -> None:
        """Have a notice posted; its outcome will come. The first one starts the thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._serve, args=(self._loop,), name="notices", daemon=True
            )
            self._thread.start()
        self._loop.call_soon_threadsafe(self._begin, posting)

    def take(self) -> list[tuple[int, Outcome]]:
        """The outcomes since the last call: (end_seq, outcome)."""
        taken = []
        while self._outcomes:
            taken.append(self._outcomes.popleft())
        return taken

    def close(self) -> None:
        """End the thread, and each try that is under way: the next broker makes it again."""
        if self._loop is None or self._thread is None:
            return
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            log.warning("the thread of notices has not ended in time")

    # ---- on the thread ---------------------------------------------------------------------------

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(self._cancel_all())
            loop.close()

    async def _cancel_all(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, posting: Posting) -> None:
        task = asyncio.get_running_loop().create_task(self._run(posting))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, posting: Posting) -> None:
        try:
            outcome = await self._post(posting)
        except Exception as bug:  # a bug of ours costs a try, not the thread
            log.exception("a notice could not be posted", extra={"notice": posting.id})
            outcome = Outcome(False, f"it could not be posted: {bug!r:.200}")
        self._outcomes.append((posting.end_seq, outcome))
        self._wake()

    async def _post(self, posting: Posting) -> Outcome:
        if self._poster is None:
            self._poster = self._make_poster()
        rules = self._rules()
        try:
            secrets = () if rules.secret is None else read_secrets(rules.secret)
        except ConfigError as error:
            return Outcome(False, str(error))
        signed = headers(secrets, posting.id, int(time()), posting.body) if secrets else {}
        named = {"webhook-id": posting.id, **signed}
        return await self._poster.post(posting.url, posting.body, named, rules.allowed)
