"""Chooses the worker for a request. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack

from mlxpool.broker.requests.request import Request
from mlxpool.broker.workers.worker import Worker
from mlxpool.broker.workers.worker_states import WorkerState

HEAD_BYTES = 256  # of a prompt, by which a worker is taken to know its beginning
MAX_PREFIXES = 512  # remembered of one worker


def prefix_keys(request: Request) -> tuple[bytes, ...]:
    """Keys of what a worker may have cached, the surer first: the other choices of the prompt, the
    session, the prompt's head.
    """
    keys = [_key(b"head", _head(request))]
    if session := request.message.session:
        keys.insert(0, _key(b"session", request.owner.encode(), session.encode()))
    if (choice := request.message.choice) is not None:
        keys.insert(0, _key(b"choices", request.owner.encode(), choice.group.encode()))
    return tuple(keys)


def _key(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).digest()


def _head(request: Request) -> bytes:
    prompt = request.message.prompt
    if blobs := prompt.blobs():
        return blobs[0][:HEAD_BYTES]
    body: dict[str, Any] = prompt.body()
    if "messages" in body:
        body["messages"] = body["messages"][:1]
    return bytes(msgpack.packb(body)[:HEAD_BYTES])


def remember_prefixes(worker: Worker, keys: Iterable[bytes]) -> None:
    """The worker was sent these; the oldest are dropped beyond MAX_PREFIXES."""
    for key in keys:
        worker.prefixes[key] = None
        worker.prefixes.move_to_end(key)
    while len(worker.prefixes) > MAX_PREFIXES:
        worker.prefixes.popitem(last=False)


def fits_facts(worker: Worker, request: Request) -> bool:
    """Whether a stream can be resumed there: the same model, and no smaller a context."""
    facts = request.run.facts
    if facts is None:
        return True
    return facts.digest in (None, worker.digest) and (facts.context or 0) <= worker.context


def keeps_batch_bounds(worker: Worker, request: Request) -> bool:
    """Whether the request may run together with what the worker has."""
    bounds = [b for b in (*worker.batch_bounds.values(), request.run.batch_bound) if b]
    return len(worker.leases) + 1 <= min(bounds) if bounds else True


def has_image_place(worker: Worker, request: Request) -> bool:
    """Whether the worker may be given the images of a request; true for one without images.

    Images are prepared one after the other, and hold a place of the batch meanwhile. So half the
    places, or the only one, may have images in preparation.
    """
    if not request.message.prompt.images:
        return True
    return len(worker.reading) < max(1, (worker.credit() + len(worker.leases)) // 2)


def _of_group(workers: Sequence[Worker], request: Request) -> Sequence[Worker]:
    """The workers among which a request may be given to one.

    A choice goes where the others of its group are, and waits for that worker to have room. One
    that is suspected to have ended a worker goes anywhere.
    """
    if request.message.choice is None or request.run.batch_bound:
        return workers
    key = prefix_keys(request)[0]
    having = [
        worker
        for worker in workers
        if key in worker.prefixes
        and worker.state in (WorkerState.READY, WorkerState.SUSPECT)
        and fits_facts(worker, request)
    ]
    return having or workers


def choose_worker(workers: Sequence[Worker], request: Request) -> Worker | None:
    """The one that knows the prompt's beginning, else the one with most credit; None if none may.

    Of equals the one that has been ready for longest.
    """
    free = [
        worker
        for worker in _of_group(workers, request)
        if worker.credit() > 0
        and fits_facts(worker, request)
        and keeps_batch_bounds(worker, request)
        and has_image_place(worker, request)
    ]
    if len(free) < 2:
        return free[0] if free else None
    keys = prefix_keys(request)

    def rank(worker: Worker) -> tuple[float, ...]:
        return (*(key in worker.prefixes for key in keys), worker.credit(), -worker.ready_at)

    return max(free, key=rank)
