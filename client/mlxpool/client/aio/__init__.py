"""The asyncio client: the same connection as the blocking client, with asyncio queues."""

from mlxpool.client.aio.batch import AsyncBatch
from mlxpool.client.aio.client import AsyncClient
from mlxpool.client.aio.stream import AsyncChoicesStream, AsyncStream

__all__ = ["AsyncBatch", "AsyncChoicesStream", "AsyncClient", "AsyncStream"]
