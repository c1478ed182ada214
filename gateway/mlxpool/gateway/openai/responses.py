"""The response bodies of OpenAI's interface: chunks of streams, and whole responses. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from mlxpool.client import Result
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.formats.events import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    merged,
)
from mlxpool.gateway.generation.choice_streams import ChoiceUpdate
from mlxpool.gateway.server_sent_events import sse

DONE = b"data: [DONE]\n\n"


def error_event(error: HttpError) -> bytes:
    """Returns the event that ends a failed stream."""
    return sse(error.openai_body(), "error")


def usage(results: Sequence[Result], choices: int) -> dict[str, Any]:
    """Returns token counts of all results; each prompt counts once, however many choices it has."""
    prompts = results[::choices]
    prompt = sum(result.usage.get("prompt_tokens", 0) for result in prompts)
    completion = sum(result.usage.get("completion_tokens", 0) for result in results)
    cached = sum(result.usage.get("cached_tokens", 0) for result in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class StreamFrame(Struct, frozen=True):
    """The members that all chunks of a stream share."""

    members: Mapping[str, Any]
    usage: bool  # the stream ends with a chunk of usage

    def chunk(self, choice: Mapping[str, Any]) -> bytes:
        """Returns a chunk with one choice."""
        null_usage = {"usage": None} if self.usage else {}
        return sse({**self.members, "choices": [choice], **null_usage})

    def tail(self, results: Sequence[Result], choices: int) -> bytes:
        """Returns the event that ends the stream, after a chunk of usage if usage was requested."""
        if not self.usage:
            return DONE
        return sse({**self.members, "choices": [], "usage": usage(results, choices)}) + DONE


# ---- chats ---------------------------------------------------------------------------------------


class DeltaBuilder(Struct, eq=False):
    """Turns the events of one choice into deltas; numbers its tool calls.

    `call_id` makes the id of a call from its number.
    """

    call_id: Callable[[int], str]
    calls: int = 0

    def deltas(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Returns a delta for each event that needs one.

        Neighbouring pieces of a kind are merged.
        """
        return [delta for event in merged(events) if (delta := self._delta(event)) is not None]

    def finish_reason(self, result: Result) -> str:
        return finish_reason(self.calls, result)

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text, "reasoning": event.text}
        if isinstance(event, CallBegin):
            self.calls += 1
            function = {"name": event.name, "arguments": ""}
            id = self.call_id(self.calls - 1)
            call = {"id": id, "type": "function", "function": function}
            return {"tool_calls": [{"index": self.calls - 1, **call}]}
        if isinstance(event, CallArguments):
            piece = {"index": self.calls - 1, "function": {"arguments": event.text}}
            return {"tool_calls": [piece]}
        return None


class ChatChunks(Struct, eq=False):
    """The chunks of a streamed chat completion."""

    frame: StreamFrame
    logprobs: bool
    builders: list[DeltaBuilder]  # by choice

    def head(self) -> bytes:
        """Returns a chunk for each choice, with the assistant's role."""
        start = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(number, start) for number in range(len(self.builders)))

    def update(self, update: ChoiceUpdate) -> bytes:
        """Returns the chunks of an update, concatenated."""
        builder = self.builders[update.choice]
        deltas = builder.deltas(update.events)
        logprobs = chat_logprobs(update.logprobs) if self.logprobs and update.logprobs else None
        if logprobs is not None and not deltas:
            deltas = [{}]  # the parser holds the text back; its log-probabilities are sent now
        chunks = [
            self._chunk(update.choice, delta, None if number else logprobs)
            for number, delta in enumerate(deltas)
        ]
        if update.result is not None:
            reason = builder.finish_reason(update.result)
            chunks.append(self._chunk(update.choice, {}, finish_reason=reason))
        return b"".join(chunks)

    def _chunk(
        self,
        choice: int,
        delta: Mapping[str, Any],
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        return self.frame.chunk(
            {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        )


class WholeChoice(Struct, eq=False):
    """Collects the updates of one choice of a response that is not streamed."""

    events: list[Event] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    prompt: list[Mapping[str, Any]] = field(default_factory=list)
    result: Result | None = None

    @property
    def final_result(self) -> Result:
        """The result; it is set after the last update."""
        assert self.result is not None
        return self.result

    def add(self, update: ChoiceUpdate) -> None:
        self.events += update.events
        self.logprobs += update.logprobs
        self.prompt += update.prompt
        self.result = update.result or self.result

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the tokens; the lowest number if there are no tokens."""
        values = [entry["logprob"] for entry in self.logprobs]
        return sum(values) / len(values) if values else -math.inf

    def text(self, kind: type[Content] | type[Reasoning]) -> str:
        """Returns all text of one kind of event."""
        return "".join(event.text for event in self.events if isinstance(event, kind))

    def calls(self) -> list[tuple[str, str]]:
        """Returns name and arguments, as JSON text, of each call."""
        calls_made: list[tuple[str, str]] = []
        for event in merged(self.events):
            if isinstance(event, CallBegin):
                calls_made.append((event.name, ""))
            elif isinstance(event, CallArguments):
                calls_made[-1] = (calls_made[-1][0], event.text)
        return calls_made


def best(wholes: Sequence[WholeChoice], candidates: int, choices: int) -> list[WholeChoice]:
    """Returns each prompt's `choices` most likely candidates, prompt by prompt, best first.

    If all candidates are returned, their order does not change.
    """
    if candidates == choices:
        return list(wholes)
    chosen: list[WholeChoice] = []
    for begin in range(0, len(wholes), candidates):
        of_prompt = wholes[begin : begin + candidates]
        chosen += sorted(of_prompt, key=lambda candidate: -candidate.mean_logprob)[:choices]
    return chosen


def finish_reason(calls: int, result: Result) -> str:
    """Returns the reason why a choice with this number of calls of tools has ended."""
    return "tool_calls" if calls and result.reason == "stop" else result.reason


def chat_choice(
    number: int, whole: WholeChoice, call_id: Callable[[int], str], *, logprobs: bool
) -> dict[str, Any]:
    """Returns a choice of a chat completion that is not streamed."""
    calls, thoughts = whole.calls(), whole.text(Reasoning)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": whole.text(Content) or (None if calls else ""),
        "refusal": None,
    }
    if thoughts:
        message["reasoning_content"] = message["reasoning"] = thoughts
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id(index),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    return {
        "index": number,
        "message": message,
        "logprobs": chat_logprobs(whole.logprobs) if logprobs else None,
        "finish_reason": finish_reason(len(calls), whole.final_result),
    }


def chat_logprobs(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns an entry for each token, with its most likely alternatives."""
    content = [
        {**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.get("top") or ()]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a token's entry; `bytes` is null for a token that is only part of a character."""
    token = str(entry["token"])
    data = None if "\ufffd" in token else list(token.encode("utf-8", "replace"))
    return {"token": token, "logprob": entry["logprob"], "bytes": data}


# ---- completions of a text -----------------------------------------------------------------------


class TextLogprobs(Struct, eq=False):
    """Encodes the log-probabilities of one choice of /v1/completions, piece by piece.

    `offset`: the number of characters before the next token. The tokens of an echoed prompt come
    first; the first of them has no log-probability. Tokens that the tokenizer put before the text
    have no characters.
    """

    offset: int = 0

    def add(self, entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the object for the next tokens of the choice."""
        columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for entry in entries:
            token = str(entry["token"])
            columns["tokens"].append(token)
            columns["token_logprobs"].append(entry["logprob"])
            others = {
                str(alternative["token"]): alternative["logprob"]
                for alternative in entry.get("top") or ()
            }
            columns["top_logprobs"].append(None if entry["logprob"] is None else others)
            columns["text_offset"].append(self.offset)
            self.offset += 0 if entry.get("added") else len(token)
        return columns


def vllm_prompt_logprobs(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
    """Returns vLLM's `prompt_logprobs`: a map for each token of the prompt, null for the first.

    The keys of a map are token ids as text: the token's own id, and the ids of the most likely
    tokens. `rank` is null if the token is not one of the most likely tokens.
    """
    maps: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry["logprob"] is None:
            maps.append(None)
            continue
        ranked = {str(entry["id"]): _ranked(entry, None)}
        for rank, other in enumerate(entry["top"], 1):
            ranked[str(other["id"])] = _ranked(other, rank)
        maps.append(ranked)
    return maps


def _ranked(entry: Mapping[str, Any], rank: int | None) -> dict[str, Any]:
    return {"logprob": entry["logprob"], "rank": rank, "decoded_token": entry["token"]}


def text_choice(
    number: int, text: str, logprobs: Mapping[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    """Returns a choice of /v1/completions, whole or in a chunk."""
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class TextChunks(Struct, eq=False):
    """The chunks of a streamed /v1/completions.

    `echoes`: the number of choices that begin with their prompt. The pool sends a prompt's
    log-probabilities only with the first choice of the prompt. Updates of its other choices wait
    until the log-probabilities are known.
    """

    frame: StreamFrame
    logprobs: bool
    offsets: list[TextLogprobs]  # by choice
    echoes: int = 0
    prompts: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)  # by first choice
    known: set[int] = field(default_factory=set)  # first choices whose prompts are whole
    held: list[ChoiceUpdate] = field(default_factory=list)

    def head(self) -> bytes:
        return b""

    def update(self, update: ChoiceUpdate) -> bytes:
        """Returns the chunks of an update, and of updates that waited for it; may be empty."""
        if not (self.logprobs and self.echoes > 1):
            return self._chunk(update)
        first = self._first(update)
        if update.choice != first:
            if first in self.known:
                return self._chunk(self._with_prompt(update))
            self.held.append(update)
            return b""
        self.prompts.setdefault(first, []).extend(update.prompt)
        chunks = [self._chunk(update)]
        if update.logprobs or update.result is not None:
            self.known.add(first)
            freed = [held for held in self.held if self._first(held) == first]
            self.held = [held for held in self.held if self._first(held) != first]
            chunks += [self._chunk(self._with_prompt(held)) for held in freed]
        return b"".join(chunks)

    def _first(self, update: ChoiceUpdate) -> int:
        """Returns the number of the first choice that has the same prompt as an update."""
        return update.choice - update.choice % self.echoes

    def _with_prompt(self, update: ChoiceUpdate) -> ChoiceUpdate:
        """Returns the update with its prompt's log-probabilities, which the first choice has."""
        entries = self.prompts[self._first(update)]
        return replace(update, prompt=tuple(entries[entry["prompt"]] for entry in update.prompt))

    def _chunk(self, update: ChoiceUpdate) -> bytes:
        """Returns the chunk of an update; empty if there is nothing to send."""
        text = "".join(event.text for event in update.events if isinstance(event, Content))
        entries = (*(update.prompt if self.echoes else ()), *update.logprobs)
        has_logprobs = self.logprobs and entries
        logprobs = self.offsets[update.choice].add(entries) if has_logprobs else None
        reason = update.result.reason if update.result is not None else None
        if not (text or logprobs or reason):
            return b""
        return self.frame.chunk(text_choice(update.choice, text, logprobs, reason))
