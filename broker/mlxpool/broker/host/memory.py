"""How much memory all workers together may take."""

from __future__ import annotations

from mlxpool.broker.host import os_process
from mlxpool.common.config.schema import PoolConfig

DEFAULT_SHARE = 0.8  # of the machine's memory, when no limit is set


def memory_limit_bytes(config: PoolConfig) -> int:
    return config.memory_limit or int(DEFAULT_SHARE * os_process.machine_memory_bytes())
