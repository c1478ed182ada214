"""The endpoints of the pool's own jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from mlxpool.client import AsyncClient, AsyncStream
from mlxpool.client.jobs import about
from mlxpool.common.errors import JobRestarted, PoolError
from mlxpool.common.protocol.from_client import Generate
from mlxpool.common.protocol.kept.job_messages import DEFAULT_LISTED, JOB_STATES, MAX_LISTED
from mlxpool.gateway import errors
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.generation import queries
from mlxpool.gateway.generation.kept_answers import drawn_key, failures_before, has_failed
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.jobs import bodies, requests
from mlxpool.gateway.jobs.bodies import Place, job_body, job_ref
from mlxpool.gateway.jobs.requests import MAX_NUMBER, MAX_POOLS, JobRequest
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.server_sent_events import EVENT_STREAM, KEEP_ALIVE

# Seconds until the stream begins. An earlier error of the read has its own HTTP status.
FIRST_WAIT = 0.5
NO_CONTENT = 204


class JobRoutes:
    """The handlers of the endpoints of jobs.

    All handlers raise HttpError and PoolError before the response starts.
    """

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def submit(
        self, body: Mapping[str, Any], response: ResponseWriter, idempotency: str | None
    ) -> None:
        """Answers POST /v1/jobs with the job, once the job is on the disk."""
        request = requests.job(body, idempotency)
        model = await self._model(request)
        client, key = self._pool.job_client, request.key or drawn_key()
        if request.kind == Generate.kind:
            job = await client.submit(model.name, key=key, **request.arguments)
        else:
            job = await client.submit_call(request.kind, model.name, key=key, **request.arguments)
        response.exchange.model, response.exchange.pool_id = model.name, job.id.hex()
        await response.json(job_body(await client.job(job)))

    async def _model(self, request: JobRequest) -> ModelInfo:
        """Returns the model of a request, in a pool that keeps jobs.

        If a pool already has a job with the request's key, that pool is chosen.
        """
        if request.key is None:
            return await self._pool.models.get(request.model, keeps=True)
        return await self._pool.keeping_model(request.model, request.key)

    async def _row(self, id: str) -> dict[str, Any]:
        """Returns this owner's job from the pool that keeps it.

        Raises PoolError if there is no such job.
        """
        return await self._pool.find_kept(lambda client: client.job(job_ref(id)))

    async def list(self, query: Mapping[str, str], response: ResponseWriter) -> None:
        """Answers GET /v1/jobs with a list of the owner's jobs."""
        state = queries.word(query, "state", ("", *JOB_STATES), "")
        after = queries.integer(query, "after", 0, MAX_NUMBER)
        before = queries.integer(query, "before", 0, MAX_NUMBER) or 0
        limit = queries.integer(query, "limit", 1, MAX_LISTED) or DEFAULT_LISTED
        if after is not None and (state or before):
            raise bad_request("'after' lists ended jobs: give no 'state' and no 'before'", "after")
        pool = queries.integer(query, "pool", 1, MAX_POOLS) or 1
        try:
            self._pool.models.take(pool)
        except IndexError:
            message = f"'pool' is {pool}, and the gateway asks fewer pools"
            raise bad_request(message, "pool") from None
        rows = await self._pool.job_client.jobs(
            after=after, before=before, state=state, limit=limit
        )
        counted = "seq" if after is None else "end_seq"
        following = rows[-1][counted] if len(rows) == limit else 0
        await response.json(bodies.job_list(rows, following))

    async def read(self, id: str, response: ResponseWriter) -> None:
        """Answers GET /v1/jobs/ID with the job."""
        await response.json(job_body(await self._row(id)))

    async def cancel(self, id: str, response: ResponseWriter) -> None:
        """Answers POST /v1/jobs/ID/cancel with the job; a job that has ended stays as it is."""
        row = await self._row(id)
        client = self._pool.job_client
        await client.cancel(key=str(row["key"]))
        await response.json(job_body(await client.job(bytes(row["job"]))))

    async def change(self, verb: str, id: str, response: ResponseWriter) -> None:
        """Answers POST /v1/jobs/ID/VERB with the job, after a message of the kind `verb`."""
        row = await self._row(id)
        changed = await self._pool.job_client.ask(about(verb, bytes(row["job"])))
        await response.json(job_body(changed))

    async def events(
        self,
        id: str,
        query: Mapping[str, str],
        last_event_id: str | None,
        response: ResponseWriter,
    ) -> None:
        """Answers GET /v1/jobs/ID/events with the job's events after the event `last_event_id`."""
        row = await self._row(id)
        client = self._pool.job_client
        if last_event_id:
            place = bodies.place_of(last_event_id)
        else:
            start = queries.integer(query, "from", 0, MAX_NUMBER) or 0
            place = Place(queries.integer(query, "gen", 0, MAX_NUMBER), start)
        if place.has_all(row):
            return await response.data(b"", "text/plain", NO_CONTENT)
        await JobReader(client, row, response, self._pool.settings.keep_alive).run(place)


class JobReader:
    """Writes the events of one job to one client, until the job has ended."""

    def __init__(
        self,
        client: AsyncClient,
        row: Mapping[str, Any],
        response: ResponseWriter,
        keep_alive: float,
    ) -> None:
        """`row`: the job's map. `keep_alive`: seconds without an event before a comment is sent."""
        self._client = client
        self._job, self._gen = bytes(row["job"]), int(row["gen"])
        self._pos = 0  # number of ids of this generation that the reader has
        self._retries = 0  # number of failures after these ids that were followed by a retry
        self._response = response
        self._keep_alive = keep_alive

    async def run(self, place: Place) -> None:
        """Writes the events after a position. Raises PoolError before the response has started."""
        if place.gen not in (None, self._gen):
            await self._restarted(self._gen)
            place = Place()
        while True:
            self._pos, self._retries = place.pos, 0
            stream = self._client.fetch(self._job, place.pos, self._gen, steps=True)
            try:
                await self._copy(stream)
                done = await asyncio.to_thread(bodies.done_event, stream.result, self._gen)
                return await self._end(done)
            except JobRestarted as error:
                gen = (error.details or {}).get("gen")
                if gen is None or gen == self._gen:
                    return await self._failed(error, place)
                await self._restarted(int(gen))
                place = Place()
            except PoolError as error:
                return await self._failed(error, place)
            finally:
                stream.close()

    async def _copy(self, stream: AsyncStream) -> None:
        wait = FIRST_WAIT
        while True:
            try:
                async with asyncio.timeout(wait):
                    deltas = await stream.ready()
            except TimeoutError:
                await self._write(KEEP_ALIVE)
            else:
                if not deltas:
                    return
                events = [
                    bodies.delta_event(delta, self._gen)
                    for delta in deltas
                    if delta.text or delta.ids
                ]
                if events:
                    await self._write(b"".join(events))
                last = deltas[-1]
                self._pos = last.pos + len(last.ids)
                self._retries = 0 if last.ids else failures_before(last)
            wait = self._keep_alive

    async def _restarted(self, gen: int) -> None:
        self._gen = gen
        await self._write(bodies.restarted_event(gen))

    async def _failed(self, error: PoolError, place: Place) -> None:
        """Ends the stream with the job's error if the job has failed, else with a reading error.

        If the job has not failed and the response has not started, raises `error`.
        """
        fault = errors.from_pool_error(error)
        ended = await has_failed(self._client, self._job, error.code, self._gen, self._pos)
        if not ended and not self._response.started:
            raise error
        self._response.identified(fault)
        failed = bodies.failed_event(fault, self._gen, self._pos, 1 + self._retries)
        await self._end(failed if ended else bodies.interrupted_event(fault))

    async def _write(self, data: bytes) -> None:
        if not self._response.started:
            await self._response.open(EVENT_STREAM)
        await self._response.write(data)

    async def _end(self, data: bytes) -> None:
        await self._write(data)
        await self._response.close()
