"""Prints a stream to standard output, as text or as JSON lines, and a line of figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxpool.cli.formatting import json_text
from mlxpool.common.protocol.encoder_calls import VECTORS
from mlxpool.common.protocol.images import images_of_text

if TYPE_CHECKING:
    from mlxpool.client import Choices, Delta, Result


def prompt_of(text: str, images: Sequence[Path], *, chat: bool) -> dict[str, Any]:
    """Returns the prompt arguments of `stream`.

    Images that the text does not name by `[img-n]` are put before the text.
    """
    if chat:
        parts = [{"type": "image", "image": file} for file in images]
        content = [*parts, {"type": "text", "text": text}] if images else text
        return {"messages": [{"role": "user", "content": content}]}
    named = set(images_of_text(text))
    tags = [f"[img-{number}]" for number in range(len(images)) if number not in named]
    return {"prompt": "".join(tags) + text, "images": images}


def print_deltas(
    stream: Iterable[Delta],
    add: Callable[[Delta], None],
    *,
    as_json: bool,
    choices: int = 1,
    on_first: Callable[[], None] = lambda: None,
) -> float:
    """Prints a stream as it arrives. Returns the time of its first delta, 0 if there is none.

    `add` prints a delta as text. In spite of its name `on_first` is called before every delta.
    Raises the stream's error after ending an incomplete line of text.
    """
    shown, first = False, 0.0
    try:
        for delta in stream:
            first = first or time.monotonic()
            on_first()
            if as_json:
                print(json_text(_delta_as_json(delta, choices)), flush=True)
            else:
                add(delta)
            shown = True
    except BaseException:
        if shown and not as_json:
            print()  # ends the line of text
        raise
    return first


def _delta_as_json(delta: Delta, choices: int) -> dict[str, Any]:
    line: dict[str, Any] = {"text": delta.text, "ids": delta.ids, "pos": delta.pos}
    if choices > 1:
        line["index"] = delta.index
    if delta.prompt:
        line["prompt"] = delta.prompt
    if delta.logprobs:
        line["logprobs"] = delta.logprobs
    return line


def result_as_json(result: Result, choices: int = 1) -> dict[str, Any]:
    """Returns the last JSON line of a stream, or of one of several choices."""
    return {
        **({"index": result.index} if choices > 1 else {}),
        "done": True,
        "reason": result.reason,
        "text": result.text,
        "ids": result.ids,
        "usage": result.usage,
        "timings_ms": result.timings_ms,
        "seed": result.seed,
        "attempts": result.attempts,
        **({} if result.complete is None else {"complete": result.complete}),
        **({} if result.answer is None else answer_as_json(result)),
    }


def answer_as_json(result: Result) -> dict[str, Any]:
    """Returns the answer of a job whose request is a call, such as `embed`.

    The map has the fields of the answer; if a model computed vectors, they are in `vectors`.
    """
    from mlxpool.client import Vectors

    answer = result.answer
    assert answer is not None
    rows = {"vectors": Vectors.of(result).tolist()} if answer.kind == VECTORS else {}
    return {**answer.fields, **rows}


def figures(result: Result, seconds: float, streamed: float) -> str:
    """Returns one line of figures about a finished completion; `seconds` is its total time.

    `streamed` is the time since the first token, in seconds. It replaces the worker's decode time
    if the decode time is shorter: after a failover, a worker reports only the time of its own
    tokens.
    """
    generated = result.usage.get("completion_tokens", 0)
    decode = max(streamed, result.timings_ms.get("decode", 0.0) / 1000)
    rate = f"{generated / decode:.0f} tokens/s, " if decode and generated > 1 else ""
    prompt = result.usage.get("prompt_tokens", 0)
    cached = result.usage.get("cached_tokens", 0)
    return (
        f"[{generated} tokens, {rate}prompt {prompt} ({cached} cached), {seconds:.2f} s,"
        f" ended: {result.reason}, seed {result.seed}]"
    )


def figures_of(choices: Choices, seconds: float, streamed: float) -> str:
    """Returns the line of figures for all choices of a prompt together."""
    if len(choices) == 1:
        return figures(choices[0], seconds, streamed)
    usage = choices.usage
    prompt, cached = usage["prompt_tokens"], usage["cached_tokens"]
    return (
        f"[{len(choices)} choices, {usage['completion_tokens']} tokens, prompt {prompt}"
        f" ({cached} cached), {seconds:.2f} s, seeds from {choices.seed}]"
    )


class ChoicesOutput:
    """Prints choice 0 as it arrives, and the other choices after the end of all choices.

    There are no titles if there is only one choice.
    """

    def __init__(self, choices: int, write: Callable[[str], None]) -> None:
        self._write = write
        self._texts = [""] * choices  # the texts of choices after choice 0
        self._begun = choices == 1

    def add(self, delta: Delta) -> None:
        """Prints a delta of choice 0, or stores a delta of another choice."""
        if not self._begun:
            self._begun = True
            self._write(_title(0))
        if delta.index:
            self._texts[delta.index] += delta.text
        else:
            self._write(delta.text)

    def end(self) -> None:
        """Prints the other choices, after all have ended."""
        for index, text in enumerate(self._texts[1:], 1):
            self._write(f"\n{_title(index)}{text}")


def _title(index: int) -> str:
    """Returns the title line above a choice."""
    return f"--- choice {index}\n"
