"""`python -m mlxpool.gateway`: the gateway that a broker starts (`mlxpool serve --http`)."""

from __future__ import annotations

import gc
import os
import signal
import sys

from mlxpool.common.config.schema import GATEWAY_VARIABLE, GatewayConfig
from mlxpool.common.process import core_dumps


def main() -> int:
    """Serves until the broker stops this process, or ends. Returns the exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a reload has no effect before the keys are read
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process immediately, as SIGTERM does
    text = os.environ.pop(GATEWAY_VARIABLE, None)
    if text is None:
        words = "this gateway is started by a broker: use `mlxpool serve --http HOST:PORT`, or"
        print(f"{words} `mlxpool gateway` for a pool that runs", file=sys.stderr)
        return 2
    config = GatewayConfig.from_environment(text)
    core_dumps.turn_off()
    from mlxpool.common import logs
    from mlxpool.common.process import private_temp

    logs.set_up(json_lines=config.log_format == "json", level=logs.LEVELS[config.log_level])
    private_temp.use()
    gc.disable()  # imported objects are not garbage, and a collection takes long
    from mlxpool.gateway.server import run_supervised

    gc.freeze()
    gc.enable()
    return run_supervised(config)


if __name__ == "__main__":
    sys.exit(main())
