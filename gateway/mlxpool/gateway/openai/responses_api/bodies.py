"""The response object of OpenAI's Responses and its items. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from mlxpool.client import Result
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation.output_blocks import Block, Kind
from mlxpool.gateway.openai.responses_api.namespaces import divided

PREFIXES = {Kind.THOUGHTS: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
STATUSES = {"length": "incomplete", "cancelled": "cancelled"}  # by the reason of the end
# status of an HTTP error -> code of a response that failed; others are of the server
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def response_id(id: str) -> str:
    """The id of a response as clients know it."""
    return f"resp_{id}"


class ResponseFrame(Struct, frozen=True):
    """What the response objects of one request have in common.

    `id`: the pool's, in hex. `echoed`: members that repeat the request. `summary`: thoughts are
    told as a summary.
    """

    id: str
    created: int  # seconds since 1970
    echoed: Mapping[str, Any]
    summary: bool

    def begun(self, status: str = "in_progress") -> dict[str, Any]:
        """The response before its first item."""
        return self._response(status, [])

    def ended(self, blocks: Iterable[Block], result: Result, thought_tokens: int) -> dict[str, Any]:
        """The whole response; incomplete if it has reached its bound of tokens."""
        cut = result.reason == "length"
        status = STATUSES.get(result.reason, "completed")
        return {
            **self._response(status, [*map(self.item, blocks)]),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": usage(result, thought_tokens),
        }

    def failed(self, blocks: Iterable[Block], error: HttpError) -> dict[str, Any]:
        """The response as far as it came."""
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
        """The id of a block's item."""
        return f"{PREFIXES[block.kind]}_{self.id}_{block.index}"

    def item(self, block: Block) -> dict[str, Any]:
        """The item of a block that has ended."""
        return self._item(block, "incomplete" if block.cut else "completed", self.parts(block))

    def item_begun(self, block: Block) -> dict[str, Any]:
        """The item of a block that begins, without its parts."""
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
        """The parts of a block's item, of which there is one."""
        return [self.part(block, block.text, block.logprobs)]

    def part(
        self, block: Block, text: str, logprobs: Iterable[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """A part of text or thoughts."""
        if block.kind is Kind.TEXT:
            found = [token_logprob(entry) for entry in logprobs]
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": found}
        return {"type": "summary_text" if self.summary else "reasoning_text", "text": text}


def token_logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The log-probability of a token, with its most likely alternatives."""
    others = [_logprob(other) for other in entry.get("top") or ()]
    return {**_logprob(entry), "top_logprobs": others}


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """`bytes` is empty for a part of a character: its text does not determine them."""
    token = str(entry["token"])
    data = [] if "\ufffd" in token else list(token.encode("utf-8", "replace"))
    return {"token": token, "logprob": entry["logprob"], "bytes": data}


def usage(result: Result, thought_tokens: int) -> dict[str, Any]:
    """Token counts."""
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
