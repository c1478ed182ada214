"""Which worker for a request, which model to evict, whom to blame: pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack

from mlxpool.broker.requests.request import Request
from mlxpool.broker.workers.worker import Model, Worker

HEAD = 256  # bytes of a prompt that tell whether a worker may know its beginning
KNOWN = 512  # prefixes remembered of one worker
POISON = 2.0  # the charge at which a request is refused
JITTER = 0.25  # of a restart's delay


def prefix_keys(request: Request) -> tuple[bytes, ...]:
    """What a worker may know of a request, the surer sign first: its session, its prompt's head."""
    keys = [_key(b"head", _head(request))]
    if request.payload.session:
        keys.insert(0, _key(b"session", request.owner.encode(), request.payload.session.encode()))
    return tuple(keys)


def _key(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).digest()


def _head(request: Request) -> bytes:
    if request.payload.blobs:
        return request.payload.blobs[0][:HEAD]
    prompt: dict[str, Any] = dict(request.payload.prompt)
    if "messages" in prompt:
        prompt["messages"] = prompt["messages"][:1]
    return bytes(msgpack.packb(prompt)[:HEAD])


def remember(worker: Worker, keys: Iterable[bytes]) -> None:
    """The worker has these prefixes now; the oldest go when there are too many."""
    for key in keys:
        worker.known[key] = None
        worker.known.move_to_end(key)
    while len(worker.known) > KNOWN:
        worker.known.popitem(last=False)


def same_facts(worker: Worker, request: Request) -> bool:
    """Whether the stream can go on there: the same model, and no smaller a context."""
    facts = request.facts or {}
    digest, context = worker.hello.get("digest"), int(worker.hello.get("context", 0))
    return bool(facts.get("digest", digest) == digest and facts.get("context", 0) <= context)


def tolerates(worker: Worker, request: Request) -> bool:
    """Whether those who run there and the request may be together."""
    bounds = [bound for bound in (*worker.company.values(), request.company) if bound]
    return len(worker.places) + 1 <= min(bounds) if bounds else True


def choose_worker(workers: Sequence[Worker], request: Request) -> Worker | None:
    """The one that knows the prompt's beginning, else the one with most room; None without room."""
    free = [
        worker
        for worker in workers
        if worker.credit() > 0 and same_facts(worker, request) and tolerates(worker, request)
    ]
    if len(free) < 2:
        return free[0] if free else None
    keys = prefix_keys(request)

    def rank(worker: Worker) -> tuple[Any, ...]:
        return (*(key in worker.known for key in keys), worker.credit(), -worker.ready_at)

    return max(free, key=rank)


def restart_delay(failures: int, first: float, most: float, boot: int = 0) -> float:
    """Seconds to wait after `failures` incarnations in a row that never served: 1, 2, 4 … .

    `boot` spreads the restarts of many pools by up to JITTER.
    """
    if failures <= 0:
        return 0.0
    share = hashlib.blake2b(b"%d %d" % (boot, failures), digest_size=2).digest()
    spread = JITTER * int.from_bytes(share, "big") / 2**16 if boot else 0.0
    return min(most, first * 2.0 ** min(failures - 1, 32)) * (1 + spread)


def charges(runs: Sequence[Request], in_prefill: bytes | None) -> dict[bytes, float]:
    """How a worker's own end speaks against what it ran: 1 to the one in prefill, if any."""
    if any(request.id == in_prefill for request in runs):
        return {request.id: float(request.id == in_prefill) for request in runs}
    return {request.id: 1 / len(runs) for request in runs}


def company_of(charge: float, group: int) -> int:
    """How many may run together with a request of this charge that was one of `group`."""
    if charge <= 0:
        return 0
    return 1 if charge >= 1 else max(1, group // 4)


def to_evict(models: Iterable[Model], missing: int) -> list[Model]:
    """Idle models whose workers free so many bytes, the least recently used first; [] if not."""
    idle = [m for m in models if m.idle_since and m.own and m.config.keep_alive >= 0]
    chosen, freed = [], 0
    for model in sorted(idle, key=lambda m: m.idle_since):
        if freed >= missing:
            break
        chosen.append(model)
        freed += model.need * len(model.own)
    return chosen if freed >= missing else []
