"""Starts the processes of a group's ranks from 1 on, and ends when one of them ends.

A group's processes (ranks) compute one model together. Rank 0 is the worker that the broker knows.
If a signal ends another rank, a signal also ends rank 0, so that the broker sees the cause.
Otherwise rank 0 ends with exit code 1. If rank 0 ends, the other ranks end, too.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NoReturn

from msgspec.structs import replace

from mlxpool.common.config.schema import WORKER_VARIABLE, WorkerConfig
from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.gpus import VISIBLE, GpusUnavailable, check_enough, visible_gpus
from mlxpool.common.progress import Block
from mlxpool.common.transport import listening
from mlxpool.worker.groups.links import LOOPBACK, GroupLinks, Meeting
from mlxpool.worker.groups.messages import Begin
from mlxpool.worker.groups.pipes import Orders

log = logging.getLogger("mlxpool.worker")

# Signals that a process causes itself; all other signals come from outside.
_FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


class RankProcess(threading.Thread):
    """Starts the process of a rank, waits for its end, and then ends this process.

    The same thread starts the rank and waits, because the Linux kernel kills the rank when the
    thread that started it ends.
    """

    def __init__(self, config: WorkerConfig, environment: Mapping[str, str]) -> None:
        super().__init__(name=f"rank-{config.rank}", daemon=True)
        self._config, self._environment = config, environment
        self._was_started = threading.Event()  # set when the process starts; Thread has `_started`
        self._start_error: OSError | None = None

    def begin(self) -> None:
        """Starts the thread, and waits until the thread has started the rank's process.

        Raises OSError if the process cannot be started.
        """
        self.start()
        self._was_started.wait()
        if self._start_error is not None:
            raise self._start_error

    def run(self) -> None:
        config = self._config
        descriptors = (
            config.block_fd,
            config.dump_fd,
            config.plan_fd,
            config.hosts_fd,
            config.ready_fd,
        )
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mlxpool.worker"],
                stdin=subprocess.PIPE,  # the pipe closes when this process ends
                env={**self._environment, WORKER_VARIABLE: config.to_environment()},
                pass_fds=[descriptor for descriptor in descriptors if descriptor >= 0],
            )
        except OSError as error:
            self._start_error = error
            return
        finally:
            self._was_started.set()
        _end_as(config.rank, process.wait())


def _end_as(rank: int, code: int) -> NoReturn:
    """Ends this process because rank `rank` ended; `code` is Popen's exit code of the rank.

    If a signal ended the rank, a signal also ends this process: the same signal if it shows a fault
    of the program, else SIGKILL.
    """
    cause = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
    log.critical("a rank has ended, and its group ends", extra={"rank": rank, "cause": cause})
    if code < 0:
        os.kill(os.getpid(), -code if -code in _FAULTS else signal.SIGKILL)
    os._exit(1)


class StartedGroup:
    """The processes of the ranks from 1 on; they start at once, because imports take seconds.

    An instance is given to model_source.open_source as `start_group`, and is called after the model
    was checked. The call makes the ranks load their parts; before the call the ranks wait. All
    ranks end with this process.
    """

    def __init__(self, config: WorkerConfig, block: Block) -> None:
        self._links: GroupLinks | None = None
        self._error: ModelLoadFailed | None = None
        try:
            self._links = start_ranks(config, block)
        except ModelLoadFailed as error:  # raised later, after errors of the model
            self._error = error

    def __call__(self) -> GroupLinks:
        """Returns the links to the ranks. Raises ModelLoadFailed if the ranks did not start."""
        if self._links is None:
            assert self._error is not None
            raise self._error
        self._links.orders.send(Begin())
        return self._links


def start_ranks(config: WorkerConfig, block: Block) -> GroupLinks:
    """Starts the other ranks; `block` is the progress block of rank 0.

    Raises ModelLoadFailed if a rank cannot be started.
    """
    ranks = config.model.devices
    own, *others = environments(config)
    os.environ.update(own)
    ports = ExitStack()
    try:
        *addresses, meeting_port = keep_ports(ranks + 1, ports)
        hosts = hosts_file(addresses)
        ready, tells_ready = os.pipe()
        common = replace(
            config,
            token="",
            key="",
            rank_block_fds=(),
            hosts_fd=hosts,
            group_port=meeting_port,
            ready_fd=tells_ready,
        )
        blocks = [*config.rank_block_fds, *[-1] * ranks]
        writers = [
            _start_rank(replace(common, rank=rank, block_fd=blocks[rank - 1]), environment)
            for rank, environment in enumerate(others, start=1)
        ]
        os.close(tells_ready)
    except OSError as error:
        ports.close()
        raise ModelLoadFailed(f"a rank of {config.name!r} cannot be started: {error}") from error
    meeting = Meeting.of(0, ranks, hosts, meeting_port, config.wait_limit)
    return GroupLinks(meeting, Orders(writers, block), ready, ports)


def environments(config: WorkerConfig) -> list[dict[str, str]]:
    """Returns the environment of each rank; each rank sees one GPU, in the order of ranks.

    A worker started by its broker uses the GPUs that the broker chose. A remote worker uses the
    GPUs in gpu_ids, or all GPUs of its machine. Raises ModelLoadFailed.
    """
    ranks = config.model.devices
    if sys.platform != "linux":
        raise ModelLoadFailed(
            f"model {config.name!r} has devices = {ranks}, which is supported only on Linux: other"
            " systems have one device; leave devices out"
        )
    gpus = visible_gpus(os.environ)
    if not gpus:
        return [dict(os.environ) for _ in range(ranks)]
    try:
        check_enough(gpus, ranks)
    except GpusUnavailable as error:
        raise ModelLoadFailed(f"model {config.name!r} cannot be divided: {error}") from error
    return [{**os.environ, VISIBLE: name} for name in gpus[:ranks]]


def keep_ports(count: int, kept: ExitStack) -> list[int]:
    """Returns free ports of this machine, reserved for MLX until `kept` is closed.

    Ranks listen on these ports seconds later. The reservations allow this, because MLX's sockets
    have SO_REUSEADDR.
    """
    sockets = [kept.enter_context(listening.reserve(LOOPBACK)) for _ in range(count)]
    return [int(socket.getsockname()[1]) for socket in sockets]


def hosts_file(ports: Sequence[int]) -> int:
    """Returns the descriptor of an unnamed file with these ports, in the format of MLX's ring."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps([[f"{LOOPBACK}:{port}"] for port in ports]).encode())
        file.flush()
        return os.dup(file.fileno())


def _start_rank(config: WorkerConfig, environment: Mapping[str, str]) -> int:
    """Starts the process of a rank; returns the writing end of the pipe to it."""
    reader, writer = os.pipe()
    try:
        RankProcess(replace(config, plan_fd=reader), environment).begin()
    finally:
        os.close(reader)
    return writer
