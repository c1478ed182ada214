"""`python -m mlxpool.worker`: one worker process, started by the broker's supervisor."""

from __future__ import annotations

import faulthandler
import os
import sys

from mlxpool.common import logs
from mlxpool.common.config import WORKER_VARIABLE, WorkerConfig
from mlxpool.worker.edge import Edge

SWITCH_INTERVAL = 0.0005  # seconds; at Python's 5 ms a busy edge makes a step three times as long


def main() -> int:
    settings = os.environ.pop(WORKER_VARIABLE, None)
    if settings is None:
        print("a worker is started by its broker: use `mlxpool serve`", file=sys.stderr)
        return 2
    config = WorkerConfig.from_environment(settings)
    logs.set_up(json_lines=config.log_format == "json")
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_INTERVAL)
    return Edge(config).run()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the compute thread may be inside MLX: do not take the interpreter apart
