"""Remote workers over CURVE and ipc: killed, stopped, refused, revoked, without a broker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.counting_checker import expected_ids
from support.pool import Pool, until
from support.secure_pool import COUNTING_MODEL, RemoteWorker, SecurePool

STEPS = 300
# Microseconds per token of a worker whose stream must outlast a fault, and of other workers.
SLOW_US, STEP_US = 200_000, 2000


def workers(pool: Pool) -> dict[int, str]:
    """Returns the ready workers: pid -> slot."""
    rows = pool.ask("ps")["workers"]
    return {row["pid"]: row["slot"] for row in rows if row["state"] in ("ready", "suspect")}


@contextmanager
def broker(tmp_path: Path, *, pool: str = "") -> Iterator[SecurePool]:
    """Runs `mlxpool broker`, which starts no workers, inside the context."""
    with SecurePool(tmp_path, verb="broker", pool=pool) as secure:
        yield secure


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecurePool]:
    """A broker for tests that restore its state."""
    with broker(tmp_path_factory.mktemp("shared")) as secure:
        yield secure
        until(lambda: not workers(secure), "each test has ended its workers")


def dialled(
    secure: SecurePool, folder: Path, name: str = "counting", *more: str, step_us: int = STEP_US
) -> RemoteWorker:
    """A remote worker with the key `hand`."""
    return RemoteWorker(
        folder, name, *secure.flags("hand", "back"), *more, config=COUNTING_MODEL.format(step_us)
    )


def busy(secure: SecurePool) -> int:
    """Returns the pid of the worker that runs a request."""
    rows = secure.ask("ps")["workers"]
    return next((int(row["pid"]) for row in rows if row.get("running")), 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stream_outlives_a_remote_worker(tmp_path: Path, number: signal.Signals) -> None:
    """The broker detects a killed worker by its connection, and a stopped one by its heartbeats."""
    limits = "beat_limit = 1.0" if number == signal.SIGSTOP else ""
    with (
        broker(tmp_path, pool=limits) as secure,
        dialled(secure, tmp_path / "one", step_us=SLOW_US),
        ExitStack() as stack,
        secure.dial("alice") as client,
    ):
        stream = client.stream("counting", "hello", seed=5, max_tokens=STEPS)
        deltas = iter(stream)
        ids = list(next(deltas).ids)
        victim = until(lambda: busy(secure), "the first worker is at work")
        stack.enter_context(dialled(secure, tmp_path / "two"))
        until(lambda: len(workers(secure)) == 2, "the other one is ready")
        os.kill(victim, number)
        try:
            for delta in deltas:
                ids.extend(delta.ids)
        finally:
            if number == signal.SIGSTOP:
                os.kill(victim, signal.SIGCONT)
        assert ids == expected_ids("hello", 5, STEPS)
        # The heartbeat limit is one second, so a slow machine may end more than one worker.
        assert stream.result.attempts == 2 or (limits and stream.result.attempts > 2)
        stats = secure.ask("stats")
        assert stats["conserved"] and stats["requests"]["done"] == 1
        until(lambda: len(workers(secure)) == 2, "the victim is replaced, or comes back")


def test_a_request_waits_for_a_worker_to_connect(shared: SecurePool, tmp_path: Path) -> None:
    with shared.dial("alice") as client:
        secure = shared
        stream = client.stream("counting", "hello", seed=5, max_tokens=20)
        until(lambda: secure.ask("requests")["requests"], "it is queued")
        assert not workers(secure)
        with dialled(secure, tmp_path / "one"):
            assert list(stream.read().ids) == expected_ids("hello", 5, 20)
        until(lambda: not workers(secure), "it has left")
        # The second cause occurs if the broker wrote to the worker just as the worker left.
        assert secure.worker("counting/0")["last_exit"] in ("it left", "its connection ended")


def test_a_model_that_only_a_worker_knows(shared: SecurePool, tmp_path: Path) -> None:
    secure = shared
    with (
        dialled(secure, tmp_path / "one", "mine", "--model", "mine=builtin:counting"),
        secure.dial("alice") as client,
    ):
        until(lambda: workers(secure), "it is ready")
        assert "mine" in [model["name"] for model in client.models()]
        assert list(client.generate("mine", "x", seed=1, max_tokens=5).ids) == expected_ids(
            "x", 1, 5
        )


def test_it_serves_beside_local_workers(tmp_path: Path) -> None:
    with (
        SecurePool(tmp_path, models=COUNTING_MODEL.format(1000)) as secure,
        secure.dial("alice") as client,
    ):
        client.generate("counting", "x", max_tokens=1)
        with dialled(secure, tmp_path / "one"):
            until(lambda: set(workers(secure).values()) == {"counting/0", "counting/1"}, "two")


def test_a_worker_on_this_machine_needs_no_key(tmp_path: Path) -> None:
    with Pool(tmp_path, verb="broker") as pool:
        endpoint = f"ipc://{pool.run_dir}/back.ipc"
        with (
            RemoteWorker(tmp_path / "one", "counting", "--endpoint", endpoint),
            pool.client() as client,
        ):
            until(lambda: workers(pool), "it is ready")
            assert len(client.generate("counting", "x", max_tokens=3).ids) == 3


def test_a_broker_with_its_own_workers_accepts_no_worker_without_a_key(tmp_path: Path) -> None:
    with Pool(tmp_path) as pool:
        endpoint = f"ipc://{pool.run_dir}/back.ipc"
        with RemoteWorker(tmp_path / "one", "counting", "--endpoint", endpoint) as worker:
            assert worker.wait() == 1, "at once: it would wait a minute for a broker"
            assert "this broker starts its own workers" in worker.log()
            assert "mlxpool broker" in worker.log()
        assert not workers(pool)
        assert "hello refused" in pool.log()


def test_a_load_without_any_worker_is_reported(tmp_path: Path) -> None:
    with Pool(tmp_path, verb="broker") as pool:
        done = pool.cli("load", "counting", "--wait", "--timeout", "0.3")
        assert done.returncode == 1 and "`mlxpool worker counting" in done.stderr.splitlines()[0]
        assert "deadline_exceeded: counting is not loaded after 0.3 s" in done.stderr
        dialled = ("--endpoint", f"ipc://{pool.run_dir}/back.ipc")
        with RemoteWorker(tmp_path / "one", "counting", *dialled):
            assert pool.cli("load", "counting", "--wait").stdout == "counting: loaded\n"


@pytest.mark.parametrize("name", ["alice", "stranger"])
def test_a_worker_with_a_wrong_key_ends_with_the_reason(
    shared: SecurePool, tmp_path: Path, name: str
) -> None:
    if name == "stranger":
        shared.keys.make(name, "worker")
    with RemoteWorker(tmp_path / "one", "counting", *shared.flags(name, "back")) as worker:
        assert worker.wait() == 1
        assert f"refuses the key '{name}'" in worker.log()


def test_a_worker_without_a_broker_ends(tmp_path: Path) -> None:
    secure = SecurePool(tmp_path)
    flags = ("--server-key", secure.server_key, "--key", str(secure.keys.path("hand")))
    with RemoteWorker(
        tmp_path / "one",
        "counting",
        *("--endpoint", "tcp://127.0.0.1:1", *flags, "--orphan-grace", "0.2"),
    ) as worker:
        assert worker.wait() == 3
        assert "no broker answers" in worker.log()
    secure.close()


def test_a_revoked_worker_is_disconnected_and_its_stream_resumed(tmp_path: Path) -> None:
    with broker(tmp_path) as secure:
        secure.keys.make("other", "worker")
        secure.write("alice", "hand", "other", "chief")
        secure.reload()
        with (
            dialled(secure, tmp_path / "one", step_us=SLOW_US) as cut,
            secure.dial("alice") as client,
        ):
            stream = client.stream("counting", "hello", seed=5, max_tokens=STEPS)
            deltas = iter(stream)
            ids = list(next(deltas).ids)
            secure.write("alice", "other", "chief")
            secure.reload()
            assert not workers(secure)
            assert cut.wait() == 1
            flags = secure.flags("other", "back")
            with RemoteWorker(
                tmp_path / "two", "counting", *flags, config=COUNTING_MODEL.format(500)
            ):
                for delta in deltas:
                    ids.extend(delta.ids)
        assert ids == expected_ids("hello", 5, STEPS)


def test_workers_wait_for_the_next_broker(tmp_path: Path) -> None:
    """The same worker process serves the next broker, without a reload of its model."""
    with Pool(tmp_path, verb="broker") as pool:
        endpoint = f"ipc://{pool.run_dir}/back.ipc"
        with (
            RemoteWorker(
                tmp_path / "one",
                "counting",
                "--endpoint",
                endpoint,
                config=COUNTING_MODEL.format(2000),
            ),
            pool.client() as client,
        ):
            before = until(lambda: workers(pool), "it is ready")
            stream = client.stream("counting", "hello", seed=5, max_tokens=STEPS)
            deltas = iter(stream)
            ids = list(next(deltas).ids)
            pool.kill()
            pool.start()
            for delta in deltas:
                ids.extend(delta.ids)
            assert ids == expected_ids("hello", 5, STEPS)
            # On a busy machine the stream may have ended before the broker was killed.
            after = until(lambda: workers(pool), "it has connected again")
            assert after.keys() == before.keys()


def test_a_restarted_worker_reconnects_until_it_is_stopped(
    shared: SecurePool, tmp_path: Path
) -> None:
    with dialled(shared, tmp_path / "one") as worker:
        ((before, slot),) = until(lambda: workers(shared), "it is ready").items()
        assert shared.cli("restart", slot).returncode == 0
        until(lambda: (now := workers(shared)) and before not in now, "a fresh one is there")
        assert shared.cli("unload", "counting").returncode == 0
        assert worker.wait() == 0


def test_a_hung_worker_is_disconnected_and_reconnects(tmp_path: Path) -> None:
    """The broker detects the hang only by heartbeats; the worker's supervisor has long limits."""
    limits = "step_limit = 0.5\nprefill_limit = 0.5\nfresh_limit = 0.5"
    fault = 'fault = "lock"\nfault_at = 5\nfault_times = 1\n'
    with (
        broker(tmp_path, pool=limits) as secure,
        RemoteWorker(
            tmp_path / "one",
            "counting",
            *secure.flags("hand", "back"),
            config=COUNTING_MODEL.format(500) + fault,
        ),
        secure.dial("alice") as client,
    ):
        result = client.generate("counting", "hello", seed=5, max_tokens=50)
        assert list(result.ids) == expected_ids("hello", 5, 50)
        assert result.attempts >= 2
        assert 'why="hung in decode' in secure.log()
