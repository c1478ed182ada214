"""The process of a rank behind the first: it loads its part, and computes what rank 0 sends.

Its main thread computes: there is no broker to answer.
"""

from __future__ import annotations

import logging
import os

from mlxpool.common.config.schema import WorkerConfig
from mlxpool.common.progress import Block
from mlxpool.worker.compute.follower import Follower
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.groups.divisions import part_of
from mlxpool.worker.groups.links import Meeting
from mlxpool.worker.groups.loading import load_part
from mlxpool.worker.groups.pipes import Inbox
from mlxpool.worker.kernels import device
from mlxpool.worker.system.load_clock import LOAD
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.locate import locate, open_files

log = logging.getLogger("mlxpool.worker")


def run(config: WorkerConfig, inbox: Inbox) -> int:
    """Load, then serve until rank 0 ends; `Begin` has come. Returns the exit code."""
    block = Block.open(config.block_fd) if config.block_fd >= 0 else Block.private()
    progress = Progress(lambda: None, block=block)
    progress.compute_begins()
    block.write("pid", os.getpid())
    progress.enter("load")
    try:
        follower = _load(config, progress)
        progress.enter("idle")
        block.write("orders", done := 1)  # `Begin`
        while (message := inbox.take()) is not None:
            follower.handle(message)
            done += 1
            block.write("orders", done)
    except Exception as error:
        fields = {"rank": config.rank, "why": f"{type(error).__name__}: {error}"}
        log.critical("a rank cannot go on", extra=fields, exc_info=True)
        return 1
    return 0


def _load(config: WorkerConfig, progress: Progress) -> Follower:
    model = config.model
    LOAD.enter("check")
    folder = inspect(open_files(locate(model)), model.engine)
    LOAD.enter("device")
    device.log_device()
    device.keep_large_arrays_off_heap()
    part = part_of(folder, config.rank, model.devices)
    os.write(config.ready_fd, b"1")
    meeting = Meeting.of(
        config.rank, model.devices, config.hosts_fd, config.group_port, config.wait_limit
    )
    found = load_part(part, model, meeting, lambda tensors, size: progress.moved())
    LOAD.enter("warm_up")
    return Follower(found.loaded, found.collectives, progress)
