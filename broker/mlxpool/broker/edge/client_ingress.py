"""Turns clients' frames into events, within the clients' quotas; answers invalid messages."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial

from mlxpool.broker.admin.commands import HANDLERS
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.events import AnswerLater, Perform
from mlxpool.broker.edge.job_service import JobService
from mlxpool.broker.jobs import events as job_events
from mlxpool.broker.metrics import Counters
from mlxpool.broker.requests.quotas import Rates, milliseconds
from mlxpool.broker.security.keyring import may_name_owners
from mlxpool.broker.transport.peers import Peer, Peers
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.errors import BadRequest, JobsOff, OverQuota, PoolError, Unauthorized
from mlxpool.common.protocol import frames, owners
from mlxpool.common.protocol.frames import EXACT_BITS, Header, Message, encoded
from mlxpool.common.protocol.kept import kept_questions
from mlxpool.common.protocol.to_client import Failed

MAX_MESSAGES = 256  # most messages read before other sockets are read
MAX_SECONDS = 0.001  # most seconds, so that a flood of clients does not delay the frames of workers
SMALL = 1024  # most bytes of a message that only maintains streams: ping, ack, cancel
NO_OWNERS = (
    "may not ask on behalf of others: set may_name_owners = true in the section of its key, or"
    " leave owner out"
)


class ClientIngress:
    """Reads the front socket (clients). Owned by the broker's thread."""

    def __init__(
        self,
        peers: Peers,
        perform: Perform,
        counters: Counters,
        *,
        boot: int,
        settings: Callable[[], PoolConfig],
        is_live: Callable[[bytes], bool],
        is_faulty: Callable[[str], bool],
        after_scan: AnswerLater,
        jobs: JobService | None,
        jobs_off: str,
    ) -> None:
        """`is_live` returns whether a request with this id is live.

        `is_faulty` returns whether the files of the named model are unusable. `jobs` is None in a
        pool without jobs; `jobs_off` is then the explanation for clients.

        `after_scan` calls its argument once the models on the disk are known.
        """
        self._peers = peers
        self._perform = perform
        self._counters = counters
        self._boot = boot
        self._settings = settings
        self._is_live = is_live
        self._is_faulty = is_faulty
        self._after_scan = after_scan
        self._jobs = jobs
        self._jobs_off = jobs_off
        self._bytes = Rates()  # rate of received bytes by owner

    def read(self, now: float) -> None:
        """Handles waiting messages: at most MAX_MESSAGES, for at most MAX_SECONDS."""
        end = time.monotonic() + MAX_SECONDS
        for _ in range(MAX_MESSAGES):
            received = self._peers.receive(now)
            if received is None:
                break
            self.on_message(*received, now)
            if time.monotonic() >= end:
                break

    def on_message(self, peer: Peer, parts: list[bytes], now: float) -> None:
        if not peer.admitted:
            self._counters.auth_failures += 1
            self._peers.disconnect(peer)
            return
        charged = not may_name_owners(peer.owner, self._settings().keys)
        if charged and not self._within_quota(peer, peer.owner, parts, now):
            return
        try:
            message = frames.decode(parts)
            number, owner = peer.number, self._owner_of(peer, message)
            if not charged and not self._within_quota(peer, owner, parts, now):
                return
            question = question_of(number, owner, message, new_seed)
            event = None if question else event_of(number, owner, message)
        except frames.Garbage as garbage:
            if not charged and not self._within_quota(peer, peer.owner, parts, now):
                return
            self._counters.bad_frames += 1
            self._refuse(peer, garbage.error, garbage.about, 0, now)
        except PoolError as error:
            self._counters.bad_frames += 1
            self._refuse(peer, error, message.header.id, message.header.attempt, now)
        else:
            if question is not None:
                self._ask(question, now)
            elif event is not None:
                self._handle(event, now)

    def _ask(self, question: job_events.QuestionAsked, now: float) -> None:
        """Gives a question about jobs to the job manager."""
        link = question.link
        self._perform(ev.ClientHeard(link), now)
        if self._jobs is not None:
            self._jobs.handle(question, now)
        else:
            error = Failed.of(JobsOff(self._jobs_off))
            self._peers.send(link, encoded(error, question.id, self._boot, question.attempt))

    def _handle(self, event: ev.Event, now: float) -> None:
        """Gives an event to the core, the job manager, or both."""
        jobs = self._jobs
        if isinstance(event, ev.ClientListModels) or self._needs_files(event):
            self._after_scan(partial(self._perform, event), now)
        elif isinstance(event, ev.CancelRequest):
            self._cancel(event, now)
        else:
            self._perform(event, now)
            if jobs is not None and isinstance(event, ev.ClientAck):
                jobs.acknowledged(event, now)

    def _needs_files(self, event: ev.Event) -> bool:
        """Returns whether an event is for a model whose files were faulty when they were last read.

        Such an event waits for a new scan, because the files may have been repaired.
        """
        if not isinstance(event, ev.ClientGenerate | ev.ClientModelCall | ev.ClientKeep):
            return False
        message = event.message
        return not isinstance(message, PoolError) and self._is_faulty(message.model)

    def _cancel(self, event: ev.CancelRequest, now: float) -> None:
        """Handles `cancel` by ending this owner's reading of a job, if the id belongs to a reading.

        For any other id, known or not, the core answers.
        """
        jobs, link, owner = self._jobs, event.link or 0, event.owner or ""
        if jobs is None or not jobs.reads(event.id, owner):
            self._perform(event, now)
            return
        self._perform(ev.ClientHeard(link), now)
        jobs.handle(job_events.ReaderLeft(link, owner, event.id), now)

    def _owner_of(self, peer: Peer, message: Message) -> str:
        """Returns the owner that the message names, else the owner of the connection.

        Raises Unauthorized if the peer may not name owners.
        """
        named = owners.take_owner(message)
        if named is None:
            return peer.owner
        if not may_name_owners(peer.owner, self._settings().keys):
            raise Unauthorized(f"{owners.KEY}: {peer.owner} {NO_OWNERS}")
        return named

    def _within_quota(self, peer: Peer, owner: str, parts: list[bytes], now: float) -> bool:
        """Returns whether the owner may send these bytes. If not, answers or drops the message.

        Over the quota the owner gets a debt of bytes: small messages still pass, and larger
        messages are answered with an error. At the largest debt all messages are dropped without an
        answer. If the peer may not name owners, only the header of a message over the quota is
        decoded.
        """
        limit, size = self._settings().quota_bytes, sum(map(len, parts))
        if not limit:
            return True
        wait = self._bytes.wait(owner, limit, now)
        broke = self._bytes.broke(owner, limit, now)
        self._bytes.spend(owner, size, limit, now)
        if not wait or (size <= SMALL and not broke):
            return True
        if not broke:
            error = OverQuota(
                f"{owner} sends more than {limit} bytes a second (quota_bytes), {size} more"
                " are too many now; send less, or wait",
                details={"owner": owner, "value": size, "bound": limit},
                retry_after_ms=milliseconds(wait),
            )
            self._counters.rejected[error.code] += 1
            header = frames.header_of(parts) or Header("")
            self._refuse(peer, error, header.id, header.attempt, now)
        return False

    def _refuse(
        self, peer: Peer, error: PoolError, about: bytes | None, attempt: int, now: float
    ) -> None:
        """Answers with an error that ends no live stream."""
        self._perform(ev.ClientHeard(peer.number), now)
        id = None if about is None or self._is_live(about) else about
        parts = encoded(Failed.about(error, about), id, self._boot, attempt)
        self._peers.send(peer.number, parts)


def new_seed() -> int:
    return secrets.randbits(EXACT_BITS)


def question_of(
    link: int, owner: str, message: Message, entropy: Callable[[], int]
) -> job_events.QuestionAsked | None:
    """Returns the event of a question for the job manager; None for any other message.

    Raises BadRequest if the message has no id.
    """
    header, kind = message.header, message.kind
    if not kept_questions.asks(message):
        return None
    if header.id is None:
        raise BadRequest(f"{kind!r} needs an id of {frames.ID_BYTES} bytes")
    question = ev.parsed(kept_questions.parse_question, kind, message.body, message.blobs)
    job_id = secrets.token_bytes(frames.ID_BYTES)
    return job_events.QuestionAsked(
        link,
        owner,
        header.id,
        header.attempt,
        question,
        job_id,
        entropy(),
        submits=kind in kept_questions.SUBMISSIONS,
    )


def event_of(link: int, owner: str, message: Message) -> ev.Event:
    """Returns the event of a client's message. Raises BadRequest if clients cannot send it."""
    event, kind = ev.of_client(link, owner, message, new_seed), message.kind
    if event is None and kind in HANDLERS:
        raise BadRequest(
            f"{kind!r} is an operator's command, and this endpoint is for clients: use the"
            " broker's run directory (--run-dir), or an endpoint of `admin` with an admin's key"
            " (`mlxpool serve --admin ENDPOINT` opens one)"
        )
    if event is None:
        raise BadRequest(f"a client cannot send the kind {kind!r:.40}")
    return event
