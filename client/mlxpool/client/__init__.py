"""The client of a pool: `from mlxpool.client import Client, AsyncClient`.

One connection, with its own thread, serves any number of streams. If the connection or the broker
is lost, the requests of the streams are sent again.
"""

from typing import TYPE_CHECKING, Any

from mlxpool.client.batches.outcome import LineResult
from mlxpool.client.choices import Choices, ChoicesStream
from mlxpool.client.decisions import Decision, DecisionList
from mlxpool.client.jobs import Job
from mlxpool.client.request import ChatTokens
from mlxpool.client.retry import Pace
from mlxpool.client.stream import Delta, Result
from mlxpool.client.sync import Batch, Client, Stream
from mlxpool.client.vectors import Ranked, Ranking, Vectors
from mlxpool.common.errors import PoolError

if TYPE_CHECKING:
    from mlxpool.client.aio import AsyncBatch, AsyncChoicesStream, AsyncClient, AsyncStream

__all__ = [
    "AsyncBatch",
    "AsyncChoicesStream",
    "AsyncClient",
    "AsyncStream",
    "Batch",
    "ChatTokens",
    "Choices",
    "ChoicesStream",
    "Client",
    "Decision",
    "DecisionList",
    "Delta",
    "Job",
    "LineResult",
    "Pace",
    "PoolError",
    "Ranked",
    "Ranking",
    "Result",
    "Stream",
    "Vectors",
]


def __getattr__(name: str) -> Any:
    """Imports `aio` at its first use, because it imports asyncio.

    The import of asyncio takes as long as the import of all other modules of the client.
    """
    if name in ("AsyncBatch", "AsyncChoicesStream", "AsyncClient", "AsyncStream"):
        from importlib import import_module

        return getattr(import_module("mlxpool.client.aio"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
