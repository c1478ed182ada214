"""The events of a streamed response, in the order of OpenAI's interface. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation.choice_streams import ChoiceUpdate
from mlxpool.gateway.generation.output_blocks import Action, Block, Kind, OutputBlocks, Step
from mlxpool.gateway.openai.responses_api.bodies import ResponseFrame, token_logprob
from mlxpool.gateway.server_sent_events import sse

ENDS = {"cancelled": "incomplete"}  # status -> name of the event, where it is another


class ResponseEvents(Struct, eq=False):
    """Encodes the updates of one answer. Numbers the events from `number` on.

    Events up to the number `after` are left out: their reader has them.
    """

    frame: ResponseFrame
    output: OutputBlocks
    number: int = 0
    after: int = -1

    def head(self, *, queued: bool = False) -> bytes:
        """The events before the first update; `queued`: of a response in the background."""
        begun = {"response": self.frame.begun()}
        if not queued:
            created = self._event("response.created", begun)
            return created + self._event("response.in_progress", begun)
        waits = {"response": self.frame.begun("queued")}
        head = self._event("response.created", waits) + self._event("response.queued", waits)
        return head + self._event("response.in_progress", begun)

    def update(self, update: ChoiceUpdate) -> bytes:
        """The events of an update. A failure before it has the number of an event: it was one."""
        self.number += update.failures
        return b"".join([self._step(step) for step in self.output.push(update)])

    def tail(self, whole: Mapping[str, Any]) -> bytes:
        """The event that ends the stream, with the whole response."""
        kind = ENDS.get(whole["status"], whole["status"])
        return self._event(f"response.{kind}", {"response": whole})

    def failed(self, error: HttpError) -> bytes:
        """The event that ends a stream with an error."""
        body = {"response": self.frame.failed(self.output.blocks, error)}
        return self._event("response.failed", body)

    def broken_off(self, error: HttpError) -> bytes:
        """The event that ends a reading whose response goes on.

        It does not count, so it has the number of the event that its reader has last: with it as
        `starting_after` another reading goes on behind that.
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
        """The events of the part of a block."""
        if self._summarised(block):
            return "response.reasoning_summary_part"
        return "response.content_part"

    def _text_kind(self, block: Block) -> str:
        """The events of the text of a block."""
        if block.kind is Kind.CALL:
            return "response.function_call_arguments"
        if block.kind is Kind.TEXT:
            return "response.output_text"
        return f"response.reasoning_{'summary_' if self.frame.summary else ''}text"
