"""The endpoints of OpenAI's Files and Batches."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from mlxpool.client import AsyncClient
from mlxpool.common.errors import Gone, PoolError, UnknownJob
from mlxpool.common.protocol.kept.batch_messages import SubmitBatch
from mlxpool.common.protocol.kept.file_messages import FilePlace, KeyName
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation import queries
from mlxpool.gateway.generation.kept_answers import KEY_BYTES, drawn_key
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.openai.batches import bodies
from mlxpool.gateway.openai.batches.bodies import BatchRequest, batch_body
from mlxpool.gateway.openai.batches.fields import MAX_FILES
from mlxpool.gateway.openai.batches.kept import FileWriter, Found, KeptBatches, KeptFiles
from mlxpool.gateway.openai.batches.lines import LineFault, LineModels, slices_of
from mlxpool.gateway.openai.batches.requests import LineReader, NewBatch, new_batch
from mlxpool.gateway.openai.batches.upload import Upload

JSONL = "application/jsonl"
MAX_LISTED, DEFAULT_LISTED = 100, 20
NOT_A_LINE = b'{"prompt": 0}\n'  # invalid line, so that a batch fails before any line runs
EMPTY = LineFault(1, "empty_file", "the file has no line")


class FileRoutes:
    """The handlers of the endpoints of files.

    All handlers raise HttpError and PoolError before the response starts.
    """

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def upload(self, request: Request, response: ResponseWriter) -> None:
        """Answers POST /v1/files with the uploaded file, once the file is on the disk."""
        files, id = KeptFiles(await self._pool.take_keeper()), bodies.file_id(drawn_key())
        await Upload(files, id, self._pool.settings.body_time).run(request)
        await response.json(bodies.file_body(await files.row(id)))

    async def list(self, query: Mapping[str, str], response: ResponseWriter) -> None:
        """Answers GET /v1/files with the uploaded files of all pools, sorted by creation."""
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
        """Returns the position of a file in lists; the file may be deleted.

        Raises HttpError if the file is unknown.
        """
        try:
            return await self._pool.find_kept(lambda client: KeptFiles(client).place(after))
        except UnknownJob:
            raise _no_file(after, "after") from None

    async def retrieve(self, id: str, response: ResponseWriter) -> None:
        """Answers GET /v1/files/ID with the properties of a file."""
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
        """Answers GET /v1/files/ID/content with the bytes of a file."""
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
        """Deletes a file (DELETE /v1/files/ID).

        For a results file, deletes these results, but not the batch.
        """
        results = bodies.results_of(id)
        if results is None:
            await self._row(id)
            await KeptFiles(self._pool.job_client).delete(id)
        else:
            row, _ = await self._found(id, *results)
            # Also for a deleted file: a broker may have ended before all results were deleted.
            await KeptBatches(self._pool.job_client).release(*results)
            if bodies.is_deleted(row, results[1]):
                raise _no_file(id)
        await response.json({"id": id, "object": "file", "deleted": True})

    async def _row(self, id: str) -> dict[str, Any]:
        """Returns an uploaded file of this owner. Raises HttpError if it does not exist."""
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
        """Returns the pool's map of a batch, and the lines of one of its results files.

        Raises HttpError if there is no such file.
        """
        kept_batch = await self._found(id, batch, kind)
        if bodies.is_deleted(kept_batch[0], kind):
            raise _no_file(id)
        return kept_batch[0], KeptBatches(self._pool.job_client).results(*kept_batch, kind)

    async def _found(self, id: str, batch: str, kind: str) -> Found:
        """Returns a batch that has, or had, this results file. Raises HttpError if none has."""
        try:
            batch_found = await self._pool.find_kept(lambda client: KeptBatches(client).find(batch))
        except (UnknownJob, Gone):
            raise _no_file(id) from None
        if bodies.batch_body(*batch_found)[f"{kind}_file_id"] != id:
            raise _no_file(id)
        return batch_found


def _no_file(id: str, param: str = "id") -> HttpError:
    return HttpError(404, f"there is no file {id!r:.80}", "file_not_found", param, retry=False)


class BatchRoutes:
    """The handlers of the endpoints of batches.

    All handlers raise HttpError and PoolError before the response starts.
    """

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def create(
        self, body: Mapping[str, Any], response: ResponseWriter, idempotency: str | None
    ) -> None:
        """Answers POST /v1/batches with the batch, once its lines are checked and it is stored.

        A request that is repeated with its header Idempotency-Key is answered with the first
        request's batch, as long as the batch is kept, even if the input file no longer exists.
        """
        new = new_batch(body)
        hex = drawn_key()
        if idempotency:
            hex = hashlib.sha256(idempotency.encode()).hexdigest()[: 2 * KEY_BYTES]
            earlier = await self._earlier(bodies.batch_id(hex), new)
            if earlier is not None:
                return await response.json(batch_body(*earlier))
        batch = await self._make(new, hex, idempotency)
        response.exchange.pool_id = bytes(batch[0]["batch"]).hex()
        await response.json(batch_body(*batch))

    async def _earlier(self, id: str, new: NewBatch) -> Found | None:
        """Returns the batch that an earlier request with this Idempotency-Key has made, or None.

        `id`: the batch id made from the key. Raises HttpError if the earlier request differs, and
        Gone if its results were deleted.
        """
        try:
            row, request = await self._pool.find_kept(
                lambda client: KeptBatches(client).find(id), despite_silent=True
            )
        except UnknownJob:
            return None
        if not new.is_of(request):
            message = (
                f"an earlier request with this Idempotency-Key has made the batch {id}, of another"
                " file or with other settings: take another key"
            )
            raise HttpError(409, message, "duplicate_id", retry=False)
        return row, request

    async def _make(self, new: NewBatch, hex: str, idempotency: str | None) -> Found:
        """Writes the lines in the pool's form, and submits the batch. A failure leaves no file.

        Raises HttpError and PoolError.
        """
        among, key = await self._pool.keepers(), f"lines_{drawn_key()}"
        models = LineModels(self._pool.models, among, idempotency or "")
        try:
            await self._pool.find_kept(lambda client: _check_input(client, new.file))
            files = KeptFiles(self._pool.job_client)
            reader, writer = await self._written(files, new, models, key)
        except UnknownJob:
            message = f"there is no file {new.file!r:.80} with the purpose {bodies.UPLOADED!r}"
            raise HttpError(404, message, "file_not_found", "input_file_id", retry=False) from None
        request = BatchRequest(
            new.endpoint, new.file, new.window, reader.total, new.metadata, reader.faults
        )
        id = bodies.batch_id(hex)
        batch = SubmitBatch(
            KeyName(id),
            key,
            new.digest,
            lines=0 if reader.faults else reader.total,
            keep_ms=None if new.keep is None else round(new.keep * 1000),
            deadline_ms=new.seconds * 1000,
            metadata=request.body(),
            notify=new.notify,
            output_file="" if reader.faults else bodies.results_id(id, bodies.OUTPUT),
            error_file="" if reader.faults else bodies.results_id(id, bodies.ERROR),
        )
        kept_batches = KeptBatches(self._pool.client_of(models.chosen))
        submitting = asyncio.ensure_future(kept_batches.submit(batch))
        try:
            batch_made = await asyncio.shield(submitting)
        except BaseException:
            self._pool.later(
                _discard_unless_used(submitting, kept_batches, writer), "deleting lines"
            )
            raise
        if batch_made[0]["file"] != key:  # another request with the same key was faster
            await writer.discard()
        return batch_made

    async def retrieve(self, id: str, response: ResponseWriter) -> None:
        """Answers GET /v1/batches/ID with the batch."""
        await response.json(batch_body(*await self._find(id)))

    async def list(self, query: Mapping[str, str], response: ResponseWriter) -> None:
        """Answers GET /v1/batches with the batches of all pools, the newest first."""
        limit = queries.integer(query, "limit", 1, MAX_LISTED) or DEFAULT_LISTED
        after = query.get("after", "")
        created = None if not after else float((await self._find(after, "after"))[0]["created"])
        rows: list[Found] = []
        for pool in await self._pool.keepers():
            batches = KeptBatches(self._pool.client_of(pool))
            if after and pool is self._pool.models.chosen:
                rows += await batches.listed(limit + 1, before=after)
            else:
                rows += await batches.listed(limit + 1, older=created)
        rows.sort(key=lambda row: float(row[0]["created"]), reverse=True)
        shown = [batch_body(*row) for row in rows[:limit]]
        await response.listing(queries.listing(shown, more=len(rows) > limit))

    async def cancel(self, id: str, response: ResponseWriter) -> None:
        """Answers POST /v1/batches/ID/cancel with the batch; an ended batch stays as it is."""
        row, request = await self._find(id)
        if row["state"] == "running" and not request.faults:
            row, request = await KeptBatches(self._pool.job_client).cancel(id)
        await response.json(batch_body(row, request))

    async def _find(self, id: str, param: str = "id") -> Found:
        try:
            return await self._pool.find_kept(lambda client: KeptBatches(client).find(id))
        except (UnknownJob, Gone):
            message = f"there is no batch {id!r:.80}"
            raise HttpError(404, message, "batch_not_found", param, retry=False) from None

    # ---- the lines of a new batch --------------------------------------------------------------

    async def _written(
        self, files: KeptFiles, new: NewBatch, models: LineModels, key: str
    ) -> tuple[LineReader, FileWriter]:
        """Converts the lines of the input file, and writes them as a new file in the chosen pool.

        `key`: the key of the new file. If a line has a fault, the file has one invalid line instead
        of all lines, so that the batch fails.
        """
        while True:
            target = models.chosen
            reader = LineReader(new.endpoint)
            writer = FileWriter(KeptFiles(self._pool.client_of(target)), key, bodies.LINES)
            try:
                async with contextlib.aclosing(files.lines(new.file)) as parts:
                    await self._write_lines(parts, reader, writer, models)
                if models.chosen is target and not reader.faults:
                    await writer.finish()
                    return reader, writer
            except BaseException:
                await writer.discard()
                raise
            await writer.discard()
            if models.chosen is target:
                break
        writer = FileWriter(KeptFiles(self._pool.client_of(models.chosen)), key, bodies.LINES)
        await writer.add(NOT_A_LINE)
        await writer.finish()
        return reader, writer

    async def _write_lines(
        self,
        parts: AsyncIterator[Sequence[bytes]],
        reader: LineReader,
        writer: FileWriter,
        models: LineModels,
    ) -> None:
        """Writes lines until a line has a fault, or another pool is chosen for them."""
        target = models.chosen
        async for lines in parts:
            for some in slices_of(lines):
                parsed = await asyncio.to_thread(reader.parse, some)
                await models.add(line["body"]["model"] for _, line in parsed)
                if models.chosen is not target:
                    return
                pool_lines = await asyncio.to_thread(reader.pool_lines, parsed, models.model)
                if reader.given_up:
                    return
                await writer.add(pool_lines)
        if not reader.total:
            reader.faults.append(EMPTY)


async def _check_input(client: AsyncClient, key: str) -> None:
    """Raises UnknownJob unless `key` is the key of a complete upload."""
    row = await KeptFiles(client).row(key)
    if not row["complete"] or row["purpose"] != bodies.UPLOADED:
        raise UnknownJob(f"there is no such upload {key!r:.80}")


async def _discard_unless_used(
    submitting: asyncio.Future[Found], kept: KeptBatches, writer: FileWriter
) -> None:
    """Deletes the file of lines unless a batch was made of it."""
    try:
        batch_found = await submitting
    except PoolError:
        await writer.discard()
        return
    if batch_found[0]["file"] != writer.key:
        await writer.discard()
