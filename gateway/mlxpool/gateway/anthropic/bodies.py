"""The responses of Anthropic's Messages: messages and errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.client import Result
from mlxpool.gateway.errors import TOO_LONG, HttpError
from mlxpool.gateway.generation.choice_streams import Answers, ChoiceUpdate
from mlxpool.gateway.generation.output_blocks import Action, Block, Kind, OutputBlocks, Step
from mlxpool.gateway.server_sent_events import sse

# status of an HTTP error -> its type; every other status below 500: invalid_request_error
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# The signature of thoughts, which are not signed. Clients do not send back a block without one.
SIGNATURE = "unsigned"
PING = sse({"type": "ping"}, "ping")


class MessageFrame(Struct, frozen=True):
    """The members that the bodies of one answer share.

    `id`: the pool's id of the request, in hex. If `shows_thoughts` is False, blocks of thoughts are
    empty. `eager`: names of tools whose arguments are streamed as the model writes them.
    """

    id: str
    model: str  # the name in the request
    shows_thoughts: bool
    eager: frozenset[str] = frozenset()

    def message(
        self,
        blocks: Iterable[Block],
        usage: Mapping[str, Any],
        ending: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Returns the complete message."""
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [self._content(block) for block in blocks],
            **ending,
            "usage": dict(usage),
        }

    def _content(self, block: Block) -> dict[str, Any]:
        begun = self.block_begun(block)
        if block.kind is Kind.CALL:
            return {**begun, "input": block.arguments()}
        if block.kind is Kind.TEXT:
            return {**begun, "text": block.text}
        return {
            **begun,
            "thinking": block.text if self.shows_thoughts else "",
            "signature": SIGNATURE,
        }

    def block_begun(self, block: Block) -> dict[str, Any]:
        """Returns a content block that is still empty, for the event that starts the block."""
        if block.kind is Kind.CALL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
        if block.kind is Kind.TEXT:
            return {"type": "text", "text": "", "citations": None}
        return {"type": "thinking", "thinking": "", "signature": ""}


NOT_ENDED: Mapping[str, Any] = {"stop_reason": None, "stop_sequence": None}


def ending(result: Result, calls: int, stop: str | None, max_tokens: int) -> dict[str, Any]:
    """Returns the reason of an answer's end, as the members `stop_reason` and `stop_sequence`.

    `stop`: the stop sequence that the model wrote; None if it wrote none.
    """
    if result.reason == "length":
        generated = result.usage.get("completion_tokens", 0)
        reason = "max_tokens" if generated >= max_tokens else "model_context_window_exceeded"
    elif stop is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": stop}


def stop_in(text: str, result: Result, stops: Sequence[str]) -> str | None:
    """Returns the stop sequence that ended an answer.

    `text`: the decoded token ids of the answer, which still contain the stop sequence. Of several
    sequences at the same position, the shortest ended the answer. White space at the
    beginning of the answer is ignored, because tokenizers may leave it out.
    """
    rest = text.lstrip()[len(result.text.lstrip()) :]
    return min((stop for stop in stops if rest.startswith(stop)), key=len, default=None)


def usage(result: Result, thought_tokens: int) -> dict[str, Any]:
    """Returns token counts; the prompt's count is split into cached and uncached tokens."""
    cached = result.usage.get("cached_tokens", 0)
    return {
        "input_tokens": result.usage.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": result.usage.get("completion_tokens", 0),
        "output_tokens_details": {"thinking_tokens": thought_tokens},
    }


def error_body(error: HttpError) -> dict[str, Any]:
    """Returns the body of an error. Messages that clients parse have Anthropic's wording."""
    kind = ERROR_TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "api_error"
    )
    body: dict[str, Any] = {
        "type": "error",
        "error": {"type": kind, "message": _message(error)},
        "request_id": error.request_id,
    }
    return body


def _message(error: HttpError) -> str:
    """Returns an error's message.

    The message about a too long prompt begins with "prompt is too long": clients look for these
    words, and then shorten the conversation.
    """
    details = error.details
    context = details.get("context")
    if error.code != TOO_LONG or not isinstance(context, int):
        return error.message
    known = details.get("prompt_tokens")
    tokens = details.get("prompt_tokens_at_least") if known is None else known
    return f"prompt is too long: {tokens} tokens > {context - 1} maximum"


def error_event(error: HttpError) -> bytes:
    """Returns the event that ends a failed stream."""
    return sse(error_body(error), "error")


class MessageEvents(Struct, eq=False):
    """Encodes the updates of one answer.

    The arguments of a call are sent as one piece, once they are known to be a map: clients cannot
    read other arguments. If the request has `eager_input_streaming` for a tool (`frame.eager`),
    arguments of this tool are sent as the model writes them.
    """

    frame: MessageFrame
    output: OutputBlocks
    generation: Answers
    _begun: bool = False

    def update(self, update: ChoiceUpdate) -> bytes:
        """Returns the events of an update; b"" while a call is held back."""
        events = [] if self._begun else [self._start()]
        self._begun = True
        events += [self._step(step) for step in self.output.push(update)]
        return b"".join(events)

    def tail(self, usage: Mapping[str, Any], ending: Mapping[str, Any]) -> bytes:
        """Returns the last events of the stream."""
        delta = {"type": "message_delta", "delta": ending, "usage": usage}
        return _event(delta) + _event({"type": "message_stop"})

    def _start(self) -> bytes:
        """Returns the first event.

        The event reports no cached tokens, because their number is known only at the end.
        """
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
