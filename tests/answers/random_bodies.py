"""A thousand random bodies of messages, HTTP requests and settings, and the result of parsing each.

`answers` yields the answers of this tree, one per line; answers.txt has the recorded answers. In
the folder tests, `python -m answers.random_bodies > answers/answers.txt` records them again.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlxpool.common.checks import shown
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.config.loading import load
from mlxpool.common.errors import PoolError
from mlxpool.common.options import Options
from mlxpool.common.protocol import from_client, from_worker, to_worker
from mlxpool.common.protocol.decisions import DecideCall
from mlxpool.common.protocol.deltas import RunEnd
from mlxpool.common.protocol.encoder_calls import EncoderCall
from mlxpool.common.protocol.kept import kept_questions
from mlxpool.gateway.anthropic import requests as anthropic
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.jobs import requests as jobs
from mlxpool.gateway.ollama import requests as ollama
from mlxpool.gateway.openai import requests as openai
from mlxpool.gateway.openai.responses_api import requests as responses

ID = bytes(range(16))
CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORMAT = {"type": "json_schema", "schema": {"type": "integer"}}
NUMBERS = (0, 1, -1, 2, 7, 0.5, 1.5, -0.0, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 2**64)
OTHERS = (None, True, False, float("nan"), float("inf"), "", "x", "0.5", "low", "a\tb", "x" * 300)
CONTAINERS: tuple[Any, ...] = (
    [],
    [1],
    ["a"],
    [""],
    ["a"] * 65,
    [None],
    {},
    {"a": 1},
    {"1": 5},
    {"1": 1000},
)
ODD = (*NUMBERS, 2**70, *OTHERS, *CONTAINERS, {"-1": 5}, {1: 2.5}, b"", ID, [[ID, 1]], [[1, 2]])


class Reader(NamedTuple):
    """A parser of bodies. `good`: a valid value for each key. `always`: the required keys.

    `bodies`: the number of random bodies for this parser.
    """

    read: Callable[[dict[str, Any]], object]
    good: Mapping[str, Any]
    always: Mapping[str, Any]
    bodies: int


OPTIONS: dict[str, Any] = {
    "max_tokens": 5,
    "num_predict": 6,
    "temperature": 1,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "repeat_penalty": 1.1,
    "repeat_last_n": -1,
    "presence_penalty": 1,
    "frequency_penalty": -1.5,
    "logit_bias": {"5": 2, 7: -1.5},
    "seed": 2**64 - 1,
    "stop": ["a", "b"],
    "logprobs": True,
    "top_logprobs": 3,
    "ignore_eos": True,
    "truncate": True,
    "shift": False,
    "num_keep": 4,
    "num_ctx": 2048,
    "format": FORMAT,
    "thinking_budget": 10,
    "continue_message": False,
    "suffix": "",
    "plain_contents": None,
    "echo": False,
    "prompt_logprobs": -1,
}
GENERATE: dict[str, Any] = {
    "options": {"seed": 3},
    "deadline_ms": 1000,
    "queue_ms": 0,
    "first_token_ms": 5,
    "priority": 2,
    "window": 10,
    "batch": True,
    "durable": False,
    "session": "s",
    "resume": None,
    "tools": [TOOL],
    "think": "low",
    "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
}
JOB = {"keep_ms": 5, "not_before": 1.5, "notify": {"url": "https://a.example/x"}, "note": b"n"}
KEY = {"key": "k"}
PROMPT = {"model": "m", "prompt": "p"}
SUBMIT = {key: GENERATE[key] for key in ("options", "deadline_ms", "priority", "session", "tools")}


def _kept(kind: str) -> Callable[[dict[str, Any]], object]:
    return lambda body: kept_questions.parse_question(kind, body, ())


def _settings(body: dict[str, Any]) -> object:
    """Writes `body` as TOML with dotted keys, and reads it as a settings file."""
    text = "".join(f"{name} = {json.dumps(value, default=repr)}\n" for name, value in body.items())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pool.toml")
        path.write_text(text)
        try:
            loaded = load(path)
        except ConfigError as error:
            said = str(error).replace(folder, "DIR")
            raise ConfigError(re.sub("(is not TOML): .*", r"\1", said)) from None
        return {
            name: getattr(loaded, name) for name in ("models", "queue_limit", "deadline", "front")
        }


READERS: dict[str, Reader] = {
    "options": Reader(Options.parse, OPTIONS, {}, 260),
    "generate": Reader(
        lambda body: from_client.Generate.parse(body, ()),
        GENERATE,
        {"model": "m", "prompt": "p"},
        160,
    ),
    "keep": Reader(from_client.Keep.parse, {"keep_ms": 3}, {"model": "m"}, 20),
    "ack": Reader(from_client.Ack.parse, {"have": [[ID, 3]]}, {}, 20),
    "embed": Reader(
        lambda body: EncoderCall.parse("embed", body, ()),
        {"truncate": True, "dimensions": 3, "first": 1, "owner": "o"},
        {"inputs": ["a"]},
        40,
    ),
    "decide": Reader(
        lambda body: DecideCall.parse(body, ()),
        {"temperature": 0.5, "first": 3, "owner": "o", "alone": True},
        {"prompt": "a", "questions": [{"question": "q", "choices": ["x", "y"]}]},
        40,
    ),
    "submit": Reader(_kept("submit"), {**SUBMIT, **JOB}, {"key": "k", **PROMPT}, 60),
    "fetch": Reader(
        _kept("fetch"),
        {"tenant": "t", "from": 3, "gen": 1, "window": 4, "steps": True},
        {"key": "k"},
        40,
    ),
    "jobs": Reader(
        _kept("jobs"),
        {"after": 3, "before": 4, "state": "done", "tenant": "t", "limit": 5, "batch": "b"},
        {},
        40,
    ),
    "files": Reader(
        _kept("files"),
        {"tenant": "t", "limit": 5, "purpose": "p", "behind": [1.5, "k"], "oldest_first": True},
        {},
        30,
    ),
    "batch_submit": Reader(
        _kept("batch_submit"),
        {**JOB, "digest": b"d", "lines": 3, "defaults": {}, "metadata": {"a": 1}, "priority": -1},
        {"key": "k", "file": "f"},
        40,
    ),
    "batch_results": Reader(
        _kept("batch_results"), {"key": "k", "after": 3, "limit": 4}, {"key": "k"}, 20
    ),
    "hello": Reader(
        from_worker.Hello.parse,
        {"slot": "s", "model": "m", "pid": 3, "start_time": 1, "host": "h", "context": 5},
        {},
        30,
    ),
    "beat": Reader(
        from_worker.Beat.parse,
        {
            "phase": "step",
            "phase_age_ms": 1.5,
            "progress": 3,
            "prefill": ID,
            "step_ms": 2,
            "running": 1,
            "waiting": 2,
            "layout": "l",
            "memory": {"a": 1},
            "prefix": {"b": 2},
            "look": [1, True, 3, 4],
            "load_progress": 0.5,
            "speculation": {"c": 3},
            "load_phase": "weights",
            "load_ms": {"weights": 3},
        },
        {},
        60,
    ),
    "run_end": Reader(
        RunEnd.parse,
        {"reason": "stop", "text": "t", "usage": {"a": 1}, "timings_ms": {}, "complete": True},
        {},
        30,
    ),
    "credit": Reader(from_worker.Credit.parse, {"sequences": 3, "works": 4}, {}, 10),
    "work": Reader(
        lambda body: to_worker.Work.parse(body, ()),
        {"options": {"seed": 3}, "seed": 5, "deadline_ms": 1.5, "suspect": True, "owner": "o"},
        {"prompt": "x"},
        40,
    ),
    "openai_chat": Reader(
        openai.chat,
        {
            "max_tokens": 5,
            "max_completion_tokens": 6,
            "temperature": 1,
            "top_p": 0.5,
            "n": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": "a",
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": 1},
            "seed": 3,
            "tools": [TOOL],
            "tool_choice": "auto",
            "response_format": {"type": "json_object"},
            "reasoning_effort": "low",
            "user": "u",
            "service_tier": "auto",
            "modalities": ["text"],
            "top_k": 3,
            "temprature": 1,
        },
        {"model": "m", "messages": CHAT},
        80,
    ),
    "openai_completion": Reader(
        openai.completion,
        {"max_tokens": 5, "echo": True, "logprobs": 2, "best_of": 2, "suffix": "x", "n": 2},
        {"model": "m", "prompt": "p"},
        40,
    ),
    "openai_response": Reader(
        responses.response,
        {
            "instructions": "i",
            "max_output_tokens": 5,
            "metadata": {"a": "b"},
            "text": {"format": {"type": "text"}},
            "tools": [{"type": "function", "name": "f"}],
            "reasoning": {"effort": "low"},
            "store": False,
            "include": [],
            "top_logprobs": 3,
        },
        {"model": "m", "input": "p"},
        50,
    ),
    "anthropic": Reader(
        anthropic.message,
        {
            "system": "s",
            "stop_sequences": ["a"],
            "temperature": 1,
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "metadata": {"user_id": "u"},
            "stream": True,
        },
        {"model": "m", "messages": CHAT, "max_tokens": 5},
        50,
    ),
    "ollama_generate": Reader(
        ollama.generate,
        {"options": {"seed": 3}, "format": "json", "keep_alive": "5m", "think": True, "raw": True},
        {"model": "m", "prompt": "p"},
        40,
    ),
    "ollama_chat": Reader(
        ollama.chat,
        {"options": {"num_predict": 3}, "tools": [TOOL], "think": "low", "stream": False},
        {"model": "m", "messages": CHAT},
        40,
    ),
    "http_job": Reader(
        jobs.job,
        {"prompt": "p", "options": {"seed": 1}, "key": "k", "keep": 5, "not_before": 3},
        {"model": "m"},
        40,
    ),
    "settings": Reader(
        _settings,
        {
            "pool.queue_limit": 5,
            "pool.queue_bytes": "1GB",
            "pool.deadline": "5m",
            "pool.log_format": "json",
            "pool.http": "127.0.0.1:0",
            "pool.traces": True,
            "pool.front": ["tcp://127.0.0.1:5"],
            "models.a.path": "counting",
            "models.b.memory": "4GB",
            "models.c.gpu_ids": ["1"],
            "models.a.max_sequences": 3,
            "models.d.scaling": {"max": 2},
            "keys.a.may_name_owners": True,
            "poool.a": 1,
            "pool.queue_limt": 3,
        },
        {"keys.a.public": "x" * 40, "keys.a.role": "client"},
        60,
    ),
}


def bodies(reader: Reader, seed: str) -> Iterator[dict[str, Any]]:
    """Yields random bodies: valid values, up to two unusual values, and rarely an unknown key."""
    draw = random.Random(seed)
    names = [*reader.good, *reader.always]
    for _ in range(reader.bodies):
        some = draw.sample(list(reader.good), draw.randint(0, min(3, len(reader.good))))
        body = {**reader.always, **{name: reader.good[name] for name in some}}
        for _ in range(draw.choice((0, 1, 1, 1, 2))):
            body[draw.choice(names)] = draw.choice(ODD)
        if draw.random() < 0.05:
            body[draw.choice(("n", "tempurature", "sesion", "grammar", "x"))] = 1
        yield body


def plain(value: object) -> object:
    """Returns a value as nested lists of type, fields and elements.

    Structs and dataclasses look alike in these lists.
    """
    names = getattr(type(value), "__match_args__", None)
    if names is not None and not isinstance(value, tuple):
        return [type(value).__name__, *(plain(getattr(value, name)) for name in names)]
    if isinstance(value, Mapping):
        return [[repr(key), plain(item)] for key, item in value.items()]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(element) for element in value]
    return shown(value) if isinstance(value, int) else repr(value)


def answer(reader: Reader, body: dict[str, Any]) -> str:
    """Returns an error's text with its code and field, or a digest of the parsed value."""
    try:
        text = json.dumps(plain(reader.read(body)))
    except HttpError as error:
        return f"{error.status} {error.param}: {error.message}"
    except (PoolError, ConfigError, ValueError, TypeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def answers() -> Iterator[str]:
    """Yields a line for each body: the parser's name, the number of the body, and the answer."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("MLXPOOL_")}
    try:
        for name, reader in READERS.items():
            for i, body in enumerate(bodies(reader, name)):
                yield f"{name} {i} {json.dumps(answer(reader, body), ensure_ascii=False)}"
    finally:
        os.environ.update(kept)


if __name__ == "__main__":
    print("\n".join(answers()))
