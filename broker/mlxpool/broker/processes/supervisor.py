"""Starts worker processes, looks at them, notices their end, ends them: SIGTERM, then SIGKILL."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mlxpool.broker.interface.events import Sample
from mlxpool.broker.processes import system
from mlxpool.broker.processes.blas import preload
from mlxpool.common.config.schema import WORKER_VARIABLE, ModelConfig, PoolConfig, WorkerConfig
from mlxpool.common.progress import Block, Look

AGAIN = 1.0  # seconds between two SIGKILLs to a process that the kernel has not let go of
TICK = 0.5  # seconds between two looks
RECORD = 4096  # characters of a worker's record that are read
DUMPS = 3  # files with stacks kept of each slot
_OWN = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


@dataclass(eq=False, slots=True)
class Child:
    """A running worker. `watch` becomes readable when its process is gone."""

    slot: str
    token: str
    process: subprocess.Popen[bytes]
    watch: int
    block: Block
    dump_path: Path
    oom_kills: int = 0  # the kernel's count when it was started
    kill_at: float = 0.0  # when SIGKILL follows; 0: not being stopped
    commanded: bool = False
    dumped: bool = False
    used_token: str = ""  # opened the newest connection; counts until `welcome` has surely come

    def opens(self, token: str) -> bool:
        """Whether a `hello` with this token is the worker's.

        The token before the newest counts too: the `welcome` with the newest may have been lost.
        """
        known = (self.token, self.used_token or self.token)
        return any(secrets.compare_digest(each.encode(), token.encode()) for each in known)

    def renew(self, token: str) -> None:
        """A connection was opened: the next needs a new token."""
        if token == self.token or not self.used_token:
            self.used_token, self.token = token, secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Dial:
    """How a worker gets to a broker elsewhere; the fields are those of WorkerConfig."""

    server_key: str = ""
    key: str = ""
    orphan_grace: float = 60.0


@dataclass(frozen=True, slots=True)
class End:
    """How a worker ended. `own`: by itself, not by a signal from outside."""

    cause: str
    own: bool
    prefill: bytes | None


class Supervisor:
    """Owns the child processes. Lives in the broker's one thread."""

    def __init__(
        self,
        config: PoolConfig,
        endpoint: str,
        *,
        portable: bool = False,
        dial: Dial | None = None,
    ) -> None:
        """With `dial` the workers are those of a broker elsewhere, and write where we do."""
        self.config = config
        self.endpoint = endpoint
        self.dial = dial
        self.portable = portable or not hasattr(os, "pidfd_open")
        self.children: dict[str, Child] = {}
        self.started: dict[str, int] = {}  # slot -> workers it has had
        self.look_at = 0.0

    # ---- start ---------------------------------------------------------------------------------

    def start(self, slot: str, name: str, model: ModelConfig) -> Child:
        """Start the worker of a slot. Raises OSError when it or its files cannot be made."""
        opened: list[int] = []
        try:
            return self._start(slot, name, model, opened)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _start(self, slot: str, name: str, model: ModelConfig, opened: list[int]) -> Child:
        """`opened` collects what only the child needs."""
        opened.append(log := self._log(slot))
        number = self.started.get(slot, 0)
        dump_path = self._dump_path(slot, number)
        opened.append(dump := os.open(dump_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        block, block_fd = Block.make()
        opened.append(block_fd)
        closed_at_exit, held_by_child = os.pipe()
        opened.append(held_by_child)
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
        )
        if self.dial is not None:
            settings = replace(settings, dials=True, token="", **asdict(self.dial))
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "mlxpool.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(settings),
                pass_fds=(held_by_child, block_fd, dump),
                start_new_session=True,
            )
        except OSError:
            os.close(closed_at_exit)
            block.close()
            raise
        watch = closed_at_exit
        if not self.portable:
            os.close(closed_at_exit)
            watch = _pidfd(process)
        self.started[slot] = number + 1
        self._remember(slot, process.pid)
        oom = system.oom_kills()
        child = Child(slot, token, process, watch, block, dump_path, oom_kills=oom)
        self.children[slot] = child
        return child

    def _log(self, slot: str) -> int:
        if self.dial is not None:
            return os.dup(sys.stderr.fileno())
        path = self.log_path(slot)
        keep = b""
        if path.exists() and path.stat().st_size > self.config.worker_log_bytes:
            with path.open("rb") as file:
                file.seek(-self.config.worker_log_bytes // 2, os.SEEK_END)
                keep = file.read()
            path.write_bytes(keep)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def log_path(self, slot: str) -> Path:
        """Where a slot's workers write what they have to say."""
        return self.config.run_dir / "logs" / f"{_file(slot)}.log"

    def _dump_path(self, slot: str, number: int) -> Path:
        return self.config.run_dir / "logs" / f"{_file(slot)}.{number % DUMPS}.stacks"

    # ---- survivors of an earlier broker --------------------------------------------------------

    def _record(self, slot: str) -> Path:
        return self.config.run_dir / "workers" / f"{_file(slot)}.json"

    def _remember(self, slot: str, pid: int) -> None:
        record = self._record(slot)
        try:
            record.parent.mkdir(mode=0o700, exist_ok=True)
            record.write_text(json.dumps({"pid": pid, "start_time": system.start_time(pid)}))
        except OSError:
            pass  # a full disk must not keep a worker from starting

    def sweep(self) -> list[int]:
        """End workers that an earlier broker of this run directory left behind; returns their pids.

        A pid counts only together with its start time: another process may have it by now.
        """
        ended = []
        for record in sorted((self.config.run_dir / "workers").glob("*.json")):
            try:
                with record.open() as file:
                    known = json.loads(file.read(RECORD))
                pid, began = int(known["pid"]), known["start_time"]
            except (OSError, ValueError, KeyError, TypeError):
                pid, began = 0, None
            if pid > 1 and began is not None and system.start_time(pid) == began:
                _kill_group(pid)
                ended.append(pid)
            record.unlink(missing_ok=True)
        return ended

    # ---- look ----------------------------------------------------------------------------------

    def due(self, now: float) -> bool:
        """Whether it is time to look at the children again."""
        if not self.children or now < self.look_at:
            return False
        self.look_at = now + TICK
        return True

    def look(self, slot: str) -> Sample:
        """What can be seen of a child from outside."""
        child = self.children[slot]
        pid, look = child.process.pid, child.block.read()
        return Sample(
            look,
            system.stopped(pid),
            system.run_queue_wait_ns(pid, look.compute_tid or pid),  # at first there is one thread
            system.run_queue_wait_ns(pid, look.edge_tid or pid),
            system.resident(pid),
        )

    def dump(self, slot: str) -> None:
        """Have it write where its threads are; `last_dump` finds it."""
        child = self.children.get(slot)
        if child is not None:
            child.dumped = True
            self._signal(child, signal.SIGUSR1)

    def last_dump(self, slot: str) -> Path | None:
        """The newest file with stacks of a slot's workers."""
        found = [
            path
            for number in range(DUMPS)
            if (path := self._dump_path(slot, number)).exists() and path.stat().st_size
        ]
        return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)

    # ---- end -----------------------------------------------------------------------------------

    def stop(self, slot: str, now: float, *, at_once: bool = False) -> None:
        """Ask the worker to end; `poll` kills it after `stop_grace`, or `at_once`."""
        child = self.children.get(slot)
        if child is not None and not child.kill_at:
            child.commanded = True
            child.kill_at = now if at_once else now + self.config.stop_grace
            self._signal(child, signal.SIGTERM)

    def poll(self, now: float) -> None:
        """Kill what did not end in time."""
        for child in self.children.values():
            if child.kill_at and now >= child.kill_at:
                child.kill_at = now + AGAIN
                self._signal(child, signal.SIGKILL, group=True)

    def next_wake(self) -> float:
        """When `poll` or `look` is due."""
        kills = min((c.kill_at for c in self.children.values() if c.kill_at), default=float("inf"))
        return min(kills, self.look_at) if self.children else kills

    def _signal(self, child: Child, number: int, *, group: bool = False) -> None:
        # Not waited for before `reap`, so its pid is its own: no other process can be hit.
        if child.process.returncode is None:
            (os.killpg if group else os.kill)(child.process.pid, number)

    def left_by_itself(self, slot: str) -> bool:
        """Whether an ended worker, not yet collected, was ended by no signal; only Linux tells."""
        if sys.platform != "linux":
            return False
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        end = os.waitid(os.P_PID, self.children[slot].process.pid, flags)
        return end is not None and end.si_code == os.CLD_EXITED

    def reap(self, slot: str) -> End:
        """Collect an ended worker and all of its group; says how it ended."""
        child = self.children.pop(slot)
        _kill_group(child.process.pid)  # not yet waited for: the group is still its own
        code = child.process.wait()
        os.close(child.watch)
        if child.process.stdin is not None:
            child.process.stdin.close()
        look = child.block.read()
        child.block.close()
        if not child.dumped:
            child.dump_path.unlink(missing_ok=True)
        self._record(slot).unlink(missing_ok=True)
        return end_of(code, child.commanded, system.oom_kills() > child.oom_kills, look)

    def close(self) -> None:
        """End every worker, at once and for good."""
        for child in self.children.values():
            self._signal(child, signal.SIGKILL, group=True)
        for slot in list(self.children):
            self.reap(slot)


def _file(slot: str) -> str:
    """Another for each slot, also where names have slashes: org/name/0 -> org%2Fname-0."""
    name, _, number = slot.rpartition("/")
    return f"{name.replace('%', '%25').replace('/', '%2F')}-{number}"


def _environment(settings: WorkerConfig) -> dict[str, str]:
    return {
        **os.environ,
        **preload(),
        "PYTHONUNBUFFERED": "1",
        WORKER_VARIABLE: settings.to_environment(),
    }


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nobody is left in it


def _pidfd(process: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # a process that nobody watches must not live
        process.kill()
        process.wait()
        raise


def end_of(code: int, commanded: bool, out_of_memory: bool, look: Look) -> End:
    """An exit code in words and whom it speaks against."""
    if commanded:
        return End("stopped", False, look.request)
    if code == -signal.SIGKILL and out_of_memory:
        return End("killed by the kernel: out of memory", True, look.request)
    own = code >= 0 or -code in _OWN
    return End(cause_of(code), own, look.request)


def cause_of(code: int) -> str:
    """An exit code in words: `exit code 3`, `killed by SIGSEGV`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
