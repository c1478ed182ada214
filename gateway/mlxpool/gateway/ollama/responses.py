"""The response bodies of Ollama's interface. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, field

from mlxpool.client import Result, Vectors
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation.choice_streams import ChoiceUpdate
from mlxpool.gateway.generation.output_blocks import Action, Block, Kind, OutputBlocks

NS_PER_MS = 1_000_000


def line(value: Mapping[str, Any]) -> bytes:
    """Returns a JSON object as a line of a stream."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace") + b"\n"


def error_line(error: HttpError) -> bytes:
    """Returns the line that ends a failed stream."""
    return line(error.ollama_body())


def created_at(time: float) -> str:
    """Returns a time in Ollama's form."""
    return datetime.fromtimestamp(time, UTC).isoformat().replace("+00:00", "Z")


class OutputPart(Struct, eq=False):
    """The output of one or more updates; a tool call is in the part that completes it."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.logprobs)


class OutputBuilder:
    """Turns the updates of one response into output parts.

    A tool call that the token limit or a cancel ends early is left out. The response's
    `done_reason` has the reason.
    """

    def __init__(self) -> None:
        self._output = OutputBlocks()
        self._calls = 0  # number of calls in earlier parts

    def part(self, updates: Iterable[ChoiceUpdate]) -> OutputPart:
        part = OutputPart()
        for update in updates:
            part.logprobs += update.logprobs
            for step in self._output.push(update):
                if step.block.kind is Kind.TEXT:
                    part.content += step.piece
                elif step.block.kind is Kind.THOUGHTS:
                    part.thinking += step.piece
                elif step.action is Action.END and not step.block.cut:
                    part.calls.append(self._call(step.block))
        return part

    def _call(self, block: Block) -> dict[str, Any]:
        self._calls += 1
        known = {"index": self._calls - 1, "name": block.name, "arguments": block.arguments()}
        return {"function": known}


def embed_body(model: str, vectors: Vectors | None, taken_ns: int) -> dict[str, Any]:
    """Returns a response of /api/embed; without vectors the model was only loaded."""
    return {
        "model": model,
        "embeddings": [] if vectors is None else vectors.tolist(),
        "total_duration": taken_ns,
        "load_duration": 0,
        "prompt_eval_count": 0 if vectors is None else vectors.usage.get("prompt_tokens", 0),
    }


def chat_body(model: str, part: OutputPart, time: float) -> dict[str, Any]:
    """Returns a response of /api/chat, or a line of its stream.

    The members that `generation_end` returns are not in it.
    """
    message: dict[str, Any] = {"role": "assistant", "content": part.content}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = part.calls
    return {"model": model, "created_at": created_at(time), "message": message, **_logprobs(part)}


def generate_body(model: str, part: OutputPart, time: float) -> dict[str, Any]:
    """Returns a response of /api/generate, or a line of its stream.

    The members that `generation_end` returns are not in it.
    """
    more = {"thinking": part.thinking} if part.thinking else {}
    return {
        "model": model,
        "created_at": created_at(time),
        "response": part.content,
        **more,
        **_logprobs(part),
    }


def _logprobs(part: OutputPart) -> dict[str, Any]:
    if not part.logprobs:
        return {}
    return {
        "logprobs": [
            {
                **_logprob(entry),
                "top_logprobs": [_logprob(other) for other in entry.get("top") or ()],
            }
            for entry in part.logprobs
        ]
    }


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": entry["logprob"]}


def load_end(reason: str) -> dict[str, Any]:
    """Returns the last members of a response to a request that only loads or unloads the model."""
    return {"done": True, "done_reason": reason}


def generation_end(result: Result) -> dict[str, Any]:
    """Returns the last members of a response: times in ns; `load` is the time in the queue."""
    times = {name: round(value * NS_PER_MS) for name, value in result.timings_ms.items()}
    return {
        "done": True,
        "done_reason": result.reason,
        "total_duration": times.get("total", 0),
        "load_duration": times.get("queue", 0),
        "prompt_eval_count": result.usage.get("prompt_tokens", 0),
        "prompt_eval_duration": times.get("prefill", 0),
        "eval_count": result.usage.get("completion_tokens", 0),
        "eval_duration": times.get("decode", 0),
    }
