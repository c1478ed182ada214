"""The endpoints of Ollama's interface that are about models: tags, ps, show, pull; and version."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from mlxpool.common.errors import UnknownModel
from mlxpool.common.version import VERSION
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.http import NDJSON, ResponseWriter
from mlxpool.gateway.ollama import requests
from mlxpool.gateway.ollama.models import pull_statuses, running, show, tag
from mlxpool.gateway.ollama.responses import line

HOW_TO_GET = (
    "nothing is downloaded: put a folder with the model's config.json, *.safetensors and"
    " tokenizer.json on the pool's machine, name it with `mlxpool serve --model {name}=FOLDER`, or"
    " in [models.{name}] of its config and run `mlxpool reload`; docs/models.md has more"
)

PLAIN_NAME = re.compile(r"[\w.-]{1,60}")  # needs no quotes in a shell or in TOML


class ModelRoutes:
    """One method a path. All raise HttpError and PoolError before the response has started."""

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool
        self._started_at = int(time.time())  # in place of the time of a model without files

    async def version(self, response: ResponseWriter) -> None:
        """GET /api/version: the version of this package."""
        await response.json({"version": VERSION})

    async def tags(self, response: ResponseWriter) -> None:
        """GET /api/tags."""
        models = await self._pool.models.all()
        await response.json({"models": [tag(model, self._started_at) for model in models]})

    async def ps(self, response: ResponseWriter) -> None:
        """GET /api/ps: the models that have a worker."""
        models, now = await self._pool.models.all(), time.time()
        loaded = [running(model, now) for model in models if model.expires_in is not None]
        await response.json({"models": loaded})

    async def show(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """POST /api/show."""
        name, verbose = requests.show(body)
        model = await self._pool.models.described(name)
        response.exchange.model = model.name
        await response.json(show(model, self._started_at, verbose=verbose))

    async def pull(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """POST /api/pull: success for a model that is there. Raises HttpError for another."""
        name, stream = requests.pull(body)
        try:
            model = await self._pool.models.described(name)
        except UnknownModel as error:
            plain = name if PLAIN_NAME.fullmatch(name) else "NAME"
            message = f"{error.message}; {HOW_TO_GET.format(name=plain)}"
            raise HttpError(404, message, "model_not_found", "model", retry=False) from None
        response.exchange.model = model.name
        statuses = pull_statuses(model)
        if not stream:
            return await response.json(statuses[-1])
        await response.open(NDJSON)
        await response.write(b"".join(map(line, statuses)))
        await response.close()
