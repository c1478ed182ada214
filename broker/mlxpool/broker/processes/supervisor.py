"""The supervisor, which starts, observes and ends the worker processes of this machine.

It ends a process by SIGTERM, and by SIGKILL after `stop_grace`, and collects the exit.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.broker import host
from mlxpool.broker.processes.records import ProcessRecords, kill_group
from mlxpool.broker.workers.exit_causes import WorkerExit, exit_of, last_line
from mlxpool.broker.workers.gpu_places import GpuPlaces
from mlxpool.broker.workers.liveness import Sample
from mlxpool.common.config.schema import WORKER_VARIABLE, ModelConfig, PoolConfig, WorkerConfig
from mlxpool.common.gpus import chosen_gpus, environment_of, visible_gpus
from mlxpool.common.paths import file_stem, worker_log
from mlxpool.common.process.blas import preload
from mlxpool.common.progress import Block
from mlxpool.common.records import as_map

KILL_INTERVAL = 1.0  # seconds between two SIGKILLs while the process still exists
OBSERVE_INTERVAL = 0.5  # seconds
SAVE_SHARE = 0.7  # share of stop_grace for which an ending worker may write prefixes
KEPT_DUMPS = 3  # most files with stacks that a slot keeps


class Child(Struct, eq=False):
    """A running worker process. `exit_descriptor` becomes readable when the process has ended."""

    slot: str
    token: str
    process: subprocess.Popen[bytes]
    exit_descriptor: int
    block: Block
    dump_path: Path
    oom_kills: int = 0  # the kernel's count of OOM kills when the worker started
    kill_at: float = 0.0  # time for SIGKILL; 0: the worker is not being stopped
    commanded: bool = False
    dumped: bool = False  # the worker's stacks were requested
    used_token: str = ""  # the token of the newest connection, see `accepts`
    rank_blocks: tuple[Block, ...] = ()  # in a group: the blocks of ranks 1 and higher
    gpus: tuple[str, ...] = ()  # the GPUs of this worker, one for each rank
    log_begin: int = 0  # size of the slot's log in bytes when the worker started

    @property
    def pid(self) -> int:
        return self.process.pid

    def accepts(self, token: str) -> bool:
        """Returns whether a `hello` with this token comes from this worker.

        The token of the worker's newest connection is valid too, because the `welcome` with the
        next token may be lost.
        """
        valid = (self.token, self.used_token or self.token)
        return any(secrets.compare_digest(known.encode(), token.encode()) for known in valid)

    def renew(self, token: str) -> None:
        """Makes a new token for the worker's next connection.

        `token` is the token with which the worker's newest connection was opened.
        """
        if token == self.token or not self.used_token:
            self.used_token, self.token = token, secrets.token_hex(16)


class DialSettings(Struct, frozen=True):
    """The settings for a worker's connection to a broker that did not start it.

    The fields are those of WorkerConfig.
    """

    server_key: str = ""
    key: str = ""
    orphan_grace: float = 60.0  # seconds


MAX_LAST_LINE = 1000  # most bytes of a worker's last line in a report
SPARE_WAIT = 60.0  # seconds after the broker's limit for hangs until a group ends itself


class Supervisor:
    """The owner of the child processes. One thread uses it."""

    def __init__(
        self,
        config: PoolConfig,
        endpoint: str,
        *,
        portable: bool = False,
        dial: DialSettings | None = None,
    ) -> None:
        """With `dial` the workers serve a broker elsewhere, and log to the stderr of this process.

        `portable`: a pipe reports the end of a child, even if the system has pidfds.
        """
        self.config = config
        self.endpoint = endpoint
        self.dial = dial
        self.portable = portable or not hasattr(os, "pidfd_open")
        self.children: dict[str, Child] = {}  # by slot
        self.places = GpuPlaces()  # invariant: each of `children` has a place
        self.records = ProcessRecords(config.run_dir / "workers")
        self._started: dict[str, int] = {}  # started workers by slot
        self._observe_at = 0.0

    # ---- start ---------------------------------------------------------------------------------

    def start(self, slot: str, name: str, model: ModelConfig) -> Child:
        """Starts the worker of a slot.

        Raises OSError if the process or its files cannot be created, and GpusUnavailable if the
        GPUs of its settings are missing.
        """
        for_child: list[int] = []
        gpus = chosen_gpus(visible_gpus(os.environ), model.gpu_ids)
        granted: tuple[str, ...] = ()
        if self.dial is None:
            granted = gpus = self.places.take(slot, gpus, model.devices)
        elif not model.gpu_ids:  # a remote worker chooses among all GPUs of its machine
            gpus = ()
        for_gpus = environment_of(gpus, os.environ)
        try:
            child = self._start(slot, name, model, for_gpus, for_child)
            child.gpus = granted
            return child
        finally:
            if self.dial is None and slot not in self.children:
                self.places.release(slot)
            for descriptor in for_child:
                os.close(descriptor)

    def _start(
        self,
        slot: str,
        name: str,
        model: ModelConfig,
        for_gpus: Mapping[str, str],
        for_child: list[int],
    ) -> Child:
        """Starts the process.

        `for_gpus`: the environment variable with the GPUs that the worker may use, if any.
        `for_child` collects the descriptors that only the child needs.
        """
        for_child.append(log := self._open_log(slot))
        # Read before the worker starts: it may write its last line, or end, at any time after that.
        log_begin, oom_kills = os.fstat(log).st_size, host.oom_kills()
        number = self._started.get(slot, 0)
        dump_path = self._dump_path(slot, number)
        for_child.append(dump := os.open(dump_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        block, block_fd = Block.create()
        for_child.append(block_fd)
        rank_blocks, rank_fds = _rank_blocks(model.devices - 1, for_child)
        closed_at_exit, held_by_child = os.pipe()
        for_child.append(held_by_child)
        token = secrets.token_hex(16)
        settings = WorkerConfig(
            self.endpoint,
            slot,
            token,
            name,
            model,
            self.config.log_format,
            block_fd,
            dump,
            number,
            prepare_limit=self.config.prepare_limit,
            log_level=self.config.log_level,
            prefix_dir=str(self.config.prefix_dir),
            save_limit=SAVE_SHARE * self.config.stop_grace,
            rank_block_fds=rank_fds,
            wait_limit=rank_wait_limit(self.config),
        )
        if self.dial is not None:
            settings = replace(settings, dials=True, token="", **as_map(self.dial))
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mlxpool.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_environment(settings), **for_gpus},
                pass_fds=(held_by_child, block_fd, dump, *rank_fds),
                start_new_session=True,
            )
        except OSError:
            os.close(closed_at_exit)
            for opened in (block, *rank_blocks):
                opened.close()
            raise
        exit_descriptor = closed_at_exit
        if not self.portable:
            os.close(closed_at_exit)
            exit_descriptor = _pidfd(process)
        self._started[slot] = number + 1
        self.records.add(slot, process.pid)
        child = Child(slot, token, process, exit_descriptor, block, dump_path, oom_kills)
        child.rank_blocks = rank_blocks
        child.log_begin = log_begin
        self.children[slot] = child
        return child

    def _open_log(self, slot: str) -> int:
        if self.dial is not None:
            return os.dup(sys.stderr.fileno())
        path = self.log_path(slot)
        if path.exists() and path.stat().st_size > self.config.worker_log_bytes:
            with path.open("rb") as file:
                file.seek(-self.config.worker_log_bytes // 2, os.SEEK_END)
                newest = file.read()
            path.write_bytes(newest)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def log_path(self, slot: str) -> Path:
        """Returns the path of the log file of a slot's workers."""
        return worker_log(self.config.run_dir, slot)

    def _dump_path(self, slot: str, number: int) -> Path:
        return self.config.run_dir / "logs" / f"{file_stem(slot)}.{number % KEPT_DUMPS}.stacks"

    def record_all(self) -> None:
        """Rewrites the files that record the running workers, because they were removed."""
        for slot, child in self.children.items():
            self.records.add(slot, child.pid)

    # ---- observe -------------------------------------------------------------------------------

    def accepts(self, slot: str, token: str) -> str | None:
        """Returns the token for the worker's next connection if `token` is valid, else None."""
        child = self.children.get(slot)
        if child is None or not child.accepts(token):
            return None
        child.renew(token)
        return child.token

    def observation_due(self, now: float) -> bool:
        """Returns whether an observation is due; if so, schedules the next."""
        if not self.children or now < self._observe_at:
            return False
        self._observe_at = now + OBSERVE_INTERVAL
        return True

    def observe(self, slot: str) -> Sample:
        """Returns the state of a child process as the system shows it."""
        child = self.children[slot]
        pid, look = child.process.pid, child.block.read()
        return Sample(
            look,
            host.is_stopped(pid),
            # Before a worker has named its threads it has a single thread.
            host.run_queue_wait_ns(pid, look.compute_tid or pid),
            host.run_queue_wait_ns(pid, look.edge_tid or pid),
            host.resident_bytes(pid),
            tuple(_sample_of_rank(pid, block) for block in child.rank_blocks),
        )

    def dump_stacks(self, slot: str) -> None:
        """Asks a worker to write the stacks of its threads; `last_dump` finds the file."""
        child = self.children.get(slot)
        if child is not None:
            child.dumped = True
            self._signal(child, signal.SIGUSR1)
            for rank in filter(
                None, (_pid_of_rank(child.pid, block) for block in child.rank_blocks)
            ):
                _signal_rank(rank)

    def last_dump(self, slot: str) -> Path | None:
        """Returns the newest file with stacks of a slot's workers, or None."""
        dumps = [
            path
            for number in range(KEPT_DUMPS)
            if (path := self._dump_path(slot, number)).exists() and path.stat().st_size
        ]
        return max(dumps, key=lambda path: path.stat().st_mtime_ns, default=None)

    def stacks(self, slot: str, limit: int) -> str:
        """Returns the last `limit` bytes of stacks of a slot's newest worker; "" without stacks."""
        number = self._started.get(slot, 0) - 1
        try:
            with self._dump_path(slot, number).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - limit))
                return file.read(limit).decode(errors="replace")
        except OSError:
            return ""

    # ---- end -----------------------------------------------------------------------------------

    def stop(self, slot: str, now: float, *, at_once: bool = False) -> None:
        """Sends SIGTERM to the worker of a slot.

        `kill_overdue` sends SIGKILL after `stop_grace` seconds, or at its next call if `at_once`.
        """
        child = self.children.get(slot)
        if child is not None and not child.kill_at:
            child.commanded = True
            child.kill_at = now if at_once else now + self.config.stop_grace
            self._signal(child, signal.SIGTERM)

    def kill_overdue(self, now: float) -> None:
        """Kills the workers that have not ended in time."""
        for child in self.children.values():
            if child.kill_at and now >= child.kill_at:
                child.kill_at = now + KILL_INTERVAL
                self._signal(child, signal.SIGKILL, group=True)

    def kill_all(self, now: float) -> None:
        """Kills all workers now. Their exits are collected as usual."""
        for child in self.children.values():
            child.commanded, child.kill_at = True, now
        self.kill_overdue(now)

    def next_wake(self) -> float:
        """Returns the time of the next due `kill_overdue` or observation."""
        kills = min((c.kill_at for c in self.children.values() if c.kill_at), default=float("inf"))
        return min(kills, self._observe_at) if self.children else kills

    def _signal(self, child: Child, number: int, *, group: bool = False) -> None:
        # Only `reap` waits for the process, so until then no other process can have its pid.
        if child.process.returncode is None:
            (os.killpg if group else os.kill)(child.process.pid, number)

    def exited_by_itself(self, slot: str) -> bool:
        """Returns whether a worker ended by an exit and not by a signal.

        On systems other than Linux it returns False.
        """
        if sys.platform != "linux":
            return False
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        end = os.waitid(os.P_PID, self.children[slot].process.pid, flags)
        return end is not None and end.si_code == os.CLD_EXITED

    def reap(self, slot: str) -> WorkerExit:
        """Collects an ended worker, and kills the remaining processes of its group."""
        child = self.children.pop(slot)
        kill_group(child.process.pid)  # before `wait`, after which the group id may be reused
        code = child.process.wait()
        if self.dial is None:
            self.places.release(slot)
        os.close(child.exit_descriptor)
        if child.process.stdin is not None:
            child.process.stdin.close()
        look = child.block.read()
        for block in (child.block, *child.rank_blocks):
            block.close()
        if child.dump_path.exists() and not child.dump_path.stat().st_size:
            child.dump_path.unlink()
        self.records.remove(slot)
        out_of_memory = host.oom_kills() > child.oom_kills
        # After `hello` a worker also logs normal events, so its last line may not be the cause.
        line = self._last_line(child) if code > 0 and not child.used_token else ""
        return exit_of(code, child.commanded, out_of_memory, look, line)

    def _last_line(self, child: Child) -> str:
        """Returns the last non-empty line of a worker's log; "" if the worker logs elsewhere."""
        if self.dial is not None:
            return ""
        try:
            with self.log_path(child.slot).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(child.log_begin, size - MAX_LAST_LINE))
                return last_line(file.read(MAX_LAST_LINE))
        except OSError:
            return ""

    def close(self) -> None:
        """Kills and reaps all workers."""
        for child in self.children.values():
            self._signal(child, signal.SIGKILL, group=True)
        for slot in list(self.children):
            self.reap(slot)


def _environment(settings: WorkerConfig) -> dict[str, str]:
    return {
        **os.environ,
        **preload(),
        "PYTHONUNBUFFERED": "1",
        WORKER_VARIABLE: settings.to_environment(),
    }


def rank_wait_limit(config: PoolConfig) -> float:
    """Returns the seconds for which a rank of a group waits for the other ranks in an all-reduce.

    This time exceeds the limits after which the broker ends a group that hangs.
    """
    longest = max(config.load_limit, config.fresh_limit, config.prefill_limit, config.step_limit)
    return 2 * longest + SPARE_WAIT


def _rank_blocks(count: int, for_child: list[int]) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Makes the shared memory blocks for the progress of a group's ranks above 0.

    `for_child` collects their descriptors.
    """
    blocks, descriptors = [], []
    for _ in range(count):
        block, descriptor = Block.create()
        for_child.append(descriptor)
        blocks.append(block)
        descriptors.append(descriptor)
    return tuple(blocks), tuple(descriptors)


def _pid_of_rank(worker: int, block: Block) -> int:
    """Returns the pid of a rank; 0 before its process starts and after it has ended."""
    pid = block.read().pid
    try:  # the check of the group excludes another process with this pid
        return pid if pid > 1 and os.getpgid(pid) == worker else 0
    except OSError:
        return 0


def _sample_of_rank(worker: int, block: Block) -> Sample:
    """Returns the state of a rank above 0, from its shared memory block and the system.

    Such a rank has no main thread that sends heartbeats.
    """
    look, pid = block.read(), _pid_of_rank(worker, block)
    if not pid:
        return Sample(look)
    waited = host.run_queue_wait_ns(pid, look.compute_tid or pid)
    return Sample(look, host.is_stopped(pid), waited, 0, host.resident_bytes(pid))


def _signal_rank(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        pass  # the process has ended


def _pidfd(process: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # a process that cannot be watched must not live
        process.kill()
        process.wait()
        raise
