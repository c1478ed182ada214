"""`python -m mlxpool.worker`: one worker process, started by the broker's supervisor."""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from mlxpool.common.config.schema import WORKER_VARIABLE, WorkerConfig
from mlxpool.common.process import core_dumps
from mlxpool.worker.system import mlx_environment, parent_death, stack_dumps

if TYPE_CHECKING:
    from mlxpool.worker.process.edge import Edge

SWITCH_INTERVAL = 0.0005  # seconds; at Python's 5 ms, a busy main thread makes steps 3 times longer


def main() -> int:
    """Runs a worker. Returns its exit code."""
    settings = os.environ.pop(WORKER_VARIABLE, None)
    if settings is None:
        print("a worker is started by its broker: use `mlxpool serve`", file=sys.stderr)
        return 2
    config = WorkerConfig.from_environment(settings)
    core_dumps.turn_off()
    stack_dumps.dump_on_signal(config.dump_fd)
    parent_death.die_with_parent()
    from mlxpool.common import logs

    logs.set_up(json_lines=config.log_format == "json", level=logs.LEVELS[config.log_level])
    mlx_environment.set_mlx_environment()
    from mlxpool.worker.system import cpu_threads, load_clock

    load_clock.LOAD.begin(load_clock.process_age())
    cpu_threads.import_numpy()
    if config.rank:
        return serve_rank(config)
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.disable()  # imports make no garbage, and its collection takes a tenth of their time
    edge = build(config)
    gc.freeze()
    gc.enable()
    parent_death.watch_stdin(edge.orphaned)
    return edge.run()


def serve_rank(config: WorkerConfig) -> int:
    """Runs a rank of a group that another process leads. Returns its exit code."""
    parent_death.watch_stdin(lambda: os._exit(0))
    from mlxpool.worker.groups.pipes import Inbox

    inbox = Inbox(config.plan_fd)
    try:
        from mlxpool.worker.compute import follower
    finally:
        begin = inbox.take()  # also if the import fails, see messages.Begin
    return 0 if begin is None else follower.run(config, inbox)


def build(config: WorkerConfig) -> Edge:
    """Builds the parts of a worker, with a test fault if the counting model's settings have one.

    The imports take long. So call it after the worker is bound to its parent process and after the
    other ranks of a group have started: these import modules at the same time.
    """
    from mlxpool.common.progress import Block

    block = Block.open(config.block_fd) if config.block_fd >= 0 else Block.private()
    start_group = None
    if config.model.devices > 1:
        from mlxpool.worker.process.ranks import StartedGroup

        start_group = StartedGroup(config, block)
    from mlxpool.common.trace import History
    from mlxpool.common.transport.keys import Credentials
    from mlxpool.common.transport.waker import Waker
    from mlxpool.worker.compute import model_source
    from mlxpool.worker.compute.messages import MakeRoom, Reserve
    from mlxpool.worker.compute.progress import Progress
    from mlxpool.worker.compute.thread import Compute
    from mlxpool.worker.preparation.lane_service import service_of
    from mlxpool.worker.preparation.limits import Limits
    from mlxpool.worker.preparation.room import WorkerMemory
    from mlxpool.worker.process.edge import Edge, Mailbox
    from mlxpool.worker.process.intake import Intake
    from mlxpool.worker.process.link import Link
    from mlxpool.worker.testing.faults import faults_of
    from mlxpool.worker.testing.faulty_engine import begin_with, open_source
    from mlxpool.worker.testing.faulty_link import FaultyIntake, FaultyLink

    history = History(f"worker-{config.slot}")
    mailbox = Mailbox(Waker())
    progress = Progress(mailbox.waker.wake, block=block)
    credentials = Credentials.of(config.server_key, config.key)
    faults = faults_of(config, history)
    if not faults.site:
        opener = partial(model_source.open_source, start_group=start_group)
        compute = Compute(config, progress, mailbox.post, opener)
    else:
        compute = Compute(
            config, progress, mailbox.post, partial(open_source, faults=faults), begin_with(faults)
        )
    make_service = partial(
        service_of,
        limits=Limits(tokenize=config.prepare_limit),
        memory_limit=config.model.memory_limit,
        worker_memory=WorkerMemory(
            reserve=lambda size: compute.send(Reserve(size)),
            make_room=lambda size: compute.send(MakeRoom(size)),
            figures=lambda: progress.memory.latest,
        ),
    )
    link: Link
    if not faults.site:
        make_intake, link = Intake, Link(config.endpoint, config.token, history, credentials)
    else:
        make_intake = FaultyIntake
        link = FaultyLink(config.endpoint, config.token, history, credentials, faults)
    intake = make_intake(link, compute.send, mailbox.post, history, make_service)
    return Edge(config, mailbox, progress, link, compute, intake)


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the compute thread may be inside MLX, so the interpreter must not shut down
