"""The endpoints for operators and tools: health, metrics, the description of the interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.operations.drain import Drain
from mlxpool.gateway.operations.metrics import Metrics
from mlxpool.gateway.pools import CLOSED

TEXT = "text/plain; charset=utf-8"


class OperationRoutes:
    """The handlers of the endpoints for operators and tools."""

    def __init__(
        self, pool: PoolAccess, drain: Drain, metrics: Metrics, document: Mapping[str, Any]
    ) -> None:
        """`document`: the answer of /openapi.json."""
        self._pool = pool
        self._drain = drain
        self._metrics = metrics
        self._document = document

    async def health(self, response: ResponseWriter) -> None:
        """Answers GET /health: 200 if the pool takes requests, else 503 or the status of an error.

        The member `status` is `degraded` if new workers cannot reach the pool: loaded models still
        answer.
        """
        if self._drain.begun:
            return await response.json({"status": "draining"}, 503, {"connection": "close"})
        models = await self._pool.models.all()
        states = {model.state for model in models}
        if states and states <= CLOSED:
            return await response.json({"status": "draining"}, 503)
        if trouble := next((model.trouble for model in models if model.trouble), ""):
            return await response.json({"status": "degraded", "why": trouble})
        await response.json({"status": "ok"})

    async def metrics(self, accept: str, response: ResponseWriter) -> None:
        """Answers GET /metrics with the gateway's metrics for Prometheus."""
        data, content_type = self._metrics.text(accept)
        await response.data(data, content_type)

    async def openapi(self, response: ResponseWriter) -> None:
        """Answers GET /openapi.json with the description of the interface."""
        await response.json(self._document)

    async def index(self, response: ResponseWriter) -> None:
        """Answers GET / with "Ollama is running", by which Ollama's clients recognise a server."""
        await response.data(b"Ollama is running", TEXT)
