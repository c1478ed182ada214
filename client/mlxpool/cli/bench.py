"""`mlxpool bench`, whose own room has everything else: bench/mlxpool/bench/."""

from mlxpool.bench.cli import add_commands

__all__ = ["add_commands"]
