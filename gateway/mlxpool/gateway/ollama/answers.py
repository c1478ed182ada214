"""The answers of Ollama's interface. Pure but for the time of day."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from mlxpool.client import Result
from mlxpool.gateway.completion import Step
from mlxpool.gateway.errors import Fault
from mlxpool.gateway.formats.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
)

NS = 1_000_000  # nanoseconds of a millisecond
UNREADABLE = "the model called {name!r} with arguments that are no JSON map: {text:.200}"


def line(value: Mapping[str, Any]) -> bytes:
    """One line of a stream."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"


def stamp() -> str:
    """Now, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(eq=False, slots=True)
class Said:
    """What one or more steps say. A call is there when it is whole."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.logprobs)


@dataclass(eq=False, slots=True)
class Talk:
    """One answer as it comes; remembers the call that is under way."""

    name: str = ""
    arguments: str = ""
    calls: int = 0

    def of(self, steps: Iterable[Step]) -> Said:
        """Raises Fault for a call whose arguments cannot be read."""
        said = Said()
        for step in steps:
            said.logprobs += step.logprobs
            for event in step.events:
                if isinstance(event, Content):
                    said.content += event.text
                elif isinstance(event, Reasoning):
                    said.thinking += event.text
                elif isinstance(event, CallBegin):
                    self.name, self.arguments = event.name, ""
                elif isinstance(event, CallArguments):
                    self.arguments += event.text
                elif isinstance(event, CallEnd):
                    said.calls.append(self._call())
        return said

    def _call(self) -> dict[str, Any]:
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            words = UNREADABLE.format(name=self.name, text=self.arguments)
            raise Fault(500, words, "bad_tool_call", retry=False)
        self.calls += 1
        function = {"index": self.calls - 1, "name": self.name, "arguments": arguments}
        return {"function": function}


def chat_body(model: str, said: Said) -> dict[str, Any]:
    """A line of /api/chat."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.thinking:
        message["thinking"] = said.thinking
    if said.calls:
        message["tool_calls"] = said.calls
    return {"model": model, "created_at": stamp(), "message": message, **_logprobs(said)}


def generate_body(model: str, said: Said) -> dict[str, Any]:
    """A line of /api/generate."""
    more = {"thinking": said.thinking} if said.thinking else {}
    return {
        "model": model,
        "created_at": stamp(),
        "response": said.content,
        **more,
        **_logprobs(said),
    }


def _logprobs(said: Said) -> dict[str, Any]:
    if not said.logprobs:
        return {}
    return {
        "logprobs": [
            {**_logprob(one), "top_logprobs": [_logprob(other) for other in one.get("top") or ()]}
            for one in said.logprobs
        ]
    }


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": entry["logprob"]}


def loaded() -> dict[str, Any]:
    """The end of a request that asked for nothing but the model."""
    return {"done": True, "done_reason": "load"}


def ended(result: Result) -> dict[str, Any]:
    """The end of an answer; times in nanoseconds, load is the time in the queue."""
    times = {name: round(value * NS) for name, value in result.timings_ms.items()}
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


# ---- models --------------------------------------------------------------------------------------


def details(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is not known of a model is left empty."""
    family = row.get("type") or ""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": row.get("quantisation") or "",
    }


def tag(row: Mapping[str, Any]) -> dict[str, Any]:
    """A model in /api/tags."""
    name = row["name"]
    return {
        "name": name,
        "model": name,
        "size": row.get("size") or 0,
        "digest": row.get("digest") or "",
        "details": details(row),
    }


def running(row: Mapping[str, Any]) -> dict[str, Any]:
    """A model in /api/ps."""
    size = row.get("size") or 0
    return {**tag(row), "size_vram": size, "context_length": row.get("context") or 0}


def show(row: Mapping[str, Any]) -> dict[str, Any]:
    """What /api/show tells of a model."""
    family, chat = row.get("type") or "", row.get("chat") or {}
    capabilities = ["completion"]
    capabilities += ["tools"] if chat.get("tools") else []
    capabilities += ["thinking"] if chat.get("thinking") else []
    info: dict[str, Any] = {"general.architecture": family}
    if row.get("context"):
        info[f"{family}.context_length"] = row["context"]
    return {"details": details(row), "model_info": info, "capabilities": capabilities}
