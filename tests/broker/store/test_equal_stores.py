"""Random sequences of operations give the same results in both stores."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import asdict, replace

from mlxpool.broker.store.operations import (
    Cancel,
    Defer,
    ExportJobs,
    FeedNext,
    FetchPage,
    ListEnded,
    ListJobs,
    ListNotices,
    NewGeneration,
    NoticeFailed,
    NoticeSent,
    Operation,
    OriginLoad,
    ReadBacklog,
    ReadHistory,
    ReadJob,
    ReadNotices,
    Release,
    Retry,
    SetBack,
    SetPoison,
    Sweep,
    VerifyJobs,
)
from mlxpool.broker.store.records import ENDED, Changed, Found, JobView, Scope
from support.job_store import OpenedStore, finish, job_id, progress, submit

JOBS, STEPS = 12, 400


def operation(draw: random.Random) -> Operation:
    """Returns a random operation on one of a few jobs, legal or not in the job's state."""
    number = draw.randrange(JOBS)
    id, gen = job_id(number), draw.choice((0, 0, 1))
    name = draw.choice((id, Scope("ab"[number % 2], "", f"key-{number}"), Scope("a", "", "none")))
    held = frozenset(job_id(draw.randrange(JOBS)) for _ in range(draw.randrange(3)))
    pos = draw.choice((0, 4, 8, 12))
    choices: list[Any] = [
        lambda: submit(
            number,
            owner="ab"[number % 2],
            digest=draw.choice((b"one", b"one", b"two")),
            priority=draw.randrange(2),
            delay=draw.choice((0.0, 3.0)),
            deadline=draw.choice((None, 5.0, 50.0)),
            keep=draw.choice((None, 1.0, 20.0)),
            notify=draw.choice(("", "https://there", "https://here/x")),
            blobs=(b"shared", bytes([number])),
            max_jobs=draw.choice((0, 3)),
        ),
        lambda: FeedNext("m", draw.randrange(2), draw.randrange(1, 4), draw.choice("ab"), held),
        lambda: progress(number, pos, gen=gen, facts=draw.choice((None, b"facts"))),
        lambda: progress(number, pos, gen=gen),
        lambda: finish(number, draw.choice(sorted(ENDED)), gen=gen, cause="why"),
        lambda: finish(number, gen=gen, answer=(b"shared", bytes([number]))),
        lambda: Defer(id, gen, draw.choice((0.0, 2.0)), draw.randrange(9), draw.random()),
        lambda: NewGeneration(id, gen),
        lambda: Cancel(name, b"end", "cause"),
        lambda: Retry(name, draw.random() < 0.5, draw.choice((None, 4.0))),
        lambda: Release(name),
        lambda: Sweep(held, draw.randrange(1, 9), b"expired"),
        lambda: ReadJob(name),
        lambda: FetchPage(
            name, draw.randrange(14), draw.choice((None, gen)), draw.choice((1, 999))
        ),
        lambda: ListJobs(draw.choice((None, "a")), count=5, reverse=draw.random() < 0.5),
        lambda: ListEnded(after=draw.randrange(5)),
        lambda: ReadBacklog(),
        lambda: SetPoison(draw.choice((b"one", b"two")), draw.choice((0.0, 9.0))),
        lambda: ReadNotices(
            draw.choice((1, 64)),
            frozenset(draw.sample(range(20), 3)),
            draw.choice((1, 64)),
            (OriginLoad("https://there:443", 1, draw.randrange(3)),),
        ),
        lambda: NoticeSent(draw.randrange(9)),
        lambda: NoticeFailed(draw.randrange(9), 2.0, "x", "https://here:443", draw.choice((1, 50))),
        lambda: ExportJobs(count=3),
        lambda: SetBack(id, gen, draw.random(), "a worker ended", "stacks"),
        lambda: ReadHistory(name),
        lambda: ListNotices(draw.choice((None, "a"))),
        lambda: NoticeFailed(draw.randrange(9), None, "refused"),
        lambda: VerifyJobs(),
    ]
    asked: Operation = draw.choice(choices)()
    return asked


def comparable(value: Any) -> Any:
    """Returns a result without arrival numbers.

    They differ between the stores: PostgreSQL also uses up the numbers of refused jobs.
    """
    if isinstance(value, JobView):
        return replace(value, seq=0)
    if isinstance(value, tuple):
        return tuple(map(comparable, value))
    if isinstance(value, Struct):
        of = {name: comparable(field) for name, field in asdict(value).items()}
        return type(value).__name__, {**of, "next": bool(of.get("next"))}
    return value


@pytest.mark.parametrize("seed", range(3))
def test_both_stores_give_the_same_results(
    sqlite_store: OpenedStore, postgres_store: OpenedStore, seed: int
) -> None:
    draw = random.Random(seed)
    seen = set()
    for step in range(STEPS):
        asked = [operation(draw) for _ in range(draw.randrange(1, 4))]
        passed = draw.choice((0.0, 0.0, 0.5, 3.0))
        results = []
        for store in (sqlite_store, postgres_store):
            store.now += passed
            if step % 100 == 99:
                store.open(boot=step)
            answers = store.do(*asked)
            if isinstance(answers[-1], Changed):  # the result of a change is the stored job
                assert store.one(ReadJob(answers[-1].job.id)) == Found(answers[-1].job)
            results.append(comparable(tuple(answers)))
        assert results[0] == results[1], asked
        seen |= {
            (type(request).__name__, name[0])
            for request, name in zip(asked, results[0], strict=True)
        }
    assert len(seen) > 35  # pairs of a kind of operation and a kind of result
