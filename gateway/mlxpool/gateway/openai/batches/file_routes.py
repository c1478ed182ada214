"""The endpoints of OpenAI's Files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request

from mlxpool.common.errors import Gone, UnknownJob
from mlxpool.common.protocol.kept.file_messages import FilePlace
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation import queries
from mlxpool.gateway.generation.kept_answers import drawn_key
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.openai.batches import bodies
from mlxpool.gateway.openai.batches.fields import MAX_FILES
from mlxpool.gateway.openai.batches.kept_batches import Found, KeptBatches
from mlxpool.gateway.openai.batches.kept_files import KeptFiles
from mlxpool.gateway.openai.batches.upload import Upload

JSONL = "application/jsonl"


class FileRoutes:
    """One method a path. All raise HttpError and PoolError before the response has started."""

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def upload(self, request: Request, response: ResponseWriter) -> None:
        """POST /v1/files; answered when the file is on the disk."""
        files, id = KeptFiles(await self._pool.take_keeper()), bodies.file_id(drawn_key())
        await Upload(files, id, self._pool.settings.body_time).run(request)
        await response.json(bodies.file_body(await files.row(id)))

    async def list(self, query: Mapping[str, str], response: ResponseWriter) -> None:
        """GET /v1/files: those that were uploaded, of all pools in the order of their creation."""
        limit = queries.integer(query, "limit", 1, MAX_FILES) or MAX_FILES
        oldest_first = queries.word(query, "order", ("asc", "desc"), "desc") == "asc"
        after = query.get("after")
        behind = None if after is None else await self._place(after)
        rows: list[dict[str, Any]] = []
        if query.get("purpose", bodies.UPLOADED) == bodies.UPLOADED:
            for pool in await self._pool.keepers():
                rows += await KeptFiles(self._pool.client_of(pool)).listed(
                    bodies.UPLOADED, limit + 1, behind, oldest_first=oldest_first
                )
        rows.sort(key=lambda row: row["created"], reverse=not oldest_first)
        shown = [bodies.file_body(row) for row in rows[:limit]]
        await response.listing(queries.listing(shown, more=len(rows) > limit))

    async def _place(self, after: str) -> FilePlace:
        """Where a file is, or was, in the list. Raises HttpError for one that is unknown."""
        try:
            return await self._pool.find_kept(lambda client: KeptFiles(client).place(after))
        except UnknownJob:
            raise _no_file(after, "after") from None

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
        """DELETE /v1/files/ID; that of a batch's results deletes these, and the batch stays."""
        results = bodies.results_of(id)
        if results is None:
            await self._row(id)
            await KeptFiles(self._pool.job_client).delete(id)
        else:
            row, _ = await self._found(id, *results)
            # Also of a file that is deleted: perhaps a broker ended before all results were.
            await KeptBatches(self._pool.job_client).release(*results)
            if bodies.is_deleted(row, results[1]):
                raise _no_file(id)
        await response.json({"id": id, "object": "file", "deleted": True})

    async def _row(self, id: str) -> dict[str, Any]:
        """An uploaded file of this owner. Raises HttpError if there is none."""
        try:
            row = await self._pool.find_kept(lambda client: KeptFiles(client).row(id))
        except (UnknownJob, Gone):
            row = {}
        if not row.get("complete") or row["purpose"] != bodies.UPLOADED:
            raise _no_file(id)
        return row

    async def _results(
        self, id: str, batch: str, kind: str
    ) -> tuple[dict[str, Any], AsyncIterator[bytes]]:
        """The row of a batch, and the lines of one of its files. Raises HttpError without it."""
        found = await self._found(id, batch, kind)
        if bodies.is_deleted(found[0], kind):
            raise _no_file(id)
        return found[0], KeptBatches(self._pool.job_client).results(*found, kind)

    async def _found(self, id: str, batch: str, kind: str) -> Found:
        """A batch that has such a file, or had it. Raises HttpError if there is none."""
        try:
            found = await self._pool.find_kept(lambda client: KeptBatches(client).find(batch))
        except (UnknownJob, Gone):
            raise _no_file(id) from None
        if bodies.batch_body(*found)[f"{kind}_file_id"] != id:
            raise _no_file(id)
        return found


def _no_file(id: str, param: str = "id") -> HttpError:
    return HttpError(404, f"there is no file {id!r:.80}", "file_not_found", param, retry=False)
