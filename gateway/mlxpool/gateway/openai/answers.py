"""The answers of OpenAI's interface: chunks of a stream, and whole ones. Pure."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxpool.client import Result
from mlxpool.gateway.completion import Step
from mlxpool.gateway.formats.events import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    merged,
)

CALL_ID = 9  # letters and digits; some templates take no other length
DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
_LETTERS = string.ascii_letters + string.digits


def sse(value: Mapping[str, Any], event: str = "") -> bytes:
    """One event of a stream."""
    name = f"event: {event}\n" if event else ""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"{name}data: {text}\n\n".encode("utf-8", "replace")


def usage(results: Sequence[Result], choices: int) -> dict[str, Any]:
    """Tokens of all choices; a prompt counts once, however many choices it has."""
    prompts = results[::choices]
    prompt = sum(result.usage.get("prompt_tokens", 0) for result in prompts)
    made = sum(result.usage.get("completion_tokens", 0) for result in results)
    cached = sum(result.usage.get("cached_tokens", 0) for result in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def call_id() -> str:
    """A new one for each call."""
    return "".join(secrets.choice(_LETTERS) for _ in range(CALL_ID))


# ---- chats ---------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class ChatChoice:
    """One choice of a chat as it comes: from steps to deltas."""

    calls: int = 0

    def deltas(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """A delta for each piece that is there to be told."""
        return [delta for event in merged(events) if (delta := self._delta(event)) is not None]

    def finish(self, result: Result) -> str:
        return "tool_calls" if self.calls and result.reason == "stop" else result.reason

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, CallBegin):
            self.calls += 1
            function = {"name": event.name, "arguments": ""}
            call = {"id": call_id(), "type": "function", "function": function}
            return {"tool_calls": [{"index": self.calls - 1, **call}]}
        if isinstance(event, CallArguments):
            piece = {"index": self.calls - 1, "function": {"arguments": event.text}}
            return {"tool_calls": [piece]}
        return None


@dataclass(eq=False, slots=True)
class Chunks:
    """The chunks of a stream, each in the frame that all have in common."""

    frame: Mapping[str, Any]
    logprobs: bool
    usage: bool
    chats: list[ChatChoice]

    def first(self) -> bytes:
        """Every choice says whose words it is."""
        start = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(number, start) for number in range(len(self.chats)))

    def of(self, step: Step) -> bytes:
        """All that a step brings, as one piece."""
        chat = self.chats[step.choice]
        deltas = chat.deltas(step.events)
        logprobs = chat_logprobs(step.logprobs) if self.logprobs and step.logprobs else None
        if logprobs is not None and not deltas:
            deltas = [{}]  # text is held back, figures are not
        chunks = [
            self._chunk(step.choice, delta, None if number else logprobs)
            for number, delta in enumerate(deltas)
        ]
        if step.result is not None:
            chunks.append(self._chunk(step.choice, {}, finish=chat.finish(step.result)))
        return b"".join(chunks)

    def last(self, results: Sequence[Result], choices: int) -> bytes:
        """Usage, if it was asked for, and the end."""
        if not self.usage:
            return DONE
        return sse({**self.frame, "choices": [], "usage": usage(results, choices)}) + DONE

    def _chunk(
        self,
        choice: int,
        delta: Mapping[str, Any],
        logprobs: Mapping[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        one = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return sse({**self.frame, "choices": [one], **({"usage": None} if self.usage else {})})


@dataclass(eq=False, slots=True)
class Whole:
    """A choice that is gathered to be sent at once."""

    events: list[Event] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    result: Result | None = None

    @property
    def ended(self) -> Result:
        """Of a stream that is over."""
        assert self.result is not None
        return self.result

    def add(self, step: Step) -> None:
        self.events += step.events
        self.logprobs += step.logprobs
        self.result = step.result or self.result

    def text(self, kind: type[Content] | type[Reasoning]) -> str:
        """All of the answer, or all of the thoughts."""
        return "".join(event.text for event in self.events if isinstance(event, kind))

    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of each call."""
        found: list[tuple[str, str]] = []
        for event in merged(self.events):
            if isinstance(event, CallBegin):
                found.append((event.name, ""))
            elif isinstance(event, CallArguments):
                found[-1] = (found[-1][0], event.text)
        return found


def chat_choice(number: int, whole: Whole, *, logprobs: bool) -> dict[str, Any]:
    """A choice of a whole chat completion."""
    calls, thoughts = whole.calls(), whole.text(Reasoning)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": whole.text(Content) or (None if calls else ""),
        "refusal": None,
    }
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {"id": call_id(), "type": "function", "function": {"name": name, "arguments": given}}
            for name, given in calls
        ]
    return {
        "index": number,
        "message": message,
        "logprobs": chat_logprobs(whole.logprobs) if logprobs else None,
        "finish_reason": ChatChoice(len(calls)).finish(whole.ended),
    }


def chat_logprobs(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One entry for each token, with what else might have stood there."""
    content = [
        {**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.get("top") or ()]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """`bytes` is null for a token that is a part of a character: its text does not tell them."""
    token = str(entry["token"])
    data = None if "\ufffd" in token else list(token.encode("utf-8", "replace"))
    return {"token": token, "logprob": entry["logprob"], "bytes": data}


# ---- completions of a text -----------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class TextLogprobs:
    """Log-probabilities in the older form, which counts characters as it goes."""

    offset: int = 0

    def of(self, entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for entry in entries:
            token = str(entry["token"])
            found["tokens"].append(token)
            found["token_logprobs"].append(entry["logprob"])
            others = {str(one["token"]): one["logprob"] for one in entry.get("top") or ()}
            found["top_logprobs"].append(others)
            found["text_offset"].append(self.offset)
            self.offset += len(token)
        return found


def text_choice(
    number: int, text: str, logprobs: Mapping[str, Any] | None, finish: str | None
) -> dict[str, Any]:
    """A choice of /v1/completions, whole or a piece."""
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}


@dataclass(eq=False, slots=True)
class TextChunks:
    """As `Chunks`, of /v1/completions."""

    frame: Mapping[str, Any]
    logprobs: bool
    usage: bool
    offsets: list[TextLogprobs]

    def first(self) -> bytes:
        """Nothing comes before the text."""
        return b""

    def of(self, step: Step) -> bytes:
        """All that a step brings, as one piece."""
        text = "".join(event.text for event in step.events if isinstance(event, Content))
        wanted = self.logprobs and step.logprobs
        figures = self.offsets[step.choice].of(step.logprobs) if wanted else None
        finish = step.result.reason if step.result is not None else None
        if not (text or figures or finish):
            return b""
        one = text_choice(step.choice, text, figures, finish)
        return sse({**self.frame, "choices": [one], **({"usage": None} if self.usage else {})})

    def last(self, results: Sequence[Result], choices: int) -> bytes:
        """Usage, if it was asked for, and the end."""
        if not self.usage:
            return DONE
        return sse({**self.frame, "choices": [], "usage": usage(results, choices)}) + DONE
