"""The endpoints of OpenAI's Files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request

from mlxpool.common.errors import UnknownJob
from mlxpool.gateway.errors import HttpError, bad_request
from mlxpool.gateway.generation import queries
from mlxpool.gateway.generation.kept_answers import drawn_key
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.openai.batches import bodies
from mlxpool.gateway.openai.batches.kept_batches import KeptBatches
from mlxpool.gateway.openai.batches.kept_files import KeptFiles
from mlxpool.gateway.openai.batches.upload import Upload

JSONL = "application/jsonl"
DEFAULT_FILES = 10_000


class FileRoutes:
    """One method a path. All raise HttpError and PoolError before the response has started."""

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def upload(self, request: Request, response: ResponseWriter) -> None:
        """POST /v1/files; answered when the file is on the disk."""
        files, id = KeptFiles(self._pool.job_client), bodies.file_id(drawn_key())
        await Upload(files, id, self._pool.settings.body_time).run(request)
        await response.json(bodies.file_body(await files.row(id)))

    async def list(self, query: Mapping[str, str], response: ResponseWriter) -> None:
        """GET /v1/files: those that were uploaded."""
        purpose = query.get("purpose", bodies.UPLOADED)
        rows = await KeptFiles(self._pool.job_client).rows()
        shown = [
            bodies.file_body(row)
            for row in reversed(rows)
            if row["complete"] and row["purpose"] == bodies.UPLOADED == purpose
        ]
        await response.json(queries.page(shown, query, DEFAULT_FILES, DEFAULT_FILES))

    async def retrieve(self, id: str, response: ResponseWriter) -> None:
        """GET /v1/files/ID."""
        results = bodies.results_of(id)
        if results is None:
            return await response.json(bodies.file_body(await self._row(id)))
        batch, kind = results
        row, pieces = await self._results(id, batch, kind)
        size = 0
        async for data in pieces:
            size += len(data)
        await response.json(bodies.results_body(row, kind, size))

    async def content(self, id: str, response: ResponseWriter) -> None:
        """GET /v1/files/ID/content."""
        results = bodies.results_of(id)
        if results is None:
            await self._row(id)
            pieces: AsyncIterator[bytes] = KeptFiles(self._pool.job_client).parts(id)
        else:
            _, pieces = await self._results(id, *results)
        await response.open(JSONL)
        async for data in pieces:
            if data:
                await response.write(data)
        await response.close()

    async def delete(self, id: str, response: ResponseWriter) -> None:
        """DELETE /v1/files/ID."""
        if bodies.results_of(id) is not None:
            message = f"{id!r:.80} is made of the results of a batch, and is deleted when they are"
            raise bad_request(message, "id")
        await self._row(id)
        await KeptFiles(self._pool.job_client).delete(id)
        await response.json({"id": id, "object": "file", "deleted": True})

    async def _row(self, id: str) -> dict[str, Any]:
        """An uploaded file of this owner. Raises HttpError if there is none."""
        try:
            row = await KeptFiles(self._pool.job_client).row(id)
        except UnknownJob:
            row = {}
        if not row.get("complete") or row["purpose"] != bodies.UPLOADED:
            raise _no_file(id)
        return row

    async def _results(
        self, id: str, batch: str, kind: str
    ) -> tuple[dict[str, Any], AsyncIterator[bytes]]:
        """The row of a batch, and the lines of one of its files. Raises HttpError without it."""
        batches = KeptBatches(self._pool.job_client)
        found = await batches.find(batch)
        if found is None or bodies.batch_body(*found)[f"{kind}_file_id"] != id:
            raise _no_file(id)
        row, request = found
        return row, batches.results(row, request, kind)


def _no_file(id: str) -> HttpError:
    return HttpError(404, f"there is no file {id!r:.80}", "file_not_found", "id", retry=False)
