"""The response object of OpenAI's Responses, its items, and the events of its streams. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from mlxpool.client import Result
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation.choice_streams import ChoiceUpdate
from mlxpool.gateway.generation.output_blocks import Action, Block, Kind, OutputBlocks, Step
from mlxpool.gateway.openai.responses_api.items import divided
from mlxpool.gateway.server_sent_events import sse

PREFIXES = {Kind.THOUGHTS: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
STATUSES = {"length": "incomplete", "cancelled": "cancelled"}  # by the reason of the end
# status of an HTTP error -> code of a failed response; other errors are server_error
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
ENDS = {"cancelled": "incomplete"}  # status -> name of the event, if it differs


def response_id(id: str) -> str:
    """Returns the id of a response as clients know it."""
    return f"resp_{id}"


class ResponseFrame(Struct, frozen=True):
    """The members that the response objects of one request share.

    `id`: the pool's id of the request, in hex. `echoed`: members that repeat the request.
    `summary`: thoughts are sent as a summary.
    """

    id: str
    created: int  # seconds since 1970
    echoed: Mapping[str, Any]
    summary: bool

    def begun(self, status: str = "in_progress") -> dict[str, Any]:
        """Returns the response before its first item."""
        return self._response(status, [])

    def ended(self, blocks: Iterable[Block], result: Result, thought_tokens: int) -> dict[str, Any]:
        """Returns the ended response; the status is `incomplete` if the token limit ended it."""
        cut = result.reason == "length"
        status = STATUSES.get(result.reason, "completed")
        return {
            **self._response(status, [*map(self.item, blocks)]),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": usage(result, thought_tokens),
        }

    def failed(self, blocks: Iterable[Block], error: HttpError) -> dict[str, Any]:
        """Returns the response with the blocks before an error."""
        code = ERROR_CODES.get(error.status, "server_error")
        return {
            **self._response("failed", [*map(self.item, blocks)]),
            "error": {"code": code, "message": error.message},
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": response_id(self.id),
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "usage": None,
            **self.echoed,
        }

    def item_id(self, block: Block) -> str:
        """Returns the id of a block's item."""
        return f"{PREFIXES[block.kind]}_{self.id}_{block.index}"

    def item(self, block: Block) -> dict[str, Any]:
        """Returns the item of a block that has ended."""
        return self._item(block, "incomplete" if block.cut else "completed", self.parts(block))

    def item_begun(self, block: Block) -> dict[str, Any]:
        """Returns the item of a block that begins, without its parts."""
        return self._item(block, "in_progress", [])

    def _item(self, block: Block, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.item_id(block), "status": status}
        if block.kind is Kind.CALL:
            named = divided(block.name, self.echoed.get("tools"))
            call = {"call_id": block.id, **named, "arguments": block.text}
            return {**head, "type": "function_call", **call}
        if block.kind is Kind.TEXT:
            return {**head, "type": "message", "role": "assistant", "content": parts}
        return {
            **head,
            "type": "reasoning",
            "summary": parts if self.summary else [],
            "content": [] if self.summary else parts,
            "encrypted_content": None,
        }

    def parts(self, block: Block) -> list[dict[str, Any]]:
        """Returns the content parts of a block of text or thoughts: a list with one part."""
        return [self.part(block, block.text, block.logprobs)]

    def part(
        self, block: Block, text: str, logprobs: Iterable[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Returns a part of text or thoughts."""
        if block.kind is Kind.TEXT:
            token_logprobs = [token_logprob(entry) for entry in logprobs]
            return {
                "type": "output_text",
                "text": text,
                "annotations": [],
                "logprobs": token_logprobs,
            }
        return {"type": "summary_text" if self.summary else "reasoning_text", "text": text}


def token_logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the log-probability of a token, with its most likely alternatives."""
    others = [_logprob(other) for other in entry.get("top") or ()]
    return {**_logprob(entry), "top_logprobs": others}


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a token's entry; `bytes` is empty for a token that is only part of a character."""
    token = str(entry["token"])
    data = [] if "\ufffd" in token else list(token.encode("utf-8", "replace"))
    return {"token": token, "logprob": entry["logprob"], "bytes": data}


def usage(result: Result, thought_tokens: int) -> dict[str, Any]:
    """Returns token counts."""
    prompt = result.usage.get("prompt_tokens", 0)
    completion = result.usage.get("completion_tokens", 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": result.usage.get("cached_tokens", 0),
            "cache_write_tokens": 0,
        },
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": prompt + completion,
    }


class ResponseEvents(Struct, eq=False):
    """Encodes the updates of one answer as events. The first event has the number `number`.

    Events up to the number `after` are left out, because the reader has them.
    """

    frame: ResponseFrame
    output: OutputBlocks
    number: int = 0
    after: int = -1

    def head(self, *, queued: bool = False) -> bytes:
        """Returns the events before the first update.

        `queued`: the response is in the background.
        """
        begun = {"response": self.frame.begun()}
        if not queued:
            created = self._event("response.created", begun)
            return created + self._event("response.in_progress", begun)
        waits = {"response": self.frame.begun("queued")}
        head = self._event("response.created", waits) + self._event("response.queued", waits)
        return head + self._event("response.in_progress", begun)

    def update(self, update: ChoiceUpdate) -> bytes:
        """Returns the events of an update.

        Skips an event number for each failure of the job that the update reports.
        """
        self.number += update.failures
        return b"".join([self._step(step) for step in self.output.push(update)])

    def tail(self, whole: Mapping[str, Any]) -> bytes:
        """Returns the event that ends the stream, with the complete response."""
        kind = ENDS.get(whole["status"], whole["status"])
        return self._event(f"response.{kind}", {"response": whole})

    def failed(self, error: HttpError) -> bytes:
        """Returns the event that ends a stream with an error."""
        body = {"response": self.frame.failed(self.output.blocks, error)}
        return self._event("response.failed", body)

    def broken_off(self, error: HttpError) -> bytes:
        """Returns the error event that ends a stream although the response is still computed.

        The event repeats the number of the client's last event. With this number as
        `starting_after`, the client can continue after that event.
        """
        fault = {"code": error.code, "message": error.message, "param": None}
        number = max(self.number - 1, self.after)
        return sse({"type": "error", "sequence_number": number, **fault}, "error")

    def _event(self, kind: str, members: Mapping[str, Any]) -> bytes:
        number, self.number = self.number, self.number + 1
        if number <= self.after:
            return b""
        return sse({"type": kind, "sequence_number": number, **members}, kind)

    def _step(self, step: Step) -> bytes:
        block = step.block
        if step.action is Action.PIECE:
            return self._piece(step)
        item = self._in_output(block)
        if step.action is Action.BEGIN:
            added = {**item, "item": self.frame.item_begun(block)}
            return self._event("response.output_item.added", added) + self._part_begins(block)
        done = {**item, "item": self.frame.item(block)}
        return self._part_ends(block) + self._event("response.output_item.done", done)

    def _part_begins(self, block: Block) -> bytes:
        if block.kind is Kind.CALL:
            return b""
        part = {**self._in_item(block), "part": self.frame.part(block, "")}
        return self._event(f"{self._part_kind(block)}.added", part)

    def _piece(self, step: Step) -> bytes:
        block = step.block
        members = {**self._in_item(block), "delta": step.piece}
        if block.kind is Kind.TEXT:
            members["logprobs"] = [token_logprob(entry) for entry in step.logprobs]
        return self._event(f"{self._text_kind(block)}.delta", members)

    def _part_ends(self, block: Block) -> bytes:
        where, kind = self._in_item(block), self._text_kind(block)
        if block.kind is Kind.CALL:
            call = {"name": block.name, "arguments": block.text}
            return self._event(f"{kind}.done", {**where, **call})
        (part,) = self.frame.parts(block)
        members = {**where, "text": part["text"]}
        if block.kind is Kind.TEXT:
            members["logprobs"] = part["logprobs"]
        done = self._event(f"{kind}.done", members)
        return done + self._event(f"{self._part_kind(block)}.done", {**where, "part": part})

    def _in_output(self, block: Block) -> dict[str, Any]:
        return {"output_index": block.index}

    def _in_item(self, block: Block) -> dict[str, Any]:
        where = {**self._in_output(block), "item_id": self.frame.item_id(block)}
        if block.kind is Kind.CALL:
            return where
        return {**where, "summary_index" if self._summarised(block) else "content_index": 0}

    def _summarised(self, block: Block) -> bool:
        return block.kind is Kind.THOUGHTS and self.frame.summary

    def _part_kind(self, block: Block) -> str:
        """Returns the type of events about a block's content part, without `.added` or `.done`."""
        if self._summarised(block):
            return "response.reasoning_summary_part"
        return "response.content_part"

    def _text_kind(self, block: Block) -> str:
        """Returns the name of the events of a block's text."""
        if block.kind is Kind.CALL:
            return "response.function_call_arguments"
        if block.kind is Kind.TEXT:
            return "response.output_text"
        return f"response.reasoning_{'summary_' if self.frame.summary else ''}text"
