"""The thread that posts notices and returns their outcomes to the broker's loop.

The thread's event loop mostly waits for sockets and signs a few bytes. The thread shares two queues
with the broker.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import time

from msgspec import Struct

from mlxpool.broker.notices.posting import Outcome, Poster
from mlxpool.common.closing import Closing
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.files import open_regular
from mlxpool.common.web_targets import Allowed

PREFIX = "whsec_"
MIN_SECRET, MAX_SECRET = 24, 64  # bytes
MAX_SECRETS = 4  # all secrets sign, so that a new secret can replace an old one
MAX_FILE = 1024  # bytes
SETTING = "pool.job_notify_secret"


def read_secrets(file: Path) -> tuple[bytes, ...]:
    """Returns the secrets in a file, one secret a line.

    Raises ConfigError; its text never has a secret.
    """
    try:
        with open_regular(file) as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read(MAX_FILE + 1).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"{SETTING}: cannot read {file}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(
            f"{SETTING}: {file} can be read by others (mode {mode:04o}): chmod 600 it, and write"
            " another secret if somebody may have seen it"
        )
    lines = text.split()
    if not 1 <= len(lines) <= MAX_SECRETS or len(text) > MAX_FILE:
        raise ConfigError(
            f"{SETTING}: {file} must have 1 to {MAX_SECRETS} secrets, one a line, it has"
            f" {len(lines)}"
        )
    return tuple(_secret(line, file) for line in lines)


def _secret(line: str, file: Path) -> bytes:
    try:
        secret = base64.b64decode(line.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not line.startswith(PREFIX) or not MIN_SECRET <= len(secret) <= MAX_SECRET:
        raise ConfigError(
            f"{SETTING}: each line of {file} must be {PREFIX} and {MIN_SECRET} to {MAX_SECRET}"
            f" bytes in base64: make one with `echo {PREFIX}$(openssl rand -base64 32)`"
        )
    return secret


def headers(secrets: Sequence[bytes], id: str, timestamp: int, body: bytes) -> Mapping[str, str]:
    """Returns the headers that identify and sign a notice. `timestamp`: the time of the attempt."""
    signed = b"%s.%d.%s" % (id.encode(), timestamp, body)
    signatures = (
        "v1," + base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()
        for secret in secrets
    )
    return {
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
    }


CLOSE_TIMEOUT = 10.0  # seconds after which `close` abandons a thread that does not end

log = logging.getLogger("mlxpool.broker")


class Posting(Struct, frozen=True):
    """A notice to be posted. `end_seq` is its number in the store, `id` its id for the receiver."""

    end_seq: int
    id: str
    url: str
    body: bytes


class PostingRules(Struct, frozen=True):
    """The settings for posting notices.

    `secret` is the file of the secrets, or None if notices are not signed.
    """

    allowed: Allowed
    secret: Path | None


class NoticeSender(Closing):
    """Posts notices. Its thread calls `wake` when there is an outcome.

    `rules` returns the present settings; each attempt calls it. The caller bounds the number of
    notices under way, because each has a task.
    """

    def __init__(
        self,
        rules: Callable[[], PostingRules],
        wake: Callable[[], None],
        make_poster: Callable[[], Poster] = Poster,
    ) -> None:
        """`make_poster` is called on the thread, because it takes time to read certificates."""
        self._rules, self._wake, self._make_poster = rules, wake, make_poster
        self._outcomes: deque[tuple[int, Outcome]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._poster: Poster | None = None  # used only on the thread, like the tasks
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, posting: Posting) -> None:
        """Queues a notice. `take` returns its outcome later. The first notice starts the thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._serve, args=(self._loop,), name="notices", daemon=True
            )
            self._thread.start()
        self._loop.call_soon_threadsafe(self._begin, posting)

    def take(self) -> list[tuple[int, Outcome]]:
        """Returns the outcomes since the last call as (end_seq, outcome)."""
        taken = []
        while self._outcomes:
            taken.append(self._outcomes.popleft())
        return taken

    def close(self) -> None:
        """Ends the thread. Attempts under way are cut off; the next broker repeats them."""
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
        except Exception as bug:  # a bug affects an attempt, not the thread
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
