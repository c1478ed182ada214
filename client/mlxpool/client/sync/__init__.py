"""The blocking client."""

from mlxpool.client.sync.batch import Batch
from mlxpool.client.sync.client import Client
from mlxpool.client.sync.stream import Stream

__all__ = ["Batch", "Client", "Stream"]
