"""Jobs in real pools: they survive the end of clients, workers, brokers, and all at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import psutil
import pytest

from mlxpool.client import Client
from mlxpool.common.errors import (
    BadRequest,
    Draining,
    DuplicateId,
    Gone,
    JobsOff,
    PoolError,
    UnknownJob,
    UnknownModel,
)
from support.counting_checker import expected_ids, text_of
from support.pool import Pool, until

CONFIG = """\
[pool]
restart_delay = 0.05
[models.m]
path = "builtin:counting"
[models.m.counting]
step_us = 5000
"""


def make_pool(tmp_path: Path, config: str = CONFIG, *arguments: str) -> Pool:
    return Pool(tmp_path, config, arguments=("--state-dir", str(tmp_path / "jobs"), *arguments))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with make_pool(tmp_path_factory.mktemp("pool")) as running:
        yield running


def ended(client: Client, key: str) -> bool:
    return client.job(key)["state"] not in ("waiting", "running")


def wanted(key: str, count: int) -> list[int]:
    """Returns the ids of a job that has its key as its prompt, and the seed 7."""
    return expected_ids(key, 7, count)


def test_a_job_is_read_by_whoever_comes(pool: Pool) -> None:
    with pool.client() as client:
        job = client.submit("m", "read", key="read", max_tokens=60, seed=7)
        assert (job.key, job.gen, job.seed) == ("read", 0, 7)
        with pool.client() as other:
            result = other.fetch("read").read()
        assert list(result.ids) == wanted("read", 60)
        assert result.text == text_of(wanted("read", 60)) and result.reason == "length"
        late = client.fetch(job.id, start=50).read()
        assert list(late.ids) == wanted("read", 60)[-len(late.ids) :] and len(late.ids) >= 10
        row = client.job(job)
        assert (row["state"], row["ids"], row["job"]) == ("done", 60, job.id)


def test_a_client_that_dies_after_submit_loses_nothing(pool: Pool) -> None:
    program = (
        "import os, sys; from mlxpool.client import Client\n"
        "c = Client(sys.argv[1], connect_timeout=200)\n"
        "c.submit('m', 'left', key='left', max_tokens=40, seed=7)\n"
        "os.kill(os.getpid(), 9)"
    )
    died = subprocess.run([sys.executable, "-c", program, str(pool.run_dir)], check=False)
    assert died.returncode == -signal.SIGKILL
    with pool.client() as client:
        assert list(client.fetch("left").read().ids) == wanted("left", 40)


def test_many_readers_of_one_job_have_the_same(pool: Pool) -> None:
    async def read() -> list[tuple[int, ...]]:
        async with pool.async_client() as client:
            job = await client.submit("m", "many", key="many", max_tokens=50, seed=7)
            streams = [client.fetch(job) for _ in range(8)]
            results = await asyncio.gather(*(stream.read() for stream in streams))
            assert (await client.job("many"))["state"] == "done"
            assert [row["key"] for row in await client.jobs(after=0)][-1:] == ["many"]
            return [result.ids for result in results]

    for ids in asyncio.run(read()):
        assert list(ids) == wanted("many", 50)


def test_keys_name_one_request(pool: Pool) -> None:
    with pool.client() as client:
        first = client.submit("m", "same", key="same", max_tokens=5, seed=7)
        again = client.submit("m", "same", key="same", seed=7, max_tokens=5, keep=9)
        assert again.id == first.id
        with pytest.raises(DuplicateId, match="'same' is that of another job"):
            client.submit("m", "same", key="same", max_tokens=6, seed=7)
        until(lambda: ended(client, "same"), "the job ends")
        assert client.release("same")["state"] == "gone"
        assert client.release("same")["state"] == "gone"
        with pytest.raises(Gone):
            client.submit("m", "same", key="same", max_tokens=5, seed=7)
        with pytest.raises(Gone):
            client.fetch("same").read()


def test_what_cannot_be_a_job_is_refused(pool: Pool) -> None:
    with pool.client() as client:
        with pytest.raises(UnknownModel):
            client.submit("nobody", "x")
        with pytest.raises(BadRequest, match="temperature"):
            client.submit("m", "x", temperature=-1)
        with pytest.raises(UnknownJob, match="'none'"):
            client.job("none")
        with pytest.raises(UnknownJob):
            client.fetch("none").read()
        with pytest.raises(UnknownJob):
            client.cancel(key="none")
        assert pool.ask("stats")["internal_errors"] == 0


def test_a_job_is_cancelled_and_its_readers_hear_of_it(pool: Pool) -> None:
    with pool.client() as client:
        job = client.submit("m", "long", key="long", max_tokens=100_000, seed=7)
        stream = client.fetch(job)
        first = next(iter(stream))
        with pool.client() as other:
            fate = other.cancel(key="long")
        assert fate["state"] == "running" and first.ids
        row = client.job("long")
        assert row["state"] == "cancelled"
        again = client.fetch("long").read()
        assert again.reason == "cancelled" and list(again.ids) == wanted("long", len(again.ids))
        with pytest.raises(BadRequest, match="only dead and expired jobs"):
            client.retry("long")


def test_leaving_a_reading_does_not_cancel_the_job(pool: Pool) -> None:
    with pool.client() as client:
        job = client.submit("m", "stay", key="stay", max_tokens=80, seed=7)
        with client.fetch(job) as stream:
            next(iter(stream))
        assert list(client.fetch(job).read().ids) == wanted("stay", 80)


def test_a_worker_dies_and_the_job_goes_on(pool: Pool) -> None:
    with pool.client() as client:
        job = client.submit("m", "worker", key="worker", max_tokens=150, seed=7)
        stream = client.fetch(job)
        seen = iter(stream)
        next(seen)
        pool.kill_worker("m/0")
        for _ in seen:
            pass
        assert list(stream.result.ids) == wanted("worker", 150)


def test_the_command_line_submits_and_fetches(pool: Pool) -> None:
    submitted = pool.cli("submit", "m", "line", "--key", "line", "--max-tokens", "9", "--seed", "7")
    assert submitted.stdout == "line\n", submitted.stderr
    fetched = pool.cli("fetch", "line")
    assert fetched.stdout == text_of(wanted("line", 9)) + "\n"
    lines = pool.cli("fetch", "line", "--from", "5", "--json").stdout.splitlines()
    assert '"done": true' in lines[-1]
    rows = pool.cli_json("jobs", "--state", "done")["jobs"]
    assert [row["ids"] for row in rows if row["key"] == "line"] == [9]
    assert "line" in pool.cli("jobs").stdout
    assert pool.cli("release", "line").stdout == "line: gone\n"
    refused = pool.cli("retry", "line")
    assert refused.returncode == 1 and "was deleted" in refused.stderr
    key = pool.cli("submit", "m", "x", "--max-tokens", "100000").stdout.strip()
    assert pool.cli("cancel", "--job", key).stdout.startswith(f"{key}: was ")


def test_a_pool_without_a_store_says_so(tmp_path: Path) -> None:
    with Pool(tmp_path, CONFIG) as pool, pool.client() as client:
        with pytest.raises(JobsOff, match="--state-dir"):
            client.submit("m", "x")
        with pytest.raises(JobsOff):
            client.fetch("x").read()
        assert client.generate("m", "x", max_tokens=1).ids


def kill_everything(pool: Pool) -> None:
    """Sends SIGKILL to the broker and all its workers, at once."""
    assert pool.process is not None
    broker = psutil.Process(pool.process.pid)
    for process in [broker, *broker.children(recursive=True)]:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    pool.kill()


def test_all_die_at_once_and_the_jobs_are_done_once(tmp_path: Path) -> None:
    keys = [f"all{number}" for number in range(20)]
    with make_pool(tmp_path) as pool:
        program = (
            "import sys; from mlxpool.client import Client\n"
            "c = Client(sys.argv[1], connect_timeout=200)\n"
            "for key in sys.argv[2:]:\n"
            "    c.submit('m', key, key=key, max_tokens=100, seed=7)\n"
            "print('submitted', flush=True); c.fetch(sys.argv[2]).read()"
        )
        arguments = [sys.executable, "-c", program, str(pool.run_dir), *keys]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as submitter:
            assert submitter.stdout is not None
            assert submitter.stdout.readline() == b"submitted\n"
            with pool.client() as client:
                next(iter(client.fetch(keys[1])))  # a part of this job is done
            submitter.kill()
            kill_everything(pool)
        pool.start()
        with pool.client() as client:
            for key in keys:
                result = client.fetch(key).read()
                assert list(result.ids) == wanted(key, 100), key
            ends = client.jobs(after=0)
            assert sorted(row["key"] for row in ends) == sorted(keys)
            assert len({row["end_seq"] for row in ends}) == len(keys)


def test_a_reading_goes_on_in_the_next_broker(tmp_path: Path) -> None:
    with make_pool(tmp_path) as pool, pool.client() as client:
        job = client.submit("m", "next", max_tokens=200, seed=7)
        stream = client.fetch(job)
        seen = iter(stream)
        next(seen)
        pool.kill()
        pool.start()
        for _ in seen:
            pass
        assert list(stream.result.ids) == wanted("next", 200)


def _begun(client: Client, key: str) -> str:
    """Returns the state of a job that has left the queue; "" while it waits."""
    state = client.job(key)["state"]
    return "" if state == "waiting" else str(state)


def test_a_stopped_broker_puts_its_jobs_back_and_counts_no_start(tmp_path: Path) -> None:
    with make_pool(tmp_path) as pool:
        stops = 0
        numbers = count()
        key = f"stop{next(numbers)}"
        while stops < 3:
            with pool.client() as client:
                client.submit("m", key, key=key, max_tokens=400, seed=7)
                state = until(partial(_begun, client, key), "it runs")
            if state == "done":  # on a busy machine, the job ended before the last stop
                if stops:
                    break
                key = f"stop{next(numbers)}"  # or before the first: then another job is stopped
                continue
            pool.stop()
            pool.start()
            stops += 1
        with pool.client() as client:
            assert list(client.fetch(key).read().ids) == wanted(key, 400)
            assert client.job(key)["attempts"] == 0


def test_readers_hear_of_the_end_of_the_broker(tmp_path: Path) -> None:
    with make_pool(tmp_path) as pool, pool.client() as client:
        job = client.submit("m", "end", max_tokens=100_000)
        stream = client.fetch(job)
        reader = iter(stream)
        assert next(reader).ids  # the broker knows the reader
        assert pool.cli("stop").returncode == 0
        with pytest.raises(Draining):
            for _ in reader:
                pass


def test_a_second_broker_on_one_store_is_refused(tmp_path: Path) -> None:
    with make_pool(tmp_path) as first:
        other = tmp_path / "other"
        other.mkdir()
        second = Pool(other, CONFIG, arguments=("--state-dir", str(tmp_path / "jobs")))
        try:
            refused = second.cli("serve", "--state-dir", str(tmp_path / "jobs"))
            assert refused.returncode != 0
            assert "another broker" in refused.stderr + second.log()
        finally:
            second.close()
        with first.client() as client:
            assert client.submit("m", "x", max_tokens=1).state == "waiting"


def test_a_job_of_later_waits_for_its_time(pool: Pool) -> None:
    with pool.client() as client:
        begun = time.time()
        client.submit("m", "later", key="later", max_tokens=3, seed=7, not_before=begun + 1.5)
        assert list(client.fetch("later").read().ids) == wanted("later", 3)
        assert client.job("later")["ended"] >= begun + 1.5


def test_a_failed_job_is_dead_with_its_cause_and_can_be_retried(tmp_path: Path) -> None:
    config = CONFIG.replace("[models.m]\n", "[models.m]\ncontext = 16\n")
    with make_pool(tmp_path, config) as pool, pool.client() as client:
        client.submit("m", "a prompt that is too long for it", key="long")
        with pytest.raises(PoolError, match="context"):
            client.fetch("long").read()
        row = client.job("long")
        assert row["state"] == "dead" and "context" in row["cause"]
        assert [job["key"] for job in client.jobs(state="dead")] == ["long"]
        assert client.retry("long")["state"] in ("waiting", "running")
        until(lambda: client.job("long")["state"] == "dead", "it fails again")
