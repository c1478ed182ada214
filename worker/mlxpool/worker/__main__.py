"""`python -m mlxpool.worker`: one worker process, started by the broker's supervisor."""

from __future__ import annotations

import os
import sys
import traceback

from mlxpool.common.config.schema import WORKER_VARIABLE, WorkerConfig
from mlxpool.worker.process import lifecycle

SWITCH_INTERVAL = 0.0005  # seconds; at Python's 5 ms a busy edge makes a step three times as long


def main() -> int:
    settings = os.environ.pop(WORKER_VARIABLE, None)
    if settings is None:
        print("a worker is started by its broker: use `mlxpool serve`", file=sys.stderr)
        return 2
    config = WorkerConfig.from_environment(settings)
    lifecycle.dump_on_signal(config.dump_fd)
    lifecycle.die_with_parent()
    from mlxpool.common import logs  # the heavy imports come after
    from mlxpool.worker.process.edge import Edge

    logs.set_up(json_lines=config.log_format == "json")
    sys.setswitchinterval(SWITCH_INTERVAL)
    edge = Edge(config)
    lifecycle.watch_stdin(edge.orphaned)
    return edge.run()


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the compute thread may be inside MLX: do not take the interpreter apart
