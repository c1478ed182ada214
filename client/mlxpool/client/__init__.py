"""Use a pool: `from mlxpool.client import Client, AsyncClient`."""

from mlxpool.client.aio import AsyncClient, AsyncStream
from mlxpool.client.stream import Delta, Result
from mlxpool.client.sync import Client, Stream
from mlxpool.common.errors import PoolError

__all__ = ["AsyncClient", "AsyncStream", "Client", "Delta", "PoolError", "Result", "Stream"]
