"""`python -m mlxpool.broker [CONFIG.toml]`: runs a broker, as `mlxpool serve` does."""

from __future__ import annotations

import sys
from pathlib import Path

from mlxpool.broker.edge.broker import Broker
from mlxpool.common import logs
from mlxpool.common.config import loading
from mlxpool.common.process import core_dumps, private_temp


def main() -> int:
    core_dumps.turn_off()
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    settings = loading.load(path)
    logs.set_up(json_lines=settings.log_format == "json", level=logs.LEVELS[settings.log_level])
    private_temp.use(settings.run_dir)  # for the child processes
    Broker(settings, lambda: loading.load(path)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
