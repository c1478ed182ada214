"""Starts the processes of a measurement that are the ranks of a group, each with its own GPU."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from mlxpool.common.gpus import VISIBLE, check_enough, visible_gpus
from mlxpool.worker.groups.links import Meeting
from mlxpool.worker.process.ranks import hosts_file, keep_ports
from mlxpool.worker.system import mlx_environment

LOOK_INTERVAL = 0.05  # seconds between two looks at which processes have ended


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the number of ranks, and what only the processes of ranks are given."""
    parser.add_argument("--ranks", type=int, default=2, help="devices of the group")
    for name in ("rank", "hosts", "port"):
        parser.add_argument(f"--{name}", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--pipes", type=int, nargs="*", default=[], help=argparse.SUPPRESS)


def meeting_of(options: argparse.Namespace) -> Meeting:
    """Where this rank finds the others."""
    return Meeting.of(options.rank, options.ranks, options.hosts, options.port)


def run_ranks(module: str, arguments: Sequence[str], ranks: int) -> int:
    """Runs `module` as every rank; what they print goes to this process's output.

    Rank 0 gets the writing ends of pipes to the others, in their order, each of these the reading
    end of its own. Returns the exit code of rank 0, or of a rank that fails before it ends.
    """
    mlx_environment.set_mlx_environment()
    ports = ExitStack()
    *addresses, port = keep_ports(ranks + 1, ports)
    hosts = hosts_file(addresses)
    pipes = [os.pipe() for _ in range(ranks - 1)]
    visible = visible_gpus(os.environ)
    check_enough(visible, ranks)
    processes = []
    try:
        for rank in range(ranks):
            ends = [write for _, write in pipes] if rank == 0 else [pipes[rank - 1][0]]
            given = [f"--rank={rank}", f"--ranks={ranks}", f"--hosts={hosts}", f"--port={port}"]
            environment = dict(os.environ)
            if visible:
                environment[VISIBLE] = visible[rank]
            processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        module,
                        *arguments,
                        *given,
                        "--pipes",
                        *map(str, ends),
                    ],
                    env=environment,
                    pass_fds=(hosts, *ends),
                )
            )
        for descriptor in (hosts, *(end for pair in pipes for end in pair)):
            os.close(descriptor)
        return _end_of(processes)
    finally:
        ports.close()
        for process in processes:
            process.kill()
            process.wait()


def _end_of(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for the end of rank 0, or of another one that fails; returns its exit code."""
    while True:
        for rank, process in enumerate(processes):
            code = process.poll()
            if code is not None and (rank == 0 or code):
                return code
        time.sleep(LOOK_INTERVAL)
