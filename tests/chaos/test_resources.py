"""Too few descriptors, a full disk, a starved processor, a clock that jumps."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from chaos.cpu_starvation import busy_process, starve
from chaos.harness import LIMITS, Chaos, model
from mlxpool.common.errors import Unauthorized
from mlxpool.common.transport import sockets
from support.pool import PATIENCE, Pool, until, with_path

Patch = pytest.MonkeyPatch

DESCRIPTORS = 300
# Clients at once. The broker has about 40 other connections. More clients could use up the
# descriptors while the broker's thread gets no processor, and then libzmq aborts.
CROWD = 220
MANY_ENDS = 20  # log lines, each about at least 30 ended connections: several hundred in all


def with_descriptors(count: int) -> tuple[str, ...]:
    return ("sh", "-c", f'ulimit -n {count}; exec "$@"', "sh")


def test_too_few_descriptors_are_refused(tmp_path: Path) -> None:
    pool = Pool(tmp_path, prefix=with_descriptors(64))
    done = subprocess.run(
        [*pool.prefix, *pool.command(), "serve"], capture_output=True, text=True, timeout=PATIENCE
    )
    pool.close()
    assert done.returncode != 0
    assert "the limit of open files is 64, the broker needs 256" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def crowd(chaos: Chaos, count: int) -> Iterator[None]:
    """Opens connections to the front that send nothing, and redial whenever they are ended."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2000)
    front = sockets.ipc(chaos.pool.run_dir, "front")
    dealers = [sockets.dealer(context, front) for _ in range(count)]
    try:
        yield
    finally:
        for each in dealers:
            each.close(linger=0)
        context.term()


def descriptors_were_short(chaos: Chaos) -> bool:
    """Returns whether clients were shut out, or idle connections were ended MANY_ENDS times.

    If clients connect slowly, the broker only ends idle connections.
    """
    if chaos.pool.log().count("idle connections ended") >= MANY_ENDS:
        return True
    try:
        return bool(chaos.pool.ask("ps")["broker"]["front_shut"])
    except Unauthorized:
        return False


def test_a_crowd_of_clients_and_few_descriptors(tmp_path: Path, monkeypatch: Patch) -> None:
    """The broker ends idle connections, or shuts all clients out for a while; streams resume.

    Its choice depends on how fast the clients connect.
    """
    with Chaos(tmp_path, monkeypatch, model(), prefix=with_descriptors(DESCRIPTORS)) as chaos:
        streams = chaos.start(200, 3)
        chaos.reach(streams, 10)
        with crowd(chaos, CROWD):
            until(lambda: descriptors_were_short(chaos), "descriptors are short")
        chaos.finish(streams)
        later = chaos.new_client()
        chaos.start(10, 2, client=later)
        chaos.assert_all_done()
        later.close()


def test_idle_connections_make_way_for_live_streams(tmp_path: Path, monkeypatch: Patch) -> None:
    """Idle clients reconnect again and again; the four running streams still complete."""
    with Chaos(tmp_path, monkeypatch, model(), prefix=with_descriptors(DESCRIPTORS)) as chaos:
        streams = chaos.start(2000, 4)
        chaos.reach(streams, 10)
        with crowd(chaos, CROWD):
            chaos.finish(streams)
        chaos.assert_all_done()


def test_a_full_file_system(tmp_path: Path, monkeypatch: Patch) -> None:
    """Logs, stacks and records cannot be written; streams are not affected."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("missing program: /dev/full, a file system that is always full")
    config = model(step_us=3000, fault="kill", fault_in="decode", fault_at=20, fault_times=1)
    chaos = Chaos(tmp_path, monkeypatch, config, log_path=full)
    logs, workers = chaos.pool.run_dir / "logs", chaos.pool.run_dir / "workers"
    logs.mkdir(mode=0o700)
    workers.mkdir(mode=0o700)
    for name in ("m-0.log", "m-0.0.stacks", "m-0.1.stacks", "m-0.2.stacks"):
        (logs / name).symlink_to(full)
    (workers / "m-0.json").symlink_to(full)
    with chaos:
        chaos.start(60, 3)
        chaos.assert_all_done()


def test_a_starved_worker_is_not_hung(tmp_path: Path, monkeypatch: Patch) -> None:
    """On 1/20 of a processor steps take long; time without a processor does not count as a hang."""
    with Chaos(tmp_path, monkeypatch, model(step_us=1000)) as chaos:
        (first,) = chaos.start(20)
        chaos.finish([first])
        pid = int(chaos.pool.worker("m/0")["pid"])
        with busy_process() as processor:
            starve(chaos.pool, "m/0", processor)
            chaos.start(200, 2)
            chaos.finish()
        chaos.assert_all_done()
        assert chaos.causes() == []
        assert chaos.pool.worker("m/0")["pid"] == pid


JUMPING_CLOCK = """\
import time

_true, _start = time.time, time.monotonic()


def _jumping():
    return _true() + 86400 * ((int(time.monotonic() - _start) % 3) - 1)


time.time = _jumping
time.time_ns = lambda: int(_jumping() * 1e9)
"""


def test_a_wall_clock_that_jumps_by_days(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
    config = model(step_us=5000, fault="kill", fault_in="decode", fault_at=100, fault_times=1)
    environment = {"PYTHONPATH": with_path(tmp_path)}
    with Chaos(tmp_path, monkeypatch, config, LIMITS, environment=environment) as chaos:
        chaos.start(400, 3)
        chaos.assert_all_done()
        assert chaos.causes() == ["killed by SIGKILL"]
