"""The endpoints of OpenAI's Batches."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any

from mlxpool.common.errors import PoolError, UnknownJob
from mlxpool.common.protocol.kept.batch_messages import SubmitBatch
from mlxpool.common.protocol.kept.file_messages import KeyName
from mlxpool.gateway import errors
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation import queries
from mlxpool.gateway.generation.kept_answers import KEY_BYTES, drawn_key
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.openai.batches import bodies
from mlxpool.gateway.openai.batches.bodies import BatchRequest, batch_body
from mlxpool.gateway.openai.batches.kept_batches import KeptBatches
from mlxpool.gateway.openai.batches.kept_files import FileWriter, KeptFiles
from mlxpool.gateway.openai.batches.lines import LineFault
from mlxpool.gateway.openai.batches.requests import LineReader, NewBatch, new_batch

MAX_LISTED, DEFAULT_LISTED = 100, 20
NOT_A_LINE = b'{"prompt": 0}\n'  # the line of a batch that failed before its first
EMPTY = LineFault(1, "empty_file", "the file has no line")


class BatchRoutes:
    """One method a path. All raise HttpError and PoolError before the response has started."""

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def create(
        self, body: Mapping[str, Any], response: ResponseWriter, idempotency: str | None
    ) -> None:
        """POST /v1/batches; answered when the lines are checked and the batch is on the disk."""
        asked = new_batch(body)
        client = self._pool.job_client
        files = KeptFiles(client)
        try:
            row = await files.row(asked.file)
        except UnknownJob:
            row = {}
        if not row.get("complete") or row["purpose"] != bodies.UPLOADED:
            message = f"there is no file {asked.file!r:.80} with the purpose {bodies.UPLOADED!r}"
            raise HttpError(404, message, "file_not_found", "input_file_id", retry=False)
        hex = drawn_key()
        if idempotency:
            hex = hashlib.sha256(idempotency.encode()).hexdigest()[: 2 * KEY_BYTES]
        reader, file = await self._check(files, asked, hex)
        request = BatchRequest(
            asked.endpoint, asked.file, asked.window, reader.total, asked.metadata, reader.faults
        )
        id = bodies.batch_id(hex)
        batch = SubmitBatch(
            KeyName(id),
            file,
            lines=0 if reader.faults else reader.total,
            keep_ms=None if asked.keep is None else round(asked.keep * 1000),
            deadline_ms=asked.seconds * 1000,
            metadata=request.body(),
            notify=asked.notify,
            output_file="" if reader.faults else bodies.results_id(id, bodies.OUTPUT),
            error_file="" if reader.faults else bodies.results_id(id, bodies.ERROR),
        )
        found = await KeptBatches(client).submit(batch)
        response.exchange.pool_id = bytes(found[0]["batch"]).hex()
        await response.json(batch_body(*found))

    async def retrieve(self, id: str, response: ResponseWriter) -> None:
        """GET /v1/batches/ID."""
        await response.json(batch_body(*await self._find(id)))

    async def list(self, query: Mapping[str, str], response: ResponseWriter) -> None:
        """GET /v1/batches: the newest first."""
        limit = queries.integer(query, "limit", 1, MAX_LISTED) or DEFAULT_LISTED
        after = query.get("after", "")
        if after:
            await self._find(after, "after")
        shown: list[dict[str, Any]] = []
        async for found in KeptBatches(self._pool.job_client).after(after):
            if len(shown) == limit:
                return await response.json(queries.listing(shown, more=True))
            shown.append(batch_body(*found))
        await response.json(queries.listing(shown, more=False))

    async def cancel(self, id: str, response: ResponseWriter) -> None:
        """POST /v1/batches/ID/cancel; a batch that has ended stays as it is."""
        row, request = await self._find(id)
        if row["state"] == "running" and not request.faults:
            row, request = await KeptBatches(self._pool.job_client).cancel(id)
        await response.json(batch_body(row, request))

    async def _find(self, id: str, param: str = "id") -> tuple[dict[str, Any], BatchRequest]:
        found = await KeptBatches(self._pool.job_client).find(id)
        if found is None:
            message = f"there is no batch {id!r:.80}"
            raise HttpError(404, message, "batch_not_found", param, retry=False)
        return found

    # ---- the lines of a new batch --------------------------------------------------------------

    async def _check(self, files: KeptFiles, asked: NewBatch, hex: str) -> tuple[LineReader, str]:
        """Write the lines as the pool takes them; returns the key of their file.

        If any has a fault, a file with one line that is none takes their place.
        """
        reader, models = LineReader(asked.endpoint), dict[str, ModelInfo | HttpError]()
        key = f"lines_{hex}"
        writer = FileWriter(files, key, bodies.LINES)
        try:
            async for lines in files.lines(asked.file):
                parsed = await asyncio.to_thread(reader.parse, lines)
                for name in {line["body"]["model"] for _, line in parsed} - models.keys():
                    models[name] = await self._model(name)
                made = await asyncio.to_thread(reader.pool_lines, parsed, models)
                if reader.given_up:
                    break
                await writer.add(made)
            if not reader.total:
                reader.faults.append(EMPTY)
            if not reader.faults:
                await writer.finish()
                return reader, key
        except BaseException:
            await writer.discard()
            raise
        await writer.discard()
        key = f"faults_{hex}"
        writer = FileWriter(files, key, bodies.LINES)
        await writer.add(NOT_A_LINE)
        await writer.finish()
        return reader, key

    async def _model(self, name: str) -> ModelInfo | HttpError:
        try:
            return await self._pool.models.get(name)
        except PoolError as error:
            if error.retryable:
                raise
            return errors.from_pool_error(error)
