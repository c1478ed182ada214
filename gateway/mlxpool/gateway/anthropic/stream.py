"""The events of a streamed message, in the order of Anthropic's interface. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mlxpool.gateway.anthropic.bodies import NOT_ENDED, SIGNATURE, MessageFrame, error_body
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation.choice_streams import Answers, ChoiceUpdate
from mlxpool.gateway.generation.output_blocks import Action, Kind, OutputBlocks, Step
from mlxpool.gateway.server_sent_events import sse

PING = sse({"type": "ping"}, "ping")


def error_event(error: HttpError) -> bytes:
    """The event that ends a failed stream."""
    return sse(error_body(error), "error")


class MessageEvents(Struct, eq=False):
    """Encodes the updates of one answer.

    The arguments of a call are one piece, when they are known to be a map: clients cannot read
    others. Those of an eager tool come as they are written, as its request asks for.
    """

    frame: MessageFrame
    output: OutputBlocks
    generation: Answers
    _begun: bool = False

    def update(self, update: ChoiceUpdate) -> bytes:
        """The events of an update; b"" while a call is held back."""
        events = [] if self._begun else [self._start()]
        self._begun = True
        events += [self._step(step) for step in self.output.push(update)]
        return b"".join(events)

    def tail(self, usage: Mapping[str, Any], ending: Mapping[str, Any]) -> bytes:
        """The end of the stream."""
        delta = {"type": "message_delta", "delta": ending, "usage": usage}
        return _event(delta) + _event({"type": "message_stop"})

    def _start(self) -> bytes:
        """How many tokens of the prompt were cached is known at the end."""
        usage = {
            "input_tokens": self.generation.facts.get("prompt_tokens") or 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message = self.frame.message((), usage, NOT_ENDED)
        return _event({"type": "message_start", "message": message})

    def _step(self, step: Step) -> bytes:
        block = step.block
        where = {"index": block.index}
        if step.action is Action.BEGIN:
            begun = self.frame.block_begun(block)
            return _event({"type": "content_block_start", **where, "content_block": begun})
        if step.action is Action.PIECE:
            return self._delta(where, self._piece(step))
        stop = _event({"type": "content_block_stop", **where})
        if block.kind is Kind.THOUGHTS:
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            return self._delta(where, signed) + stop
        if block.kind is Kind.CALL and block.name not in self.frame.eager and not block.cut:
            text = json.dumps(block.arguments(), ensure_ascii=False)
            return self._delta(where, {"type": "input_json_delta", "partial_json": text}) + stop
        return stop

    def _piece(self, step: Step) -> dict[str, Any] | None:
        if step.block.kind is Kind.CALL:
            known = {"type": "input_json_delta", "partial_json": step.piece}
            return known if step.block.name in self.frame.eager else None
        if step.block.kind is Kind.TEXT:
            return {"type": "text_delta", "text": step.piece}
        if not self.frame.shows_thoughts:
            return None
        return {"type": "thinking_delta", "thinking": step.piece}

    def _delta(self, where: Mapping[str, int], delta: Mapping[str, Any] | None) -> bytes:
        if delta is None:
            return b""
        return _event({"type": "content_block_delta", **where, "delta": delta})


def _event(value: Mapping[str, Any]) -> bytes:
    return sse(value, value["type"])
