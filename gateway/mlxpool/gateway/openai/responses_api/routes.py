"""The endpoints of OpenAI's Responses."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from mlxpool.client import AsyncClient, Job, Result
from mlxpool.common.errors import Gone, JobsOff, PoolError, UnknownJob
from mlxpool.gateway.errors import HttpError, bad_request, unsupported_parameter
from mlxpool.gateway.generation import queries
from mlxpool.gateway.generation.choice_streams import (
    ChoiceRequest,
    StreamFormat,
    call_ids,
    stream_arguments,
    write_stream,
    write_updates,
)
from mlxpool.gateway.generation.kept_answers import (
    KEY_BYTES,
    KeptAnswer,
    drawn_key,
    has_failed,
)
from mlxpool.gateway.generation.output_blocks import Kind, OutputBlocks
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.generation.token_counts import fitted, thought_tokens
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.openai.responses_api import requests
from mlxpool.gateway.openai.responses_api.bodies import ResponseEvents, ResponseFrame, response_id
from mlxpool.gateway.openai.responses_api.items import Earlier
from mlxpool.gateway.openai.responses_api.kept import KeptResponse, ResponseNote, items_of
from mlxpool.gateway.openai.responses_api.requests import ResponseRequest
from mlxpool.gateway.resumption import EventNumbers
from mlxpool.gateway.server_sent_events import EVENT_STREAM, KEEP_ALIVE

MAX_ITEMS, DEFAULT_ITEMS = 100, 20  # most items of a list, and its default
MAX_NUMBER = 2**53  # greatest number of an event
UNKEPT = "nothing is kept, for this pool keeps no jobs"
INSTEAD = {  # field that needs a pool with jobs -> advice for a pool without
    "background": f"{UNKEPT}; leave it out: the answer comes with this request",
    "store": f"{UNKEPT}; leave it out",
    "previous_response_id": f"{UNKEPT}: send the whole conversation in `input`",
}


class KeptResponseRoutes:
    """The handlers of responses that the pool stores as jobs (`store` or `background`).

    All handlers raise HttpError and PoolError.
    """

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def model(self, name: str, idempotency: str | None) -> ModelInfo:
        """Returns the model of a response that is to be stored, from a pool that stores jobs.

        A request that is repeated with the same `idempotency` goes to the pool of the first
        request.
        """
        if not idempotency:
            return await self._pool.models.get(name, keeps=True)
        return await self._pool.keeping_model(name, response_id(_hex_of(idempotency)))

    async def create(
        self,
        request: ResponseRequest,
        choice: ChoiceRequest,
        response: ResponseWriter,
        idempotency: str | None,
    ) -> None:
        """Makes a response that the pool stores as a job, and answers with it.

        `idempotency`: the header Idempotency-Key. A second request with the same key gets the first
        request's response.

        If the client disconnects, a response with a key continues. So does a response in the
        background whose id was sent. Other responses are cancelled, and also deleted if the id was
        not sent.
        """
        client, resumption = self._pool.job_client, response.resumption
        id = _hex_of(idempotency) if idempotency else drawn_key()
        if resumption is not None and resumption.after is not None:
            await client.job(response_id(id))  # raises UnknownJob without a response
        formats = (choice.chat.tools, choice.chat.thinking)
        note = ResponseNote(
            int(time.time()), request.echoed, request.summary, formats, choice.tools,
            choice.several_calls, request.background,
        )  # fmt: skip
        arguments = stream_arguments(choice, None)
        key, packed = response_id(id), note.packed()
        submitting = asyncio.ensure_future(
            client.submit(choice.model, key=key, note=packed, **arguments)
        )
        try:
            job = await asyncio.shield(submitting)
            response.exchange.model, response.exchange.pool_id = choice.model, job.id.hex()
            kept_response = KeptResponse.of(await client.submitted(key))
            if kept_response is None:
                message = f"the key {key!r} belongs to a job that is not a response: take another"
                raise HttpError(409, message, "duplicate_id", retry=False)
            if resumption is not None:
                response.numbers = EventNumbers(int(kept_response.job["gen"]), resumption.after)
            if request.background and not request.stream:
                return await response.json(kept_response.frame.begun("queued"))
            await self._answer(kept_response, response, stream=request.stream, made=True)
        except BaseException:
            id_sent = response.started  # from then on the client may know the id
            if not idempotency and not (request.background and id_sent):
                ending = _end(client, key, submitting, release=not id_sent)
                self._pool.later(ending, f"cancelling {key}")
            raise

    async def retrieve(self, id: str, query: Mapping[str, str], response: ResponseWriter) -> None:
        """Answers GET /v1/responses/ID with the response, as a whole or as a stream of events."""
        stream = queries.flag(query, "stream", False)
        after = queries.integer(query, "starting_after", 0, MAX_NUMBER)
        if after is not None and not stream:
            raise bad_request("'starting_after' needs 'stream': true", "starting_after")
        kept = await self._find(id)
        kept.check_number(after)
        if kept.waiting is not None and not stream:
            return await response.json(kept.frame.begun(kept.waiting))
        await self._answer(kept, response, stream=stream, after=after)

    async def cancel(self, id: str, response: ResponseWriter) -> None:
        """Answers POST /v1/responses/ID/cancel; a response that has ended stays as it is."""
        kept = await self._find(id)
        if not kept.note.background:
            message = f"{id!r} is not in the background: close the connection of its request"
            raise bad_request(message, "id")
        if kept.waiting is not None:
            await self._pool.job_client.cancel(key=id)
        await self._answer(await self._find(id), response, stream=False)

    async def delete(self, id: str, response: ResponseWriter) -> None:
        """Deletes a response (DELETE /v1/responses/ID); cancels it if it has not ended."""
        kept = await self._find(id)
        client = self._pool.job_client
        if kept.waiting is not None:
            await client.cancel(key=id)
        await client.release(id)
        await response.json({"id": id, "object": "response", "deleted": True})

    async def input_items(
        self, id: str, query: Mapping[str, str], response: ResponseWriter
    ) -> None:
        """Answers GET /v1/responses/ID/input_items with the messages that the model got."""
        kept = await self._find(id)
        items = items_of(kept.messages, kept.images, kept.id)
        await response.json(queries.page(items, query, MAX_ITEMS, DEFAULT_ITEMS))

    async def earlier(self, id: str) -> Earlier:
        """Returns the conversation of `previous_response_id`.

        Raises HttpError unless that response is complete.
        """
        kept = await self._find(id, "previous_response_id", off=False)
        state = kept.job["state"]
        if state != "done":
            shown = kept.waiting or ("cancelled" if state == "cancelled" else "failed")
            message = f"the response {id!r} is {shown}: continue a complete response instead"
            raise bad_request(message, "previous_response_id")
        async with self._read(kept) as answer:
            output = OutputBlocks(call_ids(kept.id))
            await output.read(answer)
        items = [kept.frame.item(block) for block in output.blocks]
        return Earlier(kept.messages, kept.images, items)

    # ---- shared by the routes ------------------------------------------------------------------

    async def _find(self, id: str, param: str = "id", *, off: bool = True) -> KeptResponse:
        """Returns a response of this owner. Raises HttpError if it does not exist.

        If the pool keeps no jobs, raises HttpError, or JobsOff if `off` is False.
        """
        try:
            submitted = await self._pool.find_kept(lambda client: client.submitted(id))
            response = KeptResponse.of(submitted)
        except (UnknownJob, Gone):
            response = None
        except JobsOff as error:
            if not off:
                raise
            raise HttpError(501, f"nothing is kept: {error.message}", error.code) from None
        if response is None:
            place = "with this key" if self._pool.settings.names_owners else "here"
            message = (
                f"there is no response {id!r:.80} {place}: only those in the background, or with"
                " 'store': true, are kept, and for a limited time"
            )
            raise HttpError(404, message, "response_not_found", param, retry=False)
        return response

    def _read(self, kept: KeptResponse) -> KeptAnswer:
        key, gen, note = response_id(kept.id), int(kept.job["gen"]), kept.note
        stream = self._pool.job_client.fetch(key, 0, gen, steps=True)
        return KeptAnswer(
            stream, note.chat, note.tools, several_calls=note.several_calls, stops=kept.stops
        )

    async def _answer(
        self,
        kept: KeptResponse,
        response: ResponseWriter,
        *,
        stream: bool,
        after: int | None = None,
        made: bool = False,
    ) -> None:
        """Sends a stored response: streams its events, or sends it as a whole when it has ended.

        `after`: the number of the last event that the client has. `made`: this request has made the
        response, so its tokens are counted in the metrics.
        """
        frame, output = kept.frame, OutputBlocks(call_ids(kept.id))
        number = kept.first_number
        events = ResponseEvents(frame, output, number, -1 if after is None else after)
        interval = self._pool.settings.keep_alive
        async with self._read(kept) as answer:
            try:
                if stream:
                    await response.open(EVENT_STREAM)
                    await response.write(events.head(queued=kept.note.background))
                    encoding = StreamFormat(
                        EVENT_STREAM, events.update, events.failed, b"", KEEP_ALIVE, interval
                    )
                    (result,) = await write_updates(response, answer, encoding)
                else:
                    result = await output.read(answer)
            except HttpError as error:
                return await self._failed(kept, response, events, error, answer.pos)
            if made:
                response.exchange.count(result.usage)
            thought = any(block.kind is Kind.THOUGHTS for block in output.blocks)
            whole = frame.ended(output.blocks, result, answer.thought_tokens if thought else 0)
            if not stream:
                return await response.json(whole)
            await response.write(events.tail(whole))
            await response.close()

    async def _failed(
        self,
        kept: KeptResponse,
        response: ResponseWriter,
        events: ResponseEvents,
        error: HttpError,
        pos: int,
    ) -> None:
        """Sends the error that ended the reading of a response.

        If the job itself has failed, the error is sent as the end of the response. Otherwise only
        the stream ends; raises `error` if the HTTP response has not started. `pos`: the number of
        token ids that were read.
        """
        key, gen = response_id(kept.id), int(kept.job["gen"])
        ended = await has_failed(self._pool.job_client, key, error.code, gen, pos)
        if not response.started:
            if not ended:
                raise error
            return await response.json(kept.frame.failed(events.output.blocks, error))
        response.identified(error)
        if ended:
            await response.write(events.failed(error))
        else:
            await response.write_aside(events.broken_off(error))
        await response.close()


def _hex_of(idempotency: str) -> str:
    """Returns a response id, in hex, that depends only on the header Idempotency-Key."""
    return hashlib.sha256(idempotency.encode()).hexdigest()[: 2 * KEY_BYTES]


async def _end(
    client: AsyncClient, key: str, submitting: asyncio.Future[Job], *, release: bool
) -> None:
    """Cancels the job of a client that has disconnected. `release`: also deletes the job."""
    with contextlib.suppress(PoolError):  # the code below checks if there is a job
        await submitting
    try:
        await client.cancel(key=key)
        if release:
            await client.release(key)
    except UnknownJob:
        pass


@contextlib.contextmanager
def _needs_store(field: str) -> Iterator[None]:
    """Converts JobsOff in the context to an HttpError that names the field."""
    try:
        yield
    except JobsOff:
        raise unsupported_parameter(field, INSTEAD[field]) from None


class ResponseRoutes:
    """Makes responses. Raises HttpError and PoolError before the response has started."""

    def __init__(self, pool: PoolAccess, kept: KeptResponseRoutes) -> None:
        self._pool = pool
        self._kept = kept

    async def create(
        self, body: Mapping[str, Any], response: ResponseWriter, idempotency: str | None
    ) -> None:
        """Answers POST /v1/responses with a response, as a whole or as a stream of events.

        `idempotency`: the header Idempotency-Key, for a response that is stored.
        """
        request = requests.response(body)
        previous = requests.previous_id(body)
        if previous is not None:
            with _needs_store("previous_response_id"):
                earlier = await self._kept.earlier(previous)
            request = requests.response(body, earlier)
        if request.store:
            with _needs_store("background" if request.background else "store"):
                model = await self._kept.model(request.chat.model, idempotency)
        else:
            model = await self._pool.model(request.chat.model, response)
        if request.truncates:
            chat = await fitted(self._pool, request.chat, model, "truncation")
            request = replace(request, chat=chat)
        choice = request.chat.choice(model)
        if request.store:
            with _needs_store("background" if request.background else "store"):
                await self._kept.create(request, choice, response, idempotency)
            return
        async with self._pool.generate([choice], response, "input") as generation:
            created = int(generation.told_time())
            frame = ResponseFrame(generation.id, created, request.echoed, request.summary)
            output = OutputBlocks(generation.call_ids(0))

            async def ended(result: Result) -> dict[str, Any]:
                client = self._pool.client
                thoughts = await thought_tokens(client, generation, model, output, result)
                return frame.ended(output.blocks, result, thoughts)

            if not request.stream:
                result = await output.read(generation)
                return await response.json(await ended(result))
            events = ResponseEvents(frame, output)
            interval = self._pool.settings.keep_alive
            encoding = StreamFormat(
                EVENT_STREAM, events.update, events.failed, events.head(), KEEP_ALIVE, interval
            )
            results = await write_stream(response, generation, encoding)
            if results is not None:
                await response.write(events.tail(await ended(results[0])))
                await response.close()
