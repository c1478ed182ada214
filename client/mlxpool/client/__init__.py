"""Use a pool: `from mlxpool.client import Client, AsyncClient`."""

from typing import TYPE_CHECKING, Any

from mlxpool.client.retry import Pace
from mlxpool.client.stream import Delta, Result
from mlxpool.client.sync import Client, Stream
from mlxpool.common.errors import PoolError

if TYPE_CHECKING:
    from mlxpool.client.aio import AsyncClient, AsyncStream

__all__ = ["AsyncClient", "AsyncStream", "Client", "Delta", "Pace", "PoolError", "Result", "Stream"]


def __getattr__(name: str) -> Any:
    """asyncio costs as much to import as everything else: only who asks for it pays."""
    if name in ("AsyncClient", "AsyncStream"):
        from mlxpool.client import aio

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
